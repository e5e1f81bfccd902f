"""From a Relax module with its weights to fused, legalised TIR functions, as TVM would run them.

Everything that depends on weights alone (transposes, batch-norm scales) is moved out of the function, as a
deployment does once at load time, so that it does not appear among the tasks. It is moved, not computed: folding
constants compiles every operator, moving them costs milliseconds.
"""

from __future__ import annotations

from typing import Any

from cdmpp.program.tvm_env import import_tvm


def fuse(module: Any, target: Any = None) -> Any:
    """Legalise and fuse a Relax module whose weights are bound as constants.

    Parameters
    ----------
    module
        ``tvm.IRModule`` with a Relax function ``main``.
    target
        ``tvm.target.Target``; one llvm core if None. Legalisation hardly depends on it.

    Returns
    -------
    tvm.IRModule
        ``main`` calls fused PrimFuncs by ``call_tir``; it takes the network's inputs and the transformed weights.
    """
    tvm = import_tvm()
    from tvm import relax

    transform = relax.transform
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
        module = _constants_to_parameters(module)
        module = transform.LiftTransformParams()(module)
        if "main_transform_params" in [var.name_hint for var in module.get_global_vars()]:
            del module["main_transform_params"]
        module = tvm.transform.Sequential(
            [
                transform.LegalizeOps(),
                transform.AnnotateTIROpPattern(),
                transform.DeadCodeElimination(["main"]),
                transform.FuseOps(),
                transform.FuseTIR(),
                transform.RewriteDataflowReshape(),
                transform.DeadCodeElimination(["main"]),
            ]
        )(module)
    return module


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


def _constants_to_parameters(module: Any) -> Any:
    """Turn every constant tensor of ``main`` into a parameter, so that it is data and not part of a task."""
    from tvm import relax

    @relax.expr_functor.mutator
    class Lifter(relax.PyExprMutator):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parameters: dict[int, Any] = {}

        def visit_generic_const_(self, op: Any) -> Any:
            if not op.ty.shape or len(op.ty.shape) == 0:
                return op
            key = hash(op)  # of the object's address: one constant used twice is one parameter
            if key not in self.parameters:
                self.parameters[key] = relax.Var(f"weight{len(self.parameters)}", op.ty)
            return self.parameters[key]

    function = module["main"]
    lifter = Lifter()
    body = lifter.visit_expr(function.body)
    number = len(function.params)
    if function.attrs and "num_input" in function.attrs:
        number = int(function.attrs["num_input"])
    module["main"] = relax.Function(
        [*function.params, *lifter.parameters.values()], body, function.ret_ty, function.is_pure, function.attrs
    ).with_attr("num_input", number)
    return module
