"""Resumable hyper-parameter search with Optuna: TPE and median pruning. Trials are judged by their error on the validation part
alone; for ours with instruction counts, by the geometric mean of its errors without and with them. Every model has its own
search space; "tuned with equal effort" means the same number of trials for each. The search folder holds Optuna's storage,
``search.db``, and ``summary.json`` (every trial) and ``best.yaml``, which are rewritten after every trial."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.files import shipped_table, write_text
from cdmpp.predictor import baselines
from cdmpp.predictor.config import Config, config_from_dict, dump_config
from cdmpp.predictor.data import TrainingData, split_data
from cdmpp.predictor.evidence import Evidence
from cdmpp.predictor.training import as_data, fingerprint
from cdmpp.program.ast import FEATURE_SET

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

    from cdmpp.dataset import DatasetView, Split

STORAGE_FILE = "search.db"
SUMMARY_FILE = "summary.json"
BEST_FILE = "best.yaml"

_SPACES = shipped_table("predictor/search.yaml")
#: Models that have a search space.
SEARCHED_MODELS: tuple[str, ...] = tuple(_SPACES)

#: Trials drawn at random before TPE takes over, and trials that must be complete before any is pruned.
_RANDOM_TRIALS = 10
_UNPRUNED_TRIALS = 5

#: First part of the epochs, in which no trial is pruned: warm-up says little about how a trial ends.
_UNPRUNED_EPOCHS = 0.2

#: Called with a trial's line of the summary at the end of the trial.
TrialCallback = Callable[[dict[str, Any]], None]


def search_space(model: str) -> dict[str, BaseDistribution]:
    """The search space of a model, dotted option -> distribution. Options are keys of the configuration for ``ours``, else
    arguments of :func:`cdmpp.predictor.baselines.make_model`. PredictorError: not in :data:`SEARCHED_MODELS`, or no Optuna."""
    try:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    except ImportError as err:
        raise PredictorError(f"searching needs Optuna: pip install 'cdmpp[search]' ({err})") from err
    if model not in SEARCHED_MODELS:
        raise PredictorError(f"no search space for model '{model}' (known: {', '.join(SEARCHED_MODELS)})")

    def distribution(of: Any) -> BaseDistribution:
        if isinstance(of, list):
            return CategoricalDistribution(of)
        return IntDistribution(**of) if isinstance(of["low"], int) else FloatDistribution(**of)

    return {name: distribution(of) for name, of in _SPACES[model].items()}


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: the content of ``summary.json``, and the best values as arguments of
    :func:`cdmpp.predictor.baselines.make_model`, including ``name`` and ``seed``."""

    summary: dict[str, Any]
    best: dict[str, Any]


def search(
    config: Config,
    datasets: TrainingData | DatasetView | str | Path | Sequence[str | Path] | None,
    out: str | Path,
    trials: int,
    model: str = "ours",
    resume: bool = False,
    progress: TrialCallback | None = None,
) -> SearchResult:
    """Search for the hyper-parameters with the lowest MAPE on the validation part; labels of the test part are blanked first.

    The first trial has the model's defaults (ours: the configuration), so that the result is no worse; a value outside the
    search space is replaced by a drawn one. Options that are not searched are those of ``config``. ``trials`` is the total, of
    earlier runs and pruned and failed ones too, but not interrupted ones. With ``resume``, a search in ``out`` is continued.

    Raises PredictorError if ``out`` holds a search and ``resume`` is off, or one of another model, configuration or records, if
    no trial succeeded, or without Optuna. DatasetError or SplitError: no records, or a split that cannot be made."""
    if trials < 1:
        raise PredictorError(f"a search needs at least one trial, got {trials}")
    out = Path(out)
    if not resume and (out / STORAGE_FILE).exists():
        raise PredictorError(f"{out} holds a search: resume it, or choose another folder")
    space = search_space(model)
    data = as_data(config, datasets)
    split = split_data(config.split.spec, data)
    # blank the labels of the test part, so that any use of them fails
    latency_s = data.latency_s.copy()
    latency_s[split.test] = np.nan
    data = replace(data, labels=data.labels.assign(latency_s=latency_s))
    out.mkdir(parents=True, exist_ok=True)
    study = _open_study(config, model, space, data, split, out)
    ended = ("complete", "pruned", "failed")
    while sum(_line(trial)["state"] in ended for trial in study.trials) < trials:
        number = _run_trial(study, space, config, model, data, split)
        _write(out, study, space, config, model, split)
        if progress is not None:
            progress(_line(study.trials[number]))
    done = _write(out, study, space, config, model, split)
    if done.summary["best"] is None:
        errors = [line["error"] for line in done.summary["trials"] if line["error"]]
        raise PredictorError(f"none of {len(done.summary['trials'])} trials succeeded; the first: {errors[0]}")
    return done


