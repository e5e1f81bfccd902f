"""Pickles that run code, as a hostile file may hold them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class _Touches:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def pickle_that_touches(file: Path) -> bytes:
    """It makes a file where it is unpickled."""
    return pickle.dumps(_Touches(file))
