"""End-to-end latency: the tasks of a network predicted on a device and replayed over its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.endtoend.replay import Replay, replay
from cdmpp.endtoend.report import INDEPENDENT, INTERVAL, LatencyReport, LayerLatency
from cdmpp.endtoend.schedules import UNTUNED, Candidates, candidates
from cdmpp.endtoend.sources import NetworkTasks, network_tasks
from cdmpp.errors import NetworkError, PredictorError
from cdmpp.predictor.predictor import COVERAGE, prediction_note

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor import Predictor
    from cdmpp.predictor.uncertainty import Calibration, ScoreDistribution
    from cdmpp.program.graph import GraphNode
    from cdmpp.program.network import Network

FloatArray = NDArray[np.float64]

#: Draws of the tasks' errors: the ends of a 90 % interval are then known to within some two points of coverage.
_DRAWS = 400


@dataclass(frozen=True)
class TaskLatency:
    """A task's program that runs, as predicted: seconds, and the distance from the training data (None: unknown)."""

    latency_s: float
    unfamiliar: bool | None
    origin: str


def predict_latency(
    network: Network | NetworkTasks | str | Path,
    device: str | Device,
    predictor: Predictor | str | Path = "default",
    *,
    schedule: str | Path = UNTUNED,
    streams: int = 1,
    launch_overhead_us: float | None = None,
    price_per_hour: float | None = None,
    coverage: float = COVERAGE,
    programs_per_task: int = 64,
    seed: int = 0,
    data: str | Path | None = None,
) -> LatencyReport:
    """Predict what a network takes on a device.

    Every task's program is predicted, and the kernels are replayed over the network's graph
    (:mod:`cdmpp.endtoend.replay`): on one stream in the order of the graph, or on several.

    Parameters
    ----------
    network
        A zoo name, an ``.onnx`` or ``.pt2`` file, a Network, the graph file of an imported trace, or
        :class:`~cdmpp.endtoend.sources.NetworkTasks` where several devices are asked for.
    predictor
        A predictor, its folder, or ``"default"``.
    schedule
        What a task's program is: ``"untuned"`` (as it is), ``"best"`` (the best predicted of `programs_per_task` random
        programs of its design space), or the folder of a MetaSchedule JSON database.
    streams
        Kernels that may run at the same time, where the graph allows (GPU).
    launch_overhead_us
        Microseconds between two launches. None: of a GPU what its specification says, 0 where it says nothing; of a
        CPU 0, whose labels hold the call.
    price_per_hour
        Of the device.
    coverage
        Of the intervals, above 0 and below 1.
    seed
        Of random programs, and of the draws of the independent interval.
    data
        Dataset with the tasks of a graph file, where it does not lie in its folder.

    Raises
    ------
    UnknownDeviceError, NetworkError, DatasetError, TunerError, ProgramError
        As their names say.
    PredictorError
        There is no such predictor, or what it predicts is no latency: the message names the task.
    """
    from cdmpp.device import get_device
    from cdmpp.predictor.predictor import load_predictor
    from cdmpp.predictor.uncertainty import check_coverage

    check_coverage(coverage)
    resolved = get_device(device) if isinstance(device, str) else device
    predictor = load_predictor(predictor)
    source = network_tasks(network, data)
    programs, notes = candidates(
        source.tasks.values(),
        schedule,
        resolved,
        library=source.library,
        programs_per_task=programs_per_task,
        seed=seed,
    )
    tasks = predict_tasks(predictor, source, programs, resolved)
    asynchronous = resolved.kind != "cpu"
    launch_us, launch_note = _launch(resolved, launch_overhead_us)
    half, scores = _scores(predictor.calibration, resolved.name, coverage)
    factors = _factors(half, scores, len(tasks), seed)
    cases = {task: tasks[task].latency_s * own for task, own in zip(tasks, factors, strict=True)}
    played = replay(
        source.graph, cases, launch_s=1e-6 * launch_us, asynchronous=asynchronous, streams=streams
    )
    alone = played
    if streams > 1:
        alone = replay(source.graph, {task: values[:1] for task, values in cases.items()},
                       launch_s=1e-6 * launch_us, asynchronous=asynchronous)  # fmt: skip
    low_s, high_s, chance_low_s, chance_high_s = _interval(played.latency_s, coverage, half)
    layers = _layers(source, tasks, played, half, resolved.name)
    latency_s = float(played.latency_s[0])
    measured_s = source.graph.measured_s.get(resolved.name)
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
        serial_s=float(alone.latency_s[0]),
        layers=layers,
        price_per_hour=price_per_hour,
        cost_per_million=None if price_per_hour is None else 1e6 * latency_s / 3600 * price_per_hour,
        measured_s=measured_s,
        assumptions=_assumptions(half is not None, streams, asynchronous),
        notes=tuple(
            note
            for note in (
                prediction_note(predictor, resolved),
                launch_note,
                *notes,
                _unknown_note(source.graph.nodes),
                _unfamiliar_note(tasks),
                _chosen_note(tasks),
            )
            if note
        ),
    )


