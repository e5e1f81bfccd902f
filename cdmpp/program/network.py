"""Networks (of the zoo, of a ``.onnx`` or ``.pt2`` file, or a torch module), their import into Relax, and their tasks: the
fused functions that they run, where equal functions of several networks are one task.

On unforeseen input Relax's front ends raise all kinds of errors (AssertionError, KeyError, TVM's own errors), so the calls into
them, and only those, catch ``Exception``.

A Relax module with its weights becomes fused, legalised TIR functions, as TVM would run them. What depends on weights alone
(transposes, batch-norm scales) is moved into a separate function. A deployment runs that once at load time, so it is not among
the tasks. It is not evaluated here: folding constants would compile every operator.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import NetworkError, ProgramError, UnsupportedOpError
from cdmpp.program import import_tvm, normalise, quiet, structural_hash
from cdmpp.program.types import Task
from cdmpp.program.zoo import TASK_COUNTS, TensorSpec, ZooEntry, zoo_entry, zoo_networks

if TYPE_CHECKING:
    from torch import nn


logger = logging.getLogger(__name__)

_VARIANT = re.compile(r"(?P<base>.*)@(?=[sb])(?:s(?P<size>[0-9]+))?(?:b(?P<batch>[0-9]+))?")
#: How the messages of the front ends list the operators that they do not know.
_UNSUPPORTED = re.compile(r"(?:operators are not supported for frontend ONNX: *|Unsupported function types? \[)([^\n\]]*)")
_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True)
class Network:
    """A model that can be imported into Relax."""

    #: Name in datasets and reports: ``resnet18``, ``resnet18@b4``, ``resnet18@s160b4``, ``my_model.onnx``.
    name: str
    #: Kind of network; ``user`` for a file or module.
    family: str
    #: All shapes are fixed.
    inputs: tuple[TensorSpec, ...]
    #: ``zoo``, ``torch`` or the path of the file.
    source: str
    #: One line, for people.
    description: str = ""
    #: Returns the ``torch.export`` program of the network; None if there is none.
    exporter: Callable[[Network], Any] | None = field(default=None, repr=False, compare=False, kw_only=True)
    #: Returns its Relax module; None if that is made from the exported program.
    importer: Callable[[], Any] | None = field(default=None, repr=False, compare=False, kw_only=True)
    #: Returns equivalent ATen operators in place of an exported program; only their sizes are meaningful.
    operators: Callable[[], Any] | None = field(default=None, repr=False, compare=False, kw_only=True)

    def to_relax(self) -> Any:
        """Import it as a ``tvm.IRModule`` with a Relax function ``main`` and the weights as constants. NetworkError: it cannot
        be exported or imported. UnsupportedOpError: TVM cannot import one of its operators; the message names it."""
        return self.importer() if self.importer is not None else _import_exported(self.name, self.export())

    def export(self) -> Any:
        """Its ``torch.export`` program, with fixed shapes (NetworkError if there is none, as for ONNX)."""
        if self.exporter is None:
            raise NetworkError(f"{self.name} is no PyTorch network: its operators are known by torch.export alone")
        return self.exporter(self)

    @staticmethod
    def from_torch(module: nn.Module, args: Sequence[Any], name: str = "network") -> Network:
        """A network from a torch module and example inputs (tensors), which fix the shapes."""
        if others := {type(arg).__name__ for arg in args if not hasattr(arg, "shape")}:
            raise NetworkError(f"{name}: an input is a {others.pop()}, expected tensors; a .pt2 file may have others, too")
        inputs = tuple(
            TensorSpec(f"x{index}", tuple(arg.shape), str(arg.dtype).removeprefix("torch.")) for index, arg in enumerate(args)
        )
        kind = type(module).__name__
        return Network(name, "user", inputs, "torch", kind, exporter=lambda _: _export(name, module, args))


def load_network(spec: Network | str | Path, shapes: Mapping[str, Sequence[int]] | None = None) -> Network:
    """A network by zoo name or by the path of a ``.onnx`` or ``.pt2`` file; a :class:`Network` is returned unchanged.

    ``spec``: ``resnet18``, ``resnet18@b4`` (batch 4), ``resnet18@s160`` (images of 160 x 160, or sequences of 160),
    ``resnet18@s160b4``, ``path/to/model.onnx``. The dynamic batch of a file is 1 unless ``@b4`` follows its name.
    ``operators@s7`` is the seventh draw of :mod:`cdmpp.program.zoo.operators`. ``shapes``: name -> shape of dynamic inputs.

    NetworkError: unknown name (the message suggests similar ones), bad batch or size, no readable file, unknown shape."""
    if not isinstance(spec, str | Path):
        return spec
    text = str(spec)
    match = _VARIANT.fullmatch(text)
    base = match["base"] if match else text
    batch, size = (int(match[part]) if match and match[part] else None for part in ("batch", "size"))
    if 0 in (batch, size):
        raise NetworkError(f"bad network {text!r}: {'the batch' if batch == 0 else 'the size'} must be at least 1")
    suffix = Path(base).suffix.lower()
    if suffix not in (".onnx", ".pt2"):
        if match is None and "@" in text:
            name = text.split("@")[0]
            raise NetworkError(
                f"bad network {text!r}: after @ comes a batch as in {name}@b4, a size as in {name}@s160, or both, {name}@s160b4"
            )
        if shapes:
            raise NetworkError(f"{text} has fixed shapes; `shapes` is for .onnx and .pt2 files")
        if base == "operators":
            if size is None or batch is not None:
                raise NetworkError(f"bad network {text!r}: operators are drawn by number, as operators@s7")
            return _drawn(text, size)
        return _from_zoo(zoo_entry(base), batch or 1, size)
    if size is not None:
        raise NetworkError(f"bad network {text!r}: @s is for networks of the zoo, `shapes` for files")
    path = Path(base)
    if not path.is_file():
        raise NetworkError(f"no such file: {path}")
    name = path.name if batch is None else f"{path.name}@b{batch}"
    source = str(path.resolve())
    if suffix == ".onnx":
        from cdmpp.program.onnx_operators import onnx_program

        model = _load_onnx(path)
        inputs = _fixed(name, _onnx_inputs(model), shapes or {}, batch)
        imported, meant = (partial(make, name, model, inputs) for make in (_import_onnx, onnx_program))
        return Network(name, "user", inputs, source, model.graph.name, importer=imported, operators=meant)
    exported = _load_pt2(path)
    inputs = _fixed(name, _exported_inputs(exported), shapes or {}, batch)

    def exporter(network: Network) -> Any:
        if all(0 not in item.shape for item in _exported_inputs(exported)):
            return exported
        import torch
        from torch.utils._pytree import tree_map_only

        module, tensors = exported.module(), iter(example_inputs(network))
        module.eval = module.train = lambda *mode: module  # an exported module refuses both
        given = exported.example_inputs or [example_inputs(network)]
        return _export(name, module, *tree_map_only(torch.Tensor, lambda _: next(tensors), given))

    def importer() -> Any:
        return _import_exported(name, exported, inputs, batch or 1)

    return Network(name, "user", inputs, source, exporter=exporter, importer=importer)


def example_inputs(network: Network, seed: int = 0) -> tuple[Any, ...]:
    """Random torch tensors for the network's inputs; integers stay below each input's bound."""
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


def _from_zoo(entry: ZooEntry, batch: int, size: int | None) -> Network:
    if size is not None and not any(item.sized for item in entry.inputs):
        raise NetworkError(f"{entry.name} has inputs of one size only: it takes no @s{size}")
    inputs = tuple(item.of(batch, size) for item in entry.inputs)
    resized = inputs != tuple(item.of(batch) for item in entry.inputs)
    variant = (f"s{size}" if resized else "") + ("" if batch == 1 else f"b{batch}")
    name = f"{entry.name}@{variant}" if variant else entry.name

    def exporter(network: Network) -> Any:
        return _export(name, entry.build(), example_inputs(network))

    return Network(name, entry.family, inputs, "zoo", entry.description, exporter=exporter)


def _drawn(name: str, number: int) -> Network:
    """Operators drawn at random."""
    import torch

    from cdmpp.program.zoo.operators import Operators

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        module = Operators(number)
    network = Network.from_torch(module, [torch.zeros(item.shape) for item in module.inputs], name)
    return replace(network, family="generated", inputs=module.inputs, source="zoo", description="random operators")


# -- torch -----------------------------------------------------------------------------------------------------


def _export(name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """``torch.export`` of a module in evaluation mode with example inputs."""
    import torch

    was_training = module.training
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(module.eval(), tuple(args), kwargs)
    except Exception as err:  # torch.export runs the user's code
        raise NetworkError(f"{name}: torch.export failed: {_first_line(err)}") from err
    finally:
        module.train(was_training)


def _load_pt2(path: Path) -> Any:
    """The ``ExportedProgram`` of a ``.pt2`` file; a file that holds pickled code is refused."""
    import torch

    if not zipfile.is_zipfile(path):
        raise NetworkError(f"{path} is not a .pt2 file (torch.export.save writes a zip archive)")
    try:
        with _quiet(), _weights_only():
            return torch.export.load(str(path))
    except Exception as err:
        said = _first_line(err).partition(" Please check the warnings")[0]
        raise NetworkError(f"{path} is not a readable .pt2 file of torch.export.save: {said}") from err


def _exported_inputs(exported: Any) -> list[TensorSpec]:
    """Inputs of an exported program; dynamic extents are 0."""
    from torch.export.graph_signature import InputKind

    values = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    inputs = []
    for spec in exported.graph_signature.input_specs:
        value = values.get(spec.arg.name) if spec.kind == InputKind.USER_INPUT else None
        if value is not None and hasattr(value, "shape"):
            shape = tuple(extent if isinstance(extent, int) else 0 for extent in value.shape)
            inputs.append(TensorSpec(spec.arg.name, shape, str(value.dtype).removeprefix("torch.")))
    return inputs


def _import_exported(name: str, exported: Any, inputs: Sequence[TensorSpec] = (), batch: int = 1) -> Any:
    """An exported program in Relax, with constant weights; dynamic extents are those of ``inputs``, or else ``batch``."""
    tvm = import_tvm()
    from tvm.relax.frontend.torch import from_exported_program

    with _importing(name):
        module = from_exported_program(exported, custom_convert_map={"cumsum.default": _cumsum})
    shapes = {item.name: item.shape for item in inputs}
    bound: dict[str, int] = {}
    for param in module["main"].params:
        given = shapes.get(str(param.name))
        for axis, extent in enumerate(getattr(param.ty, "shape", None) or ()):
            if isinstance(extent, tvm.tirx.Var):
                wanted = batch if given is None else given[axis]
                if bound.setdefault(str(extent.name), wanted) != wanted:
                    raise NetworkError(f"{name}: input {param.name} has {wanted} where another has {bound[str(extent.name)]}")
            elif not isinstance(extent, tvm.tirx.IntImm):
                raise NetworkError(f"{name}: input {param.name} has the computed extent {extent}")
    return tvm.relax.transform.BindSymbolicVars(bound, "main")(module) if bound else module


def _cumsum(node: Any, importer: Any) -> Any:
    """A cumulative sum in PyTorch's data type: TVM's own conversion adds booleans (as in transformers' masks) as booleans."""
    from tvm import relax

    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    return importer.block_builder.emit(relax.op.cumsum(importer.env[node.args[0]], int(node.args[1]), dtype))


@contextmanager
def _weights_only() -> Iterator[None]:
    """Make torch refuse to unpickle arbitrary objects, which torch.export.load falls back to."""
    key = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    with _ENVIRONMENT:
        before = os.environ.get(key)
        os.environ[key] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[key]
            else:
                os.environ[key] = before


# -- ONNX ------------------------------------------------------------------------------------------------------


def _load_onnx(path: Path) -> Any:
    """The ``ModelProto`` of an ``.onnx`` file."""
    try:
        import onnx

        model = onnx.load(str(path))
    except ImportError as err:
        raise NetworkError(f"{path}: an .onnx file needs the package onnx (pip install onnx): {err}") from err
    except Exception as err:  # the error class depends on the implementation of protobuf
        raise NetworkError(f"{path} is not a readable .onnx file: {_first_line(err)}") from err
    if not model.graph.node:
        raise NetworkError(f"{path} is not an ONNX model: it has no graph")
    return model


def _onnx_inputs(model: Any) -> list[TensorSpec]:
    """Inputs of an ONNX model; dynamic extents are 0."""
    import onnx

    weights = {initializer.name for initializer in model.graph.initializer}
    inputs = []
    for value in model.graph.input:
        if value.name not in weights:
            tensor = value.type.tensor_type
            shape = tuple(max(0, int(dim.dim_value)) for dim in tensor.shape.dim)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type) if tensor.elem_type else "float32"
            inputs.append(TensorSpec(value.name, shape, str(dtype)))
    return inputs


