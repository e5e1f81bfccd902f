"""Networks: of the zoo, of a ``.onnx`` or ``.pt2`` file, or a torch module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import NetworkError
from cdmpp.program import importers
from cdmpp.program.zoo import TensorSpec, ZooEntry, zoo_entry

if TYPE_CHECKING:
    from torch import nn

_VARIANT = re.compile(r"(?P<base>.*)@(?=[sb])(?:s(?P<size>[0-9]+))?(?:b(?P<batch>[0-9]+))?")


@dataclass(frozen=True)
class Network:
    """A model that can be imported into Relax.

    Attributes
    ----------
    name
        How it is called in datasets and reports: ``resnet18``, ``resnet18@b4``, ``resnet18@s160b4``, ``my_model.onnx``.
    family
        Kind of network; ``user`` for a file or module.
    inputs
        Names, shapes and types of the inputs, all fixed.
    source
        ``zoo``, ``torch`` or the path of the file.
    description
        One line, for people.
    """

    name: str
    family: str
    inputs: tuple[TensorSpec, ...]
    source: str
    description: str = ""
    importer: Callable[[], Any] = field(repr=False, compare=False, kw_only=True)

    def to_relax(self) -> Any:
        """Import: a ``tvm.IRModule`` with a Relax function ``main`` and the weights as constants.

        Raises
        ------
        NetworkError
            It cannot be exported or imported.
        UnsupportedOpError
            TVM has no import for one of its operators; the message names it.
        """
        return self.importer()

    @staticmethod
    def from_torch(module: nn.Module, args: Sequence[Any], name: str = "network") -> Network:
        """A network of a torch module and example inputs (tensors), which fix the shapes."""
        inputs = tuple(
            TensorSpec(f"x{index}", tuple(arg.shape), str(arg.dtype).removeprefix("torch."))
            for index, arg in enumerate(args)
        )

        def importer() -> Any:
            return importers.import_exported(name, importers.export_torch(name, module, args), {}, 1)

        return Network(name, "user", inputs, "torch", type(module).__name__, importer=importer)


def load_network(spec: str | Path, shapes: Mapping[str, Sequence[int]] | None = None) -> Network:
    """A network by zoo name or by the path of a ``.onnx`` or ``.pt2`` file.

    Parameters
    ----------
    spec
        ``resnet18``, ``resnet18@b4`` (batch 4), ``resnet18@s160`` (images of 160 x 160; of others sequences of 160),
        ``resnet18@s160b4``, ``path/to/model.onnx``, ``path/to/model.pt2``. A dynamic batch of a file is 1 unless
        ``@b4`` follows its name.
    shapes
        Input name -> shape, for files with other dynamic extents.

    Raises
    ------
    NetworkError
        Unknown name (the message suggests near ones), bad batch or size, missing or unreadable file, unknown shape.
    """
    text = str(spec)
    match = _VARIANT.fullmatch(text)
    base = match["base"] if match else text
    batch, size = (int(match[part]) if match and match[part] else None for part in ("batch", "size"))
    if 0 in (batch, size):
        raise NetworkError(
            f"bad network {text!r}: {'the batch' if batch == 0 else 'the size'} must be at least 1"
        )
    suffix = Path(base).suffix.lower()
    if suffix not in (".onnx", ".pt2"):
        if match is None and "@" in text:
            name = text.split("@")[0]
            raise NetworkError(
                f"bad network {text!r}: after @ comes a batch as in {name}@b4, a size as in {name}@s160, or both, {name}@s160b4"
            )
        if shapes:
            raise NetworkError(f"{text} has fixed shapes; `shapes` is for .onnx and .pt2 files")
        return _from_zoo(zoo_entry(base), batch or 1, size)
    if size is not None:
        raise NetworkError(f"bad network {text!r}: @s is for networks of the zoo, `shapes` for files")
    path = Path(base)
    if not path.is_file():
        raise NetworkError(f"no such file: {path}")
    load = _from_onnx if suffix == ".onnx" else _from_pt2
    return load(path, path.name if batch is None else f"{path.name}@b{batch}", dict(shapes or {}), batch)


def example_inputs(network: Network, seed: int = 0) -> tuple[Any, ...]:
    """Random torch tensors of the network's inputs; integers stay below each input's bound."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for item in network.inputs:
        dtype = getattr(torch, item.dtype)
        if dtype.is_floating_point:
            tensors.append(torch.randn(item.shape, generator=generator).to(dtype))
        else:
            tensors.append(torch.randint(0, item.high, item.shape, generator=generator).to(dtype))
    return tuple(tensors)


def _from_zoo(entry: ZooEntry, batch: int, size: int | None = None) -> Network:
    inputs = tuple(item.with_batch(batch) for item in entry.inputs)
    variant = "" if batch == 1 else f"b{batch}"
    if size is not None:
        if not any(item.sized for item in entry.inputs):
            raise NetworkError(f"{entry.name} has inputs of one size only: it takes no @s{size}")
        resized = tuple(item.with_size(size) for item in inputs)
        if resized != inputs:
            inputs, variant = resized, f"s{size}{variant}"
    name = f"{entry.name}@{variant}" if variant else entry.name

    def importer() -> Any:
        exported = importers.export_torch(name, entry.build(), example_inputs(network))
        return importers.import_exported(name, exported, {}, 1)

    network = Network(name, entry.family, inputs, "zoo", entry.description, importer=importer)
    return network


def _from_onnx(path: Path, name: str, shapes: Mapping[str, Sequence[int]], batch: int | None) -> Network:
    model = importers.load_onnx(path)
    inputs = importers.fix_shapes(name, importers.onnx_inputs(model), shapes, batch)
    return Network(
        name,
        "user",
        inputs,
        str(path.resolve()),
        model.graph.name,
        importer=lambda: importers.import_onnx(name, model, inputs),
    )


def _from_pt2(path: Path, name: str, shapes: Mapping[str, Sequence[int]], batch: int | None) -> Network:
    exported = importers.load_pt2(path)
    inputs = importers.fix_shapes(name, importers.exported_inputs(exported), shapes, batch)
    given = {item.name: item.shape for item in inputs}
    return Network(
        name,
        "user",
        inputs,
        str(path.resolve()),
        importer=lambda: importers.import_exported(name, exported, given, batch or 1),
    )