def predict_tasks(
    predictor: Predictor, source: NetworkTasks, programs: Mapping[str, Candidates], device: Device
) -> dict[str, TaskLatency]:
    """The predicted latency of each task's program, of several candidates the fastest.

    Raises
    ------
    PredictorError
        A prediction is not a positive, finite number.
    """
    asts = [ast for item in programs.values() for ast in item.asts]
    seconds = np.asarray(predictor.predict(asts, device), dtype=np.float64)
    flags = None if predictor.familiarity is None else predictor.unfamiliar(asts, device)
    found: dict[str, TaskLatency] = {}
    first = 0
    for task, item in programs.items():
        own = seconds[first : first + len(item.asts)]
        wrong = own[~(np.isfinite(own) & (own > 0))]
        if len(wrong):
            raise PredictorError(
                f"the predictor says {wrong[0]} s for task {source.tasks[task].name} ({task}) of "
                f"{source.graph.name} on {device.name}: no latency can be made of it"
            )
        best = int(own.argmin())
        far = None if flags is None else bool(flags[first + best])
        found[task] = TaskLatency(float(own[best]), far, item.origin)
        first += len(item.asts)
    return found


def _launch(device: Device, given_us: float | None) -> tuple[float, str]:
    """Microseconds between launches, and what to say about them."""
    if given_us is not None:
        if not (given_us >= 0 and np.isfinite(given_us)):
            raise NetworkError(f"the launch overhead must be 0 or more microseconds, got {given_us}")
        return float(given_us), ""
    if device.kind == "cpu":
        return 0.0, ""
    if device.launch_overhead_us is None:
        return 0.0, f"the launch overhead of {device.name} is unknown: no launch gaps are counted"
    return float(device.launch_overhead_us), ""


def _scores(
    calibration: Calibration | None, device: str, coverage: float
) -> tuple[float, ScoreDistribution] | tuple[None, None]:
    """Half the width of a task's interval in log seconds, and the scores it is a quantile of; None without intervals."""
    if calibration is None or not calibration.supports(coverage):
        return None, None
    scores = calibration.devices.get(calibration.basis(device, coverage), calibration.pooled)
    return scores.quantile(coverage), scores


def _factors(half: float | None, scores: ScoreDistribution | None, n_tasks: int, seed: int) -> FloatArray:
    """Factors of the tasks' latencies in each case that is replayed, float64 (n_tasks, cases).

    The first case is the prediction. With intervals the second and third are their ends, and the others draw each task's
    error from the calibration scores, up or down by chance.
    """
    if half is None or scores is None:
        return np.ones((n_tasks, 1))
    rng = np.random.default_rng(seed)
    steps = np.searchsorted(scores.mass, rng.uniform(0, scores.mass[-1], (n_tasks, _DRAWS)))
    errors = scores.scores[steps] * rng.choice((-1.0, 1.0), steps.shape)
    same = np.repeat([[0.0, -half, half]], n_tasks, axis=0)
    return np.exp(np.concatenate([same, errors], axis=1))


def _interval(
    latency_s: FloatArray, coverage: float, half: float | None
) -> tuple[float, float, float, float] | tuple[None, None, None, None]:
    if half is None:
        return None, None, None, None
    tail = (1 - coverage) / 2
    low_s, high_s = np.quantile(latency_s[3:], [tail, 1 - tail])
    return float(latency_s[1]), float(latency_s[2]), float(low_s), float(high_s)


def _layers(
    source: NetworkTasks,
    tasks: Mapping[str, TaskLatency],
    played: Replay,
    half: float | None,
    device: str,
) -> tuple[LayerLatency, ...]:
    total = sum(time.kernel_s + time.gap_s for time in played.nodes)
    factor = None if half is None else float(np.exp(half))
    layers = []
    for node, time in zip(source.graph.nodes, played.nodes, strict=True):
        own = [tasks[task] for task in node.tasks]
        flags = [item.unfamiliar for item in own]
        measured_s = node.measured_s.get(device)
        layers.append(
            LayerLatency(
                name=node.name,
                operator=node.operator,
                kind=node.kind,
                phase=node.phase,
                repeat=node.repeat,
                tasks=node.tasks,
                latency_s=time.kernel_s,
                low_s=None if factor is None else time.kernel_s / factor,
                high_s=None if factor is None else time.kernel_s * factor,
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


def _assumptions(intervals: bool, streams: int, asynchronous: bool) -> tuple[str, ...]:
    first = "a task takes in the network what it takes alone, with warm caches"
    order = f"kernels run one after the other{', launched while others run' if asynchronous else ''}"
    if streams > 1:
        order = (
            f"up to {streams} kernels run at the same time without slowing each other down: the least that concurrency "
            "can give"
        )
    return (first, order, *((INTERVAL, INDEPENDENT) if intervals else ()))


def _unknown_note(nodes: Sequence[GraphNode]) -> str:
    names = list(dict.fromkeys(node.operator or node.name for node in nodes if node.kind == "unknown"))
    if not names:
        return ""
    number = sum(node.kind == "unknown" for node in nodes)
    more = f" and {len(names) - 5} others" if len(names) > 5 else ""
    return f"{number} of {len(nodes)} nodes are unknown and count as nothing: {', '.join(names[:5])}{more}"


def _unfamiliar_note(tasks: Mapping[str, TaskLatency]) -> str:
    far = sum(bool(item.unfamiliar) for item in tasks.values())
    return f"{far} of {len(tasks)} tasks are far from the training data" if far else ""


def _chosen_note(tasks: Mapping[str, TaskLatency]) -> str:
    if not any(item.origin == "random" for item in tasks.values()):
        return ""
    return "the best of many predictions is more often too low than one of them: so is this latency, and its intervals"
