"""Choosing a device: one network on several, by latency and by cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.endtoend.latency import predict_latency
from cdmpp.endtoend.report import LatencyReport
from cdmpp.endtoend.sources import NetworkTasks, network_tasks

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor import Predictor
    from cdmpp.program.network import Network


@dataclass(frozen=True)
class Comparison:
    """One network on several devices.

    Attributes
    ----------
    network
        Its name.
    reports
        The fastest device first.
    by_cost
        Names of the devices that have a price, the cheapest run first.
    notes
        What to keep in mind about the order.
    """

    network: str
    reports: tuple[LatencyReport, ...]
    by_cost: tuple[str, ...]
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


def compare_devices(
    network: Network | NetworkTasks | str | Path,
    devices: Sequence[str | Device],
    predictor: Predictor | str | Path = "default",
    *,
    prices: Mapping[str, float] | None = None,
    data: str | Path | None = None,
    **options: Any,
) -> Comparison:
    """Predict a network on several devices and rank them.

    Parameters
    ----------
    devices
        Names or Devices; one that is named twice counts once.
    prices
        Canonical device name -> price of an hour (:func:`cdmpp.endtoend.prices.read_prices`); a share of a device has a
        price of its own.
    options
        As :func:`cdmpp.endtoend.predict_latency` takes them.

    Raises
    ------
    CdmppError
        As :func:`cdmpp.endtoend.predict_latency` does; every device is looked up before anything is predicted.
    """
    from cdmpp.device import get_device
    from cdmpp.predictor.predictor import load_predictor

    resolved = [get_device(device) if isinstance(device, str) else device for device in devices]
    distinct = {device.name: device for device in resolved}
    predictor = load_predictor(predictor)
    source = network_tasks(network, data)
    prices = prices or {}
    reports = sorted(
        (
            predict_latency(source, device, predictor, price_per_hour=prices.get(name), **options)
            for name, device in distinct.items()
        ),
        key=lambda report: report.latency_s,
    )
    priced = [report for report in reports if report.cost_per_million is not None]
    by_cost = sorted(priced, key=lambda report: report.cost_per_million or 0.0)
    return Comparison(
        source.graph.name,
        tuple(reports),
        tuple(report.device for report in by_cost),
        tuple(_notes(reports, prices)),
    )


def _notes(reports: Sequence[LatencyReport], prices: Mapping[str, float]) -> list[str]:
    notes = []
    for faster, slower in itertools.pairwise(reports):
        if faster.independent_high_s is None or slower.independent_low_s is None:
            continue
        if faster.independent_high_s > slower.independent_low_s:
            notes.append(
                f"the order of {faster.device} and {slower.device} is not certain: their narrower intervals overlap"
            )
    without = [report.device for report in reports if report.device not in prices]
    if prices and without:
        notes.append(f"no price is given for {', '.join(without)}")
    return notes
