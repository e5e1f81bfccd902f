"""The results of a tuning: a line per task, the whole network's latency, and the costs; as JSON, a figure and an HTML page.

They are kept in a folder with a MetaSchedule database in TVM's own format (every program that ran),
``measured/`` (a cdmpp dataset of all measurements, failures included, to train predictors on), ``tuning.json`` (what was
tuned, and how) and ``curve.jsonl``. The dataset is written first: if the two differ after a crash, the database is rebuilt
from it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from cdmpp.dataset import Dataset
from cdmpp.device import Device
from cdmpp.errors import DatasetError, ProgramError, TunerError, raised_as, reason
from cdmpp.files import cache_folder, read_json, seconds_text, write_json, write_text
from cdmpp.profiler.engine import Outcome, add_outcome, last_line
from cdmpp.program import import_tvm, quiet
from cdmpp.program.types import Task
from cdmpp.tuner.candidates import Candidate, TaskTuner, is_untuned
from cdmpp.tuner.config import Costs, Point
from cdmpp.tuner.deployment import NetworkLatency
from cdmpp.tuner.progress import TaskState

logger = logging.getLogger(__name__)

FORMAT_VERSION = KEPT_VERSION = 1
#: Number of fastest programs kept for a task on a device.
_MOST_KEPT = 16
TUNING_FILE = "tuning.json"
CURVE_FILE = "curve.jsonl"
DATASET_FOLDER = "measured"
WORKLOAD_FILE = "database_workload.json"
RECORD_FILE = "database_tuning_record.json"

#: Settings that must be unchanged when a tuning is resumed.
_FIXED = ("network", "device", "cost_model", "seed", "tvm")


def tvm_version() -> str:
    return metadata.version("apache-tvm")


class TuningStore:
    """A tuning's folder, made if missing; `settings` are JSON values that say what is tuned and how. Raises TunerError if the
    folder holds a tuning and `resume` is false, or if that tuning has other settings or was made by another TVM."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], device: Device, resume: bool) -> None:
        self.folder, self._device = folder, device
        settings = {**settings, "device": device.name, "tvm": tvm_version(), "format_version": FORMAT_VERSION}
        check_folder(folder, resume)
        if _begun(folder):
            _check_same(folder, settings)
        with raised_as(TunerError, f"cannot make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        with writing(folder / TUNING_FILE):
            write_json(folder / TUNING_FILE, settings)
        self.dataset = Dataset.open_or_create(folder / DATASET_FOLDER)
        self.dataset.set_device(device)
        now = {"started_at": time.time(), "device": device.name, "versions": {"apache-tvm": tvm_version()}}
        self.dataset.update_meta(sessions=[*self.dataset.meta.get("sessions", []), now])
        self.database: Any = None

    def close(self, done: bool = False) -> None:
        """Release the dataset for other writers; if the tuning is `done`, compact it first."""
        try:
            if done:
                self.dataset.finalize()
        finally:
            self.dataset.close()

    def open_database(self, tuners: Sequence[TaskTuner], anew: bool = False) -> None:
        """Open the MetaSchedule database; rebuild it from the dataset if they differ, or if `anew` because labels changed."""
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
        """Label of every program measured so far, in the order of measurement; None for failures."""
        return labels_of(self.dataset, self._device)

    def add(self, outcome: Outcome) -> None:
        """Add an outcome to the dataset."""
        threads = {"threads": int(self._device.share)} if self._device.kind == "cpu" else {}
        sms, devices, name = outcome.meta.get("sms"), self.dataset.meta["devices"], self._device.name
        if sms is not None and devices[name]["cores_used"] != sms:
            # the SMs that the GPU share really has: partitions come in units, the device table has the requested number
            self.dataset.update_meta(devices={**devices, name: {**devices[name], "cores_used": float(sms)}})
        add_outcome(self.dataset, name, outcome, {**threads, "cache": "warm"})

    def commit(self, tuner: TaskTuner, candidate: Candidate, latency_s: float) -> None:
        """Add a program that ran to the MetaSchedule database."""
        self.database.commit_tuning_record(tuning_record(self.database, tuner, candidate, latency_s))

    def commit_record(self, tuner: TaskTuner, record: Any) -> None:
        """Add a record that another process made (``TuningRecord.as_json``) to the MetaSchedule database."""
        from tvm.s_tir import meta_schedule as ms

        workload = self.database.commit_workload(tuner.mod)
        self.database.commit_tuning_record(ms.database.TuningRecord.from_json(record, workload))

    def add_point(self, point: Point, costs: Costs) -> None:
        """Append a point to the curve, with the costs so far."""
        line = json.dumps({"point": asdict(point), "costs": asdict(costs)})
        path = self.folder / CURVE_FILE
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def curve(self) -> tuple[list[Point], Costs]:
        """Latency against time so far, and its costs; the first point is the untuned network if all of its tasks run untuned.
        A line cut off by a crash is skipped."""
        path = self.folder / CURVE_FILE
        curve, costs = list[Point](), Costs()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
                point, costs = Point(**entry["point"]), Costs(**entry["costs"])
            except (ValueError, TypeError, KeyError):
                logger.warning("%s: a damaged line was skipped", path)
                continue
            curve.append(point)
        return curve, costs


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors in writing a file of a tuning, such as a full disk, into a TunerError."""
    try:
        yield
    except OSError as err:
        raise TunerError(f"cannot write {path}: {reason(err)}; what was measured before is kept: go on with --resume") from err


def check_folder(folder: Path, resume: bool) -> None:
    """Raise TunerError if a tuning cannot use a folder: the path is a file, or holds a tuning that is not to be resumed."""
    if folder.exists() and not folder.is_dir():
        raise TunerError(f"{folder} is a file: a tuning is kept in a folder")
    if not resume and _begun(folder):
        raise TunerError(f"{folder} holds a tuning already: go on with --resume, or choose another")


def _begun(folder: Path) -> bool:
    """Whether a tuning in a folder measured something; one that ended before that, as on bad input, does not count."""
    if not (folder / TUNING_FILE).exists():
        return False
    # resuming reports whether it is damaged
    return not (folder / DATASET_FOLDER).is_dir() or len(Dataset.open(folder / DATASET_FOLDER).records) > 0


def labels_of(dataset: Dataset, device: Device) -> dict[str, float | None]:
    """Label of every program that was measured on a device, in the order of measurement; None for failures."""
    rows = dataset.records[dataset.records["device"] == device.name].itertuples()
    return {str(row.program): float(row.latency_s) if row.status == "ok" else None for row in rows}


def tuning_record(database: Any, tuner: TaskTuner, candidate: Candidate, latency_s: float) -> Any:
    """A MetaSchedule record for a database, of a program that ran."""
    from tvm.s_tir import meta_schedule as ms

    workload, measure = database.commit_workload(tuner.mod), candidate.measure
    return ms.database.TuningRecord(measure.sch.trace, workload, [latency_s], tuner.context.target, measure.args_info)


def json_database(folder: Path) -> Any:
    """MetaSchedule's JSON database in a folder, made if missing; TunerError if it is damaged or from another TVM."""
    import_tvm()
    from tvm.s_tir import meta_schedule as ms

    try:
        with quiet():
            return ms.database.JSONDatabase(work_dir=str(folder))
    except Exception as err:  # TVM raises its own error types
        said = "(written by another TVM, or damaged)"
        raise TunerError(f"{folder} holds no database that TVM {tvm_version()} reads {said}: {last_line(err)[:200]}") from err


def replayed(dataset: Any, programs: Sequence[str], tuners: Mapping[str, TaskTuner]) -> Iterator[Candidate]:
    """Programs of a dataset as candidates of tasks (hash -> tuner); those that do not replay are counted and skipped."""
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
    """Raise TunerError if ``tuning.json`` is damaged, of another format version or of another tuning."""
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


def kept_folder() -> Path:
    """Folder of kept tunings in the user's cache. Each task and device has a file, ``TASK/DEVICE.json``, with the fastest
    programs, their spaces and latencies, the device's description at that time, and the TVM version that made it."""
    return cache_folder() / "tunings"


def keep(dataset: Dataset, device: Device, labels: Mapping[str, float | None]) -> None:
    """Merge a tuning's fastest scheduled programs into the user's cache; if it cannot be written, only warn."""
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
    """The content of a file in the cache; None if it is of another TVM or format, or damaged."""
    try:
        content: dict[str, Any] = read_json(path)
        Device.from_json(content["device"])
        same = content["format_version"] == KEPT_VERSION and content["tvm"] == tvm_version()
        return content if same and all(entry["program"] and entry["space"] for entry in content["programs"]) else None
    except (OSError, ValueError, KeyError, TypeError) as err:
        logger.debug("%s: %s", path, err)
        return None


JSON_FILE = "report.json"
FIGURE_FILE = "curve.png"
HTML_FILE = "report.html"
#: Fraction of a network's latency measured while others used the core, above which the summary reports it.
_DISTURBED = 0.05
#: If the latency falls by more than this factor, its axis is logarithmic.
_STEEP = 5.0

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.88rem; }
th, td { padding: 0.18rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True)
class TaskResult:
    """The result of tuning a task, by the task's hash."""

    task: str
    name: str
    weight: float
    #: Latency of the untuned program, and of the program used: the faster of it and the best schedule found.
    untuned_s: float | None
    best_s: float | None
    #: The program used: ``untuned``, or the origin and the hash of the schedule; "" if none runs.
    used: str
    #: Latency of the best schedule, used or not.
    scheduled_s: float | None
    #: Weighted fraction of the network's time before and after tuning; None if the latency of any task is unknown.
    share_before: float | None
    share_after: float | None
    measured: int
    failed: int
    dropped: int
    finished: str

    @classmethod
    def all_of(cls, tasks: Sequence[tuple[Task, float]], states: Sequence[TaskState]) -> list[TaskResult]:
        """Results of all tasks of a network, from the final states of their tuning."""

        def shares(seconds: Sequence[float | None]) -> list[float | None]:
            parts = [state.weight * s for state, s in zip(states, seconds, strict=True) if s is not None]
            known = len(parts) == len(states) and sum(parts) > 0
            return [part / sum(parts) for part in parts] if known else [None] * len(states)

        before, after = shares([s.untuned_s for s in states]), shares([s.latency_s for s in states])
        found = []
        for (task, _), state, part_before, part_after in zip(tasks, states, before, after, strict=True):
            names = ("name", "weight", "untuned_s", "used", "measured", "failed", "dropped", "finished")
            known: dict[str, Any] = {name: getattr(state, name) for name in names}
            known |= {"best_s": state.latency_s, "scheduled_s": state.best_s}
            found.append(cls(task.hash, share_before=part_before, share_after=part_after, **known))
        return found


