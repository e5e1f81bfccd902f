"""Shares of a device for the workers of a sharded tuning: which cores each gets, what it starts with, its process."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cdmpp.errors import TunerError
from cdmpp.tuner.shard_messages import ShardConfig
from cdmpp.tuner.shard_worker import serve_shard

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.types import Task
    from cdmpp.tuner.tuning import TuneConfig

#: As many workers as shares fit on the device.
AUTO = "auto"
#: Of sums of shares that are written in decimals.
_ROUNDING = 1e-6
#: Seconds until a process that was ended is waited for no longer.
_END_S = 10.0


class Shard(Protocol):
    """A worker that was started: :class:`ProcessShard`, or a stand-in for it."""

    connection: Connection

    def exit_reason(self) -> str:
        """How it ended, in words."""

    def close(self) -> None:
        """End it at once."""


class ProcessShard:
    """A worker as a process.

    It is started afresh and not forked from the profiler's fork server: what it starts itself must inherit its cores, and end
    with it.
    """

    def __init__(self, config: ShardConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve_shard, args=(theirs, config), name=f"shard-{config.number}"
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return int(self._process.pid or 0)

    def exit_reason(self) -> str:
        """How it ended, in words."""
        self._process.join(timeout=_END_S)
        code = self._process.exitcode
        if code is None:
            return "still running"
        return f"killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def close(self) -> None:
        """End it with SIGKILL; its builders and its measuring process end with it."""
        self.connection.close()
        self._process.kill()
        self._process.join(timeout=_END_S)


def start_process(config: ShardConfig) -> Shard:
    """Start a worker."""
    return ProcessShard(config)


def shard_cores(device: Device, shards: int | str) -> tuple[tuple[int, ...], ...]:
    """Cores of each of several workers that each get a whole share; of as many as fit for :data:`AUTO`.

    For a GPU they are those that the workers search on: each has a share of the GPU besides.

    Raises
    ------
    TunerError
        So many do not fit on the GPU, or on the cores that this process may use.
    """
    from cdmpp.profiler.machine import core_groups, usable_cores

    cores, gpu = usable_cores(), device.kind == "gpu"
    there = 1.0 if gpu else float(len(cores))
    number = max(1, int(there / device.share + _ROUNDING)) if shards == AUTO else int(shards)
    if number < 1:
        raise TunerError(f"one worker at least, got {number} shards")
    asked = number * device.share
    if asked > there + _ROUNDING:
        too_many = (
            f"are {asked:g} times what there is"
            if gpu
            else f"need {asked:g} cores, this process may use {len(cores)}"
        )
        fits = int(1000 / number) / 1000 if gpu else len(cores) // number
        smaller = f", or tune for a smaller share: {device.base}@{fits:g}" if fits else ""
        raise TunerError(f"{number} shards of {device.name} {too_many}: take fewer shards{smaller}")
    if gpu:
        return tuple(cores[i::number] or cores for i in range(number))
    return core_groups(cores, int(device.share), number)


@contextlib.contextmanager
def shard_configs(
    config: TuneConfig,
    device: Device,
    cores: Sequence[tuple[int, ...]],
    tasks: Sequence[Task],
    cost_model: Any,
    learned: bool,
) -> Iterator[list[ShardConfig]]:
    """What workers start with; the files that they read are there as long as the context is.

    Parameters
    ----------
    cost_model, learned
        A cost model, and whether it has learned something that workers are to start from.
    """
    from cdmpp.predictor import Predictor
    from cdmpp.profiler.machine import make_work_folder
    from cdmpp.tuner.validity import ValidityModel

    shm = Path("/dev/shm")
    folder = make_work_folder(shm if shm.is_dir() else Path(tempfile.gettempdir()))
    try:
        predictor = config.predictor if config.cost_model == "cdmpp" else None
        if isinstance(predictor, Predictor):
            predictor.save(folder / "predictor")
            predictor = str(folder / "predictor")
        validity = config.validity
        if isinstance(validity, ValidityModel):
            validity.save(folder / "validity")
            validity = folder / "validity"
        start = ""
        if learned and config.cost_model != "random":
            start = str(folder / "cost_model")
            cost_model.save(start)
        tune = replace(config, predictor=predictor, validity=validity)
        yield [
            ShardConfig(number, own, device, tune, tuple(tasks), start, str(folder))
            for number, own in enumerate(cores)
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
