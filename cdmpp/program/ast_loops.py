"""Loops and leaves of a program as plain data, and what TVM's lowering will do to the loops."""

from __future__ import annotations

from dataclasses import dataclass

from cdmpp.program.affine import Form, IndexSpace
from cdmpp.program.ast_body import Body

#: Kinds of loops; the first four are TVM's own numbers.
SERIAL, PARALLEL, VECTORIZED, UNROLLED, BLOCK_IDX, THREAD_IDX, VTHREAD = range(7)
#: Those whose iterations follow each other in one thread.
SEQUENTIAL = (SERIAL, VECTORIZED, UNROLLED)
#: TVM's number for a loop bound to a thread axis; the tag then tells which of the last three it is.
THREAD_BINDING = 4

#: TVM's UnrollLoop nests automatic unrolling at most this deep (its ``auto_max_depth``).
_UNROLL_MAX_DEPTH = 8
#: Virtual threads below this extent are written out one after the other by TVM.
_VTHREAD_UNROLLED_BELOW = 16


@dataclass(slots=True)
class Loop:
    """A loop that runs more than once.

    Attributes
    ----------
    parent
        Number of the loop around it, -1 at the top.
    extent
        Iterations.
    kind
        ``SERIAL`` ... ``VTHREAD``.
    max_step, explicit
        Value of ``pragma_auto_unroll_max_step`` that holds in it and whether unrolling is done by TVM itself.
    unrolled
        TVM's unrolling pass will unroll it (found after the walk).
    scalarised
        A vectorised loop that TVM turns back into a serial one, for a branch depends on it.
    """

    parent: int
    extent: int
    kind: int
    max_step: int
    explicit: int
    unrolled: bool = False
    scalarised: bool = False


@dataclass(slots=True)
class Leaf:
    """A computation in its loops.

    Attributes
    ----------
    body
        What it does per iteration.
    chain
        Numbers of the loops around it, outermost first.
    kept
        Which of ``chain``, by depth, repeat it: all, but for an initialisation only those that its output
        depends on.
    space
        The loops of ``chain`` and the atoms of its indices.
    slots
        The slots of ``body`` as forms over ``chain``.
    buffers
        Program-wide number of each buffer of ``body``.
    position
        In the pre-order of the AST.
    reduction
        Depths of the loops that its reduction runs over.
    branch
        Depths of the loops its branches and predicate depend on.
    special
        Depths of the loops that the arguments of its exponentials, roots and the like depend on.
    predicated, is_init, guarded
        It runs under a condition; it initialises a reduction; it belongs to a reduction whose initialisation
        is guarded in the same loops.
    nest
        Which of the top-level loop nests it belongs to.
    """

    body: Body
    chain: tuple[int, ...]
    kept: list[int]
    space: IndexSpace
    slots: list[Form]
    buffers: list[int]
    position: int
    reduction: set[int]
    branch: set[int]
    special: set[int]
    predicated: bool
    is_init: bool
    guarded: bool
    nest: int


@dataclass(slots=True)
class RawProgram:
    """Loops and leaves of one program.

    Attributes
    ----------
    shared_prefix
        For each buffer allocated in the program, how many outer loops all its accesses have in common; -1 for
        parameters.
    renewed
        For each buffer, how many outer loops have it allocated inside, so that every iteration of them uses the
        same storage anew.
    threads_share
        For each buffer, whether the threads among these loops share one allocation.
    """

    loops: list[Loop]
    leaves: list[Leaf]
    n_nodes: int
    n_buffers: int
    shared_prefix: list[int]
    renewed: list[int]
    threads_share: list[bool]

    @property
    def on_gpu(self) -> bool:
        """Whether loops are bound to GPU threads."""
        return any(loop.kind == THREAD_IDX for loop in self.loops)


def mark_unrolled(loops: list[Loop], leaves: list[Leaf]) -> None:
    """Set :attr:`Loop.unrolled` as TVM's UnrollLoop pass will decide (src/s_tir/transform/unroll_loop.cc).

    A serial loop is unrolled if all loops in it are, and its body then has at most ``max_step`` stores. Loops are
    in pre-order.
    """
    if not any(loop.max_step or loop.kind == UNROLLED for loop in loops):
        return
    # Of the body of each loop: stores, and depths of unrolled and of other loops.
    stores, unrolled, normal = [0] * len(loops), [0] * len(loops), [0] * len(loops)
    for leaf in leaves:
        if leaf.chain:
            stores[leaf.chain[-1]] += max(1, leaf.body.stores)
    for number in range(len(loops) - 1, -1, -1):
        loop = loops[number]
        kind, count, deep, other = loop.kind, stores[number], unrolled[number], normal[number]
        if (kind == VECTORIZED and not loop.scalarised) or kind in (BLOCK_IDX, THREAD_IDX):
            pass
        elif kind == VTHREAD:
            if loop.extent < _VTHREAD_UNROLLED_BELOW:
                count *= loop.extent
        elif kind == UNROLLED or (
            kind != PARALLEL
            and not other
            and deep <= _UNROLL_MAX_DEPTH
            and loop.extent * count <= loop.max_step
        ):
            loop.unrolled = True
            count *= loop.extent
            deep += 1
        else:
            other += 1
        parent = loop.parent
        if parent >= 0:
            stores[parent] += count
            unrolled[parent] = max(unrolled[parent], deep)
            normal[parent] = max(normal[parent], other)
