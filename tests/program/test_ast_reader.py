"""What the C++ extension makes of programs, by numbers worked out without it, and what happens where it is missing."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp import Predictor
from cdmpp.errors import CdmppError, ProgramError
from cdmpp.program import ast as reader
from cdmpp.program.ast import compact_ast, compact_asts
from tests.golden import golden
from tests.samples.scripts import CHAIN, CONV, parse

ROOT = Path(__file__).parents[2]


def gather(extents: list[int], shape: tuple[int, ...], *index: str) -> dict[str, float]:
    """Features of ``Y[i, j, ...] = X[index]`` in loops i, j, ... of these extents, the last innermost."""
    loops = ", ".join("ijk"[: len(extents)])
    tree = compact_ast(
        parse(f"""
@T.prim_func
def main(X: T.Buffer({shape}, "float32"), Y: T.Buffer({(*extents, 1)}, "float32")):
    for {loops}, one in T.grid({", ".join(map(str, extents))}, 1):
        Y[{loops}, 0] = X[{", ".join(index)}]
""")
    )
    names = ("divmod", "opaque", "slot2_stride_1", "slot2_stride_2", "slot2_stride_3", "slot2_unique")
    return {name.removeprefix("slot2_"): float(tree.column(name)[0]) for name in names}


def expressions(loops: str) -> st.SearchStrategy[str]:
    """Sums, products, quotients and remainders by constants, nested, as text."""

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        scaled = st.tuples(inner, st.sampled_from(["*", "//", "%"]), st.integers(1, 12))
        return st.tuples(inner, st.just("+"), inner).map(joined) | scaled.map(joined)

    def joined(parts: tuple[object, ...]) -> str:
        return f"({' '.join(map(str, parts))})"

    return st.recursive(st.sampled_from(loops), grow, max_leaves=8)


@given(st.data(), st.lists(st.integers(2, 6), min_size=1, max_size=3))
def test_indices_equal_a_count_over_all_iterations(data: st.DataObject, extents: list[int]) -> None:
    loops = "ijk"[: len(extents)]
    text = data.draw(expressions(loops))
    value: Callable[..., int] = eval(f"lambda {', '.join(loops)}: {text}")
    touched = {value(*point) for point in itertools.product(*map(range, extents))}
    found = gather(extents, (max(touched) + 1,), text)
    for place in range(len(extents)):
        first = [int(loop == len(extents) - 1 - place) for loop in range(len(extents))]
        assert found[f"stride_{place + 1}"] == value(*first) - value(*[0] * len(extents))
    assert len(touched) * 4 <= found["unique"] <= min(max(touched) + 1, np.prod(extents)) * 4
    assert found["opaque"] == 0


@pytest.mark.parametrize(
    ("extents", "shape", "index", "expected"),  # opaque, divmod, strides, elements
    [
        # splits of fused loops that fall together with the loops, or cancel in the address
        ([4, 8], (4, 8), "(i * 8 + j) // 8, (i * 8 + j) % 8", (0, 0, (1, 8), 32)),
        ([4, 8], (8,), "(i * 16 + j) // 8", (0, 0, (0, 2), 4)),
        ([1800], (6, 30, 10), "i // 300, i % 300 // 10, i % 10", (0, 0, (1,), 1800)),
        ([32, 64], (8, 256), "(i * 64 + j) // 256, (i * 64 + j) % 256", (0, 0, (1, 64), 2048)),
        # nested ones: i // 30, and 4 values
        ([300], (10,), "i // 10 // 3", (0, 1, (0,), 10)),
        ([300], (4,), "i % 36 // 9", (0, 1, (0,), 4)),
        # 0 ... 29 divided by 4; the first step of j stays in the same element, that of i goes on by 10 // 4
        ([3, 10], (8,), "(i * 10 + j) // 4", (0, 1, (0, 2), 8)),
        ([3, 5, 7], (13,), "i * 2 + j - i + k", (0, 0, (1, 1, 1), 13)),
        ([4, 8], (8,), "j - i + i", (0, 0, (1, 0), 8)),
        # a product of loops cannot be analysed, but keeps its loops
        ([3, 5, 7], (100,), "i * k", (1, 0, (), 3 * 7)),
    ],
)
def test_indices(extents: list[int], shape: tuple[int, ...], index: str, expected: tuple) -> None:
    found = gather(extents, shape, *index.split(", "))
    opaque, divmod, strides, elements = expected
    assert (found["opaque"], found["divmod"], found["unique"]) == (opaque, divmod, 4 * elements)
    assert [found[f"stride_{k}"] for k in range(1, len(strides) + 1)] == list(strides)


QUOTIENTS = " + ".join(f"X[i * {k} % 97 // 3]" for k in range(2, 80))


@pytest.mark.parametrize(
    ("body", "operations"),
    [
        ("Y[i] = ~X[i] & 3", {"op_iadd": 1, "loads": 64}),
        ("Y[i] = X[T.bitwise_not(i) % 64]", {"op_iadd": 0, "opaque": 1}),
        ("Y[i] = T.shift_left(X[i], 2) ^ X[i]", {"op_iadd": 2}),
        ('T.evaluate(T.call_packed("f", X.data, Y[i], i))', {"loads": 64}),
        ('T.evaluate(T.call_extern("int32", "f", T.address_of(X[i])))', {"loads": 64}),
        ('T.evaluate(T.call_extern("int32", "f", X.access_ptr("r", offset=i)))', {"loads": 0, "slot1_loads": 0}),
        (f"Y[i] = {QUOTIENTS}", {"divmod": 78}),  # any number of them
    ],
)  # fmt: skip
def test_what_is_seldom_in_programs(body: str, operations: dict[str, float]) -> None:
    text = f"""
