"""Public measurements in the form of our own datasets."""

from cdmpp.dataset.importers.benchmark_hub import import_benchmark_hub
from cdmpp.dataset.importers.common import ImportReport
from cdmpp.dataset.importers.neusight import import_neusight

__all__ = ["ImportReport", "import_benchmark_hub", "import_neusight"]
