"""The benchmark hub's configurations as scheduled programs, and its failures as records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cdmpp.cli import main
from cdmpp.dataset import Dataset
from cdmpp.dataset.importers import ImportReport, import_benchmark_hub
from cdmpp.errors import DatasetError, ProgramError, UnknownDeviceError
from cdmpp.predictor.data import program_resolver
from cdmpp.program import generators
from cdmpp.program.ast import compact_ast

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

CONVOLUTION = {
    "kernel": "convolution_milo", "gpu": "A100", "problem_size": "[4096, 4096]", "status": "ok", "latency_ms": 1.9,
    "compile_ms": 800.0, "rep_cv": 0.01, "n_rep": 32, "p_block_size_x": 48, "p_block_size_y": 4, "p_tile_size_x": 2,
    "p_tile_size_y": 3, "p_read_only": 1, "p_use_padding": 1, "p_use_shmem": 1, "p_use_cmem": 1, "p_filter_height": 15,
    "p_filter_width": 15,
}  # fmt: skip
GEMM = {
    "kernel": "gemm", "gpu": "RTX_2080_Ti", "problem_size": "[4096, 4096]", "status": "ok", "latency_ms": 18.0,
    "p_MWG": 64, "p_NWG": 32, "p_KWG": 32, "p_MDIMC": 16, "p_NDIMC": 8, "p_MDIMA": 32, "p_NDIMB": 8, "p_KWI": 2,
    "p_VWM": 2, "p_VWN": 4, "p_STRM": 0, "p_STRN": 0, "p_SA": 1, "p_SB": 0, "p_PRECISION": 32,
}  # fmt: skip
DEDISPERSION = {
    "kernel": "dedispersion_milo", "gpu": "MI250X", "problem_size": "[25000, 2048, 1]", "status": "ok",
    "latency_ms": 90.0, "p_block_size_x": 16, "p_block_size_y": 40, "p_block_size_z": 1, "p_tile_size_x": 2,
    "p_tile_size_y": 3, "p_tile_stride_x": 1, "p_tile_stride_y": 0, "p_loop_unroll_factor_channel": 0,
}  # fmt: skip
ROWS: list[dict[str, Any]] = [
    CONVOLUTION,
    {**CONVOLUTION, "gpu": "W6600", "latency_ms": 5.0},
    {**CONVOLUTION, "p_read_only": 0, "latency_ms": 2.0},
    {
        **CONVOLUTION,
        "p_use_shmem": 0,
        "p_use_padding": 0,
        "status": "CompilationFailedConfig",
        "latency_ms": None,
    },
    GEMM,
    {**GEMM, "p_SB": 1, "status": "RuntimeFailedConfig", "latency_ms": None},
    DEDISPERSION,
]


def table(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """A file of configurations as the hub's, parameters as nullable integers."""
    frame = pd.DataFrame(rows)
    for name in [column for column in frame if str(column).startswith("p_")]:
        frame[name] = frame[name].astype("Int64")
    frame.to_parquet(path)
    return path


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImportReport, Dataset]:
    folder = tmp_path_factory.mktemp("hub")
    report = import_benchmark_hub(table(folder / "hub.parquet"), folder / "out")
    return report, Dataset.open(folder / "out")


def ast_of(dataset: Dataset, number: int) -> Any:
    record = next(r for r in dataset.iter_records() if r.meta["row"] == number)
    return compact_ast(program_resolver(dataset)(dataset.programs[record.program]))


def test_records_and_failures(imported: tuple[ImportReport, Dataset]) -> None:
    report, dataset = imported
    assert report.records == {"ok": 5, "build_error": 1, "run_error": 1}
    assert (report.tasks, report.programs) == (3, 6)  # one configuration ran on two GPUs
    assert report.devices == ["a100-pcie-40gb", "mi250x", "radeon-pro-w6600", "rtx-2080-ti"]
    records = {r.meta["row"]: r for r in dataset.iter_records()}
    assert records[0].latency_s == pytest.approx(1.9e-3) and records[0].meta["build_s"] == pytest.approx(0.8)
    assert (records[3].status, records[3].latency_s, records[3].error) == (
        "build_error", None, "CompilationFailedConfig",
    )  # fmt: skip
    assert records[0].program == records[1].program != records[2].program
    assert {p.origin for p in dataset.programs.values()} == {"generator"}
    assert {p.implementation for p in dataset.programs.values()} == {"scheduled"}


