"""Goals and tables of ``benchmarks/cross_device.py``, from the content of its ``--json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from traces import FAMILIES

SOURCES = ("cdmpp", "neusight", "habitat", "micro", "roofline", "in_trace")
PAIR = ("cdmpp", "neusight")

#: End-to-end APE that the mean over left-out NVIDIA GPUs should not exceed; MAPE with 20 measurements likewise.
END_TO_END_GOAL, FEW_SHOT_GOAL, FEW_SHOT_K = 0.06, 0.10, 20


def goals(devices: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Which goals are met on devices that the predictor has not seen; ``met`` is None where nothing tells.

    All but the last are of NVIDIA GPUs, and against NeuSight on the rows that it predicts. ``end_to_end_mean`` takes all
    networks of all devices alike; ``of_devices`` is the mean of the devices' means, and neither may be above the limit. Nodes
    are pooled over the devices.
    """
    unseen = {name: d for name, d in devices.items() if "zero_shot" in d and not d["in_training"]}
    nvidia = {name: d["zero_shot"] for name, d in unseen.items() if d["vendor"] == "nvidia"}
    pairs: dict[str, tuple[float, float]] = {}
    errors: list[float] = []
    for name, found in nvidia.items():
        whole = found.get("end_to_end", {"sources": {}, "rows": ()})
        if whole["sources"].get("neusight", {}).get("n_own"):
            pair = whole["sources"]["neusight"]
            pairs[name] = (pair["ours_ape_mean_own"], pair["ape_mean_own"])
        errors += [abs(row["predicted_s"]["cdmpp"] / row["measured_s"] - 1) for row in whole["rows"]]
    families = {}
    for family in FAMILIES:
        ours, theirs = (pooled(nvidia.values(), family, key) for key in ("ours_ape_mean_own", "ape_mean_own"))
        if ours is not None and theirs is not None:
            families[family] = {
                "cdmpp": ours,
                "neusight": theirs,
                "limit": theirs / 2,
                "met": ours <= theirs / 2,
            }
    shots = {}
    for name, device in unseen.items():
        runs = device.get("few_shot", {}).get("kmeans", {}).get(str(FEW_SHOT_K), {})
        if runs:
            shots[name] = mean(run["operator_mape"] for run in runs.values())
    whole_mean, device_mean, shot_mean = (
        mean(errors),
        mean(a for a, _ in pairs.values()),
        mean(shots.values()),
    )
    return {
        "end_to_end_at_most_neusight": {
            "devices": {name: {"cdmpp": a, "neusight": b, "met": a <= b} for name, (a, b) in pairs.items()},
            "met": all(a <= b for a, b in pairs.values()) if pairs else None,
        },
        "end_to_end_mean": {
            "cdmpp": whole_mean,
            "of_devices": device_mean,
            "limit": END_TO_END_GOAL,
            "met": at_most(END_TO_END_GOAL, whole_mean, device_mean),
        },
        "forward_nodes_at_most_half_of_neusight": {
            "families": families,
            "met": all(f["met"] for f in families.values()) if families else None,
        },
        "mape_with_20_measurements": {
            "devices": shots,
            "cdmpp": shot_mean,
            "limit": FEW_SHOT_GOAL,
            "met": at_most(FEW_SHOT_GOAL, shot_mean),
        },
    }


def mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(np.mean(found)) if found else None


def at_most(limit: float, *values: float | None) -> bool | None:
    return None if None in values else max(v for v in values if v is not None) <= limit


def pooled(zero_shots: Iterable[Mapping[str, Any]], family: str, key: str) -> float | None:
    """Mean over the forward nodes of a family on all devices, of those that NeuSight predicts."""
    total, n = 0.0, 0
    for found in zero_shots:
        nodes = found.get("nodes", {}).get("forward", {"families": {}})["families"].get(family)
        theirs = nodes["sources"].get("neusight", {"n_own": 0}) if nodes else {"n_own": 0}
        if theirs["n_own"]:
            total += theirs["n_own"] * theirs[key]
            n += theirs["n_own"]
    return total / n if n else None


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def tables(content: Mapping[str, Any]) -> str:
    """All results as text; errors in per cent."""
    devices = content["devices"]
    lines = ["End to end, zero-shot", line("device", "", SOURCES, "n", PAIR, "n") + "  nearest in training"]
    for name, device in devices.items():
        whole = device.get("zero_shot", {}).get("end_to_end")
        if whole:
            near = "SEEN IN TRAINING" if device["in_training"] else device["nearest_training_device"]
            lines.append(f"{compared(name, '', whole)}  {near}")
    for phase in ("forward", "backward"):
        lines += ["", f"Nodes, {phase}, zero-shot", line("device", "family", SOURCES, "n", PAIR, "n")]
        for name, device in devices.items():
            nodes = device.get("zero_shot", {}).get("nodes", {}).get(phase, {"families": {}})
            lines += [compared(name, family, found) for family, found in nodes["families"].items()]
    lines += [
        "mean APE in % over the n rows that all sources have; then ours and NeuSight's on the n that NeuSight predicts",
        "",
        "By what was measured on the device: MAPE in % of operators alone, mean APE in % end to end",
        f"{'device':18}{'measured':18}{'MAPE':>8}{'>= 50 us':>10}{'operators':>11}{'end to end':>12}",
    ]
    for name, device in devices.items():
        runs = {"nothing": device.get("zero_shot", {})}
        for select, by_k in device.get("few_shot", {}).items():
            for k, seeds in by_k.items():
                runs.update({f"{k} {select} ({seed})": run for seed, run in seeds.items()})
        for what, run in runs.items():
            operators = run.get("operators", {"n": 0, "above_50us": {}})
            mapes = [operators.get("mape"), operators["above_50us"].get("mape")]
            lines.append(
                f"{name:18}{what:18}{percent(mapes[0]):>8}{percent(mapes[1]):>10}{operators['n']:>11}"
                f"{percent(run.get('end_to_end_ape_mean')):>12}"
            )
    lines += ["", "Goals"]
    for name, goal in content["goals"].items():
        met = {True: "met", False: "not met", None: "nothing to tell"}[goal["met"]]
        lines.append(f"{name}: {met}" + (f" ({percent(goal['cdmpp'])} %)" if "cdmpp" in goal else ""))
    for family, found in content["goals"]["forward_nodes_at_most_half_of_neusight"]["families"].items():
        lines.append(
            f"    {family}: {percent(found['cdmpp'])} %, NeuSight {percent(found['neusight'])} %: "
            f"{'met' if found['met'] else 'not met'}"
        )
    return "\n".join(lines)


def line(name: str, family: str, cells: Sequence[str], n: object, pair: Sequence[str], n_pair: object) -> str:
    one, two = ("".join(f"{cell:>9}" for cell in group) for group in (cells, pair))
    return f"{name:18}{family:8}{one}{n:>5}  |{two}{n_pair:>5}"


def compared(name: str, family: str, found: Mapping[str, Any]) -> str:
    cells = [percent(found["sources"].get(source, {}).get("ape_mean")) for source in SOURCES]
    theirs = found["sources"].get("neusight", {"n_own": 0})
    pair = [percent(theirs.get(key)) for key in ("ours_ape_mean_own", "ape_mean_own")]
    return line(name, family, cells, found["n_common"], pair, theirs["n_own"])
