"""Shared by all benchmarks: ``--json``, provenance, rows that let a later run resume, spread, intervals and tables.

A result file holds ``provenance`` (what it depends on), ``figures`` (what ``benchmarks/results.py`` shows) and often the
``rows`` from which the figures are computed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cdmpp.errors import CdmppError
from cdmpp.files import read_yaml, write_text
from cdmpp.predictor.metrics import evaluate_predictions, ordered_pairs

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_WEIGHTS = REPOSITORY / "cdmpp/predictor/weights/default"
_PACKAGES = {"torch": "torch", "tvm": "apache-tvm", "numpy": "numpy", "xgboost": "xgboost-cpu"}

Figure = dict[str, Any]
Row = dict[str, Any]

#: Metric -> its heading in tables. The metrics in PERCENT are fractions that are shown in per cent.
TITLES = {
    "mape": "MAPE", "median_ape": "median APE", "within_20pct": "within 20 %", "pairwise_accuracy": "pairwise",
    "spearman": "Spearman", "top1_regret": "top-1 regret", "top1_regret_of_32": "of 32", "top5_regret": "top-5 regret",
    "noise_floor_mape": "noise floor",
}  # fmt: skip
PERCENT = {
    "mape", "median_ape", "within_20pct", "top1_regret", "top1_regret_of_32", "top5_regret", "noise_floor_mape",
    "end to end", "NeuSight end to end", "APE", "NeuSight's APE", "dropped", "equal", "reached", "search", "against all runs",
    "rounds differ by", "worst tenth", "largest APE", "in interval", "below it", "right", "stated", "ours, on the same",
    "median regret", "mean regret", "fastest or within 5 %",
}  # fmt: skip


def arguments(doc: str | None, file: str | None = None, **more: Mapping[str, Any]) -> argparse.ArgumentParser:
    """An argument parser with the first paragraph of a benchmark's docstring, ``--json``, and the options that
    ``options.yaml`` lists for its ``file``; ``more`` adds or replaces settings of an option, by name."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="results, with what they depend on")
    options = read_yaml(Path(__file__).with_name("options.yaml"))[Path(file).stem] if file else {}
    for name, option in options.items():
        kind = {"type": {"int": int, "float": float, "Path": Path}[option["type"]]} if "type" in option else {}
        parser.add_argument(f"--{name}", **{**option, **kind, **more.get(name, {})})
    return parser


def start(main: Callable[[], None]) -> None:
    """Run a benchmark as a program: errors of :mod:`cdmpp.errors` end it with one line."""
    try:
        main()
    except CdmppError as error:
        sys.exit(f"error: {error}")


# -- provenance ------------------------------------------------------------------------------------------------


