"""What a tuning leaves behind: a folder with a MetaSchedule database in TVM's own format (every program that ran),
``measured/`` (a cdmpp dataset of all measurements, failures included, for predictors to learn from), ``tuning.json`` (what was
tuned, and how) and ``curve.jsonl``. The database is made anew from the dataset, written first, where the two differ after a
crash."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from cdmpp.dataset import Dataset
from cdmpp.device import Device
from cdmpp.errors import DatasetError, ProgramError, TunerError, reason
from cdmpp.files import cache_folder, read_json, write_json
from cdmpp.profiler.engine import Outcome, add_outcome, last_line
from cdmpp.program.tvm_env import import_tvm, quiet
from cdmpp.tuner.candidates import Candidate, TaskTuner, is_untuned
from cdmpp.tuner.objective import Costs, Curve, Point

logger = logging.getLogger(__name__)

FORMAT_VERSION = KEPT_VERSION = 1
#: Programs kept of a task on a device, the fastest.
_MOST_KEPT = 16
TUNING_FILE = "tuning.json"
CURVE_FILE = "curve.jsonl"
DATASET_FOLDER = "measured"
WORKLOAD_FILE = "database_workload.json"
RECORD_FILE = "database_tuning_record.json"

#: What must be as it was when a tuning is resumed.
_FIXED = ("network", "device", "cost_model", "seed", "tvm")


def tvm_version() -> str:
    return metadata.version("apache-tvm")


class TuningStore:
    """A tuning's folder, made if missing; `settings` are JSON values that say what is tuned and how. TunerError where there is
    a tuning and `resume` was not asked for, or where it is of something else or by another TVM."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], device: Device, resume: bool) -> None:
        self.folder, self._device = folder, device
        settings = {**settings, "device": device.name, "tvm": tvm_version(), "format_version": FORMAT_VERSION}
        check_folder(folder, resume)
        if _begun(folder):
            _check_same(folder, settings)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise TunerError(f"cannot make {folder}: {reason(err)}") from err
        with writing(folder / TUNING_FILE):
            write_json(folder / TUNING_FILE, settings)
        self.dataset = Dataset.open_or_create(folder / DATASET_FOLDER)
        self.dataset.set_device(device)
        now = {"started_at": time.time(), "device": device.name, "versions": {"apache-tvm": tvm_version()}}
        self.dataset.update_meta(sessions=[*self.dataset.meta.get("sessions", []), now])
        self.database: Any = None

    def close(self, done: bool = False) -> None:
        """Let others write; a tuning that is done has its dataset made compact."""
        try:
            if done:
                self.dataset.finalize()
        finally:
            self.dataset.close()

    def open_database(self, tuners: Sequence[TaskTuner], anew: bool = False) -> None:
        """Open the MetaSchedule database, made anew from the dataset if they differ, or if labels have changed."""
        latencies = {
            program: latency_s
            for program, latency_s in self.outcomes().items()
            if latency_s is not None and not is_untuned(self.dataset.programs[program])
        }
        try:
            self.database = json_database(self.folder)
            if len(self.database) == len(latencies) and not anew:
                return
        except TunerError as err:
            logger.warning("%s; it is made anew from %s", err, self.folder / DATASET_FOLDER)
        for name in (WORKLOAD_FILE, RECORD_FILE):
            (self.folder / name).unlink(missing_ok=True)
        self.database = json_database(self.folder)
        by_task = {tuner.task.hash: tuner for tuner in tuners}
        for candidate in replayed(self.dataset, sorted(latencies), by_task):
            self.commit(by_task[candidate.task], candidate, latencies[candidate.hash])

    def outcomes(self) -> dict[str, float | None]:
        """Label of every program measured so far, in the order of measuring; None where it failed."""
        return labels_of(self.dataset, self._device)

    def add(self, outcome: Outcome) -> None:
        """Put an outcome into the dataset."""
        threads = {"threads": int(self._device.share)} if self._device.kind == "cpu" else {}
        sms, devices, name = outcome.meta.get("sms"), self.dataset.meta["devices"], self._device.name
        if sms is not None and devices[name]["cores_used"] != sms:
            # how many a share of a GPU has: partitions come in units, and the device table has what was asked for
            self.dataset.update_meta(devices={**devices, name: {**devices[name], "cores_used": float(sms)}})
        add_outcome(self.dataset, name, outcome, {**threads, "cache": "warm"})

    def commit(self, tuner: TaskTuner, candidate: Candidate, latency_s: float) -> None:
        """Put a program that ran into the MetaSchedule database."""
        self.database.commit_tuning_record(tuning_record(self.database, tuner, candidate, latency_s))

    def commit_record(self, tuner: TaskTuner, record: Any) -> None:
        """Put a record into the MetaSchedule database that another process made (``TuningRecord.as_json``)."""
        from tvm.s_tir import meta_schedule as ms

        workload = self.database.commit_workload(tuner.mod)
        self.database.commit_tuning_record(ms.database.TuningRecord.from_json(record, workload))

    def add_point(self, point: Point, costs: Costs) -> None:
        """Append to the curve, with what everything has cost so far."""
        line = json.dumps({"point": asdict(point), "costs": asdict(costs)})
        path = self.folder / CURVE_FILE
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def curve(self) -> tuple[Curve, Costs]:
        """The curve so far and what it cost; a line that a crash cut off is left out."""
        path = self.folder / CURVE_FILE
        curve, costs = Curve(), Costs()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
                point, costs = Point(**entry["point"]), Costs(**entry["costs"])
            except (ValueError, TypeError, KeyError):
                logger.warning("%s: a damaged line was skipped", path)
                continue
            curve.points.append(point)
        return curve, costs


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file of a tuning is written, such as a full disk, into a TunerError."""
    try:
        yield
    except OSError as err:
        raise TunerError(
            f"cannot write {path}: {reason(err)}; what was measured before is kept: go on with --resume"
        ) from err


def check_folder(folder: Path, resume: bool) -> None:
    """TunerError where a tuning cannot be kept in a folder: it is a file, or there is one that is not to be resumed."""
    if folder.exists() and not folder.is_dir():
        raise TunerError(f"{folder} is a file: a tuning is kept in a folder")
    if not resume and _begun(folder):
        raise TunerError(f"{folder} holds a tuning already: go on with --resume, or choose another")


def _begun(folder: Path) -> bool:
    """Whether something was measured: what ended before that, as on bad input, is no tuning."""
    if not (folder / TUNING_FILE).exists():
        return False
    # resuming says whether it is damaged
    return not (folder / DATASET_FOLDER).is_dir() or len(Dataset.open(folder / DATASET_FOLDER).records) > 0


def labels_of(dataset: Dataset, device: Device) -> dict[str, float | None]:
    """Label of every program that was measured on a device, in the order of measuring; None where it failed."""
    rows = dataset.records[dataset.records["device"] == device.name].itertuples()
    return {str(row.program): float(row.latency_s) if row.status == "ok" else None for row in rows}


def tuning_record(database: Any, tuner: TaskTuner, candidate: Candidate, latency_s: float) -> Any:
    """A MetaSchedule record of a program that ran, for a database."""
    from tvm.s_tir import meta_schedule as ms

    workload, measure = database.commit_workload(tuner.mod), candidate.measure
    return ms.database.TuningRecord(measure.sch.trace, workload, [latency_s], tuner.context.target, measure.args_info)


def json_database(folder: Path) -> Any:
    """MetaSchedule's JSON database of a folder, made if missing; TunerError where it is damaged or of another TVM."""
    import_tvm()
    from tvm.s_tir import meta_schedule as ms

    try:
        with quiet():
            return ms.database.JSONDatabase(work_dir=str(folder))
    except Exception as err:  # TVM raises its own error types
        said = "(written by another TVM, or damaged)"
        raise TunerError(
            f"{folder} holds no database that TVM {tvm_version()} reads {said}: {last_line(err)[:200]}"
        ) from err


