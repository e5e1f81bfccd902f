"""Trip counts of loops, read off object code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cdmpp.program.codegen import CODEGEN_FEATURES, KINDS
from cdmpp.program.codegen.blocks import FlowGraph
from cdmpp.program.codegen.compile import compile_to_shared_object
from cdmpp.program.codegen.counts import codegen_features
from cdmpp.program.codegen.trips import TripCounts
from cdmpp.program.codegen.values import CodeValues
from tests.program.codegen.assembly import code, counts
from tests.samples.programs import matmul_task

COMPARED = "xor %eax,%eax; 1: vmovups (%rdi,%rax,4),%zmm0; add $0x10,%rax; cmp $0x100,%rax; jne 1b"
STARTS_AT = COMPARED.replace("xor %eax,%eax", "mov $0x20,%eax")
AFTER_THE_TEST = "xor %ecx,%ecx; 1: lea 0x1(%rcx),%rdx; cmp $0x3f,%rcx; mov %rdx,%rcx; jne 1b"
COUNTS_TO_ZERO = "mov $0xffffffffffffffc0,%r8; 1: vmovups (%rdi,%r8,4),%zmm0; add $0x10,%r8; jne 1b"
TESTED_FOR_ZERO = (
    "mov $0xfffffffffffffff8,%r14; 1: vmovups (%rdi),%zmm0; inc %r14; vaddss %xmm1,%xmm0,%xmm0; "
    "test %r14,%r14; jne 1b"
)
TOGGLED = "mov $0x1,%al; 1: vmovups (%rdi),%zmm0; test $0x1,%al; mov $0x0,%eax; jne 1b"
ON_THE_STACK = "movq $0x0,0x8(%rsp); 1: vmovups (%rdi),%zmm0; incq 0x8(%rsp); cmpq $0x7,0x8(%rsp); jb 1b"
#: The prologue of a TVM parallel loop over 14: task rdi of the number at 0x8(%rsi) runs its share.
SHARE = (
    "mov 0x8(%rsi),%esi; lea 0xd(%rsi),%eax; cltd; idiv %esi; lea 0x1(%rdi),%esi; mov $0xe,%edx; "
    "imul %eax,%esi; cmp $0xe,%esi; cmovl %esi,%edx; imul %edi,%eax; cmp %edx,%eax; jge end; "
    "movslq %eax,%rcx; movslq %edx,%rdx"
)
PARALLEL = f"{SHARE}; 1: vmovups (%rdi),%zmm0; inc %rcx; cmp %rcx,%rdx; jne 1b"
#: Vectors of four, then the two that are left.
WITH_REMAINDER = (
    f"{SHARE}; sub %rcx,%rdx; mov %rdx,%r8; and $0xfffffffffffffffc,%r8; xor %eax,%eax; "
    "1: vmovups (%rdi,%rax,4),%xmm0; add $0x4,%rax; cmp %rax,%r8; jne 1b; cmp %rdx,%r8; je end; "
    "2: vmovss (%rdi,%r8,4),%xmm0; inc %r8; cmp %rdx,%r8; jne 2b"
)
NO_REMAINDER = WITH_REMAINDER.replace("$0xe", "$0x10").replace("0xd(%rsi)", "0xf(%rsi)")
#: Three iterations of one, then those that are left by eight.
GOES_ON_WHERE_ANOTHER_ENDED = (
    "xor %ecx,%ecx; mov $0x3,%esi; 1: inc %rcx; cmp %rsi,%rcx; jne 1b; 2: vmovups (%rdi,%rcx,4),%zmm0; "
    "add $0x8,%rcx; cmp $0x43,%rcx; jne 2b"
)
COUNTS_FROM_THE_OUTER_LOOPS = (
    "xor %esi,%esi; 1: mov %rsi,%rax; lea 0x40(%rsi),%rdx; 2: vmovups (%rdi,%rax,4),%zmm0; "
    "add $0x10,%rax; cmp %rdx,%rax; jb 2b; add $0x40,%rsi; cmp $0x1000,%rsi; jne 1b"
)
BOUND_IN_A_REGISTER = "mov %rsi,%rcx; 1: vmovups (%rdi),%zmm0; inc %rdx; cmp %rcx,%rdx; jl 1b"


@pytest.mark.parametrize(
    ("listing", "trips"),
    [
        (COMPARED, [16]), (STARTS_AT, [14]), (AFTER_THE_TEST, [64]), (COUNTS_TO_ZERO, [4]), (TESTED_FOR_ZERO, [8]),
        (TOGGLED, [2]), (ON_THE_STACK, [7]), (BOUND_IN_A_REGISTER, [None]), (PARALLEL, [14]), (WITH_REMAINDER, [3, 2]),
        (NO_REMAINDER, [4, 0]), (COUNTS_FROM_THE_OUTER_LOOPS, [64, 4]), (GOES_ON_WHERE_ANOTHER_ENDED, [3, 8]),
    ],
)  # fmt: skip
def test_known_trip_counts(listing: str, trips: list[int | None]) -> None:
    found = TripCounts(CodeValues(FlowGraph(code(f"{listing}; end: ret"))))
    assert [found.of(number) for number in range(len(found.graph.loops))] == trips


def test_instructions_of_nested_loops_count_as_often_as_they_run() -> None:
    listing = (
        "xor %ecx,%ecx; 1: xor %eax,%eax; 2: vfmadd231ps (%rsi),%zmm1,%zmm0; add $0x10,%rax; "
        "cmp $0x40,%rax; jne 2b; inc %rcx; cmp $0x5,%rcx; jne 1b"
    )
    found = counts(f"{listing}; end: ret")
    assert found["program_fma_z"] == 1 and found["run_fma_z"] == 5 * 4
    assert found["run_all"] == 2 + 5 * 4 + 5 * 4 * 4  # the ends, the outer loop's own, the inner loop's
    assert found["unknown_loops"] == 0


def test_what_is_misread_stays_finite() -> None:
    nest = "; ".join(f"l{k}: xor %ecx,%ecx" for k in range(12))
    ends = "; ".join(f"inc %rcx; cmp $0xfffff,%rcx; jne l{k}" for k in reversed(range(12)))
    assert np.isfinite([*counts(f"{nest}; {ends}; end: ret").values()]).all()


@pytest.mark.parametrize("n", [24, 64])
def test_the_arithmetic_of_a_compiled_matmul_is_counted_exactly(n: int, tmp_path: Path) -> None:
    func, target = matmul_task(n).prim_func(), {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}
    compile_to_shared_object(func, target, tmp_path / "p.so")
    found = dict(zip(CODEGEN_FEATURES, codegen_features(tmp_path / "p.so"), strict=True))
    lanes = {"z": 16, "y": 8, "x": 4, "s": 1}
    assert all(f"run_{kind}" in found for kind in KINDS)
    flops = sum(width * (2 * found[f"run_fma_{w}"] + found[f"run_fp_{w}"]) for w, width in lanes.items())
    assert flops == 2 * n**3 and found["unknown_loops"] == 0
    assert found["program_fp_z"] == found["program_load_z"] == 0, "the target has no 512-bit registers"


PADDED = (
    "xor %eax,%eax; 1: vmovups (%rsi),%zmm1; cmp $0x2,%rax; jCONDITION 2f; "
    "vfmadd231ps (%rsi),%zmm1,%zmm0; 2: inc %rax; cmp $0xa,%rax; jne 1b"
)


@pytest.mark.parametrize(
    ("condition", "kept"), [("e", 9), ("ne", 1), ("b", 8), ("ae", 2), ("be", 7), ("a", 3), ("l", 8), ("g", 3)]
)
def test_a_branch_on_a_counter_is_taken_in_the_iterations_that_say_so(condition: str, kept: int) -> None:
    found = counts(PADDED.replace("CONDITION", condition) + "; end: ret")
    assert found["run_fma_z"] == pytest.approx(kept)


def test_a_branch_in_an_inner_loop_follows_the_counter_of_the_outer_one() -> None:
    listing = (
        "xor %ecx,%ecx; 1: xor %eax,%eax; 2: test %rcx,%rcx; je 3f; vfmadd231ps (%rsi),%zmm1,%zmm0; "
        "3: inc %rax; cmp $0x4,%rax; jne 2b; inc %rcx; cmp $0x5,%rcx; jne 1b"
    )
    found = counts(f"{listing}; end: ret")
    assert found["run_fma_z"] == pytest.approx(4 * 4)  # not in the first of five


def test_buffers_do_not_overlap() -> None:
    """LLVM's loop without SIMD, run where each buffer begins before the other ends, is not."""
    listing = (
        "lea 0x400(%rdi),%r8; lea 0x400(%rsi),%r9; cmp %r9,%rdi; setb %al; cmp %r8,%rsi; setb %cl; "
        "and %al,%cl; test %cl,%cl; jne 2f; xor %eax,%eax; 1: vfmadd231ps (%rsi,%rax,4),%zmm1,%zmm0; "
        "add $0x10,%rax; cmp $0x100,%rax; jne 1b; ret; 2: xor %eax,%eax; "
        "3: vfmadd231ss (%rsi,%rax,4),%xmm1,%xmm0; inc %rax; cmp $0x100,%rax; jne 3b"
    )
    found = counts(f"{listing}; end: ret")
    assert found["run_fma_z"] == 16 and found["run_fma_s"] == 0
