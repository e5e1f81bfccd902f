"""Datasets: records and the programs they are of, on disk; labels and splits made of them."""

from cdmpp.dataset.merge import MergeReport, merge
from cdmpp.dataset.noise import noise_floor_mape
from cdmpp.dataset.record import Record
from cdmpp.dataset.schema import SCHEMA_VERSION
from cdmpp.dataset.split import Split
from cdmpp.dataset.store import Dataset
from cdmpp.dataset.view import DatasetCollection, DatasetView, load_datasets

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
