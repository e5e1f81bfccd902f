"""What a benchmark has done so far, kept in a file: one that is started again goes on where it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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
        write_json(self._path, content)


class KeptGroups:
    """What is done of each group (a device, a kernel), with what follows from all of it, written after every step.

    Parameters
    ----------
    path
        The file, read if it is there; None keeps nothing. SystemExit if it was made with other ``notes["options"]``.
    notes
        Written beside it; under ``options`` what results depend on.
    groups
        What the groups are called in the file.
    summary
        A name in the file and what makes its value of all groups.
    """

    def __init__(
        self,
        path: Path | None,
        notes: dict[str, Any],
        groups: str,
        summary: tuple[str, Callable[[dict[str, Any]], Any]],
    ) -> None:
        self._path, self._groups, self._summary = path, groups, summary
        self.content: dict[str, Any] = {"notes": notes, groups: {}, summary[0]: {}}
        if path is not None and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            then, now = before["notes"]["options"], notes["options"]
            differ = [key for key in {**then, **now} if then.get(key) != now.get(key)]
            if differ:
                sys.exit(f"{path} holds results of another {', '.join(differ)}: choose another file")
            self.content[groups] = before[groups]

    def of(self, group: str) -> dict[str, Any]:
        """What is done of a group, to be added to."""
        return self.content[self._groups].setdefault(group, {})

    def write(self) -> None:
        """Keep what was added."""
        name, made = self._summary
        self.content[name] = made(self.content[self._groups])
        if self._path is not None:
            write_json(self._path, self.content)


def write_json(path: Path, content: Any) -> None:
    """Write a file that is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
