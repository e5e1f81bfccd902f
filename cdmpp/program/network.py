"""Networks: of the zoo, of a ``.onnx`` or ``.pt2`` file, or a torch module."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import NetworkError, UnsupportedOpError
from cdmpp.program.tvm_env import import_tvm
from cdmpp.program.zoo import TensorSpec, zoo_entry

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Network:
    """A model that can be imported into Relax.

    Attributes
    ----------
    name
        How it is called in datasets and reports, e.g. ``resnet18@b4``.
    family
        Kind of network; ``user`` for a file or module.
    inputs
        Names, shapes and types of the inputs.
    source
        ``zoo``, ``onnx``, ``pt2`` or ``torch``.
    """

    name: str
    family: str
    inputs: tuple[TensorSpec, ...]
    source: str
    description: str = ""
    _importer: Callable[[], Any] = field(default=lambda: None, repr=False, compare=False)

    def to_relax(self) -> Any:
        """Import: a ``tvm.IRModule`` with ``main`` and the weights as constants.

        Raises
        ------
        NetworkError
            It cannot be read, exported or imported.
        UnsupportedOpError
            TVM has no import for one of its operators.
        """
        return self._importer()

    @staticmethod
    def from_torch(module: nn.Module, args: Sequence[Any], name: str = "network") -> Network:
        """A network of a torch module and example inputs (tensors)."""
        inputs = tuple(
            TensorSpec(f"x{index}", tuple(arg.shape), str(arg.dtype).removeprefix("torch."))
            for index, arg in enumerate(args)
        )
        return Network(name, "user", inputs, "torch", "", lambda: _import_torch(name, module, tuple(args)))


def load_network(spec: str | Path) -> Network:
    """A network by zoo name (``resnet18``, ``resnet18@b4``) or by path of a ``.onnx`` or ``.pt2`` file.

    Raises
    ------
    NetworkError
        Unknown name (the message suggests near ones), bad batch size, missing or unreadable file.
    UnsupportedOpError
        The file uses an operator that TVM cannot import.
    """
    return _from_zoo(str(spec))


def _from_zoo(spec: str) -> Network:
    name, _, suffix = spec.partition("@")
    batch = 1
    entry = zoo_entry(name)
    if suffix:
        if not suffix.startswith("b") or not suffix[1:].isdigit() or int(suffix[1:]) < 1:
            raise NetworkError(f"bad network {spec!r}: after @ comes a batch size as in {name}@b4")
        batch = int(suffix[1:])
    inputs = tuple(item.with_batch(batch) for item in entry.inputs)

    def importer() -> Any:
        import torch

        generator = torch.Generator().manual_seed(0)
        args = tuple(_example(item, generator) for item in inputs)
        return _import_torch(spec, entry.build(), args)

    canonical = name if batch == 1 else f"{name}@b{batch}"
    return Network(canonical, entry.family, inputs, "zoo", entry.description, importer)


def _example(spec: TensorSpec, generator: Any) -> Any:
    import torch

    if spec.dtype == "int64":
        return torch.randint(0, spec.high, spec.shape, generator=generator)
    return torch.randn(spec.shape, generator=generator)


def _import_torch(name: str, module: nn.Module, args: tuple[Any, ...]) -> Any:
    import torch

    with torch.no_grad():
        exported = torch.export.export(module.eval(), args)
    return _import_exported(name, exported)


def _import_exported(name: str, exported: Any) -> Any:
    import_tvm()
    from tvm.relax.frontend.torch import from_exported_program

    return from_exported_program(exported)
