"""Expressions over loop variables as forms (see :mod:`cdmpp.program.affine`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cdmpp.program.affine import Form, IndexSpace
from cdmpp.program.ast_nodes import NodeTypes

#: Handle of a variable -> depth of its loop, ``(constant,)``, or the expression it is bound to. Variables are told
#: apart by their handles, which are stable while the program is alive: ``==`` would build an expression.
Environment = dict[int, Any]


def form_reader(t: NodeTypes, env: Environment) -> Callable[[Any, IndexSpace], Form]:
    """A function from an integer expression and the loops around it to its form.

    Variables that are in no loop count as constants. ``env`` is looked at whenever the function is called.
    """
    # Closed-over names, for this is where most of the time of a walk goes.
    var, int_imm, tensor_load, cast = t.Var, t.IntImm, t.TensorLoad, t.Cast
    plus, minus, times, floordiv, floormod = t.Add, t.Sub, t.Mul, t.FloorDiv, t.FloorMod

    def read(expr: Any, space: IndexSpace) -> Form:
        if type(expr) is var:
            bound = env.get(expr.__chandle__())
            if type(bound) is int:
                return {bound: 1}
        out: dict[int, int] = {}
        constant = gather(expr, 1, out, space)
        if not out:
            return constant
        if 0 in out.values():
            out = {key: coef for key, coef in out.items() if coef}
            if not out:
                return constant
        return space.joined(out) if len(space.atoms) > 1 and min(out) < 0 else out

    def gather(expr: Any, factor: int, out: dict[int, int], space: IndexSpace) -> int:
        """Add ``factor`` times an expression to ``out`` and return its constant part: one dictionary a sum."""
        constant = 0
        # The last operand of a sum and the only one of a product are next in the loop: calls take longer.
        while True:
            kind = type(expr)
            if kind is var:
                bound = env.get(expr.__chandle__())
                if type(bound) is int:
                    out[bound] = out.get(bound, 0) + factor
                    return constant
                if bound is None:
                    return constant
                if type(bound) is tuple:
                    return constant + bound[0] * factor
                expr = bound
            elif kind is plus:
                constant += gather(expr.a, factor, out, space)
                expr = expr.b
            elif kind is int_imm:
                return constant + expr.value * factor
            elif kind is times and type(b := expr.b) is int_imm:
                factor *= b.value
                expr = expr.a
            elif kind is minus:
                constant += gather(expr.a, factor, out, space)
                factor = -factor
                expr = expr.b
            elif kind is cast:
                expr = expr.value
            else:
                break
        if kind is floordiv:
            form = space.floordiv(read(expr.a, space), read(expr.b, space))
        elif kind is floormod:
            form = space.floormod(read(expr.a, space), read(expr.b, space))
        elif kind is times:
            form = space.product(read(expr.a, space), read(b, space))
        elif kind is tensor_load:
            form = space.opaque([read(i, space) for i in t.items(expr.indices)])
        else:
            form = space.opaque([read(part, space) for part in t.children(expr)])
        if isinstance(form, int):
            return constant + form * factor
        for key, coef in form.items():
            out[key] = out.get(key, 0) + coef * factor
        return constant

    return read


def interval(t: NodeTypes, expr: Any, env: Environment, extents: list[int]) -> tuple[int, int] | None:
    """Smallest and largest value of an integer expression over the loops; None if it has free variables."""
    kind = type(expr)
    if kind is t.IntImm:
        return int(expr.value), int(expr.value)
    if kind is t.Var:
        bound = env.get(expr.__chandle__())
        if bound is None:
            return None
        if isinstance(bound, int):
            return 0, extents[bound] - 1
        return (bound[0], bound[0]) if isinstance(bound, tuple) else interval(t, bound, env, extents)
    if kind is t.Cast:
        return interval(t, expr.value, env, extents)
    if kind not in (t.Add, t.Sub, t.Mul, t.FloorDiv, t.FloorMod, t.Min, t.Max):
        return None
    a, b = interval(t, expr.a, env, extents), interval(t, expr.b, env, extents)
    if a is None or b is None:
        return None
    if kind is t.Add:
        return a[0] + b[0], a[1] + b[1]
    if kind is t.Sub:
        return a[0] - b[1], a[1] - b[0]
    if kind is t.Mul:
        corners = [x * y for x in a for y in b]
        return min(corners), max(corners)
    if kind is t.Min or kind is t.Max:
        pick = min if kind is t.Min else max
        return pick(a[0], b[0]), pick(a[1], b[1])
    if b[0] <= 0:
        return None
    if kind is t.FloorDiv:
        corners = [x // y for x in a for y in b]
        return min(corners), max(corners)
    return 0, min(b[1] - 1, a[1]) if a[0] >= 0 else b[1] - 1
