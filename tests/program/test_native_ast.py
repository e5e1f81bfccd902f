"""The C++ reader finds what the Python walk finds, to the bit, and is never in the way where it cannot be had."""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.errors import ProgramError
from cdmpp.program.ast import AstBuilder, CompactAST
from cdmpp.program.native import (
    WORTH_COMPILING,
    Library,
    Reader,
    compile_library,
    library_path,
    native_reader,
)
from tests.program.test_ast_properties import schedule
from tests.samples.scripts import CHAIN, COLUMNS, CONV, CUDA, GATE, GATHER, MATMUL, PREDICATED, parse

DATA = Path(__file__).parents[2] / "data"

#: Loops without blocks, conditions, a while loop, bound values and vectors.
PLAIN_LOOPS = """
@T.prim_func(s_tir=True)
def main(
    X: T.Buffer((64, 8), "float32"), I: T.Buffer((1,), "int32"), Y: T.Buffer((64, 8), "float32"), Z: T.Buffer((512,), "float32")
):
    for i in T.serial(64, annotations={"pragma_auto_unroll_max_step": 16}):
        j = T.bind(i % 8 * 8 + i // 8)
        for k in T.unroll(8):
            if i < 32 and k > 2:
                Y[i, k] = T.exp(X[j, k]) * T.Cast("float32", i * k)
            else:
                Y[i, k] = T.Select(X[i, k] > T.float32(0), X[i, k], T.min(X[j, 7 - k], T.float32(1)))
    for i in range(8):
        for k in range(i // 2 + 1):
            Z[i * 64 + k * k] = Y[T.max(i - 1, 0), k] + T.sigmoid(X[(i * 5 + k) % 64, (i + k) // 2])
    while I[0] < 8:
        I[0] = I[0] + 1
        Z[I[0] * 3 % 512] = T.float32(0)
    for i in range(128):
        if not i % 4 == 1:
            Z[T.Ramp(i * 4, 1, 4)] = T.Broadcast(T.float32(2), 4)
"""

#: More elements than fit into 64 bits, which only Python can count.
HUGE = """
@T.prim_func(s_tir=True)
def main(X: T.Buffer((4294967296, 4294967296), "float32"), Y: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("take"):
            v = T.axis.spatial(8, i)
            T.reads(X[v, v])
            T.writes(Y[v])
            Y[v] = X[v, v]
"""

#: Nothing is computed.
EMPTY = """
@T.prim_func(s_tir=True)
def main(X: T.Buffer((8,), "float32")):
    for i in range(8):
        T.evaluate(0)
"""

TEXTS = [MATMUL, CONV, CHAIN, PREDICATED, CUDA, GATE, GATHER, COLUMNS, PLAIN_LOOPS]


def by_both_ways(library: Library, funcs: list[Any]) -> tuple[list[CompactAST], list[CompactAST], int]:
    """ASTs by the Python walk and by the C++ reader, and how many programs the reader left to Python."""
    walked, read = AstBuilder(native=False), AstBuilder()
    read._reader = Reader(library)
    pairs = walked.build(funcs), read.build(funcs)
    n_nodes, _ = Reader(library).read(funcs)
    return *pairs, int((n_nodes == 0).sum())


def expect_equal(library: Library, funcs: list[Any], left: int = 0) -> None:
    walked, read, rest = by_both_ways(library, funcs)
    assert rest == left
    for number, (a, b) in enumerate(zip(walked, read, strict=True)):
        assert (a.n_nodes, a.positions.tolist()) == (b.n_nodes, b.positions.tolist()), f"program {number}"
        np.testing.assert_array_equal(a.leaves, b.leaves, err_msg=f"program {number}")
        assert (b.leaves.dtype, b.positions.dtype) == (np.float32, np.int32)


def test_hand_written_programs(native_library: Library) -> None:
    expect_equal(native_library, [parse(text) for text in TEXTS])


@given(st.data())
def test_random_schedules(native_library: Library, data: st.DataObject) -> None:
    expect_equal(native_library, [schedule(data)["main"]])