def own_values(holder: Any, space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """Values of a configuration or a model for the options of a space, without those that are outside the space or None."""
    values: dict[str, Any] = {}
    for name, distribution in space.items():
        value: Any = holder
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else getattr(value, key)
        choices = getattr(distribution, "choices", None)
        if choices is not None:
            inside = value in choices
        else:
            inside = value is not None and distribution.low <= value <= distribution.high  # type: ignore[attr-defined]
        if inside:
            values[name] = value
    return values


def trial_options(config: Config, model: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`cdmpp.predictor.baselines.make_model` for given values of the search space."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        section = nested
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    base = config.model_dump(mode="json")
    seed = config.train.seed
    if model == "ours":
        merged = {name: {**section, **nested.get(name, {})} for name, section in base.items()}
        return {"name": model, "seed": seed, "config": merged}
    if model.startswith("xgboost"):
        return {"name": model, "seed": seed, "threads": config.train.threads or 1, **nested}
    shared = {key: base["train"][key] for key in ("epochs", "patience", "threads", "device")}
    return {"name": model, "seed": seed, **nested, "train": {**shared, **nested.get("train", {})}}


def _open_study(
    config: Config, model: str, space: Mapping[str, BaseDistribution], data: TrainingData, split: Split, out: Path
) -> optuna.Study:
    """A study, new or continued. PredictorError if it is of another model, configuration or other records."""
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=f"sqlite:///{(out / STORAGE_FILE).resolve()}",
        study_name="cdmpp",
        direction="minimize",
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=_UNPRUNED_TRIALS,
            n_warmup_steps=1 + math.ceil(_UNPRUNED_EPOCHS * config.train.epochs),  # epochs count from 1
        ),
        load_if_exists=True,
    )
    # everything that a trial's error depends on besides its hyper-parameters
    named = [model, _space_json(space), FEATURE_SET, split.spec]
    arrays = [array for rows in (split.train, split.valid) for array in (rows, data.latency_s[rows])]
    own = fingerprint(config, named, data, arrays)
    if study.user_attrs.get("fingerprint", own) != own:
        raise PredictorError(f"{out}: belongs to another model, configuration or other records; start a new search")
    study.set_user_attr("fingerprint", own)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)  # it was interrupted
    # the sampler's state is not stored: with the same seed, a resumed search would draw its first trials again
    study.sampler = optuna.samplers.TPESampler(seed=config.train.seed + len(study.trials), n_startup_trials=_RANDOM_TRIALS)
    if not study.trials:
        start = config if model == "ours" else baselines.make_model(**trial_options(config, model, {}))
        study.enqueue_trial(own_values(start, space))
    return study