@T.prim_func
def main(X: T.Buffer((64,), "int32"), Y: T.Buffer((64,), "int32")):
    for i in range(64):
        {body}
"""
    tree = compact_ast(parse(text))
    assert {name: float(tree.column(name)[0]) for name in operations} == operations
    assert np.isfinite(tree.leaves).all()


DEEP = "".join(f"{'    ' * (n + 1)}for i{n} in range(2):\n" for n in range(65)) + f"{' ' * 264}X[i0] = X[i64]"
SYMBOLIC = "    n = T.int32()\n    Y = T.match_buffer(y, (n,))\n    for i in range(8):\n"
BLOCK = "        with T.sblock('take'):\n            v = T.axis.spatial(n, i)\n            X[v] = X[v]"
HUGE = "    Y = T.match_buffer(y, (4294967296, 4294967296))\n    for i in range(8):\n        Y[i, i] = X[i]"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    for i in range(8):\n        T.evaluate(0)", "the program has no computation: it stores nothing"),
        ("    for i in range(T.Cast('int32', X[0])):\n        X[i] = X[i]", "loop i has a symbolic extent"),
        (SYMBOLIC + "        Y[i] = X[i]", "buffer Y has a symbolic extent: shapes must be fixed"),
        (SYMBOLIC + BLOCK, "block take has a symbolic extent"),
        ("    for i in range(0):\n        X[i] = X[i]", "a loop of extent 0"),
        (HUGE, "64 bits"),
        (DEEP, "over 64 loops"),
    ],
)  # fmt: skip
def test_programs_that_cannot_be_read(body: str, says: str) -> None:
    text = f'@T.prim_func(s_tir=True)\ndef main(X: T.Buffer((8,), "float32"), y: T.handle):\n{body}\n'
    with pytest.raises(ProgramError, match=f"^[^:]*{re.escape(says)}"):
        compact_ast(parse(text))
    with pytest.raises(ProgramError, match=f"^program 130: .*{re.escape(says)}"):
        compact_asts([parse(CHAIN)] * 130 + [parse(text), parse(CONV)])


def test_what_is_no_program_is_named() -> None:
    with pytest.raises(ProgramError, match="program 2: expected a PrimFunc or an IRModule, got int"):
        compact_asts([parse(CHAIN), parse(CONV), 3])


@pytest.fixture
def another_process() -> Iterator[None]:
    """The extension is not loaded, as in a process that begins."""
    reader.extension.cache_clear()
    yield
    reader.extension.cache_clear()


@pytest.mark.usefixtures("another_process")
def test_without_the_extension_stored_asts_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(CdmppError, match="install a C\\+\\+ compiler") as error:
        compact_ast(parse(CHAIN))
    assert not isinstance(error.value, ProgramError)  # which would be taken for a program that cannot be read
    assert "\n" not in str(error.value)
    asts = [*golden.stored_asts().values()][:8]
    assert (Predictor.load(golden.PREDICTOR).predict(asts, golden.CPUS[0]) > 0).all()


@pytest.mark.usefixtures("another_process")
def test_an_extension_that_is_damaged_or_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(reader, "OP_KINDS", ("fadd",))
        with pytest.raises(CdmppError, match="another version of cdmpp: install cdmpp again"):
            compact_ast(parse(CHAIN))
    damaged = tmp_path / "_reader.so"
    damaged.write_text("no library")
    monkeypatch.setattr(reader, "find_spec", lambda name: ModuleSpec(name, None, origin=str(damaged)))
    with pytest.raises(CdmppError, match=r"_reader\.so cannot be loaded, install cdmpp again"):
        compact_ast(parse(CHAIN))


def test_installing_without_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    missing = str(tmp_path / "c++")
    command = ["setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    environment = {**os.environ, "CC": missing, "CXX": missing}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "cdmpp.program.ast._reader" in done.stderr and "failed" in done.stderr
    assert not list(tmp_path.rglob("*.so"))
