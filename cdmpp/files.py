"""Helpers of all packages: files that are written whole or not at all, shipped tables, and durations as text."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

#: Size in bytes of the largest text file that is read.
MOST_TEXT = 1 << 28
#: Deepest nesting of YAML collections that is read.
_MOST_NESTED = 100


def read_text(path: str | Path) -> str:
    """The content of a text file (OSError; ValueError: it is not UTF-8, or too large to be one of ours)."""
    if (size := Path(path).stat().st_size) > MOST_TEXT:
        raise ValueError(f"{size} bytes, expected {MOST_TEXT} at most")
    return Path(path).read_text(encoding="utf-8")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text (ValueError: it is malformed or nested too deeply)."""
    try:
        return json.loads(text)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err


def read_json(path: str | Path) -> Any:
    """The value of a JSON file (OSError, ValueError)."""
    return parse_json(read_text(path))


def read_yaml(path: str | Path) -> Any:
    """The value of a YAML file, limited to plain types (OSError, ValueError)."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is ten times as fast
    text, depth = read_text(path), 0
    try:
        for event in yaml.parse(text, loader):  # without this check the C loader could overflow the stack
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_NESTED:
                raise RecursionError
        return yaml.load(text, loader)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err
    except yaml.YAMLError as err:
        raise ValueError(" ".join(str(err).split())) from err


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft file beside ``path`` to write to; it replaces ``path`` durably at the end, unless an error is raised before.

    OSError: the disk is full or the folder cannot be written; ``path`` stays as it was."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        _sync(draft)
        draft.replace(path)
        _sync(path.parent)  # the renaming, too, has to survive a power cut
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file; OSError as in :func:`replacing`."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file, its keys sorted; OSError as in :func:`replacing`, ValueError for NaN and infinity."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def cache_folder() -> Path:
    """The folder in the user's cache for what cdmpp computes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cdmpp"


def cache_file(folder: Path, name: str) -> Path:
    """Cache path of a file computed from a folder's content. It is elsewhere, so that reading a folder does not change it."""
    return cache_folder() / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16] / name


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seconds_text(value_s: float | None) -> str:
    """Seconds with three digits and a unit: ``1.25 ms``; ``-`` for None."""
    if value_s is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value_s >= scale * (1 - 1e-9):
            return f"{value_s / scale:.3g} {unit}"
    return f"{value_s / 1e-9:.3g} ns"


@cache
def shipped_table(name: str) -> dict[str, Any]:
    """A table of the package, such as ``device/cpus.yaml``. It is read once; callers must not change it."""
    rows: dict[str, Any] = read_yaml(Path(__file__).parent / name)
    return rows
