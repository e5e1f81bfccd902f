"""How likely a program works on a device at all: P(valid | program, device), learned from failures.

After Rieber et al., "HW-Aware Initialization of DNN Auto-Tuning to Improve Exploration Time and Robustness" (2022): where a
part of a design space does not compile or run, a tuner that knows which wastes fewer measurements. Theirs is a check of one
accelerator's rules; here the rules are learned: gradient-boosted trees on the compact AST and the device's limits, with
probabilities calibrated on programs that the trees had not seen.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import FeatureMismatchError, PredictorError
from cdmpp.program.ast.schema import FEATURE_SET
from cdmpp.tuner.validity_features import VALIDITY_FEATURES, limits_of, validity_features

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.program.ast import CompactAST
    from cdmpp.tuner.validity_data import ValidityData

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]

FORMAT = "cdmpp-validity-model"
FORMAT_VERSION = 1
MODEL_FILE = "validity.json"
TREES_FILE = "trees.json"

#: Log odds are kept within this: no count of programs seen makes another one certain.
_MOST_LOG_ODDS = 6.0


@dataclass(frozen=True)
class ForestConfig:
    """Of the trees; names are XGBoost's.

    Attributes
    ----------
    rounds
        Trees, at most; how many there are is chosen by the folds.
    folds
        Parts of the training programs by which the number of trees is chosen and the probabilities are calibrated. Tasks are
        kept together where there are enough.
    """

    max_depth: int = 5
    eta: float = 0.1
    min_child_weight: float = 2.0
    subsample: float = 0.8
    colsample_bytree: float = 0.5
    rounds: int = 300
    patience: int = 20
    folds: int = 4
    seed: int = 0
    threads: int = 1

    def params(self) -> dict[str, Any]:
        """For ``xgboost.train``."""
        taken = {"max_depth", "eta", "min_child_weight", "subsample", "colsample_bytree", "seed"}
        return {
            **{name: value for name, value in asdict(self).items() if name in taken},
            "nthread": self.threads,
            "tree_method": "hist",
            "objective": "binary:logistic",
            "eval_metric": "logloss",
            # XGBoost would start from the rows' mean: one margin, whatever the rows, is what a file can be read without.
            "base_score": 0.5,
        }


class ValidityModel:
    """P(valid | program, device).

    Parameters
    ----------
    config
        Of the trees.

    Attributes
    ----------
    trees_
        An ``xgboost.Booster``, or None where every row was alike.
    scale_, offset_
        Calibration: log odds are ``scale_ * margin + offset_`` (Platt 1999).
    training_
        Rows, rows that are valid, devices, number of trees, scores out of fold.
    """

    def __init__(self, config: ForestConfig | None = None) -> None:
        self.config = config or ForestConfig()
        self.trees_: Any = None
        self.scale_, self.offset_ = 1.0, 0.0
        self.training_: dict[str, Any] = {}

    def fit(self, data: ValidityData, rows: NDArray[np.int64] | None = None) -> ValidityModel:
        """Learn from rows (all of them if None) and nothing else; gives itself.

        Raises
        ------
        PredictorError
            No rows.
        """
        import xgboost as xgb

        rows = np.arange(len(data)) if rows is None else np.asarray(rows)
        if not len(rows):
            raise PredictorError("a validity model needs rows to learn from")
        x, y = data.features[rows], data.valid[rows].astype(np.float64)
        table = data.table.iloc[rows]
        self.training_ = {
            "rows": len(rows),
            "valid": int(y.sum()),
            "devices": sorted(set(table["device"])),
            "tasks": int(table["task"].nunique()),
        }
        if y.min() == y.max():
            # Nothing tells programs apart; Laplace's rule of succession keeps the probability from 0 and 1.
            self.trees_ = None
            self.scale_, self.offset_ = 1.0, _logit((y.sum() + 1) / (len(y) + 2))
            return self
        held_out, trees = self._folds(x, y, self._fold_numbers(table))
        self.scale_, self.offset_ = _platt(held_out, y)
        # Held-out trees saw fewer rows: their mean number is a little few for all of them, which does no harm.
        self.trees_ = xgb.train(self.config.params(), xgb.DMatrix(x, y), num_boost_round=trees)
        self.training_["trees"] = trees
        self.training_["out_of_fold"] = validity_scores(y > 0.5, sigmoid(self._log_odds(held_out)))
        return self

    def _fold_numbers(self, table: Any) -> NDArray[np.int64]:
        """Fold of every row: by task, or by program where there are fewer tasks than folds."""
        from cdmpp.dataset.split import ordered

        unit = "task" if table["task"].nunique() >= self.config.folds else "program"
        names = ordered(set(table[unit]), self.config.seed, "validity")
        number = {name: i % self.config.folds for i, name in enumerate(names)}
        return table[unit].map(number).to_numpy(dtype=np.int64)

    def _folds(
        self, x: NDArray[np.float32], y: FloatArray, fold: NDArray[np.int64]
    ) -> tuple[FloatArray, int]:
        """Margins of all rows from trees that were not grown on them, and the number of trees."""
        import xgboost as xgb

        margins, counts = np.zeros(len(y)), []
        for number in np.unique(fold):
            inside, outside = fold != number, fold == number
            if y[inside].min() == y[inside].max():
                margins[outside] = _logit((y[inside].sum() + 1) / (inside.sum() + 2))
                continue
            train, valid = xgb.DMatrix(x[inside], y[inside]), xgb.DMatrix(x[outside], y[outside])
            trees = xgb.train(
                self.config.params(),
                train,
                num_boost_round=self.config.rounds,
                evals=[(valid, "held_out")],
                early_stopping_rounds=self.config.patience,
                verbose_eval=False,
            )
            best = trees.best_iteration + 1
            counts.append(best)
            margins[outside] = trees.predict(valid, output_margin=True, iteration_range=(0, best))
        return margins, max(1, round(float(np.mean(counts)))) if counts else 1

    # -- asking ----------------------------------------------------------------------------------------------

    def predict(self, asts: Sequence[CompactAST], device: Device) -> FloatArray:
        """P(valid) of programs on a device, float64 (n,)."""
        if not len(asts):
            return np.zeros(0)
        return sigmoid(self.log_odds(self.features(asts, device)))

    def features(self, asts: Sequence[CompactAST], device: Device) -> NDArray[np.float32]:
        """What :meth:`log_odds` takes."""
        return validity_features(asts, limits_of(device), device)

    def predict_rows(self, data: ValidityData, rows: NDArray[np.int64]) -> FloatArray:
        """P(valid) of rows, float64 (n,)."""
        return sigmoid(self.log_odds(data.features[rows]))

    def log_odds(self, features: NDArray[np.float32]) -> FloatArray:
        """Log odds of features (n, d), float64 (n,), within +-6."""
        if self.trees_ is None:
            return np.full(len(features), self.offset_)
        import xgboost as xgb

        return self._log_odds(self.trees_.predict(xgb.DMatrix(features), output_margin=True))

    def _log_odds(self, margins: NDArray[Any]) -> FloatArray:
        odds = self.scale_ * margins.astype(np.float64) + self.offset_
        return np.clip(odds, -_MOST_LOG_ODDS, _MOST_LOG_ODDS)

    # -- storing ---------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write ``validity.json`` and the trees (XGBoost's JSON).

        Raises
        ------
        PredictorError
            The folder cannot be written.
        """
        folder = Path(folder)
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "feature_set": FEATURE_SET,
            "features": list(VALIDITY_FEATURES),
            "config": asdict(self.config),
            "scale": self.scale_,
            "offset": self.offset_,
            "trees": self.trees_ is not None,
            "training": self.training_,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.trees_ is not None:
                (folder / TREES_FILE).write_bytes(bytes(self.trees_.save_raw("json")))
            # Last: a folder without it is no model.
            text = json.dumps(content, indent=1, allow_nan=False) + "\n"
            (folder / MODEL_FILE).write_text(text, encoding="utf-8")
        except OSError as err:
            raise PredictorError(f"cannot write {folder}: {err.strerror or err}") from err

    @classmethod
    def load(cls, folder: str | Path) -> ValidityModel:
        """Read what :meth:`save` wrote.

        Raises
        ------
        PredictorError
            It is missing, damaged, or of another version.
        FeatureMismatchError
            It was trained on other features than this version has.
        """
        path = Path(folder) / MODEL_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT or content["format_version"] != FORMAT_VERSION:
                raise PredictorError(f"{path}: not a validity model that this cdmpp reads")
            if content["feature_set"] != FEATURE_SET or content["features"] != list(VALIDITY_FEATURES):
                raise FeatureMismatchError(
                    f"{path} was trained on the features {content['feature_set']}, this version has {FEATURE_SET}: "
                    "train it anew (cdmpp validity-train)"
                )
            model = cls(ForestConfig(**content["config"]))
            model.scale_, model.offset_ = float(content["scale"]), float(content["offset"])
            model.training_ = dict(content["training"])
            has_trees = bool(content["trees"])
        except OSError as err:
            raise PredictorError(f"{folder} holds no validity model: {err.strerror or err}") from err
        except (KeyError, ValueError, TypeError) as err:
            raise PredictorError(f"{path}: expected a validity model, it is damaged: {err!r}") from err
        if has_trees:
            model.trees_ = _read_trees(path.with_name(TREES_FILE))
        return model


