"""Which programs work on which devices: the rows that a validity model learns from and is judged by."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import DatasetError, ProfilerError
from cdmpp.tuner.validity_features import Limits, limits_of, limits_of_arch, validity_features

if TYPE_CHECKING:
    import pandas as pd

    from cdmpp.dataset import DatasetView
    from cdmpp.device import Device
    from cdmpp.program.ast import CompactAST

logger = logging.getLogger(__name__)

#: Columns of the table: a row a program and device.
COLUMNS: tuple[str, ...] = ("program", "task", "device", "origin", "valid", "kind")
#: Says nothing about the program.
_NOT_ITS_FAULT = "device_lost"


@dataclass(frozen=True)
class ValidityData:
    """Programs that work and that do not.

    Attributes
    ----------
    table
        Columns :data:`COLUMNS`, index 0..n-1; ``device`` is a device or an architecture such as ``sm_86``, ``kind`` why a
        program does not work.
    asts
        Program -> CompactAST.
    """

    table: pd.DataFrame
    asts: Mapping[str, CompactAST]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Whether each works, (n,)."""
        return self.table["valid"].to_numpy(dtype=bool)

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """:func:`~cdmpp.tuner.validity_features.validity_features` of every row."""
        parts = []
        for name, rows in self.table.groupby("device", sort=False).indices.items():
            limits, device = limits_of_name(str(name))
            asts = [self.asts[program] for program in self.table["program"].iloc[rows]]
            parts.append((rows, validity_features(asts, limits, device)))
        out = np.empty((len(self), parts[0][1].shape[1]), dtype=np.float32)
        for rows, values in parts:
            out[rows] = values
        return out

    def where(self, mask: NDArray[np.bool_]) -> ValidityData:
        """Some of the rows."""
        return ValidityData(self.table[mask].reset_index(drop=True), self.asts)


def limits_of_name(name: str) -> tuple[Limits, Device | None]:
    """Limits by the name of a device or of an architecture, and the device.

    Raises
    ------
    UnknownDeviceError
        It is neither.
    """
    from cdmpp.device import get_device

    try:
        return limits_of_arch(name), None
    except ProfilerError:
        device = get_device(name)
        return limits_of(device), device


def gather_validity(
    datasets: DatasetView | str | Path | Sequence[str | Path] | None = None,
    verdicts: Sequence[str | Path] = (),
    devices: Sequence[str] | None = None,
) -> ValidityData:
    """Collect rows from records and from judged programs.

    Parameters
    ----------
    datasets
        Whose records count: a program that ran once on a device works there. Lost devices say nothing about programs, and
        unscheduled tasks are no points of a space.
    verdicts
        Folders that ``cdmpp validity-data`` wrote.
    devices
        Keep these devices and architectures only.

    Raises
    ------
    DatasetError
        A folder cannot be read, or no row is left.
    """
    import pandas as pd

    from cdmpp.dataset import DatasetView, load_datasets

    parts: list[tuple[pd.DataFrame, Mapping[str, CompactAST]]] = []
    if datasets is not None:
        view = datasets if isinstance(datasets, DatasetView) else load_datasets(datasets)
        parts.append(_of_records(view, devices))
    parts.extend(_of_verdicts(Path(folder)) for folder in verdicts)
    frames, asts = [frame for frame, _ in parts], dict[str, "CompactAST"]()
    for _, found in parts:
        asts.update(found)
    table = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(COLUMNS))
    if devices is not None:
        table = table[table["device"].isin(list(devices))]
    known = table["program"].isin(list(asts))
    if not known.all():
        logger.warning("%d rows left out: their programs have no AST", int((~known).sum()))
    table = table[known].drop_duplicates(["program", "device"]).reset_index(drop=True)
    if table.empty:
        raise DatasetError("no record or verdict to learn validity from")
    return ValidityData(table, asts)


def _of_records(
    view: DatasetView, devices: Sequence[str] | None
) -> tuple[pd.DataFrame, Mapping[str, CompactAST]]:
    from cdmpp.predictor.data import collect_asts

    frame = view.records
    frame = frame[(frame["status"] != _NOT_ITS_FAULT) & (frame["task"] != "")]
    frame = frame[frame["origin"] != "unscheduled"]
    if devices is not None:
        frame = frame[frame["device"].isin(list(devices))]
    frame = frame[["program", "task", "device", "origin", "status"]].astype(str)
    # "ok" first, so that it is what stays of several records
    frame = frame.assign(valid=frame["status"] == "ok").sort_values("valid", ascending=False, kind="stable")
    frame = frame.drop_duplicates(["program", "device"]).sort_index()
    frame = frame.assign(kind=frame["status"].where(~frame["valid"], ""))[list(COLUMNS)]
    return frame, collect_asts(view, frame["program"].unique()) if len(frame) else {}


def _of_verdicts(folder: Path) -> tuple[pd.DataFrame, Mapping[str, CompactAST]]:
    from cdmpp.profiler.validity import AST_FILE, load_verdicts
    from cdmpp.program.ast.store import load_asts

    frame = load_verdicts(folder)
    frame = frame.assign(device=frame["arch"], origin="random")[list(COLUMNS)]
    return frame.astype(dict.fromkeys(set(COLUMNS) - {"valid"}, str)), load_asts(folder / AST_FILE)
