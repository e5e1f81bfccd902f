"""What all packages share: files that are written whole or not at all, tables, and seconds as text."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

#: Bytes of text that are read at most.
MOST_TEXT = 1 << 28
#: Collections of YAML inside each other, at most.
_MOST_NESTED = 100


def read_text(path: str | Path) -> str:
    """A text file (OSError; ValueError: not UTF-8, or too large to be one of ours)."""
    if (size := Path(path).stat().st_size) > MOST_TEXT:
        raise ValueError(f"{size} bytes, expected {MOST_TEXT} at most")
    return Path(path).read_text(encoding="utf-8")


def parse_json(text: str | bytes) -> Any:
    """The value of JSON (ValueError, also where it is nested too deeply)."""
    try:
        return json.loads(text)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err


def read_json(path: str | Path) -> Any:
    """The value of a JSON file (OSError, ValueError)."""
    return parse_json(read_text(path))


def read_yaml(path: str | Path) -> Any:
    """The values of a YAML file, plain ones alone (OSError, ValueError)."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is ten times as fast
    text, depth = read_text(path), 0
    try:
        for event in yaml.parse(text, loader):  # the C loader would overflow the stack
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
    """A draft beside ``path`` to write to; it takes the place of ``path`` at the end, durably, unless an error came before.

    OSError: the disk is full or the folder cannot be written; what was there stays."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        _sync(draft)
        draft.replace(path)
        _sync(path.parent)  # the renaming, too, has to survive a power cut
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file; OSError as of :func:`replacing`."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file, its keys in order; OSError as of :func:`replacing`, ValueError for NaN and infinity."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def cache_folder() -> Path:
    """The user's cache of what cdmpp computed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cdmpp"


def cache_file(folder: Path, name: str) -> Path:
    """Where a file that is computed from a folder's content is kept: reading a folder does not change it."""
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
    """A table of the package, such as ``device/cpus.yaml``; it is read once, and not to be changed."""
    rows: dict[str, Any] = read_yaml(Path(__file__).parent / name)
    return rows
