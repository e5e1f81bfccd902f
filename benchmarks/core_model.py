"""The core model against measured latencies of programs whose operands fit the caches, and against llvm-mca.

    python benchmarks/core_model.py --ghz epyc-zen4-2.6ghz@1=3.7 --json benchmarks/results/core_model.json
    python benchmarks/core_model.py --loops 600 --llvm-mca llvm-mca-22 ...

The first part needs only the instruction counts that are in the repository. The second (``apt-get install llvm-22``) compiles
programs and gives llvm-mca their loops without branches, calls and gathers, which LLVM's models do not cover.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from common import REPOSITORY, Figure, Row, arguments, bootstrap, figure, provenance, report, start

from cdmpp.dataset import load_datasets
from cdmpp.dataset.codegen import CODEGEN_FILE, Counts, load_codegen
from cdmpp.dataset.store import DatasetView
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.blocks import FlowGraph, Instruction
from cdmpp.program.codegen.compile import compile_to_shared_object
from cdmpp.program.codegen.core import Core, core_name, core_of, counts_key, with_overlap
from cdmpp.program.codegen.disassemble import read_functions
from cdmpp.program.codegen.loops import cycles_of_chain, throughput
from cdmpp.program.space import Rebuilder

#: Operands of fewer bytes stay in the second cache level; latencies of more seconds are not mostly the call itself.
_SMALL, _SHORT = 300e3, 2e-6
#: Units bound a program if they are busy for more than this part of its cycles; also the quantile of such programs' clocks.
_FULL = 0.9
_TOTAL = re.compile(r"Total Cycles:\s+(\d+)")
_ITERATIONS = 200


def estimates(view: DatasetView, counts: Counts) -> pd.DataFrame:
    """Labels of programs whose operands fit the second cache level, with the cycles that the core model estimates."""
    labels, devices, tasks = view.labels(None).query("not disturbed"), view.devices, view.tasks
    keys = {name: counts_key(device) for name, device in devices.items() if device.kind == "cpu"}
    rows = [counts.get((p, keys.get(d, ""))) for p, d in zip(labels["program"], labels["device"], strict=True)]
    labels = labels.assign(counts=rows)[[row is not None for row in rows]]
    found = np.stack(labels["counts"].to_list()).astype(np.float64)
    of_core = labels["device"].map(lambda name: core_name(devices[name])).to_numpy(dtype=str)
    for core in np.unique(of_core):
        found[of_core == core] = with_overlap(found[of_core == core], core_of(core))
    for name in ("core_cycles", "unit_cycles", "unknown_loops", "missing", "run_all"):
        labels[name] = found[:, CODEGEN_FEATURES.index(name)]
    labels["bytes"] = [tasks[task].bytes for task in labels["task"]]
    small = (labels["bytes"] < _SMALL) & (labels["unknown_loops"] == 0) & (labels["latency_s"] > _SHORT)
    return labels[small & (labels["device"].map(lambda name: devices[name].cores_used) == 1)]


def spread(name: str, logs: np.ndarray, tasks: np.ndarray, **more: float) -> Figure:
    """Figure of log(estimate / reference): the median, and the median and 90 % quantile of the absolute deviation from it."""
    middle = float(np.median(logs))
    off = np.abs(logs - middle)
    values = {"median log": middle, "MAD of log": float(np.median(off)), "worst tenth": float(np.quantile(off, 0.9)), **more}
    intervals = {"median log": bootstrap(logs, tasks, median=True), "MAD of log": bootstrap(off, tasks, median=True)}
    return figure(name, values, len(logs), interval=intervals)


def against_labels(view: DatasetView, counts: Counts, ghz: dict[str, float]) -> Iterator[Figure]:
    for name, rows in estimates(view, counts).groupby("device", observed=True):
        clock = ghz.get(str(name), (view.devices[str(name)].working_mhz or np.nan) / 1e3)
        logs = np.log(rows["core_cycles"] / (rows["latency_s"] * 1e9 * clock)).to_numpy()
        missing = float(rows["missing"].sum() / rows["run_all"].sum())
        # the model is best for programs that fill the units: the clock that few of them seem to exceed
        full = rows[rows["unit_cycles"] > _FULL * rows["core_cycles"]]
        implied = float((full["core_cycles"] / (full["latency_s"] * 1e9)).quantile(_FULL))
        tasks = rows["task"].to_numpy()
        yield spread(f"{name} at {clock:g} GHz", logs, tasks, without_row=missing, implied_ghz=implied)


def loops_of(path: Path) -> Iterator[list[Instruction]]:
    """Bodies of innermost loops that are a single block, without calls, gathers and scatters, which LLVM does not model."""
    for function in read_functions(path):
        graph = FlowGraph(function)
        for loop in graph.loops:
            body = graph.code(loop.header)
            if len(loop.body) == 1 and not any(i.flow == "call" or "gather" in i.name or "scatter" in i.name for i in body):
                yield list(body)


def by_mca(mca: str, core: Core, path: Path, body: list[Instruction]) -> float | None:
    """Cycles of an iteration by llvm-mca, with data in the first cache level; None if llvm-mca rejects the code."""
    objdump = mca.replace("llvm-mca", "llvm-objdump")
    span = [f"--start-address={body[0].address}", f"--stop-address={body[-1].address + 1}"]
    command = [objdump, "-d", "--no-show-raw-insn", "--no-leading-addr", *span, path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [re.sub(r"\s*(#|<).*", "", line) for line in text.splitlines() if line.startswith((" ", "\t"))]
    done = subprocess.run(
        [mca, "-mtriple=x86_64", f"-mcpu={core.name}", f"-iterations={_ITERATIONS}", "-all-views=false", "-summary-view"],
        input="\n".join(lines) + "\n", capture_output=True, text=True,
    )  # fmt: skip
    total = _TOTAL.search(done.stdout)
    return None if done.returncode or total is None else int(total[1]) / _ITERATIONS


def against_mca(view: DatasetView, name: str, wanted: int, mca: str, seed: int) -> tuple[Figure, list[Row]]:
    device = view.devices[name]
    core, rebuild, rows = core_of(counts_key(device).rpartition("-")[2]), Rebuilder(), list[Row]()
    labels, seen = view.labels([name]), set[str]()
    programs = labels.sample(frac=1, random_state=seed).drop_duplicates("task")["program"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.so"
        for digest in programs:
            program = view.programs[digest]
            space = view.spaces.get(program.space_hash) if program.space_hash else None
            compile_to_shared_object(rebuild(program, view.task_of(program), space), dict(device.target), path)
            for body in loops_of(path):
                listing = repr([(i.name, i.operands) for i in body])
                expected = None if listing in seen else by_mca(mca, core, path, body)
                seen.add(listing)
                if expected:
                    units, front, _ = throughput([(body, 1.0)], core)
                    ours = max(units, front, cycles_of_chain(body, core))
                    rows.append({"program": digest, "instructions": len(body), "llvm-mca": expected, "ours": ours})
            if len(rows) >= wanted:
                break
    logs = np.log([row["ours"] / row["llvm-mca"] for row in rows])
    return spread(f"llvm-mca, {core.name}", logs, np.array([row["program"] for row in rows])), rows


def main() -> None:
    args = arguments(__doc__, __file__, data={"default": REPOSITORY / "data"}).parse_args()
    ghz = {name: float(value) for name, _, value in (text.rpartition("=") for text in args.ghz)}
    view = load_datasets(args.data)
    counts: Counts = {}
    for path in sorted(args.data.glob(f"*/{CODEGEN_FILE}")):
        counts.update(load_codegen(path))
    figures, rows = list(against_labels(view, counts, ghz)), list[Row]()
    if args.loops:
        found, rows = against_mca(view, args.device, args.loops, args.llvm_mca, seed=0)
        figures.append(found)
    report(args.json, provenance(__file__, [args.data]), figures, rows=rows)


if __name__ == "__main__":
    start(main)
