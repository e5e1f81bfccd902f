"""cdmpp: how long will this tensor program take on that device?

Three things are done with it: :func:`profile` a dataset on a device, train a :class:`Predictor` on datasets, and
:func:`predict` the latency of a program on a device without running it there.

Everything below is imported when it is first used, so that ``import cdmpp`` needs neither torch nor TVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from cdmpp.dataset import Dataset, Record, Split, load_datasets
    from cdmpp.device import Device, get_device
    from cdmpp.predictor import Predictor, evaluate, train
    from cdmpp.predictor.predictor import predict
    from cdmpp.profiler.session import ProfileConfig, profile
    from cdmpp.program.ast import CompactAST, compact_ast
    from cdmpp.program.network import Network, extract_tasks, load_network
    from cdmpp.program.space import sample_programs
    from cdmpp.program.types import Program, Space, Task

__version__ = "0.1.0"

_PUBLIC = {
    "dataset": ["Dataset", "Record", "Split", "load_datasets"],
    "device": ["Device", "get_device"],
    "predictor": ["Predictor", "evaluate", "train"],
    "predictor.predictor": ["predict"],
    "profiler.session": ["ProfileConfig", "profile"],
    "program.ast": ["CompactAST", "compact_ast"],
    "program.network": ["Network", "extract_tasks", "load_network"],
    "program.space": ["sample_programs"],
    "program.types": ["Program", "Space", "Task"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["endtoend", "predictor", "tuner"], _PUBLIC)
__all__.append("__version__")
