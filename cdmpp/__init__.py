"""cdmpp: how long will this tensor program take on that device?

Three things are done with it: :func:`profile` a dataset on a device, train a :class:`Predictor` on datasets, and
:func:`predict` the latency of a program on a device without running it there.

Everything below is imported when it is first used, so that ``import cdmpp`` needs neither torch nor TVM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_HOME = {
    "CompactAST": "cdmpp.program.ast",
    "Dataset": "cdmpp.dataset",
    "Device": "cdmpp.device",
    "Network": "cdmpp.program.network",
    "Predictor": "cdmpp.predictor",
    "ProfileConfig": "cdmpp.profiler.session",
    "Program": "cdmpp.program.types",
    "Record": "cdmpp.dataset",
    "Space": "cdmpp.program.types",
    "Split": "cdmpp.dataset",
    "Task": "cdmpp.program.types",
    "compact_ast": "cdmpp.program.ast",
    "evaluate": "cdmpp.predictor",
    "extract_tasks": "cdmpp.program.network",
    "get_device": "cdmpp.device",
    "load_datasets": "cdmpp.dataset",
    "load_network": "cdmpp.program.network",
    "predict": "cdmpp.predictor.predictor",
    "profile": "cdmpp.profiler.session",
    "sample_programs": "cdmpp.program.space",
    "train": "cdmpp.predictor",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name == "tuner":
        return importlib.import_module("cdmpp.tuner")
    if name not in _HOME:
        raise AttributeError(f"module 'cdmpp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
