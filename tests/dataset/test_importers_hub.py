"""The benchmark hub's configurations as scheduled programs, and its failures as records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cdmpp.dataset import Dataset
from cdmpp.dataset.importers import ImportReport, import_benchmark_hub
from cdmpp.errors import DatasetError, ProgramError
from cdmpp.files import read_yaml
from cdmpp.predictor.data import program_resolver
from cdmpp.program.ast import compact_ast
from tests.samples.command import Command
from tests.samples.datasets import records_of

CONVOLUTION, GEMM, DEDISPERSION = read_yaml(Path(__file__).with_name("rows.yaml"))["hub"].values()
ROWS: list[dict[str, Any]] = [
    CONVOLUTION, {**CONVOLUTION, "gpu": "W6600", "latency_ms": 5.0},
    {**CONVOLUTION, "p_read_only": 0, "latency_ms": 2.0},
    {**CONVOLUTION, "p_use_shmem": 0, "p_use_padding": 0, "status": "CompilationFailedConfig", "latency_ms": None},
    GEMM, {**GEMM, "p_SB": 1, "status": "RuntimeFailedConfig", "latency_ms": None}, DEDISPERSION,
]  # fmt: skip


def table(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """A file of configurations as the hub's, parameters as nullable integers."""
    frame = pd.DataFrame(rows)
    frame.astype({name: "Int64" for name in frame if str(name).startswith("p_")}).to_parquet(path)
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ImportReport:
    folder = tmp_path_factory.mktemp("hub")
    return import_benchmark_hub(table(folder / "hub.parquet"), folder / "out")


@pytest.fixture(scope="module")
def dataset(report: ImportReport) -> Dataset:
    return Dataset.open(report.path)


def ast_of(dataset: Dataset, number: int) -> Any:
    record = next(r for r in records_of(dataset) if r.meta["row"] == number)
    return compact_ast(program_resolver(dataset)(dataset.programs[record.program]))


def test_records_and_failures(report: ImportReport, dataset: Dataset) -> None:
    assert report.records == {"ok": 5, "build_error": 1, "run_error": 1}
    assert (report.tasks, report.programs) == (3, 6)  # one configuration ran on two GPUs
    assert report.devices == ["a100-pcie-40gb", "mi250x", "radeon-pro-w6600", "rtx-2080-ti"]
    records = {r.meta["row"]: r for r in records_of(dataset)}
    assert records[0].latency_s == pytest.approx(1.9e-3) and records[0].meta["build_s"] == pytest.approx(0.8)
    assert (records[3].status, records[3].latency_s, records[3].error) == (
        "build_error", None, "CompilationFailedConfig",
    )  # fmt: skip
    assert records[0].program == records[1].program != records[2].program
    assert {p.origin for p in dataset.programs.values()} == {"generator"}
    assert {p.implementation for p in dataset.programs.values()} == {"scheduled"}


def test_programs_are_stored_by_their_parameters(dataset: Dataset) -> None:
    resolve = program_resolver(dataset)
    for program in dataset.programs.values():
        assert len(program.decisions) < 60
        resolve(program)  # refuses another hash than the stored one
    space = next(s for s in dataset.spaces.values() if "clblast" in s.insts_json)
    assert json.loads(space.insts_json)["fixed"] == {"m": 4096, "n": 4096, "k": 4096}


#: Of a tile of 4 x 3 rows and 48 x 2 columns with its border of 14.
SHARED = (4 * 3 + 14, 48 * 2 + 14)


