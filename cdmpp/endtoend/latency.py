"""End-to-end latency of a network: its tasks are predicted on one or several devices and replayed over its graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.device import Device, get_device, load_table
from cdmpp.device.table import is_number
from cdmpp.endtoend.eager import eager_latency
from cdmpp.endtoend.graph import NetworkTasks, network_tasks
from cdmpp.endtoend.replay import Replay, replay
from cdmpp.endtoend.report import INDEPENDENT, INTERVAL, LatencyReport, LayerLatency
from cdmpp.endtoend.tasks import UNTUNED, TaskLatency, candidates, predict_tasks
from cdmpp.errors import NetworkError, PriceError, UnknownDeviceError, raised_as
from cdmpp.files import read_yaml
from cdmpp.predictor import Predictor
from cdmpp.predictor.predictor import COVERAGE, load_predictor, prediction_note
from cdmpp.predictor.uncertainty import Calibration, check_coverage
from cdmpp.profiler.core_rates import with_known_clock
from cdmpp.program.graph import GraphNode
from cdmpp.program.network import Network, load_network

FloatArray = NDArray[np.float64]

#: Number of draws of the tasks' errors. It fixes the ends of a 90 % interval to within about two points of coverage.
_DRAWS = 400
#: A share counts as fast as the whole device if its latency is at most this many times the device's.
_AS_FAST = 1.05


@dataclass(frozen=True)
class Comparison:
    """One network on several devices."""

    network: str
    #: The fastest device first.
    reports: tuple[LatencyReport, ...]
    #: Names of the devices that have a price, the cheapest run first.
    by_cost: tuple[str, ...]
    #: Caveats about the order.
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values; ``by_latency`` names the devices, the fastest first."""
        return {
            "network": self.network,
            "by_latency": [report.device for report in self.reports],
            "by_cost": list(self.by_cost),
            "notes": list(self.notes),
            "reports": [report.to_json() for report in self.reports],
        }


