"""Flow graphs of object code, what registers and stack slots hold, and from both the trip counts of loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.program.codegen import CODEGEN_FEATURES, KINDS
from cdmpp.program.codegen.blocks import Address, FlowGraph, Instruction, Location
from cdmpp.program.codegen.compile import compile_to_shared_object
from cdmpp.program.codegen.core import core_of
from cdmpp.program.codegen.counts import codegen_features
from cdmpp.program.codegen.trips import TripCounts, times_run
from cdmpp.program.codegen.values import CodeValues, Flags, meets, value_at
from tests.program.codegen.assembly import code, counts
from tests.samples.programs import matmul_task


def values(listing: str) -> CodeValues:
    return CodeValues(FlowGraph(code(listing)))


#: A loop whose second part the compiler put before its first.
ROTATED = "xor %ecx,%ecx; jmp header; second: inc %rcx; jmp header; header: cmp $0x8,%rcx; jne second; ret"
#: A function that lost its symbol.
TWO_FUNCTIONS = "push %rbx; ret; nopl 0x0(%rax); xor %eax,%eax; 1: inc %rax; cmp $0x5,%rax; jne 1b; ret"
#: An addition in half of the iterations; a way around an inner loop.
TWO_WAYS = (
    "xor %ecx,%ecx; outer: test %rdi,%rdi; je 1f; vaddss %xmm1,%xmm0,%xmm0; 1: test %rsi,%rsi; "
    "je around; xor %eax,%eax; 2: inc %rax; cmp $0x3,%rax; jne 2b; around: inc %rcx; cmp $0x10,%rcx; "
    "jne outer; ret"
)
#: A register that a loop uses for something else holds the same after it is restored.
RESTORED = (
    "mov $0x5,%edx; xor %eax,%eax; 1: mov %rdx,0x8(%rsp); mov (%rdi),%rdx; add $0x3,%rdx; "
    "mov 0x8(%rsp),%rdx; inc %rax; cmp %rdx,%rax; jne 1b; ret"
)
#: A branch of which it is known that it is not taken, unless FLAGS changes the flags.
KNOWN = "mov $0x4,%eax; cmp $0x4,%eax; FLAGS; jne 1f; mov $0x1,%ecx; ret; 1: mov $0x2,%ecx; ret"


#: A loop whose end the compiler copied: each iteration runs one of the two.
TWO_EXITS = (
    "xor %eax,%eax; jmp header; 1: inc %rax; cmp $0x10,%rax; je 3f; header: test %rdi,%rdi; je 1b; inc %rax; cmp $0x10,%rax; "
    "jne header; 3: xor %ecx,%ecx; 4: inc %rcx; cmp $0x3,%rcx; jne 4b; ret"
)
#: The same inside of another loop, so that what is behind it runs as often as it is entered.
COPIED_EXIT = "xor %edx,%edx; again: " + TWO_EXITS.replace("ret", "inc %rdx; cmp $0x8,%rdx; jne again; ret")
#: Of two loops, the one for buffers that overlap is not run.
OVERLAP = (
    "lea 0x40(%rdi),%rax; cmp %rax,%rsi; setb %cl; lea 0x40(%rsi),%rax; cmp %rax,%rdi; setb %dl; test %cl,%dl; jne 1f; "
    "nop; ret; 1: nop; ret"
)


@pytest.mark.parametrize(
    ("listing", "times"),
    [
        (COPIED_EXIT, [1, 8, 8, 64, 64, 64, 128, 128, 64, 64, 64, 8, 24, 24, 24, 8, 8, 8, 1]),
        (OVERLAP, [1] * 10 + [0, 0]),
        (RESTORED, [1, 1, 5, 5, 5, 5, 5, 5, 5, 1]),
        (KNOWN.replace("FLAGS", "vaddps %zmm0,%zmm1,%zmm2"), [1, 1, 1, 1, 1, 1, 0, 0]),
        (KNOWN.replace("FLAGS", "lea 0x1(%rax),%ecx"), [1, 1, 1, 1, 1, 1, 0, 0]),
        (KNOWN.replace("FLAGS", "kortestw %k0,%k0"), [1, 1, 1, 1, 1, 1, 1, 1]),
        (KNOWN.replace("FLAGS", "call g"), [1, 1, 1, 1, 1, 1, 1, 1]),
        (ROTATED, [1, 1, 8, 8, 9, 9, 1]),  # the header runs once more than the rest
        (TWO_FUNCTIONS, [1, 1, 1, 1, 5, 5, 5, 1]),
        (TWO_WAYS, [1, 16, 16, 8, 16, 16, 16, 48, 48, 48, 16, 16, 16, 1]),
    ],
)
def test_how_often_instructions_run(listing: str, times: list[int]) -> None:
    trips = TripCounts(values(listing))
    assert times_run(trips).tolist() == times and trips.unknown == 0


_FLOWS = {"jmp": "jump", "jne": "branch", "je": "branch", "ret": "end"}
_NAMES = st.sampled_from(["nop", "jmp", "jne", "je", "inc", "ret"])


@given(st.lists(st.tuples(_NAMES, st.integers(0, 11)), min_size=1, max_size=12))
def test_any_code_has_a_graph_whose_dominators_dominate(parts: list[tuple[str, int]]) -> None:
    function = []
    for i, (name, target) in enumerate(parts):
        operands = (target,) if name.startswith("j") else ()
        condition = name[1:] if name in ("jne", "je") else None
        changed = ("rax",) if name == "inc" else ()
        what = (_FLOWS.get(name, "next"), condition, name == "inc")
        function.append(Instruction(i, name, operands, None, 0, False, False, *[changed] * 3, *what))
    trips = TripCounts(CodeValues(FlowGraph(function)))
    graph, times = trips.graph, times_run(trips)
    assert times.shape == (len(function),) and np.isfinite(times).all() and (times >= 0).all()
    assert 0 <= trips.unknown <= len(graph.loops)
    covered = sorted(i for first, last in graph.blocks for i in range(first, last + 1))
    assert covered == list(range(len(function)))
    root = len(graph.blocks) - 1
    for block in graph.order:
        over = graph.dominator[block]
        if over != root:  # without its dominator a block cannot be reached
            seen, todo = {over}, [root]
            while todo:
                here = todo.pop()
                todo += [] if here in seen else graph.successors[here]
                seen.add(here)
            assert block == root or block not in seen
    for loop in graph.loops:
        assert all(graph.dominates(loop.header, block) for block in loop.body)


SLOT = Address("rsp", displacement=8)


@pytest.mark.parametrize(
    ("listing", "place", "value"),  # None: not known
    [
        ("mov $0x10,%eax\nlea 0x4(%rax,%rax,2),%rcx", "rcx", 0x34),
        ("mov $0x7,%ecx\nimul $0x3,%rcx,%rdx\nshl $0x2,%edx\nsub $0x4,%rdx", "rdx", 80),
        ("mov $0xffffffff,%eax\nmovslq %eax,%rdx\nneg %rdx", "rdx", 1),
        ("mov $0x1d,%ecx\nand $0xfffffffffffffff8,%rcx\nmov %rcx,0x10(%rsp)\nmov 0x10(%rsp),%r9", "r9", 0x18),
        ("mov $0x65,%eax\nmov $0x7,%ecx\ncltd\nidiv %ecx", "rax", 14),
        ("mov $0x65,%eax\nmov $0x7,%ecx\ncltd\nidiv %ecx", "rdx", 3),
        ("mov $0x5,%eax\nmov $0x9,%ecx\ncmp %ecx,%eax\ncmovl %eax,%ecx", "rcx", 5),
        ("mov $0x5,%eax\ncmp $0x5,%eax\nsete %cl", "rcx", 1),
        ("mov $0x3,%eax\nnot %eax\nsar $0x1,%eax", "rax", -2),
        ("xor %eax,%eax\nvmovups %zmm0,(%rdi)\ninc %rax", "rax", 1),
        ("mov $0x1ff,%eax\nmovzbl %al,%ecx", "rcx", 0xFF),
        ("movb $0xff,0x8(%rsp)\nmovzbl 0x8(%rsp),%ecx", "rcx", 0xFF),
        ("mov $0x5,%eax\nshlx %rax,%rax,%rcx", "rcx", 5 << 5),
        ("lea 0x8(%rdi),%rcx\nsub %rdi,%rcx", "rcx", 8),
        ("mov $0x1,%eax\nmov (%rdi),%eax", "rax", None),
        ("mov $0x1,%eax\ncall g", "rax", None),
        ("mov $0x1,%ebx\ncall g", "rbx", 1),
        ("movl $0x1,0x8(%rsp)", SLOT, 1),
        ("movl $0x1,0x8(%rsp)\nsub $0x20,%rsp", SLOT, None),
        ("movl $0x1,0x8(%rsp)\npush %rax", SLOT, None),
        ("movl $0x1,0x8(%rsp)\nvextractf128 $0x1,%ymm0,0x8(%rsp)", SLOT, None),
    ],
)
def test_known_answers(listing: str, place: Location, value: int | None) -> None:
    symbol, number = value_at(values(listing).after[0], place)
    assert (symbol, number) == (None, value) if value is not None else symbol is not None


def test_what_is_unknown_keeps_its_distance() -> None:
    after = values("lea 0x8(%rdi),%rcx\nadd $0x10,%rcx\nmov %rcx,%rdx\ndec %rdx").after[0]
    assert value_at(after, "rdx") == (("entry", "rdi"), 23)


@given(st.integers(-9, 9), st.integers(-9, 9))
def test_conditions_are_those_of_the_numbers(left: int, right: int) -> None:
    flags = Flags("cmp", (None, left), (None, right))
    assert flags.satisfies("e") == (left == right) and flags.satisfies("ne") == (left != right)
    assert flags.satisfies("l") == (left < right) and flags.satisfies("ge") == (left >= right)
    assert flags.satisfies("g") == (left > right) and flags.satisfies("le") == (left <= right)
    assert Flags("cmp", ("x", left), (None, right)).satisfies("e") is None
    assert meets(left - right, "s") == (left < right)


COMPARED = "xor %eax,%eax; 1: vmovups (%rdi,%rax,4),%zmm0; add $0x10,%rax; cmp $0x100,%rax; jne 1b"
STARTS_AT = COMPARED.replace("xor %eax,%eax", "mov $0x20,%eax")
AFTER_THE_TEST = "xor %ecx,%ecx; 1: lea 0x1(%rcx),%rdx; cmp $0x3f,%rcx; mov %rdx,%rcx; jne 1b"
COUNTS_TO_ZERO = "mov $0xffffffffffffffc0,%r8; 1: vmovups (%rdi,%r8,4),%zmm0; add $0x10,%r8; jne 1b"
TESTED_FOR_ZERO = (
    "mov $0xfffffffffffffff8,%r14; 1: vmovups (%rdi),%zmm0; inc %r14; vaddss %xmm1,%xmm0,%xmm0; test %r14,%r14; jne 1b"
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
    found = dict(zip(CODEGEN_FEATURES, codegen_features(tmp_path / "p.so", core_of("haswell")), strict=True))
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
