"""Batches of compact ASTs with different numbers of leaves, as padded arrays with an attention mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import ProgramError
from cdmpp.program.ast import CompactAST


@dataclass(frozen=True, eq=False)
class AstBatch:
    """Padded leaves of several programs.

    Attributes
    ----------
    leaves
        float32 (programs, longest, features), zeros where there is no leaf.
    positions
        int32 (programs, longest), 0 where there is no leaf.
    mask
        bool (programs, longest), True where there is a leaf. ``~mask`` is what torch calls
        ``key_padding_mask``.
    """

    leaves: NDArray[np.float32]
    positions: NDArray[np.int32]
    mask: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Leaves of each program, (programs,)."""
        return self.mask.sum(axis=1)


def pad_asts(asts: Sequence[CompactAST], length: int | None = None) -> AstBatch:
    """Pad programs to the longest of them, or to `length`.

    Raises
    ------
    ProgramError
        No programs, or one with more leaves than `length`: nothing is ever cut off.
    """
    if not asts:
        raise ProgramError("a batch needs at least one program")
    lengths = np.array([ast.n_leaves for ast in asts])
    longest = int(lengths.max())
    if length is None:
        length = longest
    elif longest > length:
        raise ProgramError(
            f"program {int(lengths.argmax())} has {longest} leaves, the batch has room for {length}"
        )
    mask = np.arange(length) < lengths[:, None]
    leaves = np.zeros((len(asts), length, asts[0].leaves.shape[1]), dtype=np.float32)
    positions = np.zeros((len(asts), length), dtype=np.int32)
    leaves[mask] = np.concatenate([ast.leaves for ast in asts])
    positions[mask] = np.concatenate([ast.positions for ast in asts])
    return AstBatch(leaves, positions, mask)


def batches_by_length(lengths: Sequence[int], batch_size: int) -> Iterator[NDArray[np.int64]]:
    """Indices of programs in batches of similar length, so that little is padded; every program is in one batch.

    Parameters
    ----------
    lengths
        Number of leaves of each program.
    batch_size
        Most programs a batch has.

    Raises
    ------
    ProgramError
        A batch size below 1.
    """
    if batch_size < 1:
        raise ProgramError(f"a batch holds at least one program, got a batch size of {batch_size}")
    order = np.argsort(np.asarray(lengths), kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
