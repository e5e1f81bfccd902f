"""Importers that turn public measurements into datasets of cdmpp."""

from cdmpp.dataset.importers.benchmark_hub import import_benchmark_hub
from cdmpp.dataset.importers.common import ImportReport
from cdmpp.dataset.importers.neusight import import_neusight
from cdmpp.dataset.importers.operators import SOURCES, import_operators

__all__ = ["SOURCES", "ImportReport", "import_benchmark_hub", "import_neusight", "import_operators"]
