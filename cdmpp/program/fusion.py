"""From a Relax module with its weights to fused, legalised TIR functions, as TVM would run them.

What depends on weights alone (transposes, batch-norm scales) is moved into a function of its own, which a deployment runs once
at load time, so that it is not among the tasks. It is not computed: folding constants would compile every operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cdmpp.program.tvm_env import import_tvm

#: The function that makes the weights as ``main`` wants them, from the weights as the network has them.
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
    #: Names of the operators in ``main`` that did not become TIR, so that no task stands for them.
    untranslated: tuple[str, ...]


def fuse(module: Any, target: Any = None) -> FusedNetwork:
    """Legalise and fuse a ``tvm.IRModule`` with a Relax function ``main`` whose weights are constants, for a
    ``tvm.target.Target`` (one llvm core if None); legalisation hardly depends on it."""
    tvm = import_tvm()
    from tvm import relax

    transform = relax.transform
    entries = ["main", PREPARE_WEIGHTS]
    if target is None:
        target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    with target:
        module = transform.FoldBatchnormToConv2D()(module)
        module = _simplify_batch_norm(module)
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
    """Rewrite inference batch norm that no convolution took up to ``x * scale + shift``."""
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


def _constants_to_parameters(module: Any) -> tuple[Any, tuple[Any, ...]]:
    """Turn the constant tensors of ``main`` into parameters after its inputs, so that they are no part of a task; the module
    and their values."""
    from tvm import relax

    @relax.expr_functor.mutator
    class Lifter(relax.PyExprMutator):
        def __init__(self) -> None:
            super().__init__()
            self.parameters: dict[int, tuple[Any, Any]] = {}

        def visit_generic_const_(self, op: Any) -> Any:
            if not isinstance(op.ty, relax.TensorType) or len(op.ty.shape) == 0:
                return op  # a scalar is part of the computation
            key = hash(op)  # of the object's address: one constant used twice is one parameter
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
    """What a Relax call runs: its name, the arguments, and whether it is a PrimFunc."""
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
