"""Kernels of public data: every output is computed once, whatever the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from cdmpp.errors import ProgramError
from cdmpp.program import generators
from cdmpp.program.tvm_env import import_tvm


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
        a, b = value(node.a, env), value(node.b, env)
        return int(
            {
                "Add": lambda: a + b, "Sub": lambda: a - b, "Mul": lambda: a * b, "FloorDiv": lambda: a // b,
                "FloorMod": lambda: a % b, "LT": lambda: a < b, "And": lambda: a and b,
            }[kind]()
        )  # fmt: skip

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


def test_a_generator_refuses_what_it_cannot_make() -> None:
    with pytest.raises(ProgramError, match="no generator 'nothing'"):
        generators.build("nothing", {})
    with pytest.raises(ProgramError, match="generator linear does not take"):
        generators.build("linear", {"m": 1})
    values = {
        "MWG": 64, "NWG": 32, "KWG": 32, "MDIMC": 16, "NDIMC": 8, "MDIMA": 32, "NDIMB": 8, "KWI": 2, "VWM": 2, "VWN": 4,
        "STRM": 0, "STRN": 0, "SA": 1, "SB": 0,
    }  # fmt: skip
    with pytest.raises(ProgramError, match=r"rest of MWG % \(MDIMC VWM\)"):
        generators.build("clblast_gemm", {"m": 4096, "n": 4096, "k": 4096, **values, "VWM": 8})