#: Columns of the table of tasks; "<" aligns left. The shares are fractions of the network's time before and after tuning.
COLUMNS = ("<task", "runs", "untuned", "share", "best", "share", "used", "measured")


def task_rows(tasks: Sequence[TaskResult]) -> list[tuple[str, ...]]:
    """The table of tasks, sorted by their share of the untuned network's time; the column `used` is ``untuned`` or a hash."""

    def part(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.1f} %"

    return [
        (
            *(task.name, f"{task.weight:g}"),
            *(seconds_text(task.untuned_s), part(task.share_before), seconds_text(task.best_s), part(task.share_after)),
            *(task.used.rpartition(" ")[2] or "-", str(task.measured)),
        )
        for task in sorted(tasks, key=lambda task: -(task.share_before or 0.0))
    ]


@dataclass(frozen=True)
class TuneReport:
    """Result of a tuning."""

    name: str
    device: str
    cost_model: str
    seed: int
    #: Why it ended.
    stopped: str
    tasks: list[TaskResult]
    #: Weighted sums of the tasks' untuned and best latencies, each task measured alone; None if a task has none that works.
    untuned_s: float | None
    tuned_s: float | None
    #: Fraction of the latency that another minute is expected to save; None if unknown.
    gain_next_minute: float | None
    costs: Costs
    curve: list[Point]
    #: What cdmpp's cost model learned; empty for TVM's.
    learned: dict[str, Any] = field(default_factory=dict)
    #: Latencies of the whole network, compiled with and without the schedules; None if it was not run.
    network: NetworkLatency | None = None
    #: Number of workers that tuned at the same time, each on a device (share) of that name; None for a single search.
    shards: int | str | None = None

    @property
    def speedup(self) -> float | None:
        """Untuned over tuned latency: of the whole network if it was run, else of the sums over the tasks."""
        if self.network is not None:
            return self.network.latency_s["untuned"] / self.network.latency_s["tuned"]
        return None if not (self.untuned_s and self.tuned_s) else self.untuned_s / self.tuned_s

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values: the fields, and further values that scripts rely on."""
        found = asdict(self)
        network = self.network
        if network is not None:
            found["network"] |= {name: network.of_each(name) for name in ("latency_s", "noise", "disturbed")}
            found["network"] |= {f"{name}_s": seconds for name, seconds in network.latency_s.items()}
        return {
            **found,
            "costs": {**found["costs"], "cpu_s": self.costs.cpu_s},
            "speedup": self.speedup,
            "wall_s": self.costs.wall_s,
            "trials": self.costs.trials,
        }


def write_report(report: TuneReport, folder: Path) -> None:
    """Write ``report.json`` and, where matplotlib is installed and there is a curve, ``curve.png`` and ``report.html``."""
    text = json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n"
    with writing(folder / JSON_FILE):
        write_text(folder / JSON_FILE, text)
    if not report.curve:
        return
    try:
        png = curve_figure(report)
    except ImportError:
        logger.warning("no figure: matplotlib is not installed (pip install 'cdmpp[report]')")
        return
    with writing(folder / HTML_FILE):
        (folder / FIGURE_FILE).write_bytes(png)
        write_text(folder / HTML_FILE, _html(report, png))


def write_page(folder: Path, out: Path) -> dict[str, Any]:
    """Copy the HTML page of a tuning's folder to `out`, and return its ``report.json``. TunerError if it has not ended."""
    try:
        page = (folder / HTML_FILE).read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise TunerError(f"{folder} holds no report of a tuning that has ended: {err}") from err
    with writing(out):
        write_text(out, page)
    return content


