"""How well one number per CPU predicts latency: whole networks of ncnn on CPUs, one thread, float32.

    python benchmarks/one_number.py --data ../shared/data --json one_number.json

log latency = the CPU's number + the network's number. ``in sample`` is this model's error on the labels it was fitted to.
``one known network`` takes a CPU's number from one network measured on it, each in turn, and the networks' numbers from the
other CPUs. ``nothing measured`` predicts it from the clock, or from the clock and LLVM's scheduling model of the core
(instructions a cycle, multiply-adds a cycle, vector width), by a ridge regression on the other CPUs. CPUs with the same core
are left out together; CPUs whose core or clock is unknown are not used. ``order`` is how often the faster of two CPUs with
different cores is picked, by the ratio of their latencies.

A predictor for CPUs without measurements has to beat these. The 95 % intervals are over CPUs.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
from common import Figure, arguments, bootstrap, figure, provenance, report, start

#: A core's name in the file -> LLVM's name for it, or for the core it derives from; other names are used in lower case.
_CORES = {
    "Kryo260": "cortex-a73", "Kryo460": "cortex-a76", "Kryo485": "cortex-a76", "Cortex-A78AE": "cortex-a78", "Zen": "znver1",
    "Zen2": "znver2", "Zen3": "znver3", "Core-i7-11800H": "tigerlake", "Core-i7-7700K": "skylake",
    "Xeon-8573C": "emeraldrapids",
}  # fmt: skip
_AVX512 = ("tigerlake", "emeraldrapids")
#: A CPU counts if so many networks were measured on it, a network if it was measured on so many CPUs.
_LEAST = 10
_RIDGE = 0.1


def labels(path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Log seconds, CPUs by networks, and the core and clock (GHz) of each CPU."""
    table = pd.read_parquet(path)
    table = table[(table["backend"] == "cpu") & ~table["int8"] & (table["threads"] == 1) & (table["powersave"] != 1)]
    logs = np.log(table.pivot_table(index="device", columns="network", values="seconds", aggfunc="median"))
    logs = logs.loc[logs.notna().sum(axis=1) >= _LEAST, logs.notna().sum() >= _LEAST]
    cores = table.groupby("device")["cores"].first().loc[logs.index].fillna("")
    first = cores.str.split("+").str[0].str.split("@").str[0]
    clock = table.groupby("device")["clock_hz"].first().loc[logs.index] / 1e9
    return logs, pd.DataFrame({"core": first.map(lambda name: _CORES.get(name, name.lower())), "ghz": clock})


