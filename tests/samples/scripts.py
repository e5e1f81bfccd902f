"""Hand-written programs of the AST tests (``scripts.tvmscript``), as TVMScript text so that names can be replaced."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from cdmpp.program import import_tvm

#: Name -> text, without the comments between programs.
_TEXTS = dict(re.findall(r"^# --- (\w+)\n((?:[^#\n].*\n)+)", Path(__file__).with_suffix(".tvmscript").read_text(), re.M))
MATMUL, CONV, CHAIN, GATE, PREDICATED, CUDA, GATHER, COLUMNS, WITHOUT_BLOCKS, INTEGERS = _TEXTS.values()


@lru_cache(maxsize=64)
def parse(text: str) -> Any:
    """A PrimFunc from TVMScript text."""
    import_tvm()
    import tvm
    from tvm.script import tirx

    return tvm.script.from_source(text.strip(), {"T": tirx})
