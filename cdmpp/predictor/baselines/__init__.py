"""Models to compare with: one interface (``base``), one harness (``harness``), same records and split."""

from cdmpp.predictor.baselines.base import LatencyModel
from cdmpp.predictor.baselines.harness import comparison_table, evaluate_models
from cdmpp.predictor.baselines.ours import CdmppModel
from cdmpp.predictor.baselines.simple import TaskMedian
from cdmpp.predictor.baselines.xgboost import XGBoostModel

__all__ = ["CdmppModel", "LatencyModel", "TaskMedian", "XGBoostModel", "comparison_table", "evaluate_models"]
