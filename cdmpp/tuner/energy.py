"""Energy that a tuning has cost, where the device counts it: RAPL of a processor, NVML of an NVIDIA GPU.

Both count for the device as a whole, whoever used it: what else ran there meanwhile, and what it takes idle, are included.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cdmpp.device import Device

logger = logging.getLogger(__name__)

#: Where Linux shows RAPL's counters (AMD's processors too); since 2020 only root may read them.
POWERCAP = Path("/sys/class/powercap")
#: Domains of packages by their name: others are parts of them (cores, memory), or they of others (the whole machine).
_DOMAINS, _NAME, _PACKAGE = "intel-rapl:*", "name", "package"
_ENERGY, _RANGE = "energy_uj", "max_energy_range_uj"


class EnergyCounter(Protocol):
    """Counts the energy of a device."""

    def joules(self) -> float:
        """Since the counter was made; to be asked every few minutes, as counters of processors wrap around.

        Raises
        ------
        OSError
            It cannot be read any more.
        """


class RaplCounter:
    """The energy of all packages of this machine.

    Parameters
    ----------
    domains
        Folders of the package domains, one at least.

    Raises
    ------
    OSError, ValueError
        A counter cannot be read.
    """

    def __init__(self, domains: Sequence[Path]) -> None:
        self._range_uj = {domain: _number(domain / _RANGE) for domain in domains}
        self._last_uj = {domain: _number(domain / _ENERGY) for domain in domains}
        self._total_uj = 0

    def joules(self) -> float:
        """See :class:`EnergyCounter`."""
        for domain, last_uj in self._last_uj.items():
            now_uj = _number(domain / _ENERGY)
            # from its highest value it goes on at 0
            self._total_uj += (
                now_uj - last_uj if now_uj >= last_uj else now_uj + self._range_uj[domain] - last_uj
            )
            self._last_uj[domain] = now_uj
        return self._total_uj / 1e6


class NvmlCounter:
    """The energy of an NVIDIA GPU (Volta and later).

    Parameters
    ----------
    nvml
        The module ``pynvml``.

    Raises
    ------
    OSError
        There is no such GPU here, or it does not count.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByIndex(0)
        except nvml.NVMLError as err:
            raise OSError(f"NVML: {err}") from err
        self._start_mj = self._now_mj()

    def joules(self) -> float:
        """See :class:`EnergyCounter`."""
        return (self._now_mj() - self._start_mj) / 1e3

    def _now_mj(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError as err:
            raise OSError(f"NVML: {err}") from err


def energy_counter(device: Device, powercap: Path = POWERCAP) -> EnergyCounter | None:
    """What counts the energy of a device of this machine; None where nothing does, or this process may not read it."""
    return _nvml_counter() if device.kind == "gpu" else _rapl_counter(powercap)


def _rapl_counter(powercap: Path) -> RaplCounter | None:
    try:
        domains = [
            path
            for path in sorted(powercap.glob(_DOMAINS))
            if (path / _NAME).read_text(encoding="ascii").startswith(_PACKAGE)
        ]
        return RaplCounter(domains) if domains else None
    except (OSError, ValueError) as err:
        logger.info("energy is not counted: %s", err)
        return None


def _nvml_counter() -> NvmlCounter | None:
    try:
        import pynvml
    except ImportError:
        logger.info("energy is not counted: nvidia-ml-py is not installed")
        return None
    try:
        return NvmlCounter(pynvml)
    except OSError as err:
        logger.info("energy is not counted: %s", err)
        return None


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
