"""Library operators on GPUs left out of training: errors by operator, data type and device, against simpler predictions.

    python benchmarks/gpu_operators.py --data runs/aic runs/pipeweave runs/miopen runs/neusight data/library-gpu --json g.json

The datasets are those that ``cdmpp import`` makes. Every family of nearly equal devices is left out in turn: the model is
trained on the rest and predicts the fastest kernel of every operator on the family's devices. The baselines use the same data:

- ``roofline``: the larger of work over peak and bytes over bandwidth, times one constant per kind of operator;
- ``nearest device``: the same operator on the training device whose peak and bandwidth are nearest, times the ratio of
  rooflines; only for operators that were measured there (``n`` is their number);
- ``XGBoost``: the logarithm of latency over roofline, from the same features.

``all devices`` weights the devices of a kind equally; size classes are by the roofline's latency. Intervals are over operators.

How many measurements a new GPU takes: 0 to 300 operators of each device left out are chosen (the most informative, by KMeans,
or at random), a correction is learned from them, and the device's other operators are scored, with equal weights of kinds.
``one constant`` is the median error of operators chosen at random. Intervals are over devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from common import Figure, Results, Row, arguments, bootstrap, mean_figure, provenance, start

from cdmpp.dataset.operators import load_operators
from cdmpp.device import Device, get_device
from cdmpp.predictor.measurements import choose, fit_errors
from cdmpp.predictor.mechanism import mechanism
from cdmpp.predictor.operators import BEST, OperatorModel, encode, families, kinds, train, training_table
from cdmpp.program.operators import SIZES

MODELS = ("cdmpp", "mechanism alone", "roofline", "nearest device", "XGBoost")
METRICS = ("median_ape", "mape")
MEANS = {"median_ape": "mean", "mape": "mean", "n": "sum"}
MEASURED = (10, 30, 100, 300)
#: Kinds of operators that NeuSight measured and whole networks consist of, and the devices.
OLD_KINDS = ("gemm float32", "elementwise float32", "layernorm float32", "softmax float32")
OLD_DEVICES = ("a100-pcie-40gb", "mi100", "mi210", "p100-pcie-16gb", "p4", "t4", "v100-pcie-32gb")
#: Size classes by the roofline's latency; the first one is all of them together.
SIZE_CLASSES = ("all devices", "all devices below 10 us", "all devices, 10 to 100 us", "all devices above 100 us")
SELECTIONS = ("variance", "kmeans", "random", "one constant")
#: Largest number of a device's operators to choose from and score.
_POOL = 1500


def roofline(table: pd.DataFrame, device: Device) -> np.ndarray:
    """Log seconds at the peak or at the full bandwidth, whichever is longer, float64 (n,)."""
    seen = mechanism(table, device)
    return np.maximum.reduce([seen.features[:, 0], np.log(seen.memory_s + 1e-9)])


def baselines(table: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Log seconds that each baseline predicts for each row of a table, fitted without the family of the row's device."""
    from xgboost import XGBRegressor

    devices = {name: get_device(name) for name in sorted(set(table["device"]))}
    family = table["device"].map(families(list(devices.values()))).to_numpy()
    kind, measured = kinds(table), np.log(table["seconds"].to_numpy(dtype=np.float64))
    roof, features = np.empty(len(table)), []
    for name, at in table.groupby("device").indices.items():
        roof[at] = roofline(table.iloc[at], devices[str(name)])
        features.append((at, encode(table.iloc[at], devices[str(name)], BEST, {})[0]))
    encoded = np.empty((len(table), features[0][1].shape[1]), dtype=np.float32)
    for at, rows in features:
        encoded[at] = rows
    keys = ["op", "dtype", "kv_dtype", *SIZES]
    operator = table.groupby(keys, dropna=False, observed=True, sort=False).ngroup().to_numpy()
    above = pd.Series(measured - roof)
    found = pd.DataFrame(index=table.index, columns=MODELS[2:], dtype=np.float64)
    for number in sorted(set(family)):
        mine, others = family == number, family != number
        middle = above[others].groupby(kind[others]).median()
        found.loc[mine, "roofline"] = roof[mine] + pd.Series(kind[mine]).map(middle).to_numpy()
        booster = XGBRegressor(n_estimators=300, max_depth=8, learning_rate=0.1, n_jobs=2, random_state=seed)
        booster.fit(encoded[others], above[others])
        found.loc[mine, "XGBoost"] = roof[mine] + booster.predict(encoded[mine])
        for name in sorted(set(table["device"][mine])):
            own = (table["device"] == name).to_numpy()
            left = [other for other in devices if family[(table["device"] == other).to_numpy()][0] != number]
            near = min(left, key=lambda other: distance(devices[name], devices[other]))
            there = (table["device"] == near).to_numpy()
            known = pd.Series(above[there].to_numpy(), index=operator[there])
            found.loc[own, "nearest device"] = roof[own] + pd.Series(operator[own]).map(known).to_numpy()
    return found


def distance(one: Device, other: Device) -> float:
    """Distance between two devices by peak and bandwidth; devices of different vendors are the farthest."""
    peak = math.log(max(one.peak_gflops.values(), default=1.0) / max(other.peak_gflops.values(), default=1.0))
    bandwidth = math.log((one.bandwidth_gb_s or 1.0) / (other.bandwidth_gb_s or 1.0))
    return math.hypot(peak, bandwidth) + 100.0 * (one.vendor != other.vendor)