def _read_trees(path: Path) -> Any:
    import xgboost as xgb

    booster = xgb.Booster({"nthread": 1})
    try:
        booster.load_model(bytearray(path.read_bytes()))
    except OSError as err:
        raise PredictorError(f"cannot read {path}: {err.strerror or err}") from err
    except xgb.core.XGBoostError as err:
        raise PredictorError(f"{path}: expected XGBoost's JSON, it is damaged") from err
    if booster.num_features() != len(VALIDITY_FEATURES):
        raise PredictorError(
            f"{path}: trees of {booster.num_features()} features, expected {len(VALIDITY_FEATURES)}"
        )
    return booster


def train_validity(
    datasets: Sequence[str | Path],
    verdicts: Sequence[str | Path],
    out: str | Path,
    *,
    devices: Sequence[str] | None = None,
    split: str | None = None,
    config: ForestConfig | None = None,
) -> dict[str, Any]:
    """Train a validity model on failure records and save it.

    Parameters
    ----------
    datasets
        Dataset folders, or folders of them.
    verdicts
        Folders that ``cdmpp validity-data`` wrote.
    out
        Folder of the model.
    devices
        Learn from these devices and architectures only.
    split
        ``by_task``, ``by_device:heldout=...`` or ``within_task``, see :mod:`cdmpp.dataset.split`: its test part is not
        learned from, but scored, over all and by device.

    Returns
    -------
    ``training`` (see :class:`ValidityModel`), ``split``, and ``test``: part -> :func:`validity_scores`.

    Raises
    ------
    DatasetError, SplitError
        There is nothing to learn from, or it cannot be split so.
    PredictorError
        The folder cannot be written.
    """
    from cdmpp.dataset import Split
    from cdmpp.tuner.validity_data import gather_validity

    data = gather_validity(list(datasets) or None, verdicts, devices)
    rows, tested = np.arange(len(data)), np.zeros(0, dtype=np.int64)
    if split is not None:
        parts = Split.parse(split, data.table)
        rows, tested = np.concatenate([parts.train, parts.valid]), parts.test
    model = ValidityModel(config).fit(data, rows)
    model.save(out)
    test: dict[str, Any] = {}
    if len(tested):
        p, valid = model.predict_rows(data, tested), data.valid[tested]
        test["test"] = validity_scores(valid, p)
        names = data.table["device"].to_numpy()[tested]
        test |= {str(d): validity_scores(valid[names == d], p[names == d]) for d in sorted(set(names))}
    return {"training": model.training_, "split": split, "test": test}


