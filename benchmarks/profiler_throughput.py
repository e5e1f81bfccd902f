"""Labels per second: cdmpp's profiler against MetaSchedule's LocalBuilder + LocalRunner.

Both get the same programs, cores, and number and length of samples; MetaSchedule builds on all cores and runs on one worker,
as it always does. The 30-50 s import of tensor intrinsics in each of its workers is replaced by the stub that cdmpp uses, and
processes are started before timing begins where the design allows it (MetaSchedule restarts its builders for every batch,
which a tuner pays for too). The two alternate over chunks of the programs and measure everything twice, so that their
disagreement can be compared with the difference between two measurements by the same one.

    python benchmarks/profiler_throughput.py --programs 224 --json throughput.json
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import arguments, figure, in_turn, provenance, ratio_figure, report, start
from prediction_speed import draw, rebuilt

from cdmpp.device import get_device
from cdmpp.profiler.cpu import CpuConfig, CpuMeasurer, sentinel_job
from cdmpp.profiler.engine import BuildJob, Engine, Executor, SamplingPlan
from cdmpp.profiler.machine import core_groups, usable_cores
from cdmpp.program import import_tvm

NETWORKS = ("bert_tiny", "resnet18", "mobilenet_v2", "mlp_mixer")
BATCH = 64  # MetaSchedule's default for one round of measurements


def ours(engine: Engine, jobs: Sequence[BuildJob]) -> tuple[dict[str, float], float]:
    started = time.perf_counter()
    done = list(engine.run(iter(jobs)))
    labels = {o.job.program.hash: o.latency_s for o in done if o.status == "ok" and o.latency_s is not None}
    return labels, time.perf_counter() - started


def _initialise_worker() -> None:
    os.environ["TVM_NUM_THREADS"] = "1"  # TVM's default is all cores, whatever the target says
    import_tvm()


class MetaSchedule:
    """LocalBuilder and LocalRunner on the same cores."""

    def __init__(self, target: dict[str, Any], plan: SamplingPlan, timeout_s: float) -> None:
        tvm = import_tvm()
        from tvm.s_tir import meta_schedule as ms

        self._ms, self._tvm = ms, tvm
        self._target = tvm.target.Target(target)
        self._builder = ms.builder.LocalBuilder(
            max_workers=len(usable_cores()), timeout_sec=timeout_s, initializer=_initialise_worker
        )
        self._runner = ms.runner.LocalRunner(
            timeout_sec=timeout_s,
            evaluator_config=ms.runner.EvaluatorConfig(
                number=1, repeat=plan.min_samples, min_repeat_ms=max(1, round(1e3 * plan.min_sample_s))
            ),
            initializer=_initialise_worker,
        )

    def measure(self, jobs: Sequence[BuildJob]) -> tuple[dict[str, float], float]:
        ms, tvm = self._ms, self._tvm
        # A tuner already has the scheduled programs: the time to rebuild them is not counted here (for ours it is).
        modules = [tvm.IRModule({"main": func}) for func in rebuilt(jobs)]
        started = time.perf_counter()
        labels: dict[str, float] = {}
        for begin in range(0, len(jobs), BATCH):
            part = list(zip(jobs, modules, strict=True))[begin : begin + BATCH]
            built = self._builder.build([ms.builder.BuilderInput(m, self._target) for _, m in part])
            inputs, hashes = [], []
            for (job, module), result in zip(part, built, strict=True):
                if result.artifact_path is not None:
                    args = ms.arg_info.ArgInfo.from_entry_func(module, remove_preproc=True)
                    inputs.append(ms.runner.RunnerInput(result.artifact_path, "cpu", args))
                    hashes.append(job.program.hash)
            for digest, future in zip(hashes, self._runner.run(inputs), strict=True):
                seconds = future.result().run_secs
                if seconds:
                    labels[digest] = statistics.median(map(float, seconds))
        return labels, time.perf_counter() - started


def difference(a: dict[str, float], b: dict[str, float]) -> float:
    """Median of |a / b - 1| in per cent over the programs that both have."""
    common = sorted(set(a) & set(b))
    return 100 * float(np.median([abs(a[h] / b[h] - 1) for h in common])) if common else math.nan


def main() -> None:
    args = arguments(__doc__, __file__, networks={"default": list(NETWORKS)}).parse_args()

    made = provenance(__file__, seeds=[args.seed])
    device = get_device("this-cpu@1")
    cores = usable_cores()
    # the same samples for both: as many, and as long
    plan = SamplingPlan(min_samples=8, max_samples=8, target_noise=1.0)
    jobs = draw(args.networks, args.programs, args.seed)
    config = CpuConfig(plan=plan, build_timeout_s=30.0, run_timeout_s=30.0)
    groups = core_groups(cores, 1, len(cores))
    theirs = MetaSchedule(dict(device.target), plan, timeout_s=30.0)
    sides = ("ours", "metaschedule")
    labels: dict[tuple[str, int], dict[str, float]] = {(side, r): {} for side in sides for r in (0, 1)}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    with Engine(CpuMeasurer(config, device.target, Executor(groups), sentinel_job())) as engine:
        ours(engine, jobs[:4])  # starts and warms up the processes
        for repeat in (0, 1):
            for begin in range(0, len(jobs), args.chunk):
                chunk = jobs[begin : begin + args.chunk]
                for side in in_turn(sides, begin // args.chunk + repeat):
                    got, elapsed_s = ours(engine, chunk) if side == "ours" else theirs.measure(chunk)
                    labels[side, repeat].update(got)
                    rates[side].append(len(got) / elapsed_s)
                    print(f"round {repeat} {side:13s} {rates[side][-1]:.2f} labels/s", file=sys.stderr)
    if not all(rates["metaschedule"]):
        sys.exit("MetaSchedule returned no label for a chunk; nothing to compare")
    rate = ratio_figure("labels a second against LocalBuilder + LocalRunner", *rates.values(), more_is_better=True)
    again = [difference(labels[side, 0], labels[side, 1]) for side in sides]
    between = difference(labels["ours", 0], labels["metaschedule", 0])
    again_by = dict(zip(("ours", "theirs"), again, strict=True))
    figures = [
        rate,
        figure("% by which a label measured again differs (median)", again_by, len(jobs)),
        figure("% by which ours and theirs differ (median)", {"ours": between}, len(jobs)),
    ]
    counts = {f"{side}_{repeat}": len(found) for (side, repeat), found in labels.items()}
    report(args.json, made, figures, labels=counts, cores=list(cores), samples=plan.min_samples)


if __name__ == "__main__":
    start(main)
