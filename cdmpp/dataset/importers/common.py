"""What importers share: reading tables, naming devices, refusing latencies that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.device import Device, DeviceTable
from cdmpp.errors import DatasetError, UnknownDeviceError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

#: ``what, done, total``: called while an import goes on.
Progress = Callable[[str, int, int], None]

#: A latency below this part of the lower bound is no latency of this operator: the unit, a shape or the device is wrong.
#: Of NeuSight's 318,781 rows the lowest is at 0.999.
_LOWEST = 0.25
#: A latency above this many times the bound plus launch is wrong likewise. Of NeuSight's rows the highest is at 26.
_HIGHEST = 250.0
#: Launching a kernel and timing it takes at least some and at most some more seconds.
_SHORTEST_S, _LAUNCH_S = 5e-7, 5e-5
#: Peaks that may serve float32 operands.
_FLOAT32_PEAKS = ("float32", "float32_matrix", "tfloat32_matrix")


@dataclass(frozen=True)
class ImportReport:
    """What an import made.

    Attributes
    ----------
    path
        The dataset.
    records
        Status -> number of records.
    tasks, programs
        How many there are.
    devices
        Canonical names.
    unknown_operators
        Name -> how many rows or nodes of it there were; they are not in the dataset (nodes are in their graph).
    graphs
        Names of the networks.
    notes
        What else a reader should know.
    """

    path: Path
    records: Mapping[str, int]
    tasks: int
    programs: int
    devices: Sequence[str]
    unknown_operators: Mapping[str, int] = field(default_factory=dict)
    graphs: Sequence[str] = ()
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "path": str(self.path)}


def read_table(path: str | Path) -> pd.DataFrame:
    """A parquet or CSV file (DatasetError if it cannot be read)."""
    import pandas as pd

    path = Path(path)
    try:
        if path.suffix == ".csv":
            # "inf", short for inference, is not infinity
            return pd.read_csv(path, dtype={"mode": str, "option": str})
        return pd.read_parquet(path)
    except (OSError, ValueError, ImportError) as err:
        message = " ".join(str(err).split())[:200]
        raise DatasetError(f"cannot read {path}: {message}") from err


def require_columns(frame: pd.DataFrame, columns: Iterable[str], path: str | Path) -> None:
    """Refuse a table without some column (DatasetError names all that are missing)."""
    missing = [column for column in columns if column not in frame]
    if missing:
        raise DatasetError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(map(str, frame.columns))}"
        )


def resolve_devices(names: Iterable[str], table: DeviceTable, path: str | Path) -> dict[str, Device]:
    """Device of every name (UnknownDeviceError says which file has it, and suggests near names)."""
    devices = {}
    for name in sorted(set(names)):
        try:
            devices[name] = table.get(name)
        except UnknownDeviceError as err:
            raise UnknownDeviceError(f"{path}: {err}; --devices FILE adds a device") from err
    return devices


def refuse_implausible(
    latency_s: NDArray[np.float64],
    flops: NDArray[np.float64],
    n_bytes: NDArray[np.float64],
    device: Device,
    name: Callable[[int], str],
    slow: bool = True,
) -> None:
    """Refuse latencies of float32 operators on a device that its roofline rules out by far.

    Parameters
    ----------
    latency_s, flops, n_bytes
        Of each operator, float64 (n,). FLOPs are those that the fastest algorithm needs.
    name
        What to call row `i` in the message.
    slow
        Refuse also what is far too slow for a library's operator; the worst of many schedules may be.

    Raises
    ------
    DatasetError
        A latency is missing, not above 0, a quarter of what physics needs or less, or so long that its unit must be
        wrong; the message names the row that is worst, and how many there are.
    """
    import numpy as np

    bad = ~(np.isfinite(latency_s) & (latency_s > 0))
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise DatasetError(f"{name(first)}: the latency is {latency_s[first]}, expected a number above 0")
    bound = lower_bound_s(flops, n_bytes, device)
    low = latency_s / np.maximum(bound * _LOWEST, _SHORTEST_S)
    high = latency_s / (_HIGHEST * (bound + _LAUNCH_S)) if slow else np.zeros(len(bound))
    wrong = (low < 1) | (high > 1)
    if not wrong.any():
        return
    worst = int(np.argmax(np.maximum(1 / low, high)))
    than = "less" if low[worst] < 1 else "more"
    raise DatasetError(
        f"{name(worst)}: {latency_s[worst]:.3g} s on {device.name} is implausibly {than} than its roofline of "
        f"{bound[worst]:.3g} s ({int(wrong.sum())} of {len(latency_s)} rows are such): is the unit off by 1000, or a "
        f"shape or the device wrong?"
    )


def lower_bound_s(
    flops: NDArray[np.float64], n_bytes: NDArray[np.float64], device: Device
) -> NDArray[np.float64]:
    """Seconds that no float32 kernel can beat (n,): the roofline with the fastest unit; 0 where the device's row is
    empty. Bytes count beyond the last-level cache only, as they may be there already."""
    import numpy as np

    peaks = [device.peak_gflops[name] for name in _FLOAT32_PEAKS if name in device.peak_gflops]
    bound = flops / (1e9 * max(peaks)) if peaks else np.zeros(len(flops))
    if device.bandwidth_gb_s:
        cached = 1024 * max(device.l2_kb or 0.0, device.l3_kb or 0.0)
        bound = np.maximum(bound, np.maximum(n_bytes - cached, 0.0) / (1e9 * device.bandwidth_gb_s))
    return bound


def refuse_existing(out: str | Path) -> None:
    """Refuse a folder that is a dataset, before minutes are spent (DatasetError)."""
    from cdmpp.dataset.schema import META_FILE

    if (Path(out) / META_FILE).exists():
        raise DatasetError(f"{out} is a dataset already: import into a new folder")


def evenly(count: int, limit: int | None) -> NDArray[np.int64]:
    """Row numbers: all, or `limit` spread evenly over them (DatasetError unless the limit is positive)."""
    import numpy as np

    if limit is None or limit >= count:
        return np.arange(count)
    if limit < 1:
        raise DatasetError(f"the limit is {limit}, expected at least 1")
    return np.linspace(0, count - 1, limit).astype(np.int64)
