"""Training of one network by several processes that torchrun started, each with its part of every batch.

The loss of a step is that of the whole batch: embeddings and labels of all rows are gathered, and every process computes the
whole loss, but differentiates it with respect to its own rows only. The sum of the processes' gradients is then the gradient
of a single process, also for terms that couple the rows of a batch: CMD, and means over the rows that have instruction counts.
Each step sends the gradient and some hundred numbers per row. Only drop-out differs from training in one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from cdmpp.errors import PredictorError, reason

#: Long, as the first process may compute features for hours while the others wait; a process that dies is noticed at once.
_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class Processes:
    """A group of ``count`` processes, of which this is number ``rank``, on the torch device ``where``."""

    where: torch.device
    rank: int = 0
    count: int = 1

    def part(self, n: int) -> NDArray[np.int64]:
        """Indices of this process's rows among the ``n`` rows of a batch, at least one: with fewer rows than processes, some
        processes compute a row that does not count."""
        return np.arange(self.rank, n, self.count) if self.rank < n else np.zeros(1, np.int64)

    def gathered(self, mine: torch.Tensor, n: int, of: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 values of all ``n`` rows of a batch, with gradients for ``mine`` (k, ...), the rows of this process. If only
        some rows have values, ``of``, bool (n,), marks them, and only theirs are returned."""
        mine = mine.float()
        if self.count == 1:
            return mine
        index = torch.arange(self.rank, n, self.count, device=mine.device)
        if of is not None:
            index = (of.cumsum(0) - 1)[index[of[index]]]
            n = int(of.sum())
        placed = mine.new_zeros(n, *mine.shape[1:]).index_copy(0, index, mine[: len(index)])
        others = placed.detach().clone()
        self._together(dist.all_reduce, others)
        others[index] = 0
        return placed + others

    def add_gradients(self, network: torch.nn.Module) -> None:
        """Replace a network's gradients by their sum over the processes."""
        if self.count > 1:
            gradients = [p.grad for p in network.parameters() if p.grad is not None]
            flat = torch.cat([g.flatten() for g in gradients])
            self._together(dist.all_reduce, flat)
            for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def check_same(self, what: str, value: int) -> None:
        """Raise PredictorError unless ``value``, below 2**63, is the same in all processes."""
        if self.count > 1:
            bounds = torch.tensor([value, -value], device=self.where)
            self._together(dist.all_reduce, bounds, dist.ReduceOp.MAX)
            if int(bounds[0]) != -int(bounds[1]):
                raise PredictorError(f"the processes see different {what}: all need the same data and --out folder")

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process runs the block before the others do, and fills caches that they read."""
        if self.count > 1 and self.rank > 0:
            self._wait()
        yield
        if self.count > 1 and self.rank == 0:
            self._wait()

    def _wait(self) -> None:
        self._together(dist.all_reduce, torch.zeros(1, device=self.where))

    def _together(self, operation: Callable[..., Any], *args: Any) -> None:
        try:
            operation(*args)
        except RuntimeError as err:
            raise PredictorError(f"process {self.rank} of {self.count} lost another: {reason(err)[:200]}") from err


def pick_device(name: str) -> torch.device:
    """``cpu``, ``cuda`` or ``auto`` -> a torch device, under torchrun a different GPU for each process of a machine. Raises
    PredictorError if CUDA is asked for but missing, or if there are fewer GPUs than processes."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and not available:
        raise PredictorError("train.device is cuda, but torch sees no CUDA device; use cpu or auto")
    if name == "cpu" or not available:
        return torch.device("cpu")
    if not dist.is_torchelastic_launched():
        return torch.device("cuda")
    number, here = int(os.environ["LOCAL_RANK"]), os.environ["LOCAL_WORLD_SIZE"]
    if number >= available:
        raise PredictorError(f"torchrun started {here} processes here, but torch sees {available} CUDA devices")
    return torch.device("cuda", number)


@contextmanager
def torchrun_processes(device: str, batch_size: int) -> Iterator[Processes]:
    """The processes that torchrun started, joined by NCCL on GPUs and gloo on CPUs; without torchrun, this one alone.
    ``device`` is as in :func:`pick_device`. Raises PredictorError if a batch has fewer rows than there are processes."""
    where = pick_device(device)
    if not dist.is_torchelastic_launched():
        yield Processes(where)
        return
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if batch_size < count:
        raise PredictorError(f"train.batch_size is {batch_size}: {count} processes need at least one row each")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        yield Processes(where, rank, count)
    finally:
        dist.destroy_process_group()