def expressions(names: list[str]) -> st.SearchStrategy[str]:
    """Index expressions over variables, as text."""

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        number = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])
        return st.one_of(
            st.tuples(inner, st.sampled_from("+-"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
            st.tuples(inner, st.sampled_from(["*", "//", "%"]), number).map(
                lambda t: f"({t[0]} {t[1]} {t[2]})"
            ),
            st.tuples(inner, inner).map(lambda t: f"T.max({t[0]}, {t[1]} * 2)"),
            st.tuples(inner, inner).map(lambda t: f"T.Select({t[0]} < {t[1]}, {t[0]}, {t[1]} * {t[0]})"),
        )

    return st.recursive(st.sampled_from([*names, *names, "3"]), grow, max_leaves=10)


@given(st.data())
def test_random_indices(native_library: Library, data: st.DataObject) -> None:
    loops, axes = ["i", "j", "k"], ["u", "v", "w"]
    extents = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), min_size=3, max_size=3))
    bound, used = expressions(loops), expressions(axes)
    lines = [f"{a} = T.axis.spatial(64, {data.draw(bound)})" for a in axes]
    if data.draw(st.booleans()):
        lines.append(f"T.where({data.draw(bound)} < {data.draw(bound)})")
    x, y, i = ([data.draw(used) for _ in range(2)] for _ in range(3))
    lines += [
        "T.reads()",
        "T.writes()",
        f"Y[{y[0]}, {y[1]}] = X[{x[0]}, {x[1]}] + X[I[{i[0]}], {i[1]}] + X[{x[0]}, {x[1]}] * Y[{y[0]}, {y[1]}]",
    ]
    body = "\n".join(" " * 12 + line for line in lines)
    text = (
        '@T.prim_func(s_tir=True)\ndef main(X: T.Buffer((64, 96), "float32"), I: T.Buffer((64,), "int32"), '
        'Y: T.Buffer((64, 96), "float32")):\n    with T.sblock("root"):\n'
        f"        for i, j, k in T.grid{tuple(extents)}:\n          with T.sblock('b'):\n{body}\n"
    )
    expect_equal(native_library, [parse(text)])


def test_sampled_schedules(native_library: Library) -> None:
    from cdmpp.program.space import TaskSpaces
    from cdmpp.program.tasks import task_from_prim_func

    task = task_from_prim_func(parse(CONV), name="conv")
    spaces = TaskSpaces(task, "llvm", num_cores=2)
    by_hash = {space.hash: space for space in spaces.spaces}
    funcs = [spaces.rebuild(p, by_hash[str(p.space_hash)]) for p in spaces.sample(24, seed=5)]
    expect_equal(native_library, [task.prim_func(), *funcs])


