"""Shares of a GPU: partitions of its multiprocessors, by CUDA green contexts (driver API, CUDA 12.4 and later).

Nothing is set on the card: a green context is a property of this process's streams. Partitions come in units of the
architecture (8 multiprocessors on Hopper), so a share is rounded down to one; the real count is kept in the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdmpp.errors import ProfilerError

#: Unit of partitions where the driver does not say, by major compute capability.
_UNITS = {6: 1, 7: 2, 8: 2}
_HOPPER_UNIT = 8


@dataclass(frozen=True)
class Partitions:
    """Equal partitions of a GPU.

    Attributes
    ----------
    streams
        A CUDA stream (address) in each.
    sms
        Multiprocessors of each.
    keep
        What must live as long as the streams.
    """

    streams: tuple[int, ...]
    sms: int
    keep: Any


def partition_sms(sms: int, share: float, unit: int) -> int:
    """Multiprocessors of a share, rounded down to the unit of partitions (at least one unit).

    Raises
    ------
    ProfilerError
        The share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ProfilerError(f"a share is a fraction between 0 and 1, not {share:g}")
    return max(unit, int(sms * share + 1e-9) // unit * unit)


def make_partitions(share: float, lanes: int, capability: int) -> Partitions:
    """As many partitions of `share` as fit, at most `lanes`; the primary context must be current.

    Raises
    ------
    ProfilerError
        cuda-bindings is missing, or the driver refuses.
    """
    try:
        from cuda.bindings import driver
    except ImportError as err:
        raise ProfilerError(f"shares of a GPU need cuda-bindings: {err}") from err

    def call(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise ProfilerError(f"the driver makes no partition: {result[0].name}")
        return result[1] if len(result) == 2 else result[1:]

    device = call(driver.cuCtxGetDevice())
    whole = call(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    unit = int(getattr(whole.sm, "smCoscheduledAlignment", 0)) or _UNITS.get(capability, _HOPPER_UNIT)
    wanted = partition_sms(int(whole.sm.smCount), share, unit)
    count = max(1, min(lanes, int(whole.sm.smCount) // wanted))
    groups, made, _ = call(driver.cuDevSmResourceSplitByCount(count, whole, 0, wanted))
    streams, keep = [], []
    for group in groups[:made]:
        description = call(driver.cuDevResourceGenerateDesc([group], 1))
        flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call(driver.cuGreenCtxCreate(description, device, flag))
        nonblocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = call(driver.cuGreenCtxStreamCreate(context, nonblocking, 0))
        streams.append(int(stream))
        keep.append((context, stream))
    return Partitions(tuple(streams), int(groups[0].sm.smCount), keep)
