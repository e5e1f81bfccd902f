"""Datasets on disk: programs and the records of their measurements; and labels and splits made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from cdmpp.dataset.record import SCHEMA_VERSION, Record
    from cdmpp.dataset.split import Split
    from cdmpp.dataset.store import Dataset, load_datasets
    from cdmpp.dataset.view import DatasetView, noise_floor_mape

#: Imported on first use, because they need pandas.
_PUBLIC = {
    "record": ["Record", "SCHEMA_VERSION"],
    "split": ["Split"],
    "store": ["Dataset", "load_datasets"],
    "view": ["DatasetView", "noise_floor_mape"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, None, _PUBLIC)