@pytest.mark.parametrize(
    "name", ["xeon-cascadelake-1core", "xeon-cascadelake-1core-unscheduled", "validity-cuda"]
)
def test_programs_of_the_datasets(native_library: Library, name: str) -> None:
    from cdmpp.dataset import Dataset
    from cdmpp.program.space import Rebuilder

    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"no dataset {folder}")
    dataset = Dataset.open(folder / "programs" if (folder / "programs").is_dir() else folder)
    programs = sorted(dataset.programs.values(), key=lambda p: p.hash)
    rebuild = Rebuilder(verify=False)
    funcs = [
        rebuild(p, dataset.tasks[p.task_hash], dataset.spaces[p.space_hash] if p.space_hash else None)
        for p in programs[:: len(programs) // 20]
    ]
    expect_equal(native_library, funcs)


def test_library_kernels(native_library: Library) -> None:
    from cdmpp.program.kernels.convolution import image_convolution, kernel_tuner_convolution
    from cdmpp.program.kernels.dedispersion import dedispersion, kernel_tuner_dedispersion
    from cdmpp.program.kernels.gemm import clblast_gemm, gemm

    tiles: dict[str, int] = {"block_size_x": 32, "block_size_y": 4, "tile_size_x": 2, "tile_size_y": 3}
    funcs = [image_convolution(64, 96, 5, 5), dedispersion(128, 16, 8, 32), gemm(128, 64, 32)]
    for shared, padding in ((0, 0), (1, 0), (1, 1)):
        choice = {"read_only": 0, "use_padding": padding, "use_shmem": shared, "use_cmem": 1}
        funcs.append(kernel_tuner_convolution(256, 250, 5, 7, **tiles, **choice))
    for stride, unroll in ((0, 0), (1, 2)):
        strides = {"tile_stride_x": stride, "tile_stride_y": stride, "loop_unroll_factor_channel": unroll}
        funcs.append(kernel_tuner_dedispersion(256, 64, 16, 50, **tiles, **strides))
    blocks = {"MWG": 64, "NWG": 32, "KWG": 16, "MDIMC": 8, "NDIMC": 8, "MDIMA": 16, "NDIMB": 8, "KWI": 2}
    for vm, vn, sa, sb in ((1, 1, 0, 0), (2, 4, 1, 1)):
        funcs.append(clblast_gemm(128, 128, 64, **blocks, VWM=vm, VWN=vn, STRM=0, STRN=0, SA=sa, SB=sb))
    expect_equal(native_library, funcs)


def test_what_the_reader_cannot_take_is_read_in_python(native_library: Library) -> None:
    expect_equal(native_library, [parse(t) for t in (HUGE, CHAIN, HUGE, HUGE, CONV)], left=3)
    expect_equal(native_library, [parse(HUGE)], left=1)


def test_errors_name_the_program(native_library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDMPP_NATIVE", "1")
    with pytest.raises(ProgramError, match="program 1: the program has no computation"):
        AstBuilder().build([parse(CHAIN), parse(EMPTY), parse(CONV)])
    with pytest.raises(ProgramError, match="program 2: expected a PrimFunc or an IRModule, got int"):
        AstBuilder().build([parse(CHAIN), parse(CONV), 3])


def test_the_environment_turns_it_off(native_library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDMPP_NATIVE", "0")
    assert native_reader(WORTH_COMPILING) is None
    monkeypatch.setenv("CDMPP_NATIVE", "1")
    assert isinstance(native_reader(1), Reader)
    builder = AstBuilder(native=False)
    builder.build([parse(CHAIN)])
    assert builder._reader is None


def test_few_programs_do_not_wait_for_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 1"))
    assert native_reader(WORTH_COMPILING - 1) is None
    assert not (tmp_path / "calls").exists() and not (tmp_path / "cdmpp").exists()


@pytest.mark.parametrize(
    ("script", "says"),
    [(None, "there is no C\\+\\+ compiler"), ("echo 'x.cc:1: error: bad' >&2; exit 1", "x.cc:1: error: bad")],
)
def test_without_a_compiler_programs_are_read_in_python(
    script: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, script) if script else str(tmp_path / "missing"))
    with caplog.at_level(logging.WARNING):
        assert native_reader(WORTH_COMPILING) is None
        assert native_reader(WORTH_COMPILING) is None  # it has tried
    (record,) = caplog.records
    assert "read in Python" in record.getMessage()
    assert re.search(says, record.getMessage())
    assert AstBuilder().build([parse(CHAIN)])[0].n_leaves == 2


def test_a_damaged_library_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library_path().parent.mkdir(parents=True)
    library_path().write_text("no library")
    assert native_reader(1) is None
    assert "cannot be loaded" in caplog.text


def test_processes_that_ask_at_once_compile_once(tmp_path: Path) -> None:
    script = 'sleep 1; while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": compiler(tmp_path, script)}
    code = "from cdmpp.program.native import *; compile_library(library_path()); print(library_path())"
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, cwd=DATA.parent
        )
        for _ in range(2)
    ]
    paths = {job.communicate(timeout=120)[0].strip() for job in jobs}
    assert [job.returncode for job in jobs] == [0, 0]
    assert {Path(p).read_text() for p in paths} == {"made\n"} and len(paths) == 1
    assert (tmp_path / "calls").read_text() == "called\n"
    names = sorted(p.suffix for p in Path(paths.pop()).parent.iterdir())
    assert names == [".lock", ".so"]


def test_another_source_is_another_library(native_library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    from cdmpp.program.native import library

    before = library_path()
    monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, "-g"))
    library._digest.cache_clear()
    try:
        assert library_path() != before
    finally:
        library._digest.cache_clear()
    compile_library(before)  # is there: nothing to do


def compiler(folder: Path, script: str) -> str:
    """A program to take for a compiler, which notes its calls in ``folder / "calls"``."""
    path = folder / "fake-c++"
    path.write_text(f"#!/bin/sh\necho called >> {folder}/calls\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
