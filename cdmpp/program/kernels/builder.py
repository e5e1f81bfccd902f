"""A little of TVM's IRBuilder, for kernels of nested loops around blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from cdmpp.program.tasks import normalise
from cdmpp.program.tvm_env import import_tvm


def script() -> Any:
    """TVM's script builder for TIR (imports TVM)."""
    import_tvm()
    from tvm.tirx.script import builder

    return builder


@contextmanager
def function(
    parameters: Mapping[str, tuple[Sequence[int], str]],
) -> Iterator[tuple[list[Any], Callable[[], Any]]]:
    """Open a PrimFunc.

    Parameters
    ----------
    parameters
        Name -> shape and type of each buffer, in order.

    Yields
    ------
    The buffers, and a function that gives the PrimFunc once the ``with`` is left.
    """
    T = script()
    from tvm.script.ir_builder import IRBuilder

    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name("main")
        yield (
            [T.arg(name, T.buffer(shape, dtype)) for name, (shape, dtype) in parameters.items()],
            lambda: normalise(ir.get()),
        )


@contextmanager
def loops(*wanted: Any) -> Iterator[list[Any]]:
    """Open loops, outermost first (frames such as ``T.serial(4)``), and give their variables."""
    with ExitStack() as stack:
        yield [stack.enter_context(frame) for frame in wanted]


@contextmanager
def block(
    name: str,
    spatial: Sequence[tuple[int, Any]] = (),
    reduce: Sequence[tuple[int, Any]] = (),
    where: Sequence[Any] = (),
    annotations: Mapping[str, Any] | None = None,
) -> Iterator[list[Any]]:
    """Open a block.

    Parameters
    ----------
    spatial, reduce
        Extent and binding of each axis.
    where
        Conditions under which it runs.
    annotations
        Of the block.

    Yields
    ------
    The variables of the axes, spatial ones first.
    """
    T = script()
    with T.sblock(name):
        axes = [T.axis.spatial(extent, value) for extent, value in spatial]
        axes += [T.axis.reduce(extent, value) for extent, value in reduce]
        if where:
            condition = where[0]
            for other in where[1:]:
                condition = T.And(condition, other)
            T.where(condition)
        if annotations:
            T.sblock_attr(dict(annotations))
        yield axes


def ceil_div(a: int, b: int) -> int:
    """`a` over `b`, rounded up."""
    return -(-a // b)
