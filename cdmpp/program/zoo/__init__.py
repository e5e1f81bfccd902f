"""The zoo: networks built from configs with random, seeded weights; nothing is downloaded.

Listing it imports neither torch nor TVM; building a network does.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import NetworkError
from cdmpp.files import shipped_table

if TYPE_CHECKING:
    from torch import nn

#: Number of tasks of each network at batch 1.
TASK_COUNTS = Path(__file__).with_name("task_counts.json")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one input of a network."""

    name: str
    #: The first extent is the batch.
    shape: tuple[int, ...]
    #: ``float32`` or ``int64``.
    dtype: str = "float32"
    #: Exclusive upper bound of integer inputs (vocabulary or table size).
    high: int = 2
    #: Axes that the size of the network sets: height and width of an image, the length of a sequence.
    sized: tuple[int, ...] = ()

    def of(self, batch: int, size: int | None = None) -> TensorSpec:
        """The same input with another batch, and with another size along the sized axes."""
        extents = {0: batch} | ({} if size is None else dict.fromkeys(self.sized, size))
        return replace(self, shape=tuple(extents.get(axis, n) for axis, n in enumerate(self.shape)))

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ZooEntry:
    """One network of the zoo."""

    #: What the user types; ``name@b4`` asks for batch 4, ``name@s160`` for images of 160 x 160 or sequences of 160.
    name: str
    #: Kind of network, for splits and tables.
    family: str
    description: str
    #: Inputs at batch 1.
    inputs: tuple[TensorSpec, ...]
    #: ``module:function`` (or class) in this package, and its keyword arguments.
    builder: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0) -> nn.Module:
        """The network in evaluation mode, with random weights that depend on ``seed`` alone (imports torch)."""
        import torch

        module, function = self.builder.split(":")
        make = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network: nn.Module = make(**self.arguments).eval()
            return network


_IMAGE = TensorSpec("image", (1, 3, 224, 224), sized=(2, 3))


def _entry(name: str, row: Mapping[str, Any]) -> ZooEntry:
    builder = row["builder"] if ":" in row["builder"] else f"convolutional:{row['builder']}"
    inputs = [{**of, "shape": (1, *of["shape"]), "sized": tuple(of.get("sized", ()))} for of in row.get("inputs", ())]
    return ZooEntry(name, **{**row, "builder": builder, "inputs": tuple(TensorSpec(**x) for x in inputs) or (_IMAGE,)})


@cache
def zoo_networks() -> Mapping[str, ZooEntry]:
    """All networks by name (``networks.yaml``), in the order of their families. Imports neither torch nor TVM."""
    return {name: _entry(name, row) for name, row in shipped_table("program/zoo/networks.yaml").items()}


def zoo_entry(name: str) -> ZooEntry:
    """The entry of that name (NetworkError: no such network; the message suggests similar names)."""
    entries = zoo_networks()
    if name in entries:
        return entries[name]
    from cdmpp.program.llm import MODELS

    near = difflib.get_close_matches(name, entries, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "`cdmpp networks` lists them"
    if models := difflib.get_close_matches(name.lower(), MODELS, n=3):
        hint = f"of language models, `cdmpp latency` knows {', '.join(models)}"
    raise NetworkError(f"unknown network {name!r}: not in the zoo and not a .onnx or .pt2 file; {hint}")


def task_counts() -> dict[str, int]:
    """Number of tasks of each network at batch 1, counted when the zoo was last changed: counting takes minutes.

    Written by ``python -m cdmpp.program.network``."""
    counts: dict[str, int] = json.loads(TASK_COUNTS.read_text(encoding="utf-8"))
    return counts