def curve_figure(report: TuneReport) -> bytes:
    """Best latency against trials and against wall time, as the bytes of a PNG."""
    from matplotlib.figure import Figure

    points = report.curve
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    latency_ms = [1e3 * p.latency_s for p in points]
    best = f"best: {seconds_text(points[-1].latency_s)}"
    left.step([p.measurements for p in points], latency_ms, where="post", color="#0072B2", label=best)
    left.set(xlabel="trials measured", ylabel="sum over the tasks in ms")
    right.step([p.wall_s for p in points], latency_ms, where="post", color="#0072B2")
    right.set(xlabel="wall time in s")
    if report.untuned_s is not None:
        untuned = f"untuned: {seconds_text(report.untuned_s)}"
        for axes in (left, right):
            axes.axhline(1e3 * report.untuned_s, color="#777777", linestyle=":", label=untuned)
    if latency_ms[0] > _STEEP * latency_ms[-1]:
        left.set_yscale("log")
        left.yaxis.set_major_formatter("{x:g}")
    else:
        left.set_ylim(0, None)
    left.legend(frameon=False)
    left.grid(color="#eeeeee")
    right.grid(color="#eeeeee")
    buffer = io.BytesIO()
    # Without a date and a version in the file, the same numbers give the same file.
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def summary_lines(report: TuneReport) -> list[str]:
    """The results and costs of a tuning, in sentences."""
    costs, ended = report.costs, dict[str, list[str]]()
    share = costs.search_cpu_s / max(costs.wall_s, 1e-9)
    for task in report.tasks:
        if task.finished:
            ended.setdefault(task.finished.partition(":")[0].capitalize(), []).append(task.name)
    lines = [f"{why}: {', '.join(names)}." for why, names in ended.items()]
    lines.append(f"Stopped after {report.stopped}.")
    if report.network is not None:
        untuned, tuned = (seconds_text(report.network.latency_s[name]) for name in ("untuned", "tuned"))
        lines.append(
            f"{report.name} on {report.device}: {untuned} untuned, {tuned} tuned, {report.speedup:.2f} times as fast "
            "(the whole network in the Relax VM)."
        )
        disturbed = report.network.of_each("disturbed").items()
        parts = ", ".join(f"{part:.0%} of the time {name}" for name, part in disturbed if part > _DISTURBED)
        if parts:
            lines.append(f"Others used the core while the network ran ({parts}): it may be faster than that.")
    if report.tuned_s is not None:
        untuned, tuned = map(seconds_text, (report.untuned_s, report.tuned_s))
        lines.append(f"Sum over its tasks: {untuned} untuned, {tuned} tuned.")
    lines += [
        f"{costs.trials} trials: {costs.measurements} measured, {costs.failures} of them failed, {costs.dropped} "
        f"dropped (some {costs.saved_s:.0f} s saved).",
        f"{costs.wall_s:.0f} s: {costs.search_cpu_s:.0f} CPU seconds of search ({share:.0%} of the time), {costs.build_s:.0f} "
        f"of building, {costs.device_s:.0f} s on the device.",
        "Energy: the device does not tell."
        if costs.energy_j is None
        else f"Energy: {costs.energy_j:.0f} J of the whole device, with whatever else ran on it.",
    ]
    if search := report.learned.get("search"):
        counts = "{replayed} programs replayed, {rejected} rejected by TVM, {equal} equal to another, {distinct} distinct"
        lines.append(f"Search: {counts.format(**search)}.")
    if report.gain_next_minute is not None:
        lines.append(f"Another minute is expected to bring {100 * report.gain_next_minute:.1f} %.")
    return lines


def _html(report: TuneReport, png: bytes) -> str:
    table = pd.DataFrame(task_rows(report.tasks), columns=[name.lstrip("<") for name in COLUMNS])
    image = base64.b64encode(png).decode("ascii")
    title = escape(f"cdmpp tune: {report.name} on {report.device}, {report.cost_model}")
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in summary_lines(report))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{paragraphs}\n"
        f'<img alt="best latency against programs measured and wall time" src="data:image/png;base64,{image}">\n'
        f"<h2>Tasks</h2>\n{table.to_html(index=False, border=0)}\n</body>\n</html>\n"
    )
