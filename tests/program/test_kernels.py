"""Kernels of public data: every output is computed once, whatever the configuration."""

from __future__ import annotations

import operator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cdmpp.errors import ProgramError
from cdmpp.program import generators, import_tvm
from cdmpp.program.space import CUDA_SPACE_TARGET

OPERATORS = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod, "LT": operator.lt, "And": operator.and_,
}  # fmt: skip


def visits(func: Any) -> dict[str, list[tuple[int, ...]]]:
    """Every run of every block of a small kernel, by its name: the values of its axes."""
    types = import_tvm().tirx
    found: dict[str, list[tuple[int, ...]]] = {}

    def value(node: Any, env: dict[Any, int]) -> int:
        kind = type(node).__name__
        if kind == "IntImm":
            return int(node.value)
        if kind == "Var":
            return env[node]
        return int(OPERATORS[kind](value(node.a, env), value(node.b, env)))

    def visit(stmt: Any, env: dict[Any, int]) -> None:
        if isinstance(stmt, types.For):
            for i in range(int(stmt.extent)):
                visit(stmt.body, {**env, stmt.loop_var: i})
        elif isinstance(stmt, types.SeqStmt):
            for part in stmt.seq:
                visit(part, env)
        elif type(stmt).__name__ == "SBlockRealize":
            if stmt.block.name_hint == "root":
                visit(stmt.block.body, env)
            elif value(stmt.predicate, env):
                axes = tuple(value(v, env) for v in stmt.iter_values)
                found.setdefault(str(stmt.block.name_hint), []).append(axes)

    visit(func.body, {})
    return found


GEMM = {
    "m": 16, "n": 16, "k": 8, "MWG": 16, "NWG": 8, "KWG": 4, "MDIMC": 4, "NDIMC": 2, "MDIMA": 8, "NDIMB": 4, "KWI": 2,
    "VWM": 2, "VWN": 1, "STRM": 0, "STRN": 0, "SA": 0, "SB": 0,
}  # fmt: skip
CONVOLUTION = {
    "height": 10, "width": 9, "filter_height": 3, "filter_width": 3, "block_size_x": 2, "block_size_y": 2, "tile_size_x": 2,
    "tile_size_y": 3, "read_only": 0, "use_padding": 0, "use_shmem": 0, "use_cmem": 1,
}  # fmt: skip
DEDISPERSION = {
    "samples": 10, "measures": 7, "channels": 3, "max_shift": 2, "block_size_x": 2, "block_size_y": 2, "tile_size_x": 2,
    "tile_size_y": 3, "tile_stride_x": 0, "tile_stride_y": 0, "loop_unroll_factor_channel": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values", "changes", "updates", "outputs"),
    [
        *(("clblast_gemm", GEMM, {"STRM": strided, "STRN": strided, "SA": shared, "SB": shared}, 16 * 16 * 8, 16 * 16)
          for strided in (0, 1) for shared in (0, 1)),
        ("kernel_tuner_convolution", CONVOLUTION, {}, 10 * 9 * 9, 10 * 9),
        ("kernel_tuner_convolution", CONVOLUTION, {"use_shmem": 1}, None, 10 * 9),
        *(("kernel_tuner_dedispersion", DEDISPERSION, {"tile_stride_x": x, "tile_stride_y": y}, 10 * 7 * 3, 10 * 7)
          for x in (0, 1) for y in (0, 1)),
    ],
)  # fmt: skip
def test_every_output_is_computed_once(name: str, values: Any, changes: Any, updates: int | None, outputs: int) -> None:
    found = visits(generators.build(name, {**values, **changes}))
    assert len(found["out"]) == len(set(found["out"])) == outputs
    if updates:
        assert len(found["update"]) == len(set(found["update"])) == updates


def test_every_element_is_fetched_into_shared_memory_once() -> None:
    # each block fetches its tile of A (16 x 8) and of B (8 x 8), each element by one thread
    found = visits(generators.build("clblast_gemm", {**GEMM, "SA": 1, "SB": 1}))
    assert sorted(found["a_shared"]) == sorted(2 * [(k, m) for k in range(8) for m in range(16)])
    assert sorted(found["b_shared"]) == [(k, n) for k in range(8) for n in range(16)]
    # every block loads its tile and border once, as far as the image goes
    found = visits(generators.build("kernel_tuner_convolution", {**CONVOLUTION, "use_shmem": 1}))
    inside = [(y, x) for y in range(12) for x in range(11)]
    expected = [p for by in range(2) for bx in range(3) for p in inside
                if 0 <= p[0] - 6 * by < 8 and 0 <= p[1] - 4 * bx < 6]  # fmt: skip
    assert sorted(found["shared"]) == sorted(expected)


def test_the_kernels_lower_to_cuda() -> None:
    tvm = import_tvm()
    large = {"height": 4096, "width": 4096, "block_size_x": 48, "block_size_y": 4, "tile_size_y": 1}
    padded = {"read_only": 1, "use_padding": 1, "use_shmem": 1}
    func = generators.build("kernel_tuner_convolution", {**CONVOLUTION, **large, **padded})
    module = tvm.compile(tvm.IRModule({"main": func}), tvm.target.Target(CUDA_SPACE_TARGET)).mod
    source = module.imports[0].inspect_source()
    # 6 rows of 98 columns, padded so that the next row is 48 banks further: 112
    assert f"__shared__ float _ptr[{5 * 112 + 98}]" in source or f"[{6 * 112}]" in source
    assert source.count("__syncthreads") >= 1


def test_a_generator_refuses_what_it_cannot_make() -> None:
    wide = "clblast_gemm", {**GEMM, "VWM": 8}, r"rest of MWG % \(MDIMC VWM\)"
    wrong = ("nothing", {}, "no generator 'nothing'"), ("linear", {"m": 1}, "generator linear does not take"), wide
    for name, values, message in wrong:
        with pytest.raises(ProgramError, match=message):
            generators.build(name, values)


def test_operators_are_built_by_several_threads_at_once() -> None:
    sizes = {"batch": 1, "in_channels": 8, "out_channels": 8, "kernel": 3, "size": 8, "stride": 1, "padding": 1}
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: generators.build("conv2d", sizes), range(40)))