def git(*arguments: str) -> str | None:
    """Output of a git command in this repository; None if it fails or git is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def digest(path: str | Path) -> str | None:
    """Git's hash of a committed file or folder (relative paths start at the repository), else sha256 of its contents; None if
    it does not exist."""
    full = (REPOSITORY / path).resolve()
    if full.is_relative_to(REPOSITORY):
        committed = git("rev-parse", "--verify", "--quiet", f"HEAD:{full.relative_to(REPOSITORY).as_posix()}")
        if committed:
            return committed
    if not full.exists():
        return None
    found = hashlib.sha256()
    for file in [full] if full.is_file() else sorted(p for p in full.rglob("*") if p.is_file()):
        found.update(file.relative_to(full.parent).as_posix().encode())
        found.update(file.read_bytes())
    return f"sha256:{found.hexdigest()[:40]}"


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """CPU, usable cores and memory of this machine; None for what ``cpuinfo`` does not give."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    family, model = (int(said[key]) if said.get(key, "").isdigit() else None for key in ("cpu family", "model"))
    return {
        "vendor": said.get("vendor_id"),
        "family": family,
        "model": model,
        "name": said.get("model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that figures depend on; None for those that are not installed."""
    installed = {found.name: found.version for found in metadata.distributions()}
    packages = {name: installed.get(package) for name, package in _PACKAGES.items()}
    return {"python": platform.python_version(), **packages}


def provenance(
    benchmark: str, data: Iterable[str | Path] = (), weights: str | Path | None = None, seeds: Iterable[int] = ()
) -> dict[str, Any]:
    """What the figures of a benchmark (its ``__file__``) depend on: command, commit, machine, versions, seeds, and digests of
    the code, data and weights. ``weights`` is a predictor's folder, or ``default``."""
    folder = DEFAULT_WEIGHTS if weights == "default" else weights

    def digests(*paths: str | Path) -> dict[str, str | None]:
        names = [os.path.relpath(Path(path).resolve(), REPOSITORY) for path in paths]
        return {name: digest(name) for name in names}

    return {
        "command": shlex.join(["python", os.path.relpath(benchmark, REPOSITORY), *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", "cdmpp", "data", "benchmarks/*.py")),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "code": digests(REPOSITORY / "cdmpp", benchmark),
        "data": digests(*data),
        "weights": digests(*([folder] if folder else [])),
        "machine": machine(),
        "versions": versions(),
        "seeds": list(seeds),
    }


def changed(made: Mapping[str, Any], digest: Callable[[str], str | None] = digest) -> list[str]:
    """Which of code, data and weights have changed since. What was not recorded, and missing data or weights, are ignored."""

    def differs(kind: str, path: str, then: str | None) -> bool:
        now = digest(path) or ("gone" if kind == "code" else "")
        # a sha256 of the contents and a hash by git cannot be compared
        known = then and now and then.startswith("sha256:") == now.startswith("sha256:")
        return bool(known and then != now)

    kinds = ("code", "data", "weights")
    return [kind for kind in kinds if any(differs(kind, *entry) for entry in made[kind].items())]


# -- results ---------------------------------------------------------------------------------------------------


def load_result(path: Path) -> dict[str, Any]:
    """Read a result file; SystemExit with one line if it is not JSON or has no provenance."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        sys.exit(f"{path} is not JSON: {error}")
    made = content.get("provenance") if isinstance(content, dict) else None
    missing = {"command", "commit", "date", "code", "data", "weights", "machine", "seeds"} - set(made or ())
    if missing:
        sys.exit(f"{path} has no provenance ({', '.join(sorted(missing))}): measure it again with --json")
    return content


def save(path: Path | None, made: Mapping[str, Any], figures: Sequence[Figure] = (), **detail: Any) -> None:
    """Write a result file atomically; does nothing without a path."""
    if path is None:
        return
    content = {"provenance": made, "figures": list(figures), **detail}
    lines = ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in _rounded(content).items())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"{{\n{lines}\n}}\n")


def report(path: Path | None, made: Mapping[str, Any], figures: Sequence[Figure], **detail: Any) -> None:
    """Print the figures as a table and write the result file."""
    print("\n\n".join(map(text_table, tables(figures))), flush=True)
    save(path, made, figures, **detail)


def _rounded(value: Any) -> Any:
    """Floats with seven digits, None if not finite; numpy's numbers and arrays as Python's, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_rounded(entry) for entry in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    return str(value) if isinstance(value, Path) else value


def _lines(value: Any) -> str:
    """JSON with one line for each entry of an object or of a list of objects."""
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
        return "{\n  " + ",\n  ".join(entries) + "\n }"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
    return json.dumps(value)


class Results:
    """Rows of finished work, written to the file after each one, so that a run that is started again resumes there.

    Without a path nothing is written. ``options`` are further settings that the rows depend on; SystemExit if the file was made
    with other code, data, weights or ``options``. ``figures`` computes the figures from the rows.
    """

    def __init__(
        self,
        path: Path | None,
        made: dict[str, Any],
        options: Mapping[str, Any] | None = None,
        figures: Callable[[list[Row]], list[Figure]] = lambda rows: [],
    ) -> None:
        self._path, self._made, self._figures = path, made, figures
        self._options = _rounded(options or {})
        self.rows: list[Row] = []
        if path is None or not path.exists():
            return
        before = load_result(path)
        differs = [key for key in ("code", "data", "weights") if before["provenance"][key] != made[key]]
        then = before.get("options", {})
        differs += [key for key in {**then, **self._options} if then.get(key) != self._options.get(key)]
        if differs:
            sys.exit(f"{path} holds results of another {', '.join(differs)}: choose another file")
        made["dirty"] = made["dirty"] or before["provenance"]["dirty"]
        self.rows = before["rows"]

    def find(self, **key: Any) -> Row | None:
        """The first row that has these values."""
        return next((row for row in self.rows if all(row.get(k) == v for k, v in key.items())), None)

    def add(self, row: Row) -> Row:
        """Add a row and write the file."""
        self.rows.append(row)
        self.write()
        return row

    def once(self, make: Callable[[], Mapping[str, Any]], **key: Any) -> Row:
        """The row that has these values; if there is none yet, ``make`` computes it and it is added."""
        return self.find(**key) or self.add({**key, **make()})

    def write(self) -> None:
        """Write the file, such as after rows were changed."""
        save(self._path, self._made, self._figures(self.rows), options=self._options, rows=self.rows)

    def finish(self) -> None:
        """Write everything and print the figures."""
        report(self._path, self._made, self._figures(self.rows), options=self._options, rows=self.rows)


# -- figures ---------------------------------------------------------------------------------------------------


def figure(
    name: str,
    values: Mapping[str, float | None],
    n: int | None = None,
    seeds: Iterable[int] = (),
    spread: Mapping[str, Any] | None = None,
    interval: Mapping[str, Any] | None = None,
) -> Figure:
    """One line of a table: metric -> value, the number ``n`` of records (or pairs, or rounds) that it is computed from, the
    seeds, and by metric the :func:`spread_of` repetitions and the 95 % :func:`bootstrap` interval over tasks."""
    known = {metric: value for metric, value in values.items() if value is not None}
    of = {"spread": dict(spread or {}), "interval": dict(interval or {})}
    return {"name": name, "n": n, "seeds": sorted(set(seeds)), "values": known, **of}


def spread_of(values: Sequence[float]) -> dict[str, float | None]:
    """Sample standard deviation (None for a single value), minimum and maximum."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"sd": sd, "min": min(values), "max": max(values)}


def mean_figure(name: str, rows: Sequence[Row], metrics: Iterable[str]) -> Figure:
    """The mean over runs, their spread, and the means of their intervals' ends; ``n`` is the mean number of records."""
    values, spread, interval = {}, {}, {}
    for metric in metrics:
        own = [row[metric] for row in rows if row.get(metric) is not None]
        ends = [row["interval"][metric] for row in rows if metric in (row.get("interval") or {})]
        if own:
            values[metric] = statistics.fmean(own)
            if len(own) > 1:
                spread[metric] = spread_of(own)
        if ends and len(ends) == len(own):
            interval[metric] = np.mean(ends, axis=0).tolist()
    n = round(statistics.fmean(row["n"] for row in rows))
    return figure(name, values, n, [row["seed"] for row in rows], spread, interval)


def median_figure(name: str, columns: Mapping[str, Sequence[float]], seeds: Iterable[int] = ()) -> Figure:
    """Medians of repeated runs with their spread; ``n`` is the number of runs. Empty columns are left out."""
    known = {metric: list(found) for metric, found in columns.items() if len(found)}
    values = {metric: statistics.median(found) for metric, found in known.items()}
    n = max(map(len, known.values()))
    spread = {metric: spread_of(found) for metric, found in known.items() if len(found) > 1}
    return figure(name, values, n, seeds, spread)


def ratio_figure(name: str, ours: Sequence[float], theirs: Sequence[float], more_is_better: bool) -> Figure:
    """Medians of both sides, measured in turns, and of the ratio in each round: how many times better ours is."""
    pairs = zip(ours, theirs, strict=True)
    ratios = [a / b if more_is_better else b / a for a, b in pairs]
    return median_figure(name, {"ours": ours, "theirs": theirs, "ratio": ratios})


def bootstrap(
    values: Sequence[float] | np.ndarray,
    groups: Sequence[Any] | np.ndarray,
    weights: Sequence[float] | np.ndarray | None = None,
    median: bool = False,
    seed: int = 0,
    resamples: int = 1000,
) -> tuple[float, float]:
    """95 % interval of a weighted mean (or plain median), by resampling groups, such as tasks, with all their values."""
    _, group = np.unique(np.asarray(groups), return_inverse=True)
    value = np.asarray(values, dtype=np.float64)
    weight = np.ones(len(value)) if weights is None else np.asarray(weights, dtype=np.float64)
    n = int(group.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
    if median:
        found = np.array([np.median(np.repeat(value, counts[group])) for counts in drawn])
    else:
        total = np.bincount(group, value * weight, n)
        found = (drawn @ total) / (drawn @ np.bincount(group, weight, n))
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def accuracy_intervals(table: pd.DataFrame, predicted_s: np.ndarray) -> dict[str, tuple[float, float]]:
    """:func:`bootstrap` over the tasks of a label table (n rows), for each of the metrics of :mod:`cdmpp.predictor.metrics`."""
    label_s, task = table["latency_s"].to_numpy(dtype=np.float64), table["task"].to_numpy()
    noise = np.nan_to_num(table["noise"].to_numpy(dtype=np.float64), nan=0.0)
    error = np.abs(predicted_s / label_s - 1)
    ranked: dict[str, list[tuple[float, Any, float]]] = defaultdict(list)
    for (name, device), index in table.groupby(["task", "device"], observed=True).indices.items():
        if len(index) < 2:
            continue
        own = label_s[index], predicted_s[index]
        scores = evaluate_predictions(*own, [name] * len(index), [device] * len(index), noise[index])
        right, pairs = ordered_pairs(*own, noise[index])
        if pairs:
            ranked["pairwise_accuracy"].append((right / pairs, name, pairs))
        for metric in ("spearman", "top1_regret", "top1_regret_of_32"):
            if scores[metric] is not None:
                ranked[metric].append((scores[metric], name, 1.0))
    found = {
        "mape": bootstrap(error, task),
        "median_ape": bootstrap(error, task, median=True),
        "within_20pct": bootstrap(error <= 0.2, task),
    }
    for metric, items in ranked.items():
        values, names, weights = zip(*items, strict=True)
        found[metric] = bootstrap(values, names, weights, median=metric == "top1_regret_of_32")
    return found


# -- tables ----------------------------------------------------------------------------------------------------


def in_turn(sides: Sequence[Any], turn: int) -> list[Any]:
    """The sides in the order to measure them: each turn another one comes first, so that drift affects all equally."""
    first = turn % len(sides)
    return [*sides[first:], *sides[:first]]


def number(value: float, metric: str = "") -> str:
    """A value with the digits to show; metrics of :data:`PERCENT` in per cent, without the sign."""
    if metric in PERCENT:
        return f"{100 * value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cell(shown: Figure, metric: str) -> str:
    """Value with its interval and its spread: the standard deviation for metrics in per cent, else the range."""
    if metric not in shown["values"]:
        return "-"
    text, unit = number(shown["values"][metric], metric), " %" if metric in PERCENT else ""
    spread, interval = shown["spread"].get(metric), shown["interval"].get(metric)
    if spread and spread["sd"] is not None and unit:
        text += f" ± {number(spread['sd'], metric)}"
    elif spread and spread["min"] < spread["max"]:
        text += f" ({number(spread['min'], metric)} to {number(spread['max'], metric)})"
    if interval:
        text += f" [{', '.join(number(end, metric) for end in interval)}]"
    return text + unit


def tables(figures: Iterable[Figure]) -> list[list[list[str]]]:
    """Tables of cells, each with a heading line; consecutive figures that share a metric are in one table."""
    groups: list[tuple[dict[str, None], list[Figure]]] = []
    for shown in figures:
        if not groups or groups[-1][0].keys().isdisjoint(shown["values"]):
            groups.append(({}, []))
        groups[-1][0].update(dict.fromkeys(shown["values"]))
        groups[-1][1].append(shown)
    found = []
    for metrics, own in groups:
        lines = [["", *(TITLES.get(metric, metric) for metric in metrics), "n", "seeds"]]
        for shown in own:
            n = "-" if shown["n"] is None else f"{shown['n']:,}"
            seeds = ", ".join(map(str, shown["seeds"])) or "-"
            lines.append([shown["name"], *(cell(shown, metric) for metric in metrics), n, seeds])
        found.append(lines)
    return found


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """The table as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """The table as Markdown; its first line is the heading."""
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])
