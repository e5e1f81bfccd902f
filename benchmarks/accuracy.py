"""Held-out error of our predictor and of every baseline on the same records, for every kind of split.

    python benchmarks/accuracy.py --data data --json accuracy.json
    python benchmarks/accuracy.py --splits by_network --models ours xgboost-perstore roofline --seeds 0 1 2 --json a.json

All models of a split and a seed are trained on the same records in this process. ``by_device`` is zero-shot on each device
in turn: trained without it and without other devices of its microarchitecture (``--keep-alike``: with these). ``few_shot``
starts from a predictor trained on the other devices. It finetunes it on the device's records of K tasks, chosen by KMeans and
at random, and tests on the device's other tasks. Baselines trained on the other devices get one constant factor from the same
records. ``elsewhere`` takes the latencies measured on each other device, times a constant for that device; all models are also
scored on only the programs that were measured elsewhere (``same programs``).

``ours-compiled`` is our predictor given the instructions of each compiled program. ``ours-measured`` is given the latencies of
the same programs on the other devices; ``measured-by-estimate`` only scales these latencies by the ratio of two analytical
estimates. Programs without such input are predicted without it; ``n_compiled`` and ``n_measured`` say how many have it.

The table gives the mean over seeds with the sample standard deviation, and the 95 % interval of a bootstrap over the test
part's tasks. The noise floor is what a perfect predictor would score.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common import TITLES, Figure, Results, Row, accuracy_intervals, arguments, mean_figure, provenance, start

from cdmpp.dataset import Split
from cdmpp.predictor import Config, Predictor, TrainingData, baselines, few_shot, gather, load_config, split_data
from cdmpp.predictor.baselines import COMPILED_NAMES, MODEL_NAMES, make_model
from cdmpp.predictor.data import subset
from cdmpp.predictor.evaluation import score
from cdmpp.predictor.evidence import DeviceScaling, Evidence, fit_scaling
from cdmpp.predictor.metrics import least_mape_shift

SPLITS = ("within_task", "by_task", "by_network", "by_device", "few_shot")
COMPILED, MEASURED, BY_ESTIMATE = "ours-compiled", "ours-measured", "measured-by-estimate"


def scored(data: TrainingData, rows: np.ndarray, predicted_s: np.ndarray, **notes: Any) -> Row:
    """Metrics of these predictions with their intervals over tasks, and further entries of the row."""
    interval = accuracy_intervals(data.labels.iloc[rows], predicted_s)
    return {**score(data, rows, predicted_s, ())["overall"], **notes, "interval": interval}


def scored_given(predictor: Predictor, data: TrainingData, split: Split) -> dict[str, Row]:
    """Scores of our predictor given compiled code, given latencies on other devices, and of these latencies scaled alone. A
    score is left out if the predictor does not take that input or no program has it."""
    found = {}
    n_compiled = int(data.counted(split.test).sum()) if predictor.encoder.code_dim else 0
    if n_compiled:
        compiled = Evidence.of_rows(data, split.test, compiled=True)
        predicted_s = predictor.predict_rows(data, split.test, compiled)
        found[COMPILED] = scored(data, split.test, predicted_s, n_compiled=n_compiled)
    if predictor.scaling is None:
        predictor = replace(predictor, scaling=fit_scaling(predictor.predict_rows, data, split.valid, split.test))
    # with such an error the prediction has no weight beside the measured latencies
    without = replace(predictor, scaling=DeviceScaling(estimate_part=1.0, own_error=1e6))
    elsewhere = Evidence.of_rows(data, split.test, measured=True)
    known = elsewhere.known(len(split.test))
    if known.any():
        for name, model in ((MEASURED, predictor), (BY_ESTIMATE, without)):
            predicted_s = model.predict_rows(data, split.test, elsewhere)
            found[name] = scored(data, split.test, predicted_s, n_measured=int(known.sum()))
    return found


def without_its_like(data: TrainingData, device: str, keep: bool = False) -> TrainingData:
    """The data without others of the device's microarchitecture, unless ``keep``: few have such a core and another target."""
    if keep:
        return data
    alike = [name for name, other in data.devices.items() if other.arch == data.devices[device].arch and name != device]
    return subset(data, np.flatnonzero(~data.labels["device"].isin(alike)))