def _import_onnx(name: str, model: Any, inputs: Sequence[TensorSpec]) -> Any:
    """The Relax module of an ONNX model, with constant weights."""
    import_tvm()
    from tvm.relax.frontend.onnx import from_onnx

    with _importing(name):
        return from_onnx(
            model,
            shape_dict={item.name: list(item.shape) for item in inputs},
            dtype_dict={item.name: item.dtype for item in inputs},
        )


# -- both ------------------------------------------------------------------------------------------------------


def _fixed(
    name: str, inputs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]], batch: int | None
) -> tuple[TensorSpec, ...]:
    """Inputs with all extents fixed: by ``shapes``, or a dynamic first extent by the batch (1 if None, with a warning)."""
    unknown = sorted(set(shapes) - {item.name for item in inputs})
    if unknown:
        known = ", ".join(item.name for item in inputs)
        raise NetworkError(f"{name} has no input {', '.join(unknown)}; its inputs are {known}")
    fixed = []
    dynamic_batch = False
    for item in inputs:
        shape = item.shape
        text = "x".join(str(extent or "?") for extent in shape)
        if item.name in shapes:
            given = tuple(int(extent) for extent in shapes[item.name])
            if len(given) != len(shape) or any(new < 1 or old not in (0, new) for old, new in zip(shape, given, strict=True)):
                raise NetworkError(f"{name}: shape {given} does not fit input {item.name} of shape {text}")
            shape = given
        elif shape[:1] == (0,):
            dynamic_batch = True
            shape = (batch or 1, *shape[1:])
            text = "x".join(str(extent or "?") for extent in shape)
        if 0 in shape:
            raise NetworkError(
                f"{name}: input {item.name} has the dynamic shape {text}; give it, as in "
                f"load_network(..., shapes={{{item.name!r}: (1, 128)}}), or export with fixed shapes"
            )
        fixed.append(replace(item, shape=shape))
    if dynamic_batch and batch is None:
        logger.warning("%s has a dynamic batch: taken as 1 (write %s@b8 for 8)", name, name)
    if batch is not None and not dynamic_batch:
        raise NetworkError(f"{name} has a fixed batch: @b{batch} asks for another one; export it again")
    return tuple(fixed)


