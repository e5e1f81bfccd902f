"""A program seen as a whole: what analytical models need of its compact AST."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.ast.schema import LEAF_FEATURES, N_LOOPS

if TYPE_CHECKING:
    from cdmpp.program.ast import CompactAST

FloatArray = NDArray[np.float64]

_COLUMN = {name: i for i, name in enumerate(LEAF_FEATURES)}
_EXTENT = [_COLUMN[f"loop{i}_extent"] for i in range(1, N_LOOPS + 1)]
_REDUCTION = [_COLUMN[f"loop{i}_reduction"] for i in range(1, N_LOOPS + 1)]


@dataclass(frozen=True)
class ProgramView:
    """Numbers of n programs, each float64 or bool (n,). The *main leaf* is the one with the most operations.

    Attributes
    ----------
    flops
        Floating-point operations.
    io_bytes
        Bytes of inputs and outputs; what a program allocates in between is left out, as it may stay in a cache.
    columns, rows, batch
        Output loops of the main leaf: the innermost, the one around it, the product of the others; 1 where there is none.
    depth
        Product of its reduction loops.
    outputs
        columns * rows * batch.
    parallel
        Parallel iterations of the main leaf.
    blocks, threads, shared_bytes
        Of the largest GPU launch of the program; 1, 1 and 0 without.
    scheduled_for_gpu
        Whether a loop is bound to GPU blocks or threads. A program on a GPU that is not is run by a library.
    contraction
        Whether the main leaf is a sum of products: what matrix units do.
    windowed
        Whether it reduces over several loops, as a convolution does: libraries then run a product of matrices over all
        output points at once.
    """

    flops: FloatArray
    io_bytes: FloatArray
    columns: FloatArray
    rows: FloatArray
    batch: FloatArray
    depth: FloatArray
    parallel: FloatArray
    blocks: FloatArray
    threads: FloatArray
    shared_bytes: FloatArray
    scheduled_for_gpu: NDArray[np.bool_]
    contraction: NDArray[np.bool_]
    windowed: NDArray[np.bool_]

    @property
    def outputs(self) -> FloatArray:
        """Outputs of the main leaf."""
        return self.columns * self.rows * self.batch

    def tiles(self, edge: int) -> FloatArray:
        """Square tiles of so many points an edge that cover the outputs."""
        by_loops = np.ceil(self.columns / edge) * np.ceil(self.rows / edge) * self.batch
        return np.where(self.windowed, np.ceil(self.outputs / edge**2), by_loops)

    @classmethod
    def of(cls, asts: Sequence[CompactAST]) -> ProgramView:
        """Look at programs; each has at least one leaf."""
        lengths = np.asarray([ast.n_leaves for ast in asts])
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        leaves = (
            np.concatenate([ast.leaves for ast in asts]) if len(asts) else np.zeros((0, len(LEAF_FEATURES)))
        )

        def column(name: str) -> FloatArray:
            return leaves[:, _COLUMN[name]].astype(np.float64)

        def largest(name: str) -> FloatArray:
            return np.maximum.reduceat(column(name), starts) if len(asts) else np.zeros(0)

        owner = np.repeat(np.arange(len(asts)), lengths)
        order = np.lexsort((column("iterations"), column("flops"), owner))
        main = leaves[order[starts + lengths - 1]].astype(np.float64)
        first = leaves[starts].astype(np.float64)
        extent = np.maximum(main[:, _EXTENT], 1.0)
        output = (main[:, _REDUCTION] == 0) & (extent > 1)
        rank = np.cumsum(output, axis=1)
        products = main[:, _COLUMN["op_fma"]] + main[:, _COLUMN["op_fmul"]]
        depth = np.maximum(main[:, _COLUMN["reduction"]], 1.0)
        blocks, threads = largest("block_idx"), largest("thread_idx")
        bytes_ = first[:, _COLUMN["program_bytes"]] - first[:, _COLUMN["program_allocated"]]
        return cls(
            flops=first[:, _COLUMN["program_flops"]],
            io_bytes=np.maximum(bytes_, main[:, _COLUMN["itemsize"]]),
            columns=np.where(output & (rank == 1), extent, 1.0).prod(1),
            rows=np.where(output & (rank == 2), extent, 1.0).prod(1),
            batch=np.where(output & (rank > 2), extent, 1.0).prod(1),
            depth=depth,
            parallel=np.maximum(main[:, _COLUMN["parallel"]], 1.0),
            blocks=np.maximum(blocks, 1.0),
            threads=np.maximum(threads, 1.0),
            shared_bytes=first[:, _COLUMN["program_shared"]],
            scheduled_for_gpu=(blocks > 1) | (threads > 1),
            contraction=(products > 0) & (depth > 1),
            windowed=((main[:, _REDUCTION] > 0) & (extent > 1)).sum(1) > 1,
        )

    def take(self, numbers: NDArray[np.int64]) -> ProgramView:
        """The programs with these numbers."""
        return ProgramView(**{field.name: getattr(self, field.name)[numbers] for field in fields(self)})
