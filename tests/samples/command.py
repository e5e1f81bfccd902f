"""The ``cdmpp`` command, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cdmpp.cli import main


class Command:
    """Runs ``cdmpp`` with arguments of any type; ``out`` and ``err`` are what the last run showed."""

    out = err = ""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys, self._folder = capsys, folder

    def __call__(self, *args: object, code: int = 0) -> str:
        """What it shows on its way to this exit code."""
        self._capsys.readouterr()
        ended = main([*map(str, args)])
        self.out, self.err = self._capsys.readouterr()
        assert ended == code, self.err
        return self.out

    def json(self, *args: object) -> Any:
        """What it writes with ``--json``."""
        self(*args, "--json", self._folder / "command.json")
        return json.loads((self._folder / "command.json").read_text())

    def error(self, *args: object) -> str:
        """The one line that bad input ends it with."""
        self(*args, code=2)
        (line,) = self.err.strip().splitlines()
        assert line.startswith("cdmpp: ")
        return line
