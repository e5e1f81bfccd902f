"""Labels per second: cdmpp's profiler against MetaSchedule's LocalBuilder + LocalRunner.

Both get the same programs, the same cores and the same number and length of samples. MetaSchedule builds on all cores
and runs on one worker, as it always does. Start-up is treated fairly: the 30-50 s import of tensor intrinsics, which
every worker process of MetaSchedule would do, is replaced by the stub that cdmpp uses itself; both sides' processes are
started before the clock runs where the design allows it (MetaSchedule restarts its builders for every batch, and that
is counted, as a tuner pays for it too).

The two alternate over chunks of the programs, and both measure everything twice, so that the disagreement between them
can be held against each one's own re-measurement difference.

    python benchmarks/profiler_throughput.py --programs 224 --json throughput.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.device import get_device
from cdmpp.profiler.cpu import CpuConfig, cpu_engine, sentinel_job
from cdmpp.profiler.engine import BuildJob, Engine
from cdmpp.profiler.machine import core_groups, usable_cores
from cdmpp.profiler.statistics import SamplingPlan
from cdmpp.program.space import Rebuilder, TaskSpaces
from cdmpp.program.tasks import extract_tasks
from cdmpp.program.tvm_env import import_tvm

NETWORKS = ("bert_tiny", "resnet18", "mobilenet_v2", "mlp_mixer")
BATCH = 64  # MetaSchedule's default for one round of measurements


def draw(n: int, networks: Sequence[str], seed: int) -> list[BuildJob]:
    """About `n` random programs, the same number of every task that has that many."""
    tasks = extract_tasks(networks)
    found: list[BuildJob] = []
    per_task = max(1, -(-n // len(tasks)))
    for task in tasks:
        spaces = TaskSpaces(task)
        by_hash = {s.hash: s for s in spaces.spaces}
        found += [BuildJob(p, task, by_hash[str(p.space_hash)]) for p in spaces.sample(per_task, seed)]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(found))[:n]
    # Programs of a task stay together, as both a tuner and a collection ask for them.
    return [found[i] for i in sorted(order)]


def ours(engine: Engine, jobs: Sequence[BuildJob]) -> tuple[dict[str, float], float]:
    started = time.perf_counter()
    labels = {
        o.job.program.hash: o.latency_s
        for o in engine.run(iter(jobs))
        if o.status == "ok" and o.latency_s is not None
    }
    return labels, time.perf_counter() - started


def _initialise_worker() -> None:
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
        self._rebuild = Rebuilder()

    def measure(self, jobs: Sequence[BuildJob]) -> tuple[dict[str, float], float]:
        ms, tvm = self._ms, self._tvm
        # A tuner has the programs at hand already: rebuilding them is not counted here (for ours it is).
        modules = [tvm.IRModule({"main": self._rebuild(j.program, j.task, j.space)}) for j in jobs]
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
                result = future.result()
                if result.run_secs:
                    labels[digest] = statistics.median(float(s) for s in result.run_secs)
        return labels, time.perf_counter() - started


def difference(a: dict[str, float], b: dict[str, float]) -> float:
    """Median of |a / b - 1| over the programs that both have."""
    common = sorted(set(a) & set(b))
    return float(np.median([abs(a[h] / b[h] - 1) for h in common])) if common else float("nan")


def repeatable(a: dict[str, float], b: dict[str, float]) -> float:
    """Share of the programs whose two measurements differ by at most 5 %."""
    common = sorted(set(a) & set(b))
    return float(np.mean([abs(a[h] / b[h] - 1) <= 0.05 for h in common])) if common else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--programs", type=int, default=224)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--chunk", type=int, default=112, help="programs between changes of side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()

    device = get_device("this-cpu@1")
    target = dict(device.target)
    cores = usable_cores()
    # The same samples for both: as many, and as long.
    plan = SamplingPlan(min_samples=8, max_samples=8, target_noise=1.0)
    jobs = draw(args.programs, args.networks, args.seed)
    config = CpuConfig(plan=plan, build_timeout_s=30.0, run_timeout_s=30.0)
    theirs = MetaSchedule(target, plan, timeout_s=30.0)
    labels: dict[tuple[str, int], dict[str, float]] = {
        (s, r): {} for s in ("ours", "metaschedule") for r in (0, 1)
    }
    rates: dict[str, list[float]] = {"ours": [], "metaschedule": []}
    groups = core_groups(cores, 1, len(cores))
    with cpu_engine(config, target, groups, sentinel_job()) as engine:
        ours(engine, jobs[:4])  # processes are up and warm
        for round_number in (0, 1):
            for begin in range(0, len(jobs), args.chunk):
                chunk = jobs[begin : begin + args.chunk]
                sides = (
                    ("ours", "metaschedule")
                    if (begin // args.chunk + round_number) % 2 == 0
                    else ("metaschedule", "ours")
                )
                for side in sides:
                    got, elapsed_s = ours(engine, chunk) if side == "ours" else theirs.measure(chunk)
                    labels[side, round_number].update(got)
                    rates[side].append(len(got) / elapsed_s)
                    print(
                        f"round {round_number} {side:13s} {len(got)} labels, {rates[side][-1]:.2f}/s",
                        file=sys.stderr,
                    )
    ours_rate, their_rate = statistics.median(rates["ours"]), statistics.median(rates["metaschedule"])
    pairs = [a / b for a, b in zip(rates["ours"], rates["metaschedule"], strict=True) if b > 0]
    if not pairs:
        print("MetaSchedule returned no label; nothing to compare", file=sys.stderr)
        return 1
    result = {
        "ours_labels_per_s": ours_rate,
        "metaschedule_labels_per_s": their_rate,
        "ratio": statistics.median(pairs),
        "ratio_min": min(pairs),
        "ratio_max": max(pairs),
        "median_disagreement": difference(labels["ours", 0], labels["metaschedule", 0]),
        "ours_remeasurement_difference": difference(labels["ours", 0], labels["ours", 1]),
        "metaschedule_remeasurement_difference": difference(
            labels["metaschedule", 0], labels["metaschedule", 1]
        ),
        "ours_repeatable": repeatable(labels["ours", 0], labels["ours", 1]),
        "metaschedule_repeatable": repeatable(labels["metaschedule", 0], labels["metaschedule", 1]),
        "programs": len(jobs),
        "labels": {f"{s}_{r}": len(v) for (s, r), v in labels.items()},
        "networks": args.networks,
        "seed": args.seed,
        "cores": list(cores),
        "samples": plan.min_samples,
        "sample_s": plan.min_sample_s,
        "machine": {"device": device.name, "model": device.model, "kernel": platform.release()},
        "versions": {p: metadata.version(p) for p in ("cdmpp", "apache-tvm", "apache-tvm-ffi")},
    }
    print(f"{'':15s}{'labels/s':>10s}{'re-measured':>14s}{'within 5 %':>14s}")
    for name, key, rate in (
        ("cdmpp", "ours", ours_rate),
        ("MetaSchedule", "metaschedule", their_rate),
    ):
        again, share = result[f"{key}_remeasurement_difference"], result[f"{key}_repeatable"]
        print(f"{name:15s}{rate:10.2f}{100 * again:12.2f} %{100 * share:12.0f} %")
    print(
        f"ratio {result['ratio']:.2f} ({min(pairs):.2f} to {max(pairs):.2f} over {len(pairs)} chunks), "
        f"median disagreement {100 * result['median_disagreement']:.2f} %"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