def scores(table: pd.DataFrame, seed: int) -> Iterator[Row]:
    """A row with the errors of every model, for each operator kind, data type, device and size class."""
    predicted = baselines(table, seed)
    predicted["cdmpp"] = np.log(table["left_out_s"].to_numpy())
    predicted["mechanism alone"] = np.log(table["left_out_estimate_s"].to_numpy())
    size = pd.cut(np.exp(predicted["roofline"]), [0.0, 1e-5, 1e-4, math.inf], labels=SIZE_CLASSES[1:])
    table, by = table.assign(kind=kinds(table), size=size), ["kind", "dtype", "device", "size"]
    parts = (table.assign(size=SIZE_CLASSES[0]), table)
    groups: Any = itertools.chain.from_iterable(part.groupby(by, observed=True) for part in parts)
    for (kind, dtype, device, size_class), part in groups:
        for model in MODELS:
            logs = predicted.loc[part.index, model].dropna()
            if logs.empty:
                continue
            error = np.abs(np.exp(logs) / part.loc[logs.index, "seconds"] - 1).to_numpy()
            yield {
                "kind": kind, "dtype": dtype, "device": device, "size": size_class, "model": model, "seed": seed,
                "n": len(error), "median_ape": float(np.median(error)), "mape": float(error.mean()),
                "interval": {m: bootstrap(error, range(len(error)), median=m == "median_ape", resamples=200) for m in METRICS},
            }  # fmt: skip


def measurements(table: pd.DataFrame, model: OperatorModel, seed: int) -> Iterator[Row]:
    """Errors on a device's other operators: a row for each device left out, number of operators measured, and way to choose."""
    for name, part in table.groupby("device"):
        part = part.sample(min(len(part), _POOL), random_state=seed)
        traits = model.traits(part, get_device(str(name)))
        errors = np.log(part["seconds"] / part["left_out_s"]).to_numpy()
        for n in (0, *MEASURED):
            for select in SELECTIONS if n else ("none",):
                if 2 * n > len(part):
                    continue
                rest, shift = np.ones(len(part), dtype=bool), np.zeros(len(part))
                if n:
                    chosen = choose(*traits, n, "random" if select == "one constant" else select, seed)
                    rest[chosen] = False
                    if select == "one constant":
                        shift += np.median(errors[chosen])
                    else:
                        fit = fit_errors(traits[0][chosen], traits[1][chosen], errors[chosen], seed)
                        shift += 0.0 if fit.correction is None else fit.correction.logs(np.concatenate(traits, axis=1))
                off = pd.Series(np.abs(np.expm1(shift - errors))[rest])
                of_kind = off.groupby(kinds(part)[rest]).agg(["median", "mean"]).mean()
                found = {"median_ape": of_kind["median"], "mape": of_kind["mean"], "n": int(rest.sum())}
                yield {"device": name, "measured": n, "select": select, "seed": seed, **found}


def figures(rows: list[Row]) -> list[Figure]:
    table = pd.DataFrame([row for group in rows for row in group["scores"]])
    found = []
    for (kind, size, model), part in table.groupby(["kind", "size", "model"], sort=True):
        of_seed = part.groupby("seed").agg(MEANS).reset_index()
        found.append(mean_figure(f"{kind}, {size}, {model}", of_seed.to_dict("records"), METRICS))
    whole = table[table["size"] == SIZE_CLASSES[0]]
    for model, part in whole[whole["kind"].isin(OLD_KINDS) & whole["device"].isin(OLD_DEVICES)].groupby("model"):
        of_kind = part.groupby(["seed", "kind"]).agg(MEANS)
        of_seed = of_kind.groupby("seed").agg(MEANS).reset_index()
        found.append(mean_figure(f"NeuSight's operators, kinds alike, {model}", of_seed.to_dict("records"), METRICS))
    for (kind, dtype, device), part in whole[whole["model"] == "cdmpp"].groupby(["kind", "dtype", "device"]):
        found.append(mean_figure(f"{kind}, {dtype}, {device}", part.to_dict("records"), METRICS))
    taught = pd.DataFrame([row for group in rows for row in group["measurements"]])
    same = taught.groupby("device")["measured"].transform("max") == max(MEASURED)  # the same devices for every number
    for (n, select), part in taught[same].groupby(["measured", "select"]):
        of_seed = part.groupby("seed").agg(MEANS).reset_index()
        of_device = part.groupby("device")[list(METRICS)].mean()
        ends = {metric: bootstrap(of_device[metric], np.arange(len(of_device))) for metric in METRICS}
        shown = mean_figure(f"{n} operators of a new device measured, {select}", of_seed.to_dict("records"), METRICS)
        found.append({**shown, "interval": ends})
    return found


def main() -> None:
    args = arguments(__doc__, __file__).parse_args()
    made = provenance(__file__, args.data, seeds=args.seeds)
    results = Results(args.json, made, {"rows": args.rows, "epochs": args.epochs}, figures)
    for seed in args.seeds:
        if results.find(seed=seed):
            continue
        table = training_table(load_operators(args.data), args.rows, seed)
        model, left = train(table, members=2, epochs=args.epochs, seed=seed)
        best = left[left["framework"] == BEST].reset_index(drop=True)
        found = {"scores": list(scores(best, seed)), "measurements": list(measurements(best, model, seed))}
        results.add({"seed": seed, **found})
    results.finish()


if __name__ == "__main__":
    start(main)
