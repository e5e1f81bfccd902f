"""Datasets: records and the programs they are of, on disk; labels and splits made of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.dataset.merge import MergeReport, merge
    from cdmpp.dataset.noise import noise_floor_mape
    from cdmpp.dataset.record import Record
    from cdmpp.dataset.schema import SCHEMA_VERSION
    from cdmpp.dataset.split import Split
    from cdmpp.dataset.store import Dataset
    from cdmpp.dataset.view import DatasetCollection, DatasetView, load_datasets

#: Imported when first used: all but :class:`Record` need pandas.
_HOME = {
    "SCHEMA_VERSION": "schema",
    "Dataset": "store",
    "DatasetCollection": "view",
    "DatasetView": "view",
    "MergeReport": "merge",
    "Record": "record",
    "Split": "split",
    "load_datasets": "view",
    "merge": "merge",
    "noise_floor_mape": "noise",
}

__all__ = [
    "SCHEMA_VERSION",
    "Dataset",
    "DatasetCollection",
    "DatasetView",
    "MergeReport",
    "Record",
    "Split",
    "load_datasets",
    "merge",
    "noise_floor_mape",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cdmpp.dataset' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"cdmpp.dataset.{_HOME[name]}"), name)
    globals()[name] = found  # a function in place of the module of its name
    return found
