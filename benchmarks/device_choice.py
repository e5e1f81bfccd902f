"""How often a source picks the faster of two devices, by their latency ratio, and whether the stated confidence is right.

    python benchmarks/device_choice.py --json device_choice.json

* **programs**: those of the networks that the predictor was not trained on, measured on several CPUs of different kinds; the
  predictor was trained on these CPUs. ``compiled`` is given the instructions of each compiled program. ``peak`` picks the CPU
  with the larger float32 peak, ``usual`` the one on which most of the training programs were faster.
* **networks**: NeuSight's, each GPU predicted without its labels; read from the results of ``benchmarks/cross_device.py``.
  ``peak`` as above; ``neusight`` and ``roofline`` are the predictions of NeuSight's authors, who trained on some of these GPUs.

``stated`` is the mean confidence in the choice, computed from the widths of both intervals as if their errors were independent.
The 95 % intervals are over tasks, or networks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
from common import Figure, Row, arguments, bootstrap, figure, load_result, provenance, report, start

from cdmpp.device import get_device
from cdmpp.predictor import TrainingData, gather, split_data
from cdmpp.predictor.evidence import Evidence
from cdmpp.predictor.predictor import Predictor, load_predictor

#: Upper ends of the classes of latency ratios; below the first one both choices are equally good.
RATIOS = (1.1, 1.5, 3.0, np.inf)
_SIGMA = 2 * NormalDist().inv_cdf(0.95)


def choices(measured_s: Mapping[str, float], says: Mapping[str, Mapping[str, float]], sigma: Mapping[str, float]) -> list[Row]:
    """A row for each pair of devices of one case. It has the ratio of their latencies, and whether each source of ``says``
    (name -> device -> seconds, or any score that is lower for the faster device) picks the faster one, 0.5 for a tie.
    ``stated`` is our confidence, from ``sigma``, the standard deviation of log latency by device."""
    rows = []
    for one, two in itertools.combinations(sorted(measured_s), 2):
        ratio = measured_s[two] / measured_s[one]
        right = {
            source: 0.5 + 0.5 * float(np.sign(np.log(found[two] / found[one]) * np.log(ratio)))
            for source, found in says.items()
            if one in found and two in found
        }
        apart = abs(np.log(says["ours"][two] / says["ours"][one])) / np.hypot(sigma[one], sigma[two])
        stated = NormalDist().cdf(float(apart))
        rows.append({"devices": f"{one}, {two}", "ratio": max(ratio, 1 / ratio), "right": right, "stated": stated})
    return rows


def program_choices(predictor: Predictor, data: TrainingData) -> list[Row]:
    """The :func:`choices` for test programs that were measured on several CPUs of different kinds, one core each."""
    split = split_data(predictor.training["split"], data)
    train, test = (data.labels.iloc[rows] for rows in (split.train, split.test))
    rows = split.test[test["device"].str.endswith("@1").to_numpy()]
    one_of_kind = {name: name for name in set(test["device"]) if not data.devices[name].isa}
    rows = rows[data.labels["device"].iloc[rows].isin(one_of_kind).to_numpy()]
    table = data.labels.iloc[rows].assign(
        ours=predictor.predict_rows(data, rows),
        compiled=predictor.predict_rows(data, rows, Evidence.of_rows(data, rows, compiled=True)),
    )
    calibration = predictor.calibration
    assert calibration is not None
    sigma = {name: np.ptp(calibration.ends(name, 0.9)) / _SIGMA for name in one_of_kind}
    peak = {name: 1 / data.devices[name].peak_gflops["float32"] for name in one_of_kind}
    wide = train.pivot_table(index="program", columns="device", values="latency_s")
    usual = {name: 1 + sum(_slower(wide, name, other) for other in one_of_kind if other != name) for name in one_of_kind}
    found = []
    for _, own in table.groupby("program", observed=True):
        own = own.drop_duplicates("device").set_index("device")
        if len(own) > 1:
            says = {"ours": own["ours"].to_dict(), "compiled": own["compiled"].to_dict(), "peak": peak, "usual": usual}
            cases = choices(own["latency_s"].to_dict(), says, sigma)
            found += [{"group": str(own["task"].iloc[0]), **case} for case in cases]
    return found


def _slower(wide: pd.DataFrame, name: str, other: str) -> float:
    """Fraction of the programs measured on both devices that are slower on the first; 0.5 if there are none."""
    if not {name, other} <= set(wide.columns):
        return 0.5
    both = wide[[name, other]].dropna()
    return float((both[name] > both[other]).mean()) if len(both) else 0.5


def network_choices(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The :func:`choices` for networks, from the rows of ``cross_device.json`` that used no labels of the device."""
    by_network: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        for case in row["end_to_end"]["rows"] if row["k"] == 0 else ():
            by_network.setdefault(case["network"], {}).setdefault(row["device"], case)
    found = []
    for network, cases in by_network.items():
        says = {
            source: {d: c["predicted_s"][key] for d, c in cases.items() if key in c["predicted_s"]}
            for source, key in (("ours", "cdmpp"), ("neusight", "neusight"), ("roofline", "roofline"))
        }
        says["peak"] = {device: 1 / get_device(device).peak_gflops["float32"] for device in cases}
        sigma = {device: float(np.log(case["high_s"] / case["low_s"])) / _SIGMA for device, case in cases.items()}
        measured_s = {device: case["measured_s"] for device, case in cases.items()}
        found += [{"group": network.split("-")[0], **row} for row in choices(measured_s, says, sigma)]
    return found