def fitted(logs: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The number of each CPU and of each network, by least squares."""
    cpus, networks = pd.Series(0.0, logs.index), pd.Series(0.0, logs.columns)
    for _ in range(200):
        cpus = logs.sub(networks, axis=1).mean(axis=1)
        networks = logs.sub(cpus, axis=0).mean()
    return cpus, networks


def specification(cpus: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Log clock and, by LLVM's scheduling model, log width, in order or not, and log multiply-add bits a cycle; no NaN rows."""
    models = pd.read_csv(folder / "uarch_cpus.csv").drop_duplicates("mcpu").set_index("mcpu")
    own = models.reindex(cpus["core"]).set_axis(cpus.index)
    bits = np.where(own["isa"] == "x86", np.where(cpus["core"].isin(_AVX512), 512, 256), 128)
    columns = {
        "clock": np.log(cpus["ghz"]),
        "width": np.log(own["dispatch_width"]),
        "in order": (own["reorder_buffer"] == 0).astype(float),
        "arithmetic": np.log(bits / own["fma_reciprocal_throughput"]),
    }
    return pd.DataFrame(columns)[own["isa"].notna() & cpus["ghz"].notna()]


def from_specification(facts: pd.DataFrame, number: pd.Series, cores: pd.Series) -> pd.Series:
    """Each CPU's number by a ridge regression on the CPUs with another core; the penalty does not apply to the clock."""
    found = {}
    for name in facts.index:
        others = facts.index[(cores[facts.index] != cores[name]).to_numpy()]
        middle, width = facts.loc[others].mean(), facts.loc[others].std().clip(lower=1e-6)
        x, y = (facts.loc[others] - middle) / width, number[others]
        held = _RIDGE * len(others) * np.diag([0.0, *[1.0] * (x.shape[1] - 1)])
        slopes = np.linalg.solve(x.T @ x + held, x.T @ (y - y.mean()))
        found[name] = y.mean() + float(((facts.loc[name] - middle) / width) @ slopes)
    return pd.Series(found)


def scored(name: str, logs: pd.DataFrame, predicted: pd.DataFrame, seen: np.ndarray | None = None) -> Figure:
    """Errors of the predictions, except for labels that were given as input: ``seen``, bool, of the table's shape."""
    error = np.abs(np.exp(predicted - logs) - 1).to_numpy()
    if seen is not None:
        error = np.where(seen, np.nan, error)
    rows, columns = np.nonzero(np.isfinite(error))
    values, groups = error[rows, columns], logs.index.to_numpy()[rows]
    interval = {"mape": bootstrap(values, groups), "median_ape": bootstrap(values, groups, median=True)}
    return figure(name, {"mape": values.mean(), "median_ape": float(np.median(values))}, len(values), interval=interval)


def order(number: pd.Series, predicted: pd.Series, cores: pd.Series, least: float, most: float) -> float:
    """Fraction of the pairs, of CPUs with different cores that are this many times apart, whose faster one is picked."""
    pairs = [
        (number[a] - number[b]) * (predicted[a] - predicted[b]) > 0
        for a, b in itertools.combinations(predicted.index, 2)
        if np.log(least) < abs(number[a] - number[b]) <= np.log(most) and cores[a] != cores[b]
    ]
    return float(np.mean(pairs))


def main() -> None:
    args = arguments(__doc__, __file__).parse_args()
    file = args.data / "ncnn_networks.parquet"
    logs, cpus = labels(file)
    number, networks = fitted(logs)
    both = pd.DataFrame(number.to_numpy()[:, None] + networks.to_numpy(), logs.index, logs.columns)
    found = [scored(f"in sample, {len(logs)} CPUs, {logs.shape[1]} networks", logs, both)]
    of_others = pd.DataFrame({name: fitted(logs.drop(name))[1] for name in logs.index}).T.reindex(columns=logs.columns)
    known = [(logs[network] - of_others[network], network) for network in logs.columns]
    cases = [(of_others.add(own, axis=0), network) for own, network in known]
    every = [scored("", logs, own, np.tile(logs.columns == network, (len(logs), 1))) for own, network in cases]
    ranked = sorted(zip(logs.columns, every, strict=True), key=lambda row: row[1]["values"]["mape"])
    mean = {metric: float(np.mean([own["values"][metric] for own in every])) for metric in ("mape", "median_ape")}
    found.append(figure("one known network, mean over which", mean, len(every)))
    found += [
        {**own, "name": f"one known network, {which}: {name}"}
        for which, (name, own) in (("best", ranked[0]), ("worst", ranked[-1]))
    ]
    facts = specification(cpus, args.data)
    for name, columns in (("the clock", ["clock"]), ("clock and LLVM's model of the core", list(facts))):
        predicted = from_specification(facts[columns], number, cpus["core"])
        table = of_others.loc[predicted.index].add(predicted, axis=0)
        row = scored(f"nothing measured, from {name}, {len(facts)} CPUs", logs.loc[predicted.index], table)
        for ends in ((1.1, np.inf), (1.1, 1.5), (1.5, 3.0), (3.0, np.inf)):
            row["values"]["order, {:g} to {:g}".format(*ends)] = order(number, predicted, cpus["core"], *ends)
        found.append(row)
    report(args.json, provenance(__file__, [file, args.data / "uarch_cpus.csv"]), found)


if __name__ == "__main__":
    start(main)
