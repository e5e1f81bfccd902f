"""Machine code of short listings in GNU assembler's (AT&T) syntax: assembled once, kept in ``assembled.json``. Those of which
one number or a few are known are rows of ``cases.yaml``.

``ASSEMBLE=1 python -m pytest tests/program/codegen`` assembles listings that are new; it needs ``as`` and ``objcopy``.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from cdmpp.files import read_yaml
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.blocks import Instruction
from cdmpp.program.codegen.core import core_of
from cdmpp.program.codegen.counts import count
from cdmpp.program.codegen.disassemble import decode

CASES: dict[str, Any] = read_yaml(Path(__file__).with_name("cases.yaml"))
_FILE = Path(__file__).with_name("assembled.json")
_ASSEMBLED: dict[str, str] = json.loads(_FILE.read_text()) if _FILE.exists() else {}


def code(listing: str) -> list[Instruction]:
    """Instructions of a listing, separated by ";" or line ends, of which the first is at address 0."""
    listing = "\n".join(line.strip() for line in listing.replace(";", "\n").splitlines())
    if listing not in _ASSEMBLED and os.environ.get("ASSEMBLE"):
        _ASSEMBLED[listing] = _assemble(listing)
        _FILE.write_text(json.dumps(_ASSEMBLED, indent=1, sort_keys=True) + "\n")
    return decode(bytes.fromhex(_ASSEMBLED[listing]))


def counts(listing: str, core: str = "znver4") -> dict[str, float]:
    """What is counted of a program of one function, by name."""
    return dict(zip(CODEGEN_FEATURES, count([code(listing)], core_of(core)).tolist(), strict=True))


def _assemble(listing: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        object_, binary = Path(folder) / "code.o", Path(folder) / "code"
        subprocess.run(["as", "-o", object_, "-"], input=f"{listing}\n", text=True, check=True)
        subprocess.run(["objcopy", "-O", "binary", "-j", ".text", object_, binary], check=True)
        return binary.read_bytes().hex()
