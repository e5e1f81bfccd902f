"""The ``cdmpp`` command as others script against it: names of options, and what ``--json`` writes."""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from cdmpp.files import read_yaml
from tests.golden.golden import DATA, FOLDER, HUB, NEUSIGHT, PREDICTOR, SMALL, dataset

XEON, EPYC = "xeon-cascadelake-2.5ghz@1", "epyc-zen4-2.6ghz@1"
#: Dictionaries of more keys, or of paths, are maps: what matters is the shape of their values.
_MOST_KEYS, _MOST_ALIKE = 40, 6


class _Parsed(Exception):
    """Carries the parser of the command."""


def cdmpp(*args: str | Path) -> int:
    """Run ``python -m cdmpp`` in this process; its exit code."""
    with mock.patch.object(sys, "argv", ["cdmpp", *map(str, args)]):
        try:
            runpy.run_module("cdmpp", run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def run_json(out: Path, *args: str | Path) -> Any:
    """What a command writes with ``--json``."""
    file = out / "result.json"
    if cdmpp(*args, "--json", file):
        raise AssertionError(f"cdmpp {' '.join(map(str, args))} failed")
    return json.loads(file.read_text())


def options() -> dict[str, dict[str, Any]]:
    """Verb -> its options (those that the help hides too) and positional arguments."""

    def parsed(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise _Parsed(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parsed):
        try:
            cdmpp()
        except _Parsed as caught:
            parser = caught.args[0]
    verbs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    found = {
        verb: {
            name: _fields(action)
            for number, action in enumerate(sub._actions)
            for name in action.option_strings or [f"<{number}>"]
        }
        for verb, sub in verbs.items()
    }
    return json.loads(json.dumps(found))


def _fields(action: argparse.Action) -> dict[str, Any]:
    return {
        "nargs": action.nargs,
        "choices": None if action.choices is None else sorted(map(str, action.choices)),
        "default": action.default if action.option_strings and action.dest != "help" else None,
        "required": action.required,
    }


def missing_options(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What someone who scripts against the former options would miss."""
    found: list[str] = []
    for verb, names in before.items():
        for name, old in names.items():
            new = now.get(verb, {}).get(name)
            if new is None:
                found.append(f"{verb} {name} is gone")
                continue
            misses = {
                "nargs": new["nargs"] != old["nargs"],
                "default": old["default"] not in (None, new["default"]),
                "choices": new["choices"] is not None and not set(old["choices"] or [new]) <= set(new["choices"]),
                "required": new["required"] and not old["required"],
            }
            found += [f"{verb} {name}: {key} is {new[key]}, was {old[key]}" for key in misses if misses[key]]
    return found


def shape(value: Any) -> Any:
    """Keys and types of a JSON value: {key: shape}, {"*": shape} for maps, [shape of the elements] or "number|null"."""
    if isinstance(value, dict):
        shapes = {key: shape(item) for key, item in value.items()}
        alike = all(isinstance(item, dict) for item in value.values()) and len({*map(_text, shapes.values())}) == 1
        if len(value) > (_MOST_ALIKE if alike else _MOST_KEYS) or any("/" in key for key in value):
            return {"*": _united(list(shapes.values()))}
        return shapes
    if isinstance(value, list):
        return [_united([shape(item) for item in value])] if value else []
    if value is None:
        return "null"
    return {bool: "bool", str: "string"}.get(type(value), "number")


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _united(shapes: Sequence[Any]) -> Any:
    """What fits all shapes; an element without a key has null there."""
    if all(isinstance(item, dict) for item in shapes):
        keys = dict.fromkeys(key for item in shapes for key in item)
        return {key: _united([item.get(key, "null") for item in shapes]) for key in keys}
    if all(isinstance(item, list) for item in shapes):
        inner = [item[0] for item in shapes if item]
        return [_united(inner)] if inner else []
    texts = [_text(item) if isinstance(item, dict | list) else item for item in shapes]
    parts = {part for text in texts for part in ([text] if text[0] in "[{" else text.split("|"))}
    return "|".join(sorted(parts))


def misfits(before: Any, now: Any, where: str = "") -> list[str]:
    """Where a shape lacks what another has; more keys are welcome."""
    if isinstance(before, dict) and isinstance(now, dict):
        if "*" in before:
            return [m for key, item in now.items() for m in misfits(before["*"], item, f"{where}.{key}")]
        gone = [f"{where}.{key} is gone" for key in before if key not in now and "*" not in now]
        both = [(key, now.get(key, now.get("*"))) for key in before if key in now or "*" in now]
        return gone + [m for key, item in both for m in misfits(before[key], item, f"{where}.{key}")]
    if isinstance(before, list) and isinstance(now, list):
        if not before or not now:
            return [f"{where} is empty"] if before else []
        return misfits(before[0], now[0], f"{where}[]")
    if isinstance(before, str) and isinstance(now, str) and "{" not in before:
        fits = before == "null" or set(now.split("|")) <= set(before.split("|"))
        return [] if fits else [f"{where} is {now}, was {before}"]
    return [] if before in (now, "null") else [f"{where} is {_text(now)}, was {_text(before)}"]


def results_of(out: Path, group: str, **names: Any) -> dict[str, Any]:
    """Results of a group of commands (``commands.yaml``), by name."""
    lines = read_yaml(FOLDER.parent / "commands.yaml")[group]
    names |= {"out": out, "xeon": XEON, "epyc": EPYC}
    return {name: run_json(out, *line.format(**names).split()) for name, line in lines.items()}


def quick(out: Path) -> dict[str, Any]:
    """Results of commands that take a second, by name."""
    matmul = min((t for t in dataset().tasks.values() if "matmul" in t.name), key=lambda t: (t.flops, t.hash))
    program = out / "program.json"
    program.write_text(matmul.tir_json)
    data = shutil.copytree(FOLDER, out / "data")
    return results_of(out, "quick", data=data, program=program, neusight=NEUSIGHT, hub=HUB)


def slow(out: Path) -> dict[str, Any]:
    """Results of commands that measure, train or compile much, by name."""
    data = shutil.copytree(FOLDER, out / "data")
    return results_of(out, "slow", data=data, small=SMALL, predictor=PREDICTOR)


def scores(results: dict[str, Any]) -> dict[str, Any]:
    """The values of what ``evaluate`` writes, of groups but tasks."""
    found: dict[str, Any] = {}
    for name, result in results.items():
        if name.startswith("evaluate"):
            kept = {group: values for group, values in result["groups"].items() if group != "task"}
            found[name] = {**result, "groups": kept}
    return found


def model_card(out: Path) -> dict[str, Any]:
    """Scores of the weights that ship on the held-out networks of all data."""
    return results_of(out, "model_card", data=DATA)