def keep(results: Results, row: Row, **key: Any) -> None:
    """Add the scores of a model to the results and print its MAPE."""
    results.add({**key, **row})
    print(" ".join(f"{k}={v}" for k, v in key.items()), f"MAPE {100 * row['mape']:.1f} %", flush=True)


def score_model(
    results: Results, model: baselines.LatencyModel, data: TrainingData, split: Split, key: Row
) -> baselines.LatencyModel | None:
    """Train a model and keep its scores; our model is also scored with compiled code and latencies of other devices.

    Returns the model, or None if the results have its scores: then it is not trained again.
    """
    if results.find(**key) is not None:
        return None
    (found,) = baselines.evaluate_models([model], data, split).values()
    ours = model.predictor_ if isinstance(model, baselines.CdmppModel) else None
    notes = {"spec": split.spec, "n_train": len(split.train)}
    for name, row in ({} if ours is None else scored_given(ours, data, split)).items():
        given = name if key["model"] == "ours" else f"{key['model']} ({name})"
        keep(results, {**row, **notes}, **{**key, "model": given})
    notes.update(fit_s=found["fit_s"], predict_s=found["predict_s"])
    keep(results, scored(data, split.test, model.predict(data, split.test), **notes), **key)
    return model


def baseline_options(files: list[Path], epochs: int, network_seconds: float | None) -> dict[str, dict[str, Any]]:
    """Arguments of the baselines by name, as the best.yaml files of a search have them. Networks train for ``epochs`` epochs,
    as ours does (a search may use fewer), and for at most ``network_seconds``."""
    networks = {} if network_seconds is None else {"max_seconds": network_seconds}
    found: dict[str, dict[str, Any]] = {name: dict(networks) for name in ("lstm", "released")}
    for file in files:
        options = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(options, dict) or "name" not in options:
            raise SystemExit(f"{file} is not a best.yaml of a baseline that cdmpp search wrote")
        options = {key: value for key, value in options.items() if key not in ("seed", "threads")}
        if "train" in options:
            options["train"] = {**options["train"], "epochs": epochs}
        name = options.pop("name")
        found[name] = {**found.get(name, {}), **options}
    return found


def specifications(kind: str, args: argparse.Namespace, seed: int) -> list[tuple[str, str]]:
    """Splits of a kind for one seed: (split specification, what is held out)."""
    if kind == "by_device":
        return [(f"by_device:heldout={name};seed={seed}", name) for name in args.devices]
    if kind == "by_network" and args.heldout:
        valid = f";valid={args.valid}" if args.valid else ""
        return [(f"by_network:heldout={args.heldout}{valid};seed={seed}", args.heldout)]
    return [(f"{kind}:seed={seed}", "")]


Models = dict[tuple[str, str], baselines.LatencyModel]


def score_split(kind: str, data: TrainingData, args: argparse.Namespace, config: Config, results: Results) -> Models:
    """Score every model on one kind of split. Returns the models trained with seed 0, by (held out, name)."""
    unseen: Models = {}
    for seed in args.seeds:
        for spec, held in specifications(kind, args, seed):
            used = without_its_like(data, held, args.keep_alike) if kind == "by_device" else data
            split = split_data(spec, used)
            for name in args.models:
                key = {"split": kind, "held_out": held, "seed": seed, "model": name}
                model = score_model(results, model_of(name, seed, args, config), used, split, key)
                if model is not None and seed == 0:
                    unseen[held, name] = model
    return unseen


def model_of(name: str, seed: int, args: argparse.Namespace, config: Config) -> baselines.LatencyModel:
    """An untrained model with the options of this run."""
    return make_model(name, seed, **({"config": config} if name == "ours" else args.baselines.get(name, {})))