@contextmanager
def _importing(name: str) -> Iterator[None]:
    """Turn what a front end raises into an UnsupportedOpError, which names the operators, or a NetworkError."""
    try:
        with _quiet():
            yield
    except Exception as err:
        if found := _UNSUPPORTED.search(str(err)):
            ops = ", ".join(sorted(op.strip(" '\"") for op in found[1].split(",")))
            raise UnsupportedOpError(f"{name}: TVM cannot import the operator(s) {ops}") from err
        if isinstance(err, NotImplementedError):
            raise UnsupportedOpError(f"{name}: TVM cannot import it: {_first_line(err)}") from err
        raise NetworkError(f"{name}: TVM cannot import it: {type(err).__name__}: {_first_line(err)}") from err


def _first_line(err: BaseException) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(err).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings: front ends warn about each renamed input and about their own deprecations, torch logs tracebacks."""
    log = logging.getLogger("torch.export")
    log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = False


#: Name of the function that turns the network's weights into the form that ``main`` takes.
PREPARE_WEIGHTS = "main_transform_params"

#: Operators that make a view of a tensor and run no kernel.
VIEWS = ("relax.reshape", "relax.shape_of", "relax.shape_to_tensor", "relax.memory.view")


@dataclass(frozen=True)
class FusedNetwork:
    """A network as calls of fused PrimFuncs."""

    #: ``tvm.IRModule``: ``main(*inputs, *prepared_weights)`` calls PrimFuncs by ``call_tir``;
    #: ``main_transform_params(weights)`` returns the tuple of prepared weights.
    module: Any
    #: The network's weights as runtime tensors, in the order ``main_transform_params`` takes them.
    weights: tuple[Any, ...] = field(repr=False)
    #: How many of ``main``'s parameters are inputs.
    num_inputs: int
    #: Names of the PrimFuncs that ``main`` calls, in order of execution.
    calls: tuple[str, ...]
    #: Names of the operators in ``main`` that did not become TIR and so have no task.
    untranslated: tuple[str, ...]


def fuse(module: Any, target: Any = None) -> FusedNetwork:
    """Legalise and fuse a ``tvm.IRModule`` with a Relax function ``main`` whose weights are constants, for a
    ``tvm.target.Target`` (one llvm core if None); legalisation hardly depends on the target."""
    tvm = import_tvm()
    from tvm import relax

    transform = relax.transform
    entries = ["main", PREPARE_WEIGHTS]
    if target is None:
        target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    with target:
        module = transform.FoldBatchnormToConv2D()(module)
        module = _multiply_powers(_simplify_batch_norm(module))
        module = tvm.transform.Sequential(
            [
                transform.DecomposeOpsForInference(),
                transform.CanonicalizeBindings(),
                transform.ConvertToDataflow(),
                transform.DeadCodeElimination(["main"]),
            ]
        )(module)
        module, weights = _constants_to_parameters(module)
        module = tvm.transform.Sequential(
            [
                transform.LiftTransformParams(),
                relax.backend.DispatchSampling(),
                relax.backend.DispatchSortScan(),
                transform.LegalizeOps(),
                transform.AnnotateTIROpPattern(),
                transform.DeadCodeElimination(entries),
                transform.FuseOps(),
                transform.FuseTIR(),
                transform.RewriteDataflowReshape(),  # a reshape on its own is a view: no kernel runs
                transform.DeadCodeElimination(entries),
            ]
        )(module)
    num_inputs = int(module["main"].attrs["num_input"])
    calls, untranslated = _calls(module["main"])
    return FusedNetwork(module, weights, num_inputs, calls, untranslated)


def _simplify_batch_norm(module: Any) -> Any:
    """Rewrite inference batch norms that were not folded into a convolution as ``x * scale + shift``."""
    from tvm import relax
    from tvm.relax.dpl import is_op, rewrite_call, wildcard
    from tvm.relax.dpl.pattern import TupleGetItemPattern

    data, gamma, beta, mean, variance = (wildcard() for _ in range(5))
    norm = is_op("relax.nn.batch_norm")(data, gamma, beta, mean, variance)
    pattern = TupleGetItemPattern(norm, 0)

    def rewrite(expr: Any, matches: Any) -> Any:
        call, x = matches[norm], matches[data]
        axis = int(call.attrs["axis"])
        shape: list[Any] = [1] * len(x.ty.shape)
        shape[axis] = x.ty.shape[axis]
        epsilon = relax.const(float(call.attrs["epsilon"]), x.ty.dtype)
        scale = relax.op.divide(matches[gamma], relax.op.sqrt(relax.op.add(matches[variance], epsilon)))
        shift = relax.op.subtract(matches[beta], relax.op.multiply(matches[mean], scale))
        scaled = relax.op.multiply(x, relax.op.reshape(scale, shape))
        return relax.op.add(scaled, relax.op.reshape(shift, shape))

    module["main"] = rewrite_call(pattern, rewrite, module["main"])
    return module


def _multiply_powers(module: Any) -> Any:
    """Rewrite squares and cubes as products, as PyTorch computes them: a CPU core takes far longer for a call of powf."""
    from tvm import relax
    from tvm.relax.dpl import is_const, is_op, rewrite_call, wildcard

    base, exponent = wildcard(), is_const()
    pattern = is_op("relax.power")(base, exponent)

    def rewrite(expr: Any, matches: Any) -> Any:
        power, x = matches[exponent].value.numpy(), matches[base]
        if power.shape or power not in (2, 3):
            return expr
        square = relax.op.multiply(x, x)
        return square if power == 2 else relax.op.multiply(square, x)

    module["main"] = rewrite_call(pattern, rewrite, module["main"])
    return module


def _constants_to_parameters(module: Any) -> tuple[Any, tuple[Any, ...]]:
    """The constants of ``main`` made parameters after its inputs, so that they are not part of a task, and their values."""
    from tvm import relax

    @relax.expr_functor.mutator
    class Lifter(relax.PyExprMutator):
        def __init__(self) -> None:
            super().__init__()
            self.parameters: dict[int, tuple[Any, Any]] = {}

        def visit_generic_const_(self, op: Any) -> Any:
            if not isinstance(op.ty, relax.TensorType) or len(op.ty.shape) == 0:
                return op  # a scalar is part of the computation
            key = hash(op)  # by the object's address: one constant used twice is one parameter
            if key not in self.parameters:
                self.parameters[key] = (relax.Var(f"weight{len(self.parameters)}", op.ty), op.value)
            return self.parameters[key][0]

    function = module["main"]
    lifter = Lifter()
    body = lifter.visit_expr(function.body)
    variables = [variable for variable, _ in lifter.parameters.values()]
    lifted = relax.Function([*function.params, *variables], body, function.ret_ty, function.is_pure, function.attrs)
    module["main"] = lifted.with_attr("num_input", len(function.params))
    return module, tuple(value for _, value in lifter.parameters.values())


def callee(call: Any) -> tuple[str, Sequence[Any], bool]:
    """What a Relax call runs: the name, the arguments, and whether it is a PrimFunc."""
    operator = str(getattr(call.op, "name", "?"))
    if operator.startswith("relax.call_tir"):
        return str(call.args[0].name_hint), [call.args[1]], True
    if operator == "relax.call_dps_packed":
        return str(call.args[0].global_symbol), [call.args[1]], False
    return operator, list(call.args), False


def _calls(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    from tvm import relax

    calls: list[str] = []
    others: list[str] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call):
            name, _, is_prim_func = callee(expr)
            if is_prim_func:
                calls.append(name)
            elif name not in VIEWS:
                others.append(name)

    relax.analysis.post_order_visit(function.body, visit)
    return tuple(calls), tuple(others)


_PACKED_CALLS = ("tirx.tvm_call_packed", "tirx.tvm_call_cpacked", "tirx.call_extern", "tirx.tvm_call_packed_lowered")

#: Called before each network is imported, with its name, its number (from 1) and the number of networks.
Progress = Callable[[str, int, int], None]


def extract_tasks(networks: Iterable[Network | str], target: Any = None, progress: Progress | None = None) -> list[Task]:
    """The tasks of networks (or of what :func:`cdmpp.program.network.load_network` takes), one per structural hash, in the
    order of first occurrence. Their ``networks`` say how often each network runs them.

    ``target``: ``tvm.target.Target`` (or what its constructor takes); one llvm core if None. Functions of dynamic shape or
    without any computation are left out, with a logged reason. NetworkError, UnsupportedOpError: a network cannot be imported,
    or two different networks have the same name."""
    tvm = import_tvm()
    if target is not None and not isinstance(target, tvm.target.Target):
        target = tvm.target.Target(target)
    specs = list(networks)
    seen: dict[str, Network] = {}
    tasks: dict[str, Task] = {}
    for number, network in enumerate(map(load_network, specs), start=1):
        if progress is not None:
            progress(network.name, number, len(specs))
        if network.name in seen:
            same = network is seen[network.name] or (network == seen[network.name] and network.source != "torch")
            if not same:
                raise NetworkError(f"two different networks are called {network.name}: rename one")
            logger.warning("%s was given twice: counted once", network.name)
            continue
        seen[network.name] = network
        with quiet():
            fused = fuse(network.to_relax(), target)
        found = tasks_of(fused, network.name)
        if names := ", ".join(sorted({*fused.untranslated, *fused.calls} - found.keys())):
            logger.warning("%s: no task stands for %s, which TVM does not translate or schedule", network.name, names)
        for task in found.values():
            known = tasks.get(task.hash, task)
            tasks[task.hash] = replace(known, networks={**known.networks, **task.networks})
    return list(tasks.values())


def tasks_of(fused: FusedNetwork, network: str) -> dict[str, Task]:
    """Name of a function that a network calls -> its task, with how often the network runs it; equal functions have the same
    task. Functions that are not a task (see :func:`task_from_prim_func`) are left out, with a logged reason."""
    found: dict[str, Task] = {}
    weights = Counter[str]()
    for name, count in Counter(fused.calls).items():
        try:
            found[name] = task_from_prim_func(fused.module[name], name)
        except ProgramError as err:
            logger.info("%s: left out: %s", network, err)
        else:
            weights[found[name].hash] += count
    first = {task.hash: task for task in reversed(found.values())}
    tasks = {key: replace(task, networks={network: float(weights[key])}) for key, task in first.items()}
    return {name: tasks[task.hash] for name, task in found.items()}


def task_from_prim_func(func: Any, name: str = "main") -> Task:
    """The task of one unscheduled PrimFunc (ProgramError: it has no loop, no fixed shapes, or no schedulable blocks)."""
    tvm = import_tvm()
    from tvm.s_tir.analysis import estimate_tir_flops

    func = normalise(func)
    total_bytes = 0.0
    dtype = "float32"
    for param in func.params:
        if not isinstance(param.ty, tvm.tirx.BufferType):
            raise ProgramError(f"{name} takes a scalar argument, so its work is not fixed")
        elements = 1
        for extent in param.shape:
            if not isinstance(extent, tvm.tirx.IntImm):
                raise ProgramError(f"{name} has a dynamic shape {list(param.shape)}")
            elements *= int(extent)
        dtype = str(param.dtype)
        total_bytes += elements * max(1, tvm.DataType(dtype).bits // 8)
    _check_schedulable(func, name)
    return Task(
        hash=structural_hash(func),
        name=name,
        tir_json=tvm.ir.save_json(func),
        networks={},
        flops=float(estimate_tir_flops(tvm.IRModule({"main": func}))),
        bytes=total_bytes,
        dtype=dtype,
    )


def library_task(name: str, arguments: Mapping[str, Any]) -> Task:
    """The task of a library operator, made in some 0.7 ms (ProgramError: no such operator, or not with these arguments)."""
    from cdmpp.program import generators, library_ops

    func, (flops, elements) = generators.build(name, arguments), library_ops.operator_work(name, arguments)
    return Task(
        hash=structural_hash(func),
        name=str(arguments["op"]) if name == "elementwise" else name,
        tir_json=generators.describe(name, arguments),
        networks={},
        flops=float(flops),
        bytes=4.0 * elements,
    )


def _check_schedulable(func: Any, name: str) -> None:
    """Raise ProgramError unless there is a loop around a block, which is what MetaSchedule works on."""
    import tvm_ffi

    tvm = import_tvm()
    from tvm.s_tir.stmt import SBlock

    def nodes_in(body: Any) -> list[Any]:
        found: list[Any] = []
        tvm_ffi.structural_walk(body, found.append, order="pre")
        return found

    nodes = nodes_in(func.body)
    for node in nodes:
        if isinstance(node, tvm.ir.Call) and str(getattr(node.op, "name", "")) in _PACKED_CALLS:
            raise ProgramError(f"{name} calls the external function {getattr(node.args[0], 'value', '?')}")
    loops = [node for node in nodes if isinstance(node, tvm.tirx.For)]
    if not loops:
        raise ProgramError(f"{name} has no loop")
    if not any(isinstance(node, SBlock) for loop in loops for node in nodes_in(loop.body)):
        raise ProgramError(f"{name} has loops inside of an opaque block only: there is nothing to schedule")


if __name__ == "__main__":  # counts the tasks of every network of the zoo, which takes minutes
    counts = {name: len(extract_tasks([name])) for name in zoo_networks()}
    TASK_COUNTS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
