"""Trip counts of loops, read off object code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.profiler.build import compile_to_shared_object
from cdmpp.profiler.code_values import split_operands
from cdmpp.profiler.codegen import CODEGEN_FEATURES, KINDS, codegen_features, count
from cdmpp.profiler.control_flow import Instruction
from cdmpp.profiler.loop_trips import times_run


def _code(listing: str) -> list[Instruction]:
    """Instructions at addresses 0x10, 0x20, ... of lines ``operation operands``, and ``ret``, where END leads."""
    lines = [*listing.strip().splitlines(), "ret"]
    lines = [line.replace("END", f"{16 * len(lines):x} <f>").split(maxsplit=1) for line in lines]
    return [(16 * (i + 1), line[0], line[1] if len(line) > 1 else "") for i, line in enumerate(lines)]


COMPARED = """
xor %eax,%eax
vmovups (%rdi,%rax,4),%zmm0
add $0x10,%rax
cmp $0x100,%rax
jne 20 <f+0x20>
"""
STARTS_AT = COMPARED.replace("xor %eax,%eax", "mov $0x20,%eax")
AFTER_THE_TEST = """
xor %ecx,%ecx
lea 0x1(%rcx),%rdx
cmp $0x3f,%rcx
mov %rdx,%rcx
jne 20 <f+0x20>
"""
COUNTS_TO_ZERO = """
mov $0xffffffffffffffc0,%r8
vmovups (%rdi,%r8,4),%zmm0
add $0x10,%r8
jne 20 <f+0x20>
"""
TESTED_FOR_ZERO = """
mov $0xfffffffffffffff8,%r14
vmovups (%rdi),%zmm0
inc %r14
vaddss %xmm1,%xmm0,%xmm0
test %r14,%r14
jne 20 <f+0x20>
"""
TOGGLED = """
mov $0x1,%al
vmovups (%rdi),%zmm0
test $0x1,%al
mov $0x0,%eax
jne 20 <f+0x20>
"""
ON_THE_STACK = """
movq $0x0,0x8(%rsp)
vmovups (%rdi),%zmm0
incq 0x8(%rsp)
cmpq $0x7,0x8(%rsp)
jb 20 <f+0x20>
"""
#: The prologue of a TVM parallel loop over 14: task rdi of the number at 0x8(%rsi) runs its share.
SHARE = """
mov 0x8(%rsi),%esi
lea 0xd(%rsi),%eax
cltd
idiv %esi
lea 0x1(%rdi),%esi
mov $0xe,%edx
imul %eax,%esi
cmp $0xe,%esi
cmovl %esi,%edx
imul %edi,%eax
cmp %edx,%eax
jge END
movslq %eax,%rcx
movslq %edx,%rdx
"""
PARALLEL = f"""{SHARE}vmovups (%rdi),%zmm0
inc %rcx
cmp %rcx,%rdx
jne f0 <f+0xf0>
"""
#: Vectors of four, then the two that are left.
WITH_REMAINDER = f"""{SHARE}sub %rcx,%rdx
mov %rdx,%r8
and $0xfffffffffffffffc,%r8
xor %eax,%eax
vmovups (%rdi,%rax,4),%xmm0
add $0x4,%rax
cmp %rax,%r8
jne 130 <f+0x130>
cmp %rdx,%r8
je END
vmovss (%rdi,%r8,4),%xmm0
inc %r8
cmp %rdx,%r8
jne 190 <f+0x190>
"""
NO_REMAINDER = WITH_REMAINDER.replace("$0xe", "$0x10").replace("0xd(%rsi)", "0xf(%rsi)")
#: Three rounds of one, then those that are left by eight.
GOES_ON_WHERE_ANOTHER_ENDED = """
xor %ecx,%ecx
mov $0x3,%esi
inc %rcx
cmp %rsi,%rcx
jne 30 <f+0x30>
vmovups (%rdi,%rcx,4),%zmm0
add $0x8,%rcx
cmp $0x43,%rcx
jne 60 <f+0x60>
"""
COUNTS_FROM_THE_OUTER_LOOPS = """
xor %esi,%esi
mov %rsi,%rax
lea 0x40(%rsi),%rdx
vmovups (%rdi,%rax,4),%zmm0
add $0x10,%rax
cmp %rdx,%rax
jb 40 <f+0x40>
add $0x40,%rsi
cmp $0x1000,%rsi
jne 20 <f+0x20>
"""
BOUND_IN_A_REGISTER = """
mov %rsi,%rcx
vmovups (%rdi),%zmm0
inc %rdx
cmp %rcx,%rdx
jl 20 <f+0x20>
"""


@pytest.mark.parametrize(
    ("listing", "trips"),
    [
        (COMPARED, 16.0),
        (STARTS_AT, 14.0),
        (AFTER_THE_TEST, 64.0),
        (COUNTS_TO_ZERO, 4.0),
        (TESTED_FOR_ZERO, 8.0),
        (TOGGLED, 2.0),
        (ON_THE_STACK, 7.0),
        (BOUND_IN_A_REGISTER, None),
        (PARALLEL, 14.0),
        (WITH_REMAINDER, (3.0, 2.0)),
        (NO_REMAINDER, (4.0, 0.0)),
        (COUNTS_FROM_THE_OUTER_LOOPS, (64.0, 4.0)),
        (GOES_ON_WHERE_ANOTHER_ENDED, (3.0, 8.0)),
    ],
)
def test_known_trip_counts(listing: str, trips: float | tuple[float, ...] | None) -> None:
    found = times_run(_code(listing)).trips
    assert found == (list(trips) if isinstance(trips, tuple) else [trips])


def test_operands_with_addresses_and_comments() -> None:
    assert split_operands("0x8(%rax,%rcx,4),%zmm1{%k1}  # 2000 <x>") == ["0x8(%rax,%rcx,4)", "%zmm1{%k1}"]
    assert split_operands("20 <f+0x10>") == ["20"]


def test_instructions_of_nested_loops_count_as_often_as_they_run() -> None:
    listing = """
    xor %ecx,%ecx
    xor %eax,%eax
    vfmadd231ps (%rsi),%zmm1,%zmm0
    add $0x10,%rax
    cmp $0x40,%rax
    jne 30 <f+0x30>
    inc %rcx
    cmp $0x5,%rcx
    jne 20 <f+0x20>
    """
    counts = dict(zip(CODEGEN_FEATURES, count([_code(listing)]), strict=True))
    assert counts["program_fma_z"] == 1 and counts["run_fma_z"] == 5 * 4
    assert counts["run_all"] == 2 + 5 * 4 + 5 * 4 * 4  # the ends, the outer loop's own, the inner loop's
    assert counts["unknown_loops"] == 0


def test_what_is_misread_stays_finite() -> None:
    nest = "\n".join(["xor %ecx,%ecx"] * 12)
    ends = "\n".join(f"inc %rcx\ncmp $0xfffff,%rcx\njne {16 * k:x} <f>" for k in range(12, 0, -1))
    assert np.isfinite(count([_code(f"{nest}\n{ends}")])).all()


def _matmul(n: int) -> Any:
    from tvm import te

    a, b = te.placeholder((n, n), name="a"), te.placeholder((n, n), name="b")
    k = te.reduce_axis((0, n), name="k")
    c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    return te.create_prim_func([a, b, c])


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize("n", [24, 64])
def test_the_arithmetic_of_a_compiled_matmul_is_counted_exactly(n: int, tmp_path: Path) -> None:
    from cdmpp.program.tvm_env import import_tvm

    import_tvm()
    compile_to_shared_object(
        _matmul(n), {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}, tmp_path / "p.so"
    )
    counts = dict(zip(CODEGEN_FEATURES, codegen_features(tmp_path / "p.so"), strict=True))
    lanes = {"z": 16, "y": 8, "x": 4, "s": 1}
    assert all(f"run_{kind}" in counts for kind in KINDS)
    flops = sum(width * (2 * counts[f"run_fma_{w}"] + counts[f"run_fp_{w}"]) for w, width in lanes.items())
    assert flops == 2 * n**3
    assert counts["unknown_loops"] == 0


PADDED = """
xor %eax,%eax
vmovups (%rsi),%zmm1
cmp $0x2,%rax
jCONDITION 60 <f+0x60>
vfmadd231ps (%rsi),%zmm1,%zmm0
inc %rax
cmp $0xa,%rax
jne 20 <f+0x20>
"""


@pytest.mark.parametrize(
    ("condition", "kept"), [("e", 9), ("ne", 1), ("b", 8), ("ae", 2), ("be", 7), ("a", 3), ("l", 8), ("g", 3)]
)
def test_a_branch_on_a_counter_is_taken_in_the_rounds_that_say_so(condition: str, kept: int) -> None:
    counts = dict(zip(CODEGEN_FEATURES, count([_code(PADDED.replace("CONDITION", condition))]), strict=True))
    assert counts["run_fma_z"] == pytest.approx(kept)


def test_a_branch_in_an_inner_loop_follows_the_counter_of_the_outer_one() -> None:
    listing = """
    xor %ecx,%ecx
    xor %eax,%eax
    test %rcx,%rcx
    je 60 <f+0x60>
    vfmadd231ps (%rsi),%zmm1,%zmm0
    inc %rax
    cmp $0x4,%rax
    jne 30 <f+0x30>
    inc %rcx
    cmp $0x5,%rcx
    jne 20 <f+0x20>
    """
    counts = dict(zip(CODEGEN_FEATURES, count([_code(listing)]), strict=True))
    assert counts["run_fma_z"] == pytest.approx(4 * 4)  # not in the first of five


def test_buffers_do_not_overlap() -> None:
    """LLVM's loop without SIMD, run where each buffer begins before the other ends, is not."""
    listing = """
    lea 0x400(%rdi),%r8
    lea 0x400(%rsi),%r9
    cmp %r9,%rdi
    setb %al
    cmp %r8,%rsi
    setb %cl
    and %al,%cl
    test %cl,%cl
    jne 100 <f+0x100>
    xor %eax,%eax
    vfmadd231ps (%rsi,%rax,4),%zmm1,%zmm0
    add $0x10,%rax
    cmp $0x100,%rax
    jne b0 <f+0xb0>
    ret
    xor %eax,%eax
    vfmadd231ss (%rsi,%rax,4),%xmm1,%xmm0
    inc %rax
    cmp $0x100,%rax
    jne 110 <f+0x110>
    """
    counts = dict(zip(CODEGEN_FEATURES, count([_code(listing)]), strict=True))
    assert counts["run_fma_z"] == 16 and counts["run_fma_s"] == 0