def test_programs_are_stored_by_their_parameters(imported: tuple[ImportReport, Dataset]) -> None:
    _, dataset = imported
    resolve = program_resolver(dataset)
    for program in dataset.programs.values():
        assert len(program.decisions) < 60
        resolve(program)  # refuses another hash than the stored one
    space = next(s for s in dataset.spaces.values() if "clblast" in s.insts_json)
    assert json.loads(space.insts_json)["fixed"] == {"m": 4096, "n": 4096, "k": 4096}


def test_a_convolution_has_the_blocks_threads_and_tiles_of_its_configuration(
    imported: tuple[ImportReport, Dataset],
) -> None:
    ast = ast_of(imported[1], 0)
    load, init, update, store = range(4)
    # blocks of 48 x 4 threads with 2 x 3 outputs each: 43 x 342 of them cover 4096 x 4096
    assert (ast.column("block_idx") == 43 * 342).all() and (ast.column("thread_idx") == 48 * 4).all()
    # the loads of a tile with its border of 14, and all loops over the filter and a thread's outputs
    rows, columns = 4 * 3 + 14, 48 * 2 + 14
    assert ast.column("unrolled")[load] == -(-rows // 4) * -(-columns // 48)
    assert ast.column("unrolled")[update] == 15 * 15 * 2 * 3
    assert ast.column("unrolled")[init] == ast.column("unrolled")[store] == 2 * 3
    assert ast.column("thread_iterations")[update] == 15 * 15 * 2 * 3
    assert ast.column("program_local")[0] == 4 * 2 * 3
    assert (
        4 * rows * columns
        <= ast.column("program_shared")[0]
        <= 4 * (-(-rows // 4) * 4) * (-(-columns // 48) * 48)
    )
    whole = compact_ast(ast_task(imported[1], "image_convolution"))
    assert whole.column("program_flops")[0] == 2 * 4096 * 4096 * 15 * 15
    # some threads of the last blocks compute what is not stored
    assert 1 <= ast.column("program_flops")[0] / whole.column("program_flops")[0] < 1.02
    without = ast_of(imported[1], 3)
    assert without.n_leaves == 3 and without.column("program_shared")[0] == 0


def test_a_matrix_product_has_the_tiles_and_vectors_of_its_configuration(
    imported: tuple[ImportReport, Dataset],
) -> None:
    ast = ast_of(imported[1], 4)
    names = ("init", "a_shared", "a_local", "b_local", "update", "out")
    leaf = {name: i for i, name in enumerate(names)}
    assert ast.n_leaves == len(names)
    assert (ast.column("block_idx") == 64 * 128).all() and (ast.column("thread_idx") == 16 * 8).all()
    # 64 x 32 outputs of 128 threads: 4 x 4 each; A and C in vectors of 2, B of 4
    assert ast.column("vectorized").tolist() == [2, 2, 2, 4, 2, 2]
    assert ast.column("unrolled")[leaf["update"]] == 2 * (4 // 2) * (4 // 4) * 4
    assert ast.column("thread_iterations")[leaf["update"]] == 4096 * 16
    # each thread fetches 64 x 32 of A, over 128 threads
    assert ast.column("thread_iterations")[leaf["a_shared"]] == 4096 // 32 * (64 * 32 // 128)
    assert ast.column("program_shared")[0] == 4 * 64 * 32
    assert ast.column("program_local")[0] == 4 * (16 + 4 + 4)
    assert ast.column("program_flops")[0] == 2 * 4096**3 + 4096**2
    assert ast_of(imported[1], 5).column("program_shared")[0] == 4 * 32 * (64 + 32)


def test_dedispersion_has_its_threads_and_tiles(imported: tuple[ImportReport, Dataset]) -> None:
    ast = ast_of(imported[1], 6)
    assert (ast.column("thread_idx") == 640).all() and (ast.column("block_idx") == 782 * 18).all()
    assert ast.column("thread_iterations")[1] == 2 * 3 * 1536
    assert ast.column("program_local")[0] == 4


def ast_task(dataset: Dataset, name: str) -> Any:
    return next(task for task in dataset.tasks.values() if task.name == name).prim_func()


# -- the kernels cover what they should ------------------------------------------------------------------------------


def stores(func: Any) -> Iterator[tuple[str, dict[str, int], tuple[int, ...]]]:
    """Every run of every block of a small kernel: its name, the values of all loops, and those of its axes."""
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    types = tvm.tirx

    def value(node: Any, env: dict[Any, int]) -> int:
        kind = type(node).__name__
        if kind == "IntImm":
            return int(node.value)
        if kind == "Var":
            return env[node]
        a, b = value(node.a, env), value(node.b, env)
        return int(
            {
                "Add": lambda: a + b, "Sub": lambda: a - b, "Mul": lambda: a * b, "FloorDiv": lambda: a // b,
                "FloorMod": lambda: a % b, "LT": lambda: a < b, "And": lambda: a and b,
            }[kind]()
        )  # fmt: skip

    def visit(stmt: Any, env: dict[Any, int], tags: dict[str, int]) -> Iterator[Any]:
        if isinstance(stmt, types.For):
            for i in range(int(stmt.extent)):
                binding = stmt.thread_binding
                more = {str(binding.thread_tag): i} if binding is not None else {}
                yield from visit(stmt.body, {**env, stmt.loop_var: i}, {**tags, **more})
        elif isinstance(stmt, types.SeqStmt):
            for part in stmt.seq:
                yield from visit(part, env, tags)
        elif type(stmt).__name__ == "SBlockRealize":
            if stmt.block.name_hint == "root":
                yield from visit(stmt.block.body, env, tags)
            elif value(stmt.predicate, env):
                axes = tuple(value(v, env) for v in stmt.iter_values)
                yield str(stmt.block.name_hint), tags, axes

    yield from visit(func.body, {}, {})


def visits(func: Any) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, _, axes in stores(func):
        found.setdefault(name, []).append(axes)
    return found


@pytest.mark.parametrize("strided", [0, 1])
@pytest.mark.parametrize("shared", [0, 1])
def test_every_product_is_computed_once(strided: int, shared: int) -> None:
    func = generators.build(
        "clblast_gemm",
        {"m": 16, "n": 16, "k": 8, "MWG": 16, "NWG": 8, "KWG": 4, "MDIMC": 4, "NDIMC": 2, "MDIMA": 8, "NDIMB": 4,
         "KWI": 2, "VWM": 2, "VWN": 1, "STRM": strided, "STRN": strided, "SA": shared, "SB": shared},
    )  # fmt: skip
    found = visits(func)
    assert len(found["update"]) == len(set(found["update"])) == 16 * 16 * 8
    assert len(found["out"]) == len(set(found["out"])) == 16 * 16
    if shared:  # each block fetches its tile of A (16 x 8) and of B (8 x 8), each element by one thread
        assert sorted(found["a_shared"]) == sorted(2 * [(k, m) for k in range(8) for m in range(16)])
        assert sorted(found["b_shared"]) == [(k, n) for k in range(8) for n in range(16)]


@pytest.mark.parametrize("shared", [0, 1])
def test_every_output_of_a_convolution_is_computed_once(shared: int) -> None:
    func = generators.build(
        "kernel_tuner_convolution",
        {"height": 10, "width": 9, "filter_height": 3, "filter_width": 3, "block_size_x": 2, "block_size_y": 2,
         "tile_size_x": 2, "tile_size_y": 3, "read_only": 0, "use_padding": 0, "use_shmem": shared, "use_cmem": 1},
    )  # fmt: skip
    found = visits(func)
    assert len(found["out"]) == len(set(found["out"])) == 10 * 9
    if not shared:
        assert len(found["update"]) == len(set(found["update"])) == 10 * 9 * 9
        return
    # every block loads its tile and border once, as far as the image goes
    inside = [(y, x) for y in range(12) for x in range(11)]
    expected = [p for by in range(2) for bx in range(3) for p in inside
                if 0 <= p[0] - 6 * by < 8 and 0 <= p[1] - 4 * bx < 6]  # fmt: skip
    assert sorted(found["shared"]) == sorted(expected)


@pytest.mark.parametrize(("stride_x", "stride_y"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_every_sum_of_dedispersion_is_computed_once(stride_x: int, stride_y: int) -> None:
    func = generators.build(
        "kernel_tuner_dedispersion",
        {"samples": 10, "measures": 7, "channels": 3, "max_shift": 2, "block_size_x": 2, "block_size_y": 2,
         "tile_size_x": 2, "tile_size_y": 3, "tile_stride_x": stride_x, "tile_stride_y": stride_y,
         "loop_unroll_factor_channel": 0},
    )  # fmt: skip
    found = visits(func)
    assert len(found["update"]) == len(set(found["update"])) == 10 * 7 * 3
    assert len(found["out"]) == len(set(found["out"])) == 70


def test_the_kernels_lower_to_cuda() -> None:
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    target = tvm.target.Target(
        {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152,
         "thread_warp_size": 32}
    )  # fmt: skip
    func = generators.build(
        "kernel_tuner_convolution",
        {"height": 4096, "width": 4096, "filter_height": 3, "filter_width": 3, "block_size_x": 48, "block_size_y": 4,
         "tile_size_x": 2, "tile_size_y": 1, "read_only": 1, "use_padding": 1, "use_shmem": 1, "use_cmem": 1},
    )  # fmt: skip
    source = tvm.compile(tvm.IRModule({"main": func}), target).mod.imports[0].inspect_source()
    # 6 rows of 98 columns, padded so that the next row is 48 banks further: 112
    assert f"__shared__ float _ptr[{5 * 112 + 98}]" in source or f"[{6 * 112}]" in source
    assert source.count("__syncthreads") >= 1


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_generator_refuses_what_it_cannot_make() -> None:
    with pytest.raises(ProgramError, match="no generator 'nothing'"):
        generators.build("nothing", {})
    with pytest.raises(ProgramError, match="generator linear does not take"):
        generators.build("linear", {"m": 1})
    values = {name: GEMM[f"p_{name}"] for name in ("MWG", "NWG", "KWG", "MDIMC", "NDIMC", "MDIMA", "NDIMB", "KWI",
              "VWM", "VWN", "STRM", "STRN", "SA", "SB")}  # fmt: skip
    with pytest.raises(ProgramError, match=r"rest of MWG % \(MDIMC VWM\)"):
        generators.build("clblast_gemm", {"m": 4096, "n": 4096, "k": 4096, **values, "VWM": 8})


def test_a_program_of_another_version_is_refused(imported: tuple[ImportReport, Dataset]) -> None:
    from dataclasses import replace

    _, dataset = imported
    program = next(iter(dataset.programs.values()))
    with pytest.raises(ProgramError, match="made by another version"):
        program_resolver(dataset)(replace(program, hash="0" * 16))
    with pytest.raises(ProgramError, match="name no generator"):
        program_resolver(dataset)(replace(program, decisions="[1]"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{**CONVOLUTION, "latency_ms": 1.9e-3}],
            r"row 0 \(convolution_milo block_size_x=48.*implausibly less",
        ),
        ([{**CONVOLUTION, "latency_ms": 1900.0}], "row 0 .*implausibly more"),
        ([{**CONVOLUTION, "latency_ms": None}], "row 0 .*expected a number above 0"),
        (
            [{**CONVOLUTION, "problem_size": "4096"}],
            "problem_size '4096' of image_convolution should be width, height",
        ),
        (
            [CONVOLUTION, {**CONVOLUTION, "p_tile_size_x": None}],
            "row 1: convolution_milo has no p_tile_size_x",
        ),
        ([{k: v for k, v in GEMM.items() if k != "p_MWG"}], "has no column p_MWG"),
        ([{k: v for k, v in GEMM.items() if k != "status"}], "has no column status"),
    ],
)
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
    assert report.notes == (
        "1 configurations stand for no program: their parameters do not divide each other",
    )


def test_an_unknown_gpu_is_named_with_near_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = table(tmp_path / "hub.parquet", [{**CONVOLUTION, "gpu": "A4001"}])
    with pytest.raises(
        UnknownDeviceError, match=r"hub\.parquet: unknown device 'A4001'; did you mean .*a4000"
    ):
        import_benchmark_hub(file, tmp_path / "out")
    assert main(["import", "benchmark-hub", str(file), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(not (SHARED / "benchmark_hub.parquet").exists(), reason="needs ../shared/data")
def test_known_rows_of_the_published_hub(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = import_benchmark_hub(SHARED / "benchmark_hub.parquet", out, limit=60)
    assert sum(report.records.values()) == 60 and report.unknown_operators == {} and report.notes == ()
    first = next(r for r in Dataset.open(out).iter_records() if r.meta["row"] == 0)
    assert (first.device, first.latency_s) == ("a100-pcie-40gb", pytest.approx(3.875328e-3))
