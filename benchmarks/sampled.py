"""A sample of a dataset's records, spread evenly over kinds of tasks and devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from operator import attrgetter

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.dataset import DatasetView
from cdmpp.dataset.split import ordered
from cdmpp.errors import DatasetError


class SampledView(DatasetView):
    """Some records of another view, by row number, (n,), with all of its tasks, spaces and programs."""

    def __init__(self, view: DatasetView, rows: NDArray[np.int64]) -> None:
        self._view = view
        self.rows = rows

    @cached_property
    def records(self) -> pd.DataFrame:
        return self._view.records.iloc[self.rows].reset_index(drop=True)

    tasks, spaces, programs, network_families, devices, parts, task_of = (
        property(attrgetter(f"_view.{name}"))
        for name in ("tasks", "spaces", "programs", "network_families", "devices", "parts", "task_of")
    )


def sample_evenly(view: DatasetView, number: int, seed: int = 0, devices: Collection[str] | None = None) -> SampledView:
    """Sample `number` ok records, about equally many of every kind of task (by name) on every device (None: all devices).

    The choice of programs depends only on their hashes and the seed, so that devices share programs as far as the same ones
    were measured on them. DatasetError if `number` is below 1, or no record is ok.
    """
    if number < 1:
        raise DatasetError(f"the number of records to take is {number}, expected at least 1")
    records = view.records
    usable = records["status"] == "ok"
    if devices is not None:
        usable &= records["device"].isin(list(devices))
    ok = np.flatnonzero(usable.to_numpy())
    if not len(ok):
        raise DatasetError("there is no ok record to take")
    table = records.iloc[ok]
    kinds = {task: view.tasks[task].name for task in table["task"].unique()}
    programs = table["program"].to_numpy(str)
    rank = {program: i for i, program in enumerate(ordered(set(programs), seed, "sample"))}
    ranks = np.array([rank[program] for program in programs], dtype=np.int64)
    groups = table.groupby([table["task"].map(kinds), table["device"]], observed=True).indices
    keys = sorted(groups)
    shares = even_shares([len(groups[key]) for key in keys], number)
    chosen = [
        groups[key][np.argsort(ranks[groups[key]], kind="stable")[:share]] for key, share in zip(keys, shares, strict=True)
    ]
    return SampledView(view, np.sort(ok[np.concatenate(chosen)]))


def even_shares(counts: Sequence[int], total: int) -> list[int]:
    """Split `total` into parts that are as equal as possible, none above its count; the counts if their sum is lower."""
    shares = [0] * len(counts)
    left = total
    for place, index in enumerate(sorted(range(len(counts)), key=lambda i: counts[i])):
        shares[index] = min(counts[index], left // (len(counts) - place))
        left -= shares[index]
    return shares
