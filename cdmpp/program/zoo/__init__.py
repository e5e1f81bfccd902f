"""The zoo: networks built from configs with random, seeded weights; nothing is downloaded.

Listing it imports neither torch nor TVM; the builders do.
"""

from cdmpp.program.zoo.registry import TensorSpec, ZooEntry, task_counts, zoo_entry, zoo_networks

__all__ = ["TensorSpec", "ZooEntry", "task_counts", "zoo_entry", "zoo_networks"]