def figures(what: str, rows: list[Row]) -> list[Figure]:
    """A line for each class of ratios and each source, on the pairs for which both this source and ours have a prediction."""
    found, least = [], 1.0
    for most in RATIOS:
        own = [row for row in rows if least <= row["ratio"] < most]
        for source in dict.fromkeys(source for row in own for source in row["right"]):
            known = [row for row in own if source in row["right"]]
            groups = [row["group"] for row in known]
            right, ours = ([row["right"][name] for row in known] for name in (source, "ours"))
            values = {"right": float(np.mean(right)), "ours, on the same": float(np.mean(ours))}
            interval = {"right": bootstrap(right, groups), "ours, on the same": bootstrap(ours, groups)}
            if source == "ours":
                values = {"right": values["right"], "stated": float(np.mean([row["stated"] for row in known]))}
                interval = {"right": interval["right"]}
            apart = f"{least:g} to {most:g}" if np.isfinite(most) else f"over {least:g}"
            found.append(figure(f"{what}, {apart} times: {source}", values, len(known), interval=interval))
        least = most
    return found


def main() -> None:
    default = Path(__file__).parent / "results/cross_device.json"
    args = arguments(__doc__, __file__, networks={"default": default}).parse_args()
    predictor, data = load_predictor(args.predictor), gather(args.data)
    programs = program_choices(predictor, data)
    networks = network_choices(load_result(args.networks)["rows"])
    made = provenance(__file__, [*args.data, args.networks], args.predictor, [predictor.training["seed"]])
    sure = [0.5, 0.7, 0.9, 0.99, 1.01]
    calibration = [
        figure(
            f"{what}, stated {100 * low:g} to {100 * min(high, 1):g} %",
            {
                "right": float(np.mean([row["right"]["ours"] for row in own])),
                "stated": float(np.mean([row["stated"] for row in own])),
            },
            len(own),
            interval={"right": bootstrap([row["right"]["ours"] for row in own], [row["group"] for row in own])},
        )
        for what, rows in (("programs", programs), ("networks", networks))
        for low, high in itertools.pairwise(sure)
        if (own := [row for row in rows if low <= row["stated"] < high])
    ]
    report(args.json, made, [*figures("programs", programs), *figures("networks", networks), *calibration])


if __name__ == "__main__":
    start(main)