@pytest.mark.parametrize(("row", "leaf", "wanted"), [
    # convolution: blocks of 48 x 4 threads with 2 x 3 outputs each: 43 x 342 of them cover 4096 x 4096
    *((0, leaf, {"block_idx": 43 * 342, "thread_idx": 48 * 4, "program_local": 4 * 2 * 3}) for leaf in range(4)),
    # loads, initialisation, update and store: all loops over the filter and a thread's outputs
    (0, 0, {"unrolled": -(-SHARED[0] // 4) * -(-SHARED[1] // 48)}),
    *((0, leaf, {"unrolled": 2 * 3}) for leaf in (1, 3)),
    (0, 2, {"unrolled": 15 * 15 * 2 * 3, "thread_iterations": 15 * 15 * 2 * 3}),
    (3, 2, {"program_shared": 0, "leaf_count": 3}),  # without shared memory
    # matrix product: 64 x 32 outputs of 128 threads: 4 x 4 each; A and C in vectors of 2, B of 4
    *((4, leaf, {"leaf_count": 6, "block_idx": 64 * 128, "thread_idx": 16 * 8, "vectorized": lanes})
      for leaf, lanes in enumerate((2, 2, 2, 4, 2, 2))),
    (4, 4, {"unrolled": 2 * (4 // 2) * (4 // 4) * 4, "thread_iterations": 4096 * 16, "program_shared": 4 * 64 * 32,
            "program_local": 4 * (16 + 4 + 4), "program_flops": 2 * 4096**3 + 4096**2}),
    # each thread fetches 64 x 32 of A, over 128 threads
    (4, 1, {"thread_iterations": 4096 // 32 * (64 * 32 // 128)}),
    (5, 0, {"program_shared": 4 * 32 * (64 + 32)}),
    *((6, leaf, {"thread_idx": 640, "block_idx": 782 * 18, "program_local": 4}) for leaf in range(3)),
    (6, 1, {"thread_iterations": 2 * 3 * 1536}),
])  # fmt: skip
def test_programs_have_the_blocks_threads_and_tiles_of_their_configuration(
    dataset: Dataset, row: int, leaf: int, wanted: dict[str, float]
) -> None:
    ast = ast_of(dataset, row)
    assert {name: ast.column(name)[leaf] for name in wanted} == wanted


def test_a_convolution_computes_what_its_task_does_and_shares_a_tile(dataset: Dataset) -> None:
    ast, (rows, columns) = ast_of(dataset, 0), SHARED
    shared = ast.column("program_shared")[0]
    assert 4 * rows * columns <= shared <= 4 * (-(-rows // 4) * 4) * (-(-columns // 48) * 48)
    task = next(task for task in dataset.tasks.values() if task.name == "image_convolution")
    whole = compact_ast(task.prim_func())
    assert whole.column("program_flops")[0] == 2 * 4096 * 4096 * 15 * 15
    # some threads of the last blocks compute what is not stored
    assert 1 <= ast.column("program_flops")[0] / whole.column("program_flops")[0] < 1.02


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_program_of_another_version_is_refused(dataset: Dataset) -> None:
    program = next(iter(dataset.programs.values()))
    with pytest.raises(ProgramError, match="made by another version"):
        program_resolver(dataset)(replace(program, hash="0" * 16))
    with pytest.raises(ProgramError, match="name no generator"):
        program_resolver(dataset)(replace(program, decisions="[1]"))


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(("rows", "message"), [
    ([{**CONVOLUTION, "latency_ms": 1.9e-3}], r"row 0 \(convolution_milo block_size_x=48.*implausibly less"),
    ([{**CONVOLUTION, "latency_ms": 1900.0}], "row 0 .*implausibly more"),
    ([{**CONVOLUTION, "latency_ms": None}], "row 0 .*expected a number above 0"),
    ([{**CONVOLUTION, "problem_size": "4096"}], "'4096' of image_convolution should be width, height"),
    ([CONVOLUTION, {**CONVOLUTION, "p_tile_size_x": None}], "row 1: convolution_milo has no p_tile_size_x"),
    ([CONVOLUTION, {**CONVOLUTION, "p_filter_width": None}], "row 1: convolution_milo has no p_filter_width"),
    ([without(GEMM, "p_MWG")], "has no column p_MWG"),
    ([without(GEMM, "status")], "has no column status"),
])  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        import_benchmark_hub(table(tmp_path / "hub.parquet", rows), tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_unknown_kernels_and_states_are_counted(tmp_path: Path) -> None:
    rows = [CONVOLUTION, {**CONVOLUTION, "kernel": "hotspot_milo"}, {**CONVOLUTION, "status": "Strange"},
            {**GEMM, "p_VWM": 8}]  # fmt: skip
    report = import_benchmark_hub(table(tmp_path / "hub.parquet", rows), tmp_path / "out")
    assert report.unknown_operators == {"hotspot_milo": 1, "convolution_milo, status Strange": 1}
    assert report.records == {"ok": 1}
    assert report.notes == ("1 configurations stand for no program: their parameters do not divide each other",)


def test_an_unknown_gpu_is_named_with_near_ones(tmp_path: Path, command: Command) -> None:
    file = table(tmp_path / "hub.parquet", [{**CONVOLUTION, "gpu": "A4001"}])
    error = command.error("import", "benchmark-hub", file, "--out", tmp_path / "out")
    assert "hub.parquet: unknown device 'A4001'; did you mean" in error and "a4000" in error