def _run_trial(
    study: optuna.Study, space: dict[str, BaseDistribution], config: Config, model: str, data: TrainingData, split: Split
) -> int:
    """Draw values, fit and judge the model, and return the trial's number."""
    import optuna
    from optuna.trial import TrialState

    trial = study.ask(space)

    def report(line: Mapping[str, Any]) -> None:
        if "valid_mape" in line:
            trial.report(float(line["valid_mape"]), int(line["epoch"]))
        if trial.should_prune():
            raise optuna.TrialPruned

    extra: dict[str, Any] = {} if model.startswith("xgboost") else {"progress": report}
    try:
        fitted = baselines.make_model(**trial_options(config, model, trial.params), **extra)
        fitted.fit(data, split)
        errors = _errors(fitted, data, split.valid)
        if not all(math.isfinite(error) for error in errors.values()):
            raise PredictorError(f"validation MAPE is {max(errors.values())}")
    except optuna.TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
    except PredictorError as err:  # it diverged
        trial.set_user_attr("error", str(err))
        study.tell(trial, state=TrialState.FAIL)
    else:
        for name, error in errors.items():
            trial.set_user_attr(name, error)
        study.tell(trial, math.prod(errors.values()) ** (1 / len(errors)))
    return trial.number


def _errors(fitted: baselines.LatencyModel, data: TrainingData, rows: NDArray[np.int64]) -> dict[str, float]:
    """MAPE on these rows, by its key in a trial's line; for ours also that with instruction counts."""
    predicted = {"valid_mape": fitted.predict(data, rows)}
    ours = fitted.predictor_ if isinstance(fitted, baselines.CdmppModel) else None
    if ours is not None and ours.encoder.code_dim and data.counted(rows).any():
        predicted["valid_mape_compiled"] = ours.predict_rows(data, rows, Evidence.of_rows(data, rows, compiled=True))
    return {name: float(np.mean(np.abs(p / data.latency_s[rows] - 1))) for name, p in predicted.items()}


def _write(
    out: Path, study: optuna.Study, space: Mapping[str, BaseDistribution], config: Config, model: str, split: Split
) -> SearchResult:
    """Write the results so far: the summary and, once a trial succeeded, the best values."""
    lines = [_line(trial) for trial in study.trials]
    complete = [line for line in lines if line["state"] == "complete"]
    best = min(complete, key=lambda line: line["value"]) if complete else None
    summary = {
        "model": model,
        "split": split.spec,
        "seed": config.train.seed,
        "n_train": len(split.train),
        "n_valid": len(split.valid),
        "space": _space_json(space),
        "best": best,
        "seconds": round(sum(line["seconds"] or 0.0 for line in lines), 3),
        "trials": lines,
    }
    write_text(out / SUMMARY_FILE, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    if best is None:
        return SearchResult(summary, {})
    options = trial_options(config, model, best["values"])
    compiled = best["valid_mape_compiled"]
    found = f"found by cdmpp search: trial {best['trial']} of {len(lines)}, validation MAPE {best['valid_mape']:.4f}" + (
        "" if compiled is None else f", with compiled code {compiled:.4f}"
    )
    if model == "ours":
        text = f"# F{found[1:]}.\n" + dump_config(config_from_dict(options["config"]))
    else:
        text = f"# Arguments of cdmpp.predictor.baselines.make_model, {found}.\n"
        text += yaml.safe_dump(options, sort_keys=False)
    write_text(out / BEST_FILE, text)
    return SearchResult(summary, options)


def _line(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """A trial's line of the summary, as JSON values."""
    error = trial.user_attrs.get("error")
    state = trial.state.name.lower()
    if state == "fail":
        state = "failed" if error else "interrupted"
    last = trial.last_step
    reached = trial.intermediate_values.get(-1 if last is None else last)
    mape = trial.user_attrs.get("valid_mape", trial.value if state == "complete" else reached)
    return {
        "trial": trial.number,
        "state": state,
        "values": dict(trial.params),
        "value": trial.value if state == "complete" else None,
        "valid_mape": None if mape is None or not math.isfinite(mape) else mape,
        "valid_mape_compiled": trial.user_attrs.get("valid_mape_compiled"),
        "epochs": last,
        "seconds": None if trial.duration is None else round(trial.duration.total_seconds(), 3),
        "error": error,
    }


def _space_json(space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    from optuna.distributions import distribution_to_json

    return {name: json.loads(distribution_to_json(distribution)) for name, distribution in space.items()}
