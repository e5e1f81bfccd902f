"""Chooses the programs that golden files are about, and stores them as a dataset and a predictor of today.

Run once (``python -m tests.golden.choose``): later versions of the library have to open these folders as they are.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.golden.golden import (
    CPUS,
    DATA,
    FOLDER,
    HUB,
    JOURNALS,
    NEUSIGHT,
    PREDICTOR,
    SMALL,
    Dataset,
    codegen_counts,
    import_benchmark_hub,
    import_neusight,
    load_config,
    load_datasets,
    store_asts,
    store_codegen,
    train,
)

#: Programs of each operator word, unscheduled and scheduled, and of each kind of CUDA program.
UNSCHEDULED, SCHEDULED, CUDA = 1, 4, 8
#: Programs labelled on all four CPUs, failures of each kind, and programs in the half-written journals.
ON_ALL, FAILED, JOURNALED = 24, 2, 12


def words(name: str) -> list[str]:
    """The operators in a task's name: ``fused_conv2d3_add_relu`` -> conv2d, add, relu."""
    return [
        word for word in re.sub(r"(?<=[a-z])\d+(?=_|$)", "", name).split("_") if word not in ("fused", "tir")
    ]


def even(items: Iterable[Any], n: int) -> list[Any]:
    """`n` items at even distances."""
    items = list(items)
    return [items[i] for i in sorted({int(i) for i in np.linspace(0, len(items) - 1, n)})] if items else []


def cpu_programs(view: Any) -> Iterator[str]:
    """Hashes: even over operators and devices."""
    records = view.records[view.records["device"].isin(CPUS)]
    for _, failed in records[records["status"] != "ok"].groupby("status"):
        yield from even(sorted(failed["program"].unique()), FAILED)
    devices = records[records["status"] == "ok"].groupby("program")["device"].nunique()
    yield from even(sorted(devices.index[devices == len(CPUS)]), ON_ALL)
    by_word: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for program in devices.index:
        stored = view.programs[program]
        for word in words(view.tasks[stored.task_hash].name):
            by_word[word, stored.origin == "unscheduled"].append(program)
    for (_, unscheduled), found in sorted(by_word.items()):
        found.sort(key=lambda program: (-devices[program], program))
        known = [program for program in found if devices[program] > 1] or found
        yield from even(known, UNSCHEDULED if unscheduled else SCHEDULED)


def cuda_programs(view: Any) -> Iterator[str]:
    """Hashes: even over operators."""
    by_word: dict[str, list[str]] = defaultdict(list)
    for program in view.programs.values():
        for word in words(view.tasks[program.task_hash].name):
            by_word[word].append(program.hash)
    for _, found in sorted(by_word.items()):
        yield from even(sorted(found), 2)


def library_rows() -> pd.DataFrame:
    """Operators as in NeuSight's table; the latencies mean nothing."""
    sizes = [(1, 58, 13, 141), (16, 128, 256, 64), (734, 196, 220, 65), (8, 1024, 4096, 1024), (3, 7, 5, 1)]
    rows: list[dict[str, Any]] = []
    for b, m, n, k in sizes:
        rows += [{"op": op, "B": b, "M": m, "N": n, "K": k} for op in ("linear", "bmm")]
        vector = (
            "add",
            "mul",
            "div",
            "pow",
            "addu",
            "mulu",
            "divu",
            "powu",
            "tanh",
            "relu",
            "gelu",
            "softmax",
            "ln",
        )
        rows += [{"op": op, "B": b * m, "H": n} for op in vector[(b + m) % 3 :: 3]]
    convolutions = [(18, 21, 2034, 3, 9, 1, 1), (1, 3, 64, 7, 224, 2, 3), (32, 256, 64, 1, 56, 1, 0)]
    names = (
        "B",
        "conv_in_channels",
        "conv_out_channels",
        "conv_kernel",
        "conv_input_hw",
        "conv_stride",
        "conv_padding",
    )
    rows += [{"op": "conv", **dict(zip(names, sizes, strict=True))} for sizes in convolutions]
    frame = pd.DataFrame(rows)
    # 10 us, 100 ns an element of a vector and 1 ns a multiply-add: as slow as the importer believes
    image = (
        frame["conv_in_channels"]
        * frame["conv_out_channels"]
        * (frame["conv_kernel"] * frame["conv_input_hw"]) ** 2
    )
    work = frame["M"] * frame["N"] * frame["K"]
    latency = (
        0.01
        + 1e-7 * frame["B"] * frame["H"].fillna(0)
        + 1e-9 * frame["B"] * (work.fillna(0) + image.fillna(0))
    )
    for column in frame.columns.difference(["op"]):
        frame[column] = frame[column].astype("Int64")
    common = {
        "device": "Tesla T4",
        "latency_ms": latency,
        "split": "train",
        "authors_used": True,
        "dtype": "float32",
    }
    return frame.assign(**common)


