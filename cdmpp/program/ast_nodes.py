"""TVM's node classes, gathered once so that the walkers can dispatch on ``type(node)``."""

from __future__ import annotations

from functools import lru_cache
from types import MethodType
from typing import Any

from cdmpp.program.tvm_env import import_tvm

#: Fields that hold operands of the expressions that are not handled one by one.
_OPERANDS = (
    "a",
    "b",
    "value",
    "base",
    "stride",
    "condition",
    "true_value",
    "false_value",
    "body",
    "vectors",
    "args",
)


class NodeTypes:
    """TVM's node classes by their names."""

    def __init__(self) -> None:
        tvm = import_tvm()
        from tvm.ir import expr as ir_expr
        from tvm.ir.prim import expr as prim
        from tvm.s_tir import stmt as s_stmt
        from tvm.tirx import stmt

        self.IRModule: Any = tvm.IRModule
        self.PrimFunc: Any = tvm.tirx.PrimFunc
        self.Var: Any = ir_expr.Var
        self.TensorLoad: Any = ir_expr.TensorLoad
        self.Call: Any = ir_expr.Call
        for name in (
            "IntImm", "FloatImm", "Cast", "Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max", "EQ", "NE",
            "LT", "LE", "GT", "GE", "And", "Or", "Not", "Select", "Ramp", "Broadcast", "Let", "LShift", "RShift",
            "BitwiseAnd", "BitwiseOr", "BitwiseXor",
        ):  # fmt: skip
            setattr(self, name, getattr(prim, name))
        for name in (
            "For", "While", "BufferStore", "AllocBuffer", "DeclBuffer", "AttrStmt", "SeqStmt", "IfThenElse",
            "Evaluate", "Bind", "AssertStmt",
        ):  # fmt: skip
            setattr(self, name, getattr(stmt, name))
        self.SBlock: Any = s_stmt.SBlock
        self.SBlockRealize: Any = s_stmt.SBlockRealize
        string = getattr(ir_expr, "StringImm", None)
        self.constants = frozenset(
            c for c in (self.IntImm, self.FloatImm, string, str, int, float) if c is not None
        )
        self.division = frozenset((self.FloorDiv, self.FloorMod, self.Mod, self.Div))
        self.arithmetic = frozenset((self.Add, self.Sub, self.Mul, self.Div, self.Min, self.Max))
        self.compare = frozenset((self.EQ, self.NE, self.LT, self.LE, self.GT, self.GE))
        logic = (
            self.And,
            self.Or,
            self.LShift,
            self.RShift,
            self.BitwiseAnd,
            self.BitwiseOr,
            self.BitwiseXor,
        )
        self.binary = self.division | self.arithmetic | self.compare | frozenset(logic)

        import tvm_ffi

        # The containers' own methods check their arguments in Python, which takes longer than the access.
        self.item: Any = tvm_ffi.get_global_func("ffi.ArrayGetItem")
        self.size: Any = tvm_ffi.get_global_func("ffi.ArraySize")
        self.map_size: Any = tvm_ffi.get_global_func("ffi.MapSize")
        self.hash: Any = tvm_ffi.get_global_func("ffi.StructuralHash")

    def items(self, array: Any) -> list[Any]:
        """The elements of an ``Array``."""
        item = self.item
        return [item(array, i) for i in range(self.size(array))]

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that __init__ did not set; declared for the type checker.
        raise AttributeError(name)

    @staticmethod
    def children(expr: Any) -> list[Any]:
        """Operands of an expression of any kind."""
        found: list[Any] = []
        for name in _OPERANDS:
            operand = getattr(expr, name, None)
            if operand is None or isinstance(operand, MethodType):  # variables and loads can be called too
                continue
            found.extend(operand if name in ("vectors", "args") else [operand])
        return found


@lru_cache(maxsize=1)
def node_types() -> NodeTypes:
    """The classes (imports TVM on the first call)."""
    return NodeTypes()
