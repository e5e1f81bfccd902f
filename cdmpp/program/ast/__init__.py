"""Compact ASTs: what the model sees of a program. Importing this does not import TVM."""

from cdmpp.program.ast.reader import AstBuilder, CompactAST, compact_ast, compact_asts
from cdmpp.program.ast.schema import FEATURE_SET, LEAF_FEATURE_DOCS, LEAF_FEATURES

__all__ = [
    "FEATURE_SET",
    "LEAF_FEATURES",
    "LEAF_FEATURE_DOCS",
    "AstBuilder",
    "CompactAST",
    "compact_ast",
    "compact_asts",
]
