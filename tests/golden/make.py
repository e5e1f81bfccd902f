"""Freezes what the library at hand does: ``python -m tests.golden.make [NAME...]``, all by default.

A file is written again only by a commit that says why the values change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.golden import golden


def _arrays(name: str, compute: Callable[[], golden.Arrays]) -> None:
    stored = {
        key: np.float32(value) if value.dtype == np.float64 else value for key, value in compute().items()
    }
    np.savez_compressed(golden.HERE / f"{name}.npz", **stored)


FREEZE: dict[str, Callable[[], Any]] = {
    "asts": golden.store_asts,
    "predictions": lambda: _arrays("predictions", golden.predictions),
    "encodings": lambda: _arrays("encodings", golden.encodings),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or FREEZE:
        FREEZE[name]()
        print(f"{name}: frozen")
