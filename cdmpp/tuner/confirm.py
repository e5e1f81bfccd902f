"""Programs of a task that are as fast as its best within the noise, measured again in turn before the best is named.

Of many programs the one with the lowest label was lucky besides fast. Of two runs the better one counts, as the first label
did not: it was taken at another time than those it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cdmpp.profiler.engine import BuildJob
from cdmpp.tuner.measure import Measurer, in_time

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.profiler.engine import Outcome
    from cdmpp.tuner.progress import Progress
    from cdmpp.tuner.store import TuningStore

#: Programs of a task at most, runs of each, and measurements for each one of the tuning.
_OF_TASK, _RUNS, _PART = 3, 2, 0.1
#: Noise that a label has at least.
_LEAST = 0.01


def close_programs(store: TuningStore, device: Device, budget: int) -> list[list[str]]:
    """Programs that may be their task's fastest, of tasks that have several, those first that took longest to measure."""
    records, found = store.dataset.records, []
    records = records[(records["device"] == device.name) & (records["status"] == "ok")]
    times = records["program"].value_counts()
    for _, rows in records.drop_duplicates("program", keep="last").groupby("task"):
        rows = rows.sort_values("latency_s").head(_OF_TASK)
        noise = np.maximum(rows["noise"].fillna(0.0).to_numpy(), _LEAST)
        latency_s = rows["latency_s"].to_numpy()
        close = rows["program"][latency_s <= latency_s[0] * (1 + np.maximum(noise, noise[0]))].tolist()
        # not again where a resumed tuning did it before
        if len(close) > 1 and times[close].min() <= _RUNS:
            found.append((latency_s[0], close))
    chosen: list[list[str]] = []
    for _, close in sorted(found, reverse=True):
        if _RUNS * sum(map(len, [*chosen, close])) <= budget:
            chosen.append(close)
    return chosen


def measure_close_again(
    store: TuningStore, device: Device, measurer: Measurer, progress: Progress, say: Callable[[str], None]
) -> None:
    """Measure such programs again, within a tenth of the tuning's measurements and the time that is left."""
    dataset, before = store.dataset, store.outcomes()
    groups = close_programs(store, device, max(_RUNS * _OF_TASK, round(_PART * progress.costs.measurements)))
    if not groups or progress.time_left_s == 0.0:
        return
    programs = [dataset.programs[digest] for close in groups for digest in close]
    jobs = [
        BuildJob(p, dataset.tasks[p.task_hash], None if p.space_hash is None else dataset.spaces[p.space_hash])
        for p in programs
    ]
    runs: dict[str, list[Outcome]] = {program.hash: [] for program in programs}
    for _ in range(_RUNS):
        for outcome in in_time(measurer, measurer.submit(jobs), progress.time_left_s):
            if outcome is not None and outcome.latency_s is not None:
                runs[outcome.job.program.hash].append(outcome)
    changed = 0
    for close in groups:
        # compared are only labels of the same two runs
        if all(len(runs[digest]) == _RUNS for digest in close):
            for digest in close:
                for outcome in sorted(runs[digest], key=lambda o: -(o.latency_s or 0.0)):
                    store.add(outcome)  # the last one is the label
                    progress.count_costs(outcome)
            changed += progress.relabel(store.outcomes(), dataset.programs[close[0]].task_hash)
    store.relabel(before)
    say(
        f"{len(programs)} programs of {len(groups)} tasks were close: measured again, another one is the best in {changed}"
    )