# -- numbers ---------------------------------------------------------------------------------------------------


def sigmoid(log_odds: NDArray[Any]) -> FloatArray:
    """Probabilities of log odds."""
    return 1.0 / (1.0 + np.exp(-np.asarray(log_odds, dtype=np.float64)))


def _logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def _platt(margins: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Slope and offset that make held-out margins log odds, by logistic regression (Platt 1999)."""
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=1e3).fit(margins[:, None], y > 0.5)
    # A slope below 0 would turn the trees' order around; held-out programs then say that they know nothing.
    return max(0.0, float(fitted.coef_[0, 0])), float(fitted.intercept_[0])


def validity_scores(
    valid: NDArray[np.bool_], p: FloatArray, losses: Sequence[float] = (0.01, 0.05)
) -> dict[str, Any]:
    """How good probabilities are.

    Parameters
    ----------
    valid, p
        What was so, and its predicted probability, (n,) each.
    losses
        Shares of the valid ones that may be given up.

    Returns
    -------
    ``n``, ``invalid`` (share), ``auc`` (None where all rows are alike), ``brier``, ``log_loss``, ``calibration_error`` (ten
    bins of equal width, weighted), and ``found_at_loss``: for each loss the share of the invalid ones whose probability lies
    below that of all but so many of the valid ones (None where there are no invalid or no valid ones).
    """
    from sklearn.metrics import roc_auc_score

    valid, p = np.asarray(valid, dtype=bool), np.asarray(p, dtype=np.float64)
    kept, bad = np.sort(p[valid]), p[~valid]
    both = bool(len(kept)) and bool(len(bad))
    inside = np.clip(p, 1e-12, 1 - 1e-12)
    bins = np.minimum((p * 10).astype(int), 9)
    gaps = np.bincount(bins, weights=p - valid, minlength=10)
    return {
        "n": len(p),
        "invalid": float(1 - valid.mean()) if len(p) else None,
        "auc": float(roc_auc_score(valid, p)) if both else None,
        "brier": float(np.mean((p - valid) ** 2)) if len(p) else None,
        "log_loss": float(-np.mean(np.log(np.where(valid, inside, 1 - inside)))) if len(p) else None,
        "calibration_error": float(np.abs(gaps).sum() / len(p)) if len(p) else None,
        "found_at_loss": {
            f"{loss:g}": float(np.mean(bad < kept[int(loss * len(kept))])) if both else None
            for loss in losses
        },
    }
