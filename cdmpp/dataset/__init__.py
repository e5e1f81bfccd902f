"""Datasets: records and the programs they are of, on disk; labels and splits made of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.dataset.record import SCHEMA_VERSION, Record
    from cdmpp.dataset.split import Split
    from cdmpp.dataset.store import Dataset, load_datasets
    from cdmpp.dataset.view import DatasetView, noise_floor_mape

#: Imported when first used: they need pandas.
_HOME = {
    "SCHEMA_VERSION": "record",
    "Dataset": "store",
    "DatasetView": "view",
    "Record": "record",
    "Split": "split",
    "load_datasets": "store",
    "noise_floor_mape": "view",
}

__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cdmpp.dataset' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cdmpp.dataset.{_HOME[name]}"), name)
