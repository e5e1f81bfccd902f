"""Choosing one of MIOpen's solvers for a convolution, on AMD GPUs left out of training: regret of the first choice.

    python benchmarks/solver_choice.py --data runs/miopen --json solver_choice.json

The dataset is what ``cdmpp import miopen`` makes. Every family of nearly equal devices is left out in turn (MI210 and MI250X
are one, MI50 and MI60 another). Regret is how much longer the solver ranked first takes than the fastest of those timed for a
problem, over problems with two or more timed solvers; a problem has one layout. The baselines use the same data:

- ``most often best``: among problems of the same class (data type, direction, layout, window, stride, groups);
- ``usual time``: the solver whose median of time over the operator's estimate is lowest in the class;
- ``nearest device``: the solver that was fastest for this problem on the training device whose peak and bandwidth are nearest;
  only for problems that were timed there (``n`` is their number).

``all`` weights devices equally. Intervals are over problems.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from common import Figure, Results, Row, arguments, bootstrap, mean_figure, provenance, start
from gpu_operators import distance

from cdmpp.dataset.operators import load_operators
from cdmpp.device import get_device
from cdmpp.predictor.operators import BEST, encode, families, fit_constants, solver_times, train_solvers
from cdmpp.program.operators import SIZES

MODELS = ("cdmpp", "most often best", "usual time", "nearest device")
METRICS = ("median regret", "mean regret", "fastest or within 5 %")
_CLASS = ["dtype", "backward", "kernel_h", "kernel_w", "stride", "groups", "layout"]


def by_layout(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Problems, each with one layout, and their seconds, with a column for each solver."""
    parts = []
    for layout, part in table.groupby(table["kernel"].str.partition(" ")[2]):
        own, seconds, names = solver_times(part, len(part))
        parts.append((own.assign(layout=layout), pd.DataFrame(seconds, columns=names)))
    problems, seconds = (pd.concat(own, ignore_index=True) for own in zip(*parts, strict=True))
    keys = problems[["dtype", "layout", *SIZES]].fillna(-1)
    estimate = np.empty(len(problems))
    for name, at in problems.groupby("device").indices.items():
        estimate[at] = encode(problems.iloc[at], get_device(str(name)), "miopen", {})[1]
    return problems.assign(
        problem=keys.groupby(list(keys), sort=False).ngroup(),
        of_class=keys.groupby(_CLASS, sort=False).ngroup(),
        best=seconds.idxmin(axis=1),
        estimate=estimate,
    ), seconds


def scores(
    every: pd.DataFrame, every_s: pd.DataFrame, times: tuple, family: dict[str, int], left_out: int, rows: int, seed: int
) -> Iterator[Row]:
    """A row for each model, and each device and data type of the family that is left out."""
    operators, operators_s, names = times
    left_in = (operators["device"].map(family) != left_out).to_numpy()
    operators, operators_s = operators[left_in].reset_index(drop=True), operators_s[left_in]
    constants = fit_constants(operators.assign(seconds=np.nanmin(operators_s, axis=1), framework=BEST))
    model = train_solvers(operators, operators_s, names, constants, seed=seed)
    known = (every["device"].map(family) != left_out).to_numpy()
    often = pd.get_dummies(every["best"][known], dtype=float).groupby(every["of_class"]).mean()
    usual = np.log(every_s[known].div(every["estimate"][known], axis=0)).groupby(every["of_class"]).median()
    drawn = every[~known].sample(frac=1.0, random_state=seed)
    drawn = drawn[drawn.groupby(["device", "dtype", "backward"]).cumcount() < rows]
    names = every_s.columns
    for device, part in drawn.groupby("device"):
        took, here = every_s.loc[part.index].to_numpy(), get_device(str(device))
        logs, _ = model.rank(encode(part, here, "miopen", constants)[0])
        near = min(set(every["device"][known]), key=lambda name: distance(here, get_device(str(name))))
        there = every[every["device"] == near].set_index("problem")["best"]
        nearest = part["problem"].map(there)
        orders = {
            "cdmpp": pd.DataFrame(logs, columns=model.names).reindex(columns=names),
            "most often best": -often.reindex(index=part["of_class"], columns=names),
            "usual time": usual.reindex(index=part["of_class"], columns=names),
            "nearest device": -pd.DataFrame(np.equal.outer(nearest.to_numpy(), names.to_numpy()).astype(float)),
        }
        for name, order in orders.items():
            ran = ~np.isnan(took)
            value = np.where(ran, np.nan_to_num(order.to_numpy(), nan=1e6), np.inf)
            asked = (ran.sum(1) > 1) & (nearest.notna().to_numpy() | (name != "nearest device"))
            # the best solver there may not run here: then any other is taken
            regret = took[np.arange(len(took)), value.argmin(1)] / np.nanmin(took, axis=1) - 1
            for dtype in sorted(set(part["dtype"])):
                own = regret[asked & (part["dtype"] == dtype).to_numpy()]
                if len(own) < 30:
                    continue
                yield {
                    "device": device, "dtype": dtype, "model": name, "seed": seed, "left_out": left_out, "n": len(own),
                    "median regret": float(np.median(own)), "mean regret": float(own.mean()),
                    "fastest or within 5 %": float((own <= 0.05).mean()),
                    "interval": {
                        "median regret": bootstrap(own, np.arange(len(own)), median=True, resamples=200),
                        "mean regret": bootstrap(own, np.arange(len(own)), resamples=200),
                    },
                }  # fmt: skip


def figures(rows: list[Row]) -> list[Figure]:
    table = pd.DataFrame([row for group in rows for row in group["scores"]])
    found = []
    for model in MODELS:
        part = table[table["model"] == model]
        of_seed = part.groupby("seed").agg({**dict.fromkeys(METRICS, "mean"), "n": "sum"}).reset_index()
        found.append(mean_figure(f"all, {model}", of_seed.to_dict("records"), METRICS))
    for (device, dtype, model), part in table.groupby(["device", "dtype", "model"]):
        if model in ("cdmpp", "most often best"):
            found.append(mean_figure(f"{device}, {dtype}, {model}", part.to_dict("records"), METRICS))
    return found


def main() -> None:
    args = arguments(__doc__, __file__).parse_args()
    results = Results(args.json, provenance(__file__, args.data, seeds=args.seeds), {"rows": args.rows}, figures)
    table = load_operators(args.data)
    family = families([get_device(name) for name in sorted(set(table["device"]))])
    every, every_s = by_layout(table)
    for seed in args.seeds:
        times = solver_times(table, args.rows, seed)
        for number in sorted(set(family.values())):
            left_out = every, every_s, times, family, number, args.rows, seed
            results.once(lambda own=left_out: {"scores": list(scores(*own))}, seed=seed, left_out=number)
    results.finish()


if __name__ == "__main__":
    start(main)
