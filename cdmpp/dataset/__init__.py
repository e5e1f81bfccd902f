"""Datasets: records and the programs they are of, on disk; labels and splits made of them."""

from cdmpp.dataset.record import Record
from cdmpp.dataset.schema import SCHEMA_VERSION
from cdmpp.dataset.store import Dataset
from cdmpp.dataset.view import DatasetView, load_datasets

__all__ = ["SCHEMA_VERSION", "Dataset", "DatasetView", "Record", "load_datasets"]