def hub_rows() -> pd.DataFrame:
    """Configurations as in the benchmark hub's table; the latencies mean nothing."""
    tiles = {"p_block_size_x": 48, "p_block_size_y": 4, "p_tile_size_x": 2, "p_tile_size_y": 3}
    convolution = {**tiles, "p_read_only": 1, "p_use_cmem": 1, "p_filter_height": 15, "p_filter_width": 15}
    gemm = {
        "p_MWG": 64, "p_NWG": 32, "p_KWG": 32, "p_MDIMC": 16, "p_NDIMC": 8, "p_MDIMA": 32, "p_NDIMB": 8, "p_KWI": 2,
        "p_VWM": 2, "p_VWN": 4, "p_STRM": 0, "p_STRN": 0, "p_SA": 1, "p_PRECISION": 32,
    }  # fmt: skip
    square = "[4096, 4096]"
    rows = [
        {"kernel": "convolution_milo", "problem_size": square, **convolution, "p_use_shmem": 1, "p_use_padding": 1},
        {"kernel": "convolution_milo", "problem_size": square, **convolution, "p_use_shmem": 0, "p_use_padding": 0},
        {"kernel": "gemm", "problem_size": square, **gemm, "p_SB": 0},
        {"kernel": "gemm", "problem_size": square, **gemm, "p_SB": 1, "status": "RuntimeFailedConfig", "latency_ms": None},
        {
            "kernel": "dedispersion_milo", "problem_size": "[25000, 2048, 1]", **tiles, "p_block_size_z": 1,
            "p_tile_stride_x": 1, "p_tile_stride_y": 0, "p_loop_unroll_factor_channel": 0,
        },
    ]  # fmt: skip
    common = {
        "gpu": "A100",
        "status": "ok",
        "latency_ms": 1.9,
        "compile_ms": 800.0,
        "rep_cv": 0.01,
        "n_rep": 32,
    }
    frame = pd.DataFrame([{**common, **row} for row in rows])
    for column in [name for name in frame if str(name).startswith("p_")]:
        frame[column] = frame[column].astype("Int64")
    return frame


def copy(view: Any, programs: Iterable[str], to: Any) -> set[str]:
    """Add programs with their tasks and spaces to a dataset; the hashes. Left out are those of a task that is there with
    other names of blocks, which the decisions of schedules refer to and its hash does not tell."""
    chosen = set()
    for stored in (view.programs[program] for program in sorted(set(programs))):
        task = view.task_of(stored)
        if to.tasks.get(task.hash, task).tir_json == task.tir_json:
            to.add_task(task)
            if stored.space_hash:
                to.add_space(view.spaces[stored.space_hash])
            to.add_program(stored)
            chosen.add(stored.hash)
    return chosen


def new(folder: Path, view: Any) -> Any:
    """An empty dataset of the devices and networks of another."""
    shutil.rmtree(folder, ignore_errors=True)
    devices = {name: spec for part in view.parts for name, spec in part.meta["devices"].items()}
    families = dict(view.network_families)
    return Dataset.create(folder, devices=devices, network_families=families)


def main() -> None:
    library_rows().to_parquet(NEUSIGHT, compression="zstd")
    hub_rows().to_parquet(HUB, compression="zstd")
    cpu = load_datasets(DATA)
    with new(FOLDER, cpu) as to, tempfile.TemporaryDirectory() as scratch:
        for read, path, name in ((import_neusight, NEUSIGHT, "neusight"), (import_benchmark_hub, HUB, "hub")):
            read([path], Path(scratch) / name)
            imported = Dataset.open(Path(scratch) / name)
            copy(imported, imported.programs, to)
        cuda = Dataset.open(DATA / "validity-cuda" / "programs")
        copy(cuda, cuda_programs(cuda), to)
        chosen = copy(cpu, cpu_programs(cpu), to)
        for record in cpu.iter_records():
            if record.program in chosen and record.device in CPUS:
                to.add_record(record)
        to.finalize()
    store_asts()
    store_codegen({key: row for key, row in codegen_counts(cpu).items() if key[0] in chosen})
    with tempfile.TemporaryDirectory() as scratch:
        train(load_config(SMALL), [FOLDER], Path(scratch)).predictor.save(PREDICTOR)
    # a dataset that was finished, added to, and whose writer was killed in the middle of a record
    small = sorted(chosen, key=lambda program: (len(cpu.task_of(cpu.programs[program]).tir_json), program))
    records = [record for record in cpu.iter_records() if record.program in small[:JOURNALED]]
    with new(JOURNALS, cpu) as to:
        for number, record in enumerate(sorted(records, key=lambda record: (record.program, record.device))):
            copy(cpu, [record.program], to)
            to.add_record(record)
            if number == len(records) // 2:
                to.finalize()
    journal = JOURNALS / "records.jsonl"
    journal.write_bytes(journal.read_bytes()[:-40])


if __name__ == "__main__":
    main()
