"""Starts a tuning from records of the same tasks, of earlier tunings and collections. Records of the same device train the
cost model. The best programs of any device are measured first: their schedules are reused, but their labels may not hold here
and now. From the kept tunings it takes those of the device, or else those of the nearest device."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.dataset import DatasetView, load_datasets
from cdmpp.device import Device, device_features
from cdmpp.errors import PredictorError, ProgramError
from cdmpp.predictor.encoding import signed_log1p
from cdmpp.program import structural_hash
from cdmpp.program.types import Program, Space
from cdmpp.tuner import results as stored
from cdmpp.tuner.candidates import Candidate, TaskTuner, runner_results
from cdmpp.tuner.config import AUTO

logger = logging.getLogger(__name__)

#: Device features with a smaller standard deviation over all devices count as constant.
_CONSTANT_STD = 1e-6
#: Number of a task's programs to measure before any search.
_FIRST = 4


@dataclass(frozen=True)
class _Earlier:
    """A program, measured earlier, of one of the tasks to tune; `here` is whether it was measured on this device."""

    candidate: Candidate
    latency_s: float | None
    here: bool


def warm_start(
    paths: Sequence[str | Path], tuners: Mapping[str, TaskTuner], device: Device, cost_model: Any, say: Callable[[str], None]
) -> tuple[dict[str, list[Candidate]], int]:
    """Train a cost model on earlier records, and choose the programs to measure first. `paths` are dataset folders (or folders
    of them), tuning folders, folders of a MetaSchedule JSON database, or :data:`AUTO`; `tuners` are by their task's hash.
    Returns, by task, at most four candidates to measure before any search, best first; and the number of records learned from.
    Raises TunerError for a database that this TVM does not read, DatasetError for a path that is none of these."""
    earlier = defaultdict[str, dict[str, _Earlier]](dict)
    first: dict[str, list[Candidate]] = {}
    learned = 0
    for name in paths:
        path = Path(name)
        if name == AUTO:
            found = kept_programs(tuners, device, say)
        elif (path / stored.RECORD_FILE).exists() and not (path / stored.DATASET_FOLDER).is_dir():
            found = _of_database(path, tuners, device)
        else:
            view = load_datasets([path / stored.DATASET_FOLDER if (path / stored.DATASET_FOLDER).is_dir() else path])
            found = _of_dataset(view, tuners, device)
        for entry in found:
            earlier[entry.candidate.task][entry.candidate.hash] = entry
    for task, entries in earlier.items():
        here = [e for e in entries.values() if e.here]
        if here:
            results = runner_results([e.latency_s for e in here])
            cost_model.update(tuners[task].context, [e.candidate.measure for e in here], results)
            learned += len(here)
        ran = [e for e in entries.values() if e.latency_s is not None]
        # programs measured on this device first, then by latency: the order on other devices is only a hint
        ran.sort(key=lambda e: (not e.here, e.latency_s))
        if ran:
            first[task] = [e.candidate for e in ran[:_FIRST]]
    return first, learned


def _of_dataset(view: DatasetView, tuners: Mapping[str, TaskTuner], device: Device) -> Iterator[_Earlier]:
    frame = view.records
    frame = frame[frame["task"].isin(list(tuners))]
    # of several records of a program, one of this device is used
    frame = frame.assign(here=frame["device"] == device.name).sort_values("here", kind="stable")
    rows = {str(row.program): row for row in frame.itertuples()}
    for candidate in stored.replayed(view, list(rows), tuners):
        row = rows[candidate.hash]
        yield _Earlier(candidate, float(row.latency_s) if row.status == "ok" else None, bool(row.here))


def _of_database(path: Path, tuners: Mapping[str, TaskTuner], device: Device) -> Iterator[_Earlier]:
    lost = 0
    for record in stored.json_database(path).get_all_tuning_records():
        tuner = tuners.get(structural_hash(record.workload.mod["main"]))
        if tuner is None:
            continue
        try:
            candidate = tuner.candidate(record.as_measure_candidate().sch, "earlier")
        except Exception as err:  # TVM raises its own error types
            logger.debug("a record does not replay: %s", err)
            lost += 1
            continue
        seconds = [float(s) for s in record.run_secs or ()]
        # TVM writes failures as 1e10 seconds
        latency_s = float(np.median(seconds)) if seconds and max(seconds) < 1e9 else None
        yield _Earlier(candidate, latency_s, _same_target(record.target, device.target))
    if lost:
        logger.warning("%s: %d records do not replay with TVM %s", path, lost, stored.tvm_version())


def _same_target(target: Any, wanted: Mapping[str, Any]) -> bool:
    """Whether a record was measured on code for the same instruction set and number of cores, or the same GPU architecture."""
    if target is None or str(target.kind.name) != wanted.get("kind"):
        return False
    attributes, names = dict(target.attrs), ("mcpu", "num-cores", "arch")
    return all(str(attributes.get(name, "")) == str(wanted.get(name, "")) for name in names)


def kept_programs(tuners: Mapping[str, TaskTuner], device: Device, say: Callable[[str], None]) -> Iterator[_Earlier]:
    """Kept programs of tasks, made by this TVM: for each task those of the device, or else of the nearest device with some."""
    others, lost = 0, 0
    for task, tuner in tuners.items():
        found: dict[str, dict[str, Any]] = {}
        for path in sorted((stored.kept_folder() / task).glob("*.json")):
            content = stored.read_kept(path)
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
            yield _Earlier(candidate, float(entry["latency_s"]), here)
    if others or lost:
        say(f"kept tunings: {others} files of another TVM (or damaged) and {lost} programs that do not replay passed over")


def nearest_device(name: str, vectors: Mapping[str, NDArray[np.float64]]) -> str:
    """The device nearest to the device `name`, by features (device name -> raw :func:`cdmpp.device.device_features`) as
    logarithms standardised over the devices; a feature that one of two devices lacks is ignored in their distance."""
    others = sorted(set(vectors) - {name})
    if not others or name not in vectors:
        raise PredictorError(f"there is no device to compare {name} with")
    table = pd.DataFrame({device: signed_log1p(vector) for device, vector in vectors.items()}).T
    std = table.std(ddof=0)
    varies = std > _CONSTANT_STD
    gaps = ((table.loc[others] - table.loc[name]) / std).loc[:, varies]
    distance = np.sqrt((gaps**2).mean(axis=1)).fillna(math.inf)
    return min(others, key=lambda other: (distance[other], other))
