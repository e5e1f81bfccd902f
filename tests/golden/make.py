"""Freezes what the library at hand does: ``python -m tests.golden.make NAME...``; without a name it lists them.

A file is written again only by a commit that says why the values change. ``asts`` and ``predictor`` (in this order) are
for another feature set; instruction counts beside the records are made anew by ``cdmpp codegen tests/golden/dataset``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import commands, golden

#: Significant digits of numbers in JSON.
_DIGITS = 7
#: One of so many objects is kept, if it is not larger than this (bytes).
_OBJECTS, _LARGEST_OBJECT = 6, 60_000


def write_arrays(name: str, arrays: golden.Arrays) -> None:
    stored: dict[str, Any] = {key: np.float32(value) if value.dtype == np.float64 else value for key, value in arrays.items()}
    np.savez_compressed(golden.HERE / f"{name}.npz", **stored)


def write_json(name: str, value: Any) -> None:
    text = json.dumps(_rounded(value), indent=0, sort_keys=True)
    (golden.HERE / f"{name}.json").write_text(text + "\n")


def write_shapes(name: str, results: dict[str, Any]) -> None:
    write_json(name, {command: commands.shape(result) for command, result in results.items()})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _predictor() -> None:
    with tempfile.TemporaryDirectory() as run:
        golden.train(golden.load_config(golden.SMALL), [golden.FOLDER], run).predictor.save(golden.PREDICTOR)


def _counts() -> None:
    """Counts of all, and the objects of some."""
    ran = set(golden.dataset().records.query("status == 'ok'")["program"])
    hashes = [program for program in golden.programs("cpu") if program in ran][::3]
    objects: dict[str, bytes] = {}

    def keep(mcpu: str, program: str, path: Path) -> None:
        size = path.stat().st_size
        if hashes.index(program) % _OBJECTS == list(golden.TARGETS).index(mcpu) and size < _LARGEST_OBJECT:
            objects[f"{program}-{mcpu}.so"] = path.read_bytes()

    counts = {mcpu: golden.compile_and_count(hashes, mcpu, partial(keep, mcpu)) for mcpu in golden.TARGETS}
    names = {"programs": np.array(hashes), "columns": np.array(golden.CODEGEN_FEATURES)}
    write_arrays("counts", {**counts, **names})
    with zipfile.ZipFile(golden.OBJECTS, "w") as archive:
        for name, content in sorted(objects.items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)


def _quick() -> None:
    with tempfile.TemporaryDirectory() as out:
        results = commands.quick(Path(out))
    write_shapes("shapes", results)
    write_json("scores", commands.scores(results))


def _slow() -> None:
    with tempfile.TemporaryDirectory() as out:
        write_shapes("shapes_slow", commands.slow(Path(out)))
        write_json("model_card", commands.model_card(Path(out)))
    write_json("split_of_data", golden.splits(golden.load_datasets(golden.DATA), golden.SPLITS[-1:]))


FREEZE: dict[str, Callable[[], Any]] = {
    "asts": golden.store_asts, "predictor": _predictor,
    "predictions": lambda: write_arrays("predictions", golden.predictions()),
    "encodings": lambda: write_arrays("encodings", golden.encodings()), "counts": _counts,
    "splits": lambda: write_json("splits", golden.splits(golden.dataset())),
    "options": lambda: write_json("options", commands.options()), "quick": _quick, "slow": _slow,
}  # fmt: skip


if __name__ == "__main__":
    if not sys.argv[1:]:
        print(*FREEZE)
    for name in sys.argv[1:]:
        FREEZE[name]()
        print(f"{name}: frozen")
