"""What a benchmark has done so far, kept in a file: one that is started again goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class KeptRows:
    """Rows of what is done, written after every step.

    Parameters
    ----------
    path
        The file, read if it is there; None keeps nothing.
    notes
        Written beside the rows, anew in every run: the file is an object with ``notes`` and ``rows``. Without any it is the
        list of rows.
    """

    def __init__(self, path: Path | None, notes: dict[str, Any] | None = None) -> None:
        self._path, self._notes = path, notes
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            self.rows = content if notes is None else content["rows"]

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The first row that has these values."""
        return next((row for row in self.rows if all(row.get(k) == v for k, v in key.items())), None)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Keep rows that were changed."""
        if self._path is None:
            return
        content = self.rows if self._notes is None else {"notes": self._notes, "rows": self.rows}
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self._path)