def replayed(dataset: Any, programs: Sequence[str], tuners: Mapping[str, TaskTuner]) -> Iterator[Candidate]:
    """Programs of a dataset as candidates, of tasks (hash -> tuner); those that do not replay are counted and left."""
    lost = 0
    for digest in programs:
        program = dataset.programs[digest]
        tuner = tuners.get(program.task_hash)
        if tuner is None or is_untuned(program):
            continue
        try:
            yield tuner.replay(program, dataset.spaces[program.space_hash])
        except ProgramError as err:
            logger.debug("%s", err)
            lost += 1
    if lost:
        logger.warning("%d programs of earlier records do not replay with TVM %s", lost, tvm_version())


def _check_same(folder: Path, settings: Mapping[str, Any]) -> None:
    """TunerError where ``tuning.json`` is damaged, of another version or of another tuning."""
    path = folder / TUNING_FILE
    try:
        known = read_json(path)
        version = known["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise TunerError(f"{path} is damaged: {err}") from err
    if version != FORMAT_VERSION:
        raise TunerError(f"{path}: tuning format {version}, this cdmpp reads {FORMAT_VERSION}")
    for name in _FIXED:
        if known.get(name) != settings.get(name):
            raise TunerError(
                f"{folder} was tuned with {name} {known.get(name)}, not {settings.get(name)}: choose another folder"
            )
    if not (folder / DATASET_FOLDER).is_dir():
        raise DatasetError(f"{folder / DATASET_FOLDER} is missing: what was measured cannot be read")


# -- kept for later tunings -----------------------------------------------------------------------------------------


def kept_folder() -> Path:
    """Of the user's cache: a file a task and device, ``TASK/DEVICE.json``, with the fastest programs, their spaces and
    latencies, the device as it was, and the TVM that made it."""
    return cache_folder() / "tunings"


def keep(dataset: Dataset, device: Device, labels: Mapping[str, float | None]) -> None:
    """Keep the fastest scheduled programs of a tuning beside those of earlier ones; a cache that cannot be written is said."""
    found = defaultdict[str, dict[str, Any]](dict)
    for digest, latency_s in labels.items():
        program = dataset.programs[digest]
        if latency_s is not None and program.space_hash is not None:
            space = asdict(dataset.spaces[program.space_hash])
            found[program.task_hash][digest] = {"latency_s": latency_s, "program": asdict(program), "space": space}
    for task, entries in found.items():
        path = kept_folder() / task / f"{device.name}.json"
        earlier = {entry["program"]["hash"]: entry for entry in (read_kept(path) or {"programs": []})["programs"]}
        programs = sorted({**earlier, **entries}.values(), key=lambda entry: entry["latency_s"])[:_MOST_KEPT]
        head = {"format_version": KEPT_VERSION, "tvm": tvm_version(), "device": device.to_json()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {**head, "programs": programs})
        except OSError as err:
            logger.warning("the tuning is not kept for later ones: %s", err)
            return


def read_kept(path: Path) -> dict[str, Any] | None:
    """A file of the cache; None for one of another TVM or format, or a damaged one."""
    try:
        content: dict[str, Any] = read_json(path)
        Device.from_json(content["device"])
        same = content["format_version"] == KEPT_VERSION and content["tvm"] == tvm_version()
        return content if same and all(entry["program"] and entry["space"] for entry in content["programs"]) else None
    except (OSError, ValueError, KeyError, TypeError) as err:
        logger.debug("%s: %s", path, err)
        return None