def elsewhere_s(data: TrainingData, device: str, shots: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Latencies of the rows' programs on each other device, times a constant (the median ratio on the shots): the geometric
    mean over the other devices, float64 (n,), NaN for programs that were measured nowhere else."""
    logs = np.log(data.labels.pivot_table(index="program", columns="device", values="latency_s", observed=True))
    taught, others = logs.loc[data.labels["program"].iloc[shots]], logs.drop(columns=device)
    constants = -taught.drop(columns=device).sub(taught[device], axis=0).median()
    programs = data.labels["program"].iloc[rows]
    return np.exp((others + constants).mean(axis=1)).reindex(programs).to_numpy(dtype=np.float64)


def score_few_shot(data: TrainingData, args: argparse.Namespace, config: Config, results: Results, unseen: Models) -> None:
    """Score few-shot learning of every device, starting from the models in ``unseen``; those missing are trained here."""
    for device in args.devices:
        used = without_its_like(data, device, args.keep_alike)
        split = split_data(f"by_device:heldout={device};seed=0", used)
        for seed, k, select in itertools.product(args.few_shot_seeds, args.tasks, ("kmeans", "random")):
            key = {"split": "few_shot", "held_out": device, "seed": seed, "k": k, "select": select}
            if results.find(**key) is not None:
                continue
            for name in args.models:
                if (device, name) not in unseen:
                    unseen[device, name] = model_of(name, 0, args, config)
                    unseen[device, name].fit(used, split)
            score_taught(used, device, key, {name: unseen[device, name] for name in args.models}, results)


def score_taught(
    data: TrainingData, device: str, key: Row, models: dict[str, baselines.LatencyModel], results: Results
) -> None:
    """Score our model finetuned on K tasks of a device, and the others times one constant fitted to the same records."""
    ours = models["ours"]
    assert isinstance(ours, baselines.CdmppModel)
    tuned, split = few_shot(ours.predictor_, data, device, key["k"], key["select"], key["seed"])
    shots = split.train[(data.labels["device"].iloc[split.train] == device).to_numpy()]
    label_s, rows = data.latency_s[shots], split.test
    predicted = {"ours": tuned.predict_rows(data, rows)}
    if data.counted(rows).any() and tuned.encoder.code_dim:
        predicted[COMPILED] = tuned.predict_rows(data, rows, Evidence.of_rows(data, rows, compiled=True))
    for name, model in models.items():
        if name != "ours":
            constant = np.exp(least_mape_shift(np.log(label_s / model.predict(data, shots))))
            predicted[f"{name} times a constant"] = constant * model.predict(data, rows)
    predicted["elsewhere"] = elsewhere_s(data, device, shots, rows)
    known = np.isfinite(predicted["elsewhere"])
    for name, predicted_s in predicted.items():
        notes = {"spec": split.spec, "n_shots": len(shots)}
        if name != "elsewhere":
            keep(results, scored(data, rows, predicted_s, **notes), **key, model=name)
        if known.sum() > 1:
            same = name if name == "elsewhere" else f"{name}, same programs"
            keep(results, scored(data, rows[known], predicted_s[known], **notes), **key, model=same)


def figures(rows: list[Row]) -> list[Figure]:
    """One figure for each split, held-out device and model: the mean over its seeds."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        where = [row["split"]]
        if row["split"] in ("by_device", "few_shot"):
            where.append(row["held_out"])
        if row.get("k") is not None:
            where.append(f"K={row['k']} {row['select']}")
        groups[f"{' '.join(where)}: {row['model']}"].append(row)
    return [mean_figure(name, found, TITLES) for name, found in groups.items()]


def main() -> None:
    models = {"default": list(MODEL_NAMES), "choices": MODEL_NAMES + COMPILED_NAMES}
    parser = arguments(__doc__, __file__, splits={"default": list(SPLITS), "choices": SPLITS}, models=models)
    args = parser.parse_args()

    config = load_config(args.config)
    args.baselines = baseline_options(args.found, config.train.epochs, args.network_seconds)
    data = gather(args.data, config.data)
    args.devices = args.devices or sorted(data.devices)
    if set(args.devices) - set(data.devices):
        parser.error(f"there are records of {', '.join(sorted(data.devices))}, not of all of {args.devices}")
    options = {"records": len(data), "config": config.model_dump(mode="json"), "baselines": args.baselines}
    made = provenance(__file__, args.data, seeds={*args.seeds, *args.few_shot_seeds})
    results = Results(args.json, made, options, figures)
    unseen: Models = {}
    for kind in args.splits:
        if kind in ("by_device", "few_shot") and len(data.devices) < 2:
            print(f"{kind} needs records of two devices", file=sys.stderr)
        elif kind == "few_shot":
            score_few_shot(data, args, config, results, unseen)
        else:
            found = score_split(kind, data, args, config, results)
            unseen = found if kind == "by_device" else unseen
    results.finish()


if __name__ == "__main__":
    start(main)