def predict_latency(
    network: Network | NetworkTasks | str | Path,
    device: str | Device,
    predictor: Predictor | str | Path = "default",
    *,
    runtime: str | None = None,
    schedule: str | Path = UNTUNED,
    streams: int = 1,
    launch_overhead_us: float | None = None,
    price_per_hour: float | None = None,
    coverage: float = COVERAGE,
    programs_per_task: int = 64,
    compile_best: int = 4,
    seed: int = 0,
    data: str | Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatencyReport:
    """Predict the latency of a network on a device: every task's program is predicted, and the kernels are replayed over the
    network's graph (:mod:`cdmpp.endtoend.replay`).

    ``network`` is a zoo name, an ``.onnx`` or ``.pt2`` file, a Network, the graph file of an imported trace, or
    :class:`~cdmpp.endtoend.graph.NetworkTasks`; ``data`` is the dataset with the tasks of a graph file, if the file is not in
    its folder. ``predictor`` is one, its folder (for PyTorch that of an operator model), or ``"default"``. ``runtime`` runs the
    network: ``"torch"``, eagerly (:mod:`cdmpp.endtoend.eager`; on a GPU with the kernels of its libraries), or ``"tvm"``. None
    is TVM if tasks or a schedule are given, else PyTorch. ``schedule`` selects a task's program: ``"untuned"`` (as it is),
    ``"best"`` (the best predicted of ``programs_per_task`` random programs of its design space), or the folder of a
    MetaSchedule JSON database. For an x86 CPU the ``compile_best`` best predicted programs of each task are compiled (not run)
    and predicted again from their instructions, which is far more accurate; with 0 only their ASTs are used.

    ``streams`` is how many kernels may run at the same time, if the graph allows it (GPU); with 1 they run in graph order.
    ``launch_overhead_us`` is the microseconds between two launches. None stands for a GPU's specification, or 0 if that has
    none; for 0 on a CPU, whose labels include the call; and for the usual time of a call in PyTorch. ``coverage`` is that of
    the intervals, above 0 and below 1. ``seed`` is for random programs and for the draws of the independent interval.
    ``progress`` is called with the numbers of compiled and of all programs. Raises UnknownDeviceError, NetworkError,
    DatasetError, TunerError, ProgramError, or PredictorError, also for a prediction that is not a latency."""
    check_coverage(coverage)
    if launch_overhead_us is not None and not 0 <= launch_overhead_us < math.inf:
        raise NetworkError(f"the launch overhead must be 0 or more microseconds, got {launch_overhead_us}")
    resolved = with_known_clock(device)
    if runs_eagerly(network, runtime, schedule):
        if isinstance(predictor, Predictor) or streams != 1:
            raise NetworkError("PyTorch runs operators one by one: streams and predictors of programs are for TVM")
        return eager_latency(network, resolved, predictor, price_per_hour, coverage, launch_overhead_us)  # type: ignore[arg-type]
    if runtime == "torch" and resolved.kind == "cpu":
        raise NetworkError("PyTorch runs networks, not tasks, on a CPU: give a network's name or file")
    if runtime == "tvm" and str(schedule) == UNTUNED and resolved.kind == "gpu":
        raise NetworkError(f"TVM has no untuned programs for {resolved.name}: ask for torch, or tvm with a schedule")
    predictor = load_predictor(predictor)
    source = network_tasks(network, data)
    programs, notes = candidates(source, schedule, resolved, programs_per_task, seed)
    if source.library or not predictor.reads_code_of(resolved):
        compile_best = 0
    tasks, evidence = predict_tasks(predictor, source, programs, resolved, compile_best, progress)
    difficulty = np.array([task.difficulty for task in tasks.values()])
    factors = _error_factors(predictor.calibration_of(evidence, resolved), resolved.name, coverage, difficulty, seed)
    cases = {task: tasks[task].latency_s * own for task, own in zip(tasks, factors, strict=True)}
    launch_us, launch_note = _launch(resolved, launch_overhead_us)
    play = partial(replay, source.graph, launch_s=1e-6 * launch_us, asynchronous=resolved.kind != "cpu")
    played = play(cases, streams=streams)
    latency_s = serial_s = float(played.latency_s[0])
    if streams > 1:
        first = {task: values[:1] for task, values in cases.items()}
        serial_s = float(play(first).latency_s[0])
    low_s = high_s = chance_low_s = chance_high_s = ends_of = None  # without intervals
    if len(played.latency_s) > 1:
        low_s, high_s = map(float, played.latency_s[1:3])
        tail = (1 - coverage) / 2
        ends_of = dict(zip(tasks, factors[:, 1:3].tolist(), strict=True))
        chance_low_s, chance_high_s = map(float, np.quantile(played.latency_s[3:], [tail, 1 - tail]))
    layers = _layers(source, tasks, played, ends_of, resolved.name)
    said = (prediction_note(predictor, resolved), launch_note, *notes, *_notes(source.graph.nodes, tasks.values()))
    return LatencyReport(
        network=source.graph.name,
        device=resolved.name,
        schedule=str(schedule),
        latency_s=latency_s,
        low_s=low_s,
        high_s=high_s,
        independent_low_s=chance_low_s,
        independent_high_s=chance_high_s,
        coverage=coverage,
        kernel_s=sum(layer.latency_s for layer in layers),
        gap_s=sum(layer.gap_s for layer in layers),
        launches=sum(source.graph.task_weights().values()),
        launch_overhead_us=launch_us,
        streams=streams,
        serial_s=serial_s,
        layers=layers,
        price_per_hour=price_per_hour,
        cost_per_million=None if price_per_hour is None else 1e6 * latency_s / 3600 * price_per_hour,
        measured_s=source.graph.measured_s.get(resolved.name),
        assumptions=_assumptions(ends_of is not None, streams, resolved.kind != "cpu", compile_best > 0),
        notes=tuple(note for note in said if note),
    )


def compare_devices(
    network: Network | NetworkTasks | str | Path,
    devices: Sequence[str | Device],
    predictor: Predictor | str | Path = "default",
    *,
    prices: Mapping[str, float] | None = None,
    data: str | Path | None = None,
    **options: Any,
) -> Comparison:
    """Predict a network on several devices and rank them; a device that is named twice counts once.

    Options and errors are those of :func:`predict_latency`; every device is looked up before anything is predicted. `prices`
    are per hour, by canonical device name (:func:`read_prices`); a share of a device has its own price."""
    resolved = [get_device(device) for device in devices]
    source: Any = network
    if runs_eagerly(network, options.get("runtime"), options.get("schedule", UNTUNED)):
        loaded = load_network(network)  # type: ignore[arg-type]
        source = replace(loaded, operators=cache(loaded.operators or loaded.export))  # exported once
    else:
        predictor, source = load_predictor(predictor), network_tasks(network, data)
    prices = prices or {}
    reports = []
    for name, device in {device.name: device for device in resolved}.items():
        reports.append(predict_latency(source, device, predictor, price_per_hour=prices.get(name), **options))
    reports.sort(key=lambda report: report.latency_s)
    costs = {r.device: r.cost_per_million for r in reports if r.cost_per_million is not None}
    notes = [
        f"the order of {fast.device} and {slow.device} is not certain: their narrower intervals overlap"
        for fast, slow in itertools.pairwise(reports)
        if fast.independent_high_s is not None
        and slow.independent_low_s is not None
        and fast.independent_high_s > slow.independent_low_s
    ]
    if prices and (without := [report.device for report in reports if report.device not in costs]):
        notes.append(f"no price is given for {', '.join(without)}")
    return Comparison(reports[0].network, tuple(reports), tuple(sorted(costs, key=costs.__getitem__)), tuple(notes))


def shares_of(name: str) -> list[Device]:
    """The shares of a device, the smallest first, and the whole device last: powers of two of a CPU's cores, eighths of a GPU.
    Raises UnknownDeviceError if it is unknown or itself a share."""
    if "@" in name:
        raise UnknownDeviceError(f"{name} is a share itself: shares are of a whole device, {name.partition('@')[0]}")
    whole = get_device(name)
    if whole.kind == "gpu":
        return [get_device(f"{name}@{eighths / 8:g}") for eighths in range(1, 8)] + [whole]
    cores = int(whole.share)
    return [get_device(f"{name}@{n}") for n in sorted({min(2**k, cores) for k in range(cores.bit_length() + 1)})]


def smallest_share(latency_s: Sequence[float]) -> int:
    """Index of the first of a device's shares (the smallest first) that is as fast as the whole device, within 5 %."""
    return next(number for number, seconds in enumerate(latency_s) if seconds <= _AS_FAST * latency_s[-1])


def read_prices(path: str | Path) -> dict[str, float]:
    """Read canonical device name -> price per hour, in the user's currency. The YAML or JSON file maps device names, with the
    share if it is not the whole device, to prices. Raises PriceError if it does not, or if a price is not positive and finite,
    or is given twice; UnknownDeviceError for an unknown name."""
    path = Path(path)
    with raised_as(PriceError, f"cannot read prices from {path}"):
        content = read_yaml(path)
    if not isinstance(content, dict) or not content:
        raise PriceError(f"{path}: expected device names and prices of an hour, such as 'h200: 4.5'")
    table = load_table()
    prices: dict[str, float] = {}
    for name, price in content.items():
        try:
            device = get_device(str(name), table).name
        except UnknownDeviceError as err:
            raise UnknownDeviceError(f"{path}: {err}") from err
        if not is_number(price) or price <= 0:
            raise PriceError(f"{path}: the price of {name} must be a positive number, not {price!r}")
        if device in prices:
            raise PriceError(f"{path}: two prices of {device}")
        prices[device] = float(price)
    return prices


def runs_eagerly(network: object, runtime: str | None, schedule: str | Path) -> bool:
    """Whether PyTorch runs a network. Raises NetworkError if the runtime is unknown or does not match the other arguments."""
    tasks = isinstance(network, NetworkTasks) or str(network).lower().endswith(".json")
    of_tvm = tasks or str(schedule) != UNTUNED
    if runtime not in (None, "torch", "tvm"):
        raise NetworkError(f"no runtime {runtime!r}: expected torch or tvm")
    if runtime == "torch" and str(schedule) != UNTUNED:
        raise NetworkError("PyTorch's kernels have no schedule to choose: --schedule is of --runtime tvm")
    return not tasks and (runtime == "torch" or (runtime is None and not of_tvm))


def _launch(device: Device, given_us: float | None) -> tuple[float, str]:
    """Microseconds between launches, and a note about them, which may be empty."""
    known_us = given_us if given_us is not None else 0.0 if device.kind == "cpu" else device.launch_overhead_us
    if known_us is None:
        return 0.0, f"the launch overhead of {device.name} is unknown: no launch gaps are counted"
    return float(known_us), ""


def _error_factors(
    calibration: Calibration | None, device: str, coverage: float, difficulty: FloatArray, seed: int
) -> FloatArray:
    """Factors of the latencies of n tasks in each replayed case, float64 (n, cases): the prediction; with intervals also their
    two ends, then draws of each task's error from the calibration scores, with random signs."""
    if calibration is None or not calibration.supports(coverage):
        return np.ones((len(difficulty), 1))
    scores = calibration.devices.get(calibration.basis(device, coverage), calibration.pooled)
    rng = np.random.default_rng(seed)
    steps = np.searchsorted(scores.mass, rng.uniform(0, scores.mass[-1], (len(difficulty), _DRAWS)))
    errors = calibration.middle + scores.scores[steps] * rng.choice((-1.0, 1.0), steps.shape)
    same = np.repeat([[0.0, *calibration.ends(device, coverage)]], len(difficulty), axis=0)
    return np.exp(np.concatenate([same, errors], axis=1) * difficulty[:, None])


def _layers(
    source: NetworkTasks, tasks: Mapping[str, TaskLatency], played: Replay, ends: dict[str, list[float]] | None, device: str
) -> tuple[LayerLatency, ...]:
    total = sum(time.kernel_s + time.gap_s for time in played.nodes)
    layers = []
    for node, time in zip(source.graph.nodes, played.nodes, strict=True):
        own = [tasks[task] for task in node.tasks]
        flags = [item.unfamiliar for item in own]
        measured_s = node.measured_s.get(device)
        factors = None if ends is None else [factor for task in node.tasks for factor in ends[task]] or [1.0]
        layers.append(
            LayerLatency(
                *(node.name, node.operator, node.kind, node.phase, node.repeat, node.tasks),
                latency_s=time.kernel_s,
                low_s=None if factors is None else time.kernel_s * min(factors),
                high_s=None if factors is None else time.kernel_s * max(factors),
                gap_s=time.gap_s,
                fraction=(time.kernel_s + time.gap_s) / total,
                start_s=time.start_s,
                stream=time.stream,
                origin=", ".join(dict.fromkeys(item.origin for item in own)),
                unfamiliar=None if not own or None in flags else any(flags),
                measured_s=None if measured_s is None else measured_s * node.repeat,
            )
        )
    return tuple(layers)


def _assumptions(intervals: bool, streams: int, asynchronous: bool, compiled: bool) -> tuple[str, ...]:
    alone = "a task takes in the network what it takes alone, with warm caches"
    order = f"kernels run one after the other{', launched while others run' if asynchronous else ''}"
    if streams > 1:
        together = f"up to {streams} kernels run at the same time without slowing each other down"
        order = f"{together}: the least that concurrency can give"
    code = ("programs are compiled as LLVM compiles them here",) if compiled else ()
    return (alone, order, *code, *((INTERVAL, INDEPENDENT) if intervals else ()))


def _notes(nodes: Sequence[GraphNode], tasks: Collection[TaskLatency]) -> Iterator[str]:
    if unknown := [node.operator or node.name for node in nodes if node.kind == "unknown"]:
        names = list(dict.fromkeys(unknown))
        more = f" and {len(names) - 5} others" if len(names) > 5 else ""
        yield f"{len(unknown)} of {len(nodes)} nodes are unknown and count as nothing: {', '.join(names[:5])}{more}"
    if far := sum(bool(task.unfamiliar) for task in tasks):
        yield f"{far} of {len(tasks)} tasks are far from the training data"
    if any(task.origin == "random" for task in tasks):
        yield "the best of many predictions is more often too low than one: so is this latency, and its intervals"
