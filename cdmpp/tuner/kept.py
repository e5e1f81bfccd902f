"""Tunings kept for later ones: the fastest programs of each task on each device, in the user's cache folder.

A file a task and device, ``tunings/TASK/DEVICE.json``: decisions, spaces, latencies, the device as it was, the TVM that made
it. On the same device they teach the cost model and are measured first; else the nearest device's are measured first.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.device import Device, device_features
from cdmpp.errors import PredictorError, ProgramError
from cdmpp.files import cache_folder, write_json
from cdmpp.program.types import Program, Space
from cdmpp.tuner.store import tvm_version

if TYPE_CHECKING:
    from cdmpp.dataset import Dataset
    from cdmpp.tuner.candidates import Candidate, TaskTuner

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
#: Programs kept of a task on a device, the fastest.
_MOST = 16
#: Device features that differ by less than this between all devices do not tell them apart.
_CONSTANT_STD = 1e-6


def keep(dataset: Dataset, device: Device, labels: Mapping[str, float | None]) -> None:
    """Keep the fastest scheduled programs of a tuning beside those of earlier ones; a cache that cannot be written is said."""
    fastest: dict[str, list[tuple[float, Program]]] = {}
    for digest, latency_s in labels.items():
        program = dataset.programs[digest]
        if latency_s is not None and program.space_hash is not None:
            fastest.setdefault(program.task_hash, []).append((latency_s, program))
    for task, found in fastest.items():
        path = _folder() / task / f"{device.name}.json"
        earlier = _read(path) if path.is_file() else None
        entries = {} if earlier is None else {entry["program"]["hash"]: entry for entry in earlier["programs"]}
        for latency_s, program in found:
            space = dataset.spaces[str(program.space_hash)]
            entries[program.hash] = {"latency_s": latency_s, "program": asdict(program), "space": asdict(space)}
        programs = sorted(entries.values(), key=lambda entry: entry["latency_s"])[:_MOST]
        head = {"format_version": FORMAT_VERSION, "tvm": tvm_version(), "device": device.to_json()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {**head, "programs": programs})
        except OSError as err:
            logger.warning("the tuning is not kept for later ones: %s", err)
            return


def kept_programs(
    tuners: Sequence[TaskTuner], device: Device, say: Callable[[str], None]
) -> Iterator[tuple[int, Candidate, float, bool]]:
    """Number of a task, a program kept of it, its latency in seconds, and whether it was measured on this device.

    A task's are those of the device, or else of the nearest one that has some. What another TVM wrote is passed over.
    """
    others, lost = 0, 0
    for number, tuner in enumerate(tuners):
        found: dict[str, dict[str, Any]] = {}
        for path in sorted((_folder() / tuner.task.hash).glob("*.json")):
            content = _read(path)
            if content is None:
                others += 1
            elif content["device"]["kind"] == device.kind:
                found[path.stem] = content
        if not found:
            continue
        vectors = {name: device_features(Device.from_json(content["device"])) for name, content in found.items()}
        here = device.name in found
        name = device.name if here else nearest_device(device.name, {**vectors, device.name: device_features(device)})
        for entry in found[name]["programs"]:
            try:
                candidate = tuner.replay(Program(**entry["program"]), Space(**entry["space"]))
            except ProgramError as err:
                logger.debug("%s", err)
                lost += 1
                continue
            yield number, candidate, float(entry["latency_s"]), here
    if others or lost:
        say(
            f"kept tunings: {others} files of another TVM (or damaged) and {lost} programs that do not replay passed over"
        )


def _folder() -> Path:
    return cache_folder() / "tunings"


def _read(path: Path) -> dict[str, Any] | None:
    """A file of the cache; None for one of another TVM or format, or a damaged one."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        Device.from_json(content["device"])
        same = content["format_version"] == FORMAT_VERSION and content["tvm"] == tvm_version()
        return content if same and all(entry["program"] and entry["space"] for entry in content["programs"]) else None
    except (OSError, ValueError, KeyError, TypeError) as err:
        logger.debug("%s: %s", path, err)
        return None


def nearest_device(name: str, vectors: Mapping[str, NDArray[np.float64]]) -> str:
    """The device whose features (device name -> raw :func:`cdmpp.device.device_features`) are nearest to a device's.

    Logarithms are compared, standardised over the devices; a feature that one of two devices lacks tells nothing of them.
    """
    import pandas as pd

    from cdmpp.predictor.encoding import signed_log1p

    others = sorted(set(vectors) - {name})
    if not others or name not in vectors:
        raise PredictorError(f"there is no device to compare {name} with")
    table = pd.DataFrame({device: signed_log1p(vector) for device, vector in vectors.items()}).T
    std = table.std(ddof=0)
    varies = std > _CONSTANT_STD
    gaps = ((table.loc[others] - table.loc[name]) / std).loc[:, varies]
    distance = np.sqrt((gaps**2).mean(axis=1)).fillna(math.inf)
    return min(others, key=lambda other: (distance[other], other))
