"""What all verbs share: their options, each described once (those of settings come from the fields of their class), and what
they show results with: tables of at most 100 columns, sentences, and progress."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cdmpp.errors import CdmppError
from cdmpp.files import seconds_text

Namespace = argparse.Namespace
Settings = TypeVar("Settings")
#: Name of a verb -> what adds its options and what runs it, with consoles for results and for progress; ``--json`` writes
#: what that returns. Its docstring is the verb's help: when to use it, and two examples.
Verbs = dict[str, tuple[Callable[["Parser"], None], Callable[[Namespace, Console, Console], Any]]]

NETWORK = "zoo name (name@b4, name@s160), .onnx or .pt2 file"
NETWORKS = f"{NETWORK}, or 'zoo' for all"
_DURATION = re.compile(r"(?:([0-9.]+)h)?(?:([0-9.]+)m(?:in)?)?(?:([0-9.]+)s?)?")


class Parser(argparse.ArgumentParser):
    """Bad arguments are a :class:`CdmppError`, so that they are one line as all bad input is."""

    def error(self, message: str) -> Any:
        raise CdmppError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True)
class Option:
    """What the help says of an option. Without a ``name`` it is the key, less a unit as in ``_s``; without a ``type`` the
    default's, or the field annotation's. ``aliases`` are former names, not shown; ``more`` is for ``add_argument``."""

    help: str
    metavar: str | None = None
    name: str | None = None
    aliases: tuple[str, ...] = ()
    type: Callable[[str], Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def _flag(help: str) -> Option:
    return Option(help, more={"action": "store_true"})


def auto_or_number(text: str) -> int | str:
    """A whole number, or ``auto``."""
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"takes auto or a whole number, not {text!r}")


def duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m`` or ``1h30m``."""
    match = _DURATION.fullmatch(text.strip().lower())
    try:
        if match is None or not match[0]:
            raise ValueError
        hours, minutes, seconds = (float(part or 0.0) for part in match.groups())
    except ValueError:
        raise CdmppError(f"{text!r} is no duration: expected such as 90s, 10m or 1h30m") from None
    return 3600 * hours + 60 * minutes + seconds


def fraction(text: str) -> float:
    """0.01 of ``0.01`` or ``1%``."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError as err:
        raise CdmppError(f"{text!r} is no fraction: expected such as 0.01 or 1%") from err


#: Options that several verbs have, and all that are fields of settings: a field has an option if it is named here.
OPTIONS = {
    # of several verbs
    "out": Option("where results go", "DIR"),
    "data": Option("dataset folders, or folders of them", "DIR", more={"nargs": "+"}),
    "device": Option("device name, such as this-cpu@1 or h200 (see cdmpp devices)", "D"),
    "device_files": Option("YAML files of further devices", "FILE", "--devices", more={"nargs": "+", "default": ()}),
    "predictor": Option("a run or predictor folder (default: the one that ships)", "DIR"),
    "config": Option("configs/*.yaml", "FILE"),
    "split": Option("by_network, by_task:seed=1, ..., or all", "SPEC"),
    "resume": _flag("continue the run in --out; nothing is done twice"),
    "seed": Option("seed of all random choices", "N"),
    "limit": Option("at most N programs, spread evenly over the tasks", "N"),
    "trials": Option("number of trials, those of earlier runs included", "N"),
    # building and measuring
    "programs_per_task": Option("programs (schedules) of each task", "N"),
    "invalid_per_task": Option("programs of each task that cannot run, recorded as invalid", "N"),
    "search_fraction": Option("fraction of the programs found by evolutionary search", "F"),
    "unscheduled": _flag("measure each task unscheduled, as an untuned network runs it"),
    "workers": Option("programs measured in parallel, each on its own cores or SMs", "N"),
    "degree": Option("programs measured in parallel", name="--workers", aliases=("--degree",)),
    "builders": Option("building processes (default: one per core)", "N", aliases=("--compilers",)),
    "build_timeout_s": Option("CPU seconds allowed for building one program", "S"),
    "run_timeout_s": Option("seconds allowed for one run", "S"),
    "task_seconds": Option("seconds spent on one task", "S"),
    "check_per_task": Option("programs of a task whose output is compared with a reference", "N", aliases=("--check",)),
    "from_source": _flag("compile here, although the bundle has cubins"),
    "overlap": Option("build, load and measure one program at a time"),
    "object_cache": Option("cache of compiled programs", "DIR"),
    "max_seconds": Option("stop after a time such as 10m (go on with --resume)", "T", "--budget", ("--max-seconds",), duration),
    "rpc": Option("measure on boards of this TVM RPC tracker; programs are built here", "HOST:PORT"),
    "key": Option("with --rpc: the key that the boards are registered with", "KEY"),
    "ray": Option("build and measure on a Ray cluster: its head (HOST:PORT), or local", "ADDRESS|local"),
    # tuning
    "compile": Option("compile N candidates, measure the best by its instructions (default: 4 on x86 CPUs)", "N"),
    "budget_s": Option("stop after a time such as 10m, earlier runs included", "T", type=duration),
    "cpu_budget_s": Option("stop after this CPU time of search, building and measuring", "T", type=duration),
    "energy_budget_j": Option("stop after J joules, where the device counts them", "J", "--energy-budget"),
    "max_measurements": Option("stop after N candidates were built and measured", "N"),
    "least_gain_per_minute": Option(
        "stop when the expected gain of another minute is below this, such as 0.5%%",
        "F",
        "--stop-when-gain-per-minute-below",
        type=fraction,
    ),
    "cost_model": Option("what ranks candidates", more={"choices": ("cdmpp", "xgb", "random")}),
    "trim": Option("coverage of the intervals that decide which candidates are dropped unmeasured", "C"),
    "validity": Option(
        "skip candidates that are unlikely to run: by the model that ships (on GPUs), or one learned from a dataset's failures "
        "('online': from this tuning alone; 'none': measure every proposal)",
        "DIR",
    ),
    "batch": Option("candidates per round", "N"),
    "search": Option("cdmpp's own, or metaschedule: TVM's evolutionary search"),
    "population": Option("programs per generation of the evolutionary search", "N"),
    "generations": Option("generations of the evolutionary search", "N"),
    "shards": Option("tasks tuned at the same time, each on its own share; auto: as many as fit"),
}


def add(parser: argparse._ActionsContainer, *keys: str, **changes: Any) -> None:
    """Add options by their keys in :data:`OPTIONS`, or a verb's own; all get ``changes``, arguments of ``add_argument``."""
    for key in keys:
        option = OPTIONS.get(key, Option(""))
        given: dict[str, Any] = {"metavar": option.metavar, "help": option.help, "type": option.type}
        given |= {**option.more, **changes, "dest": key}
        default = given.get("default")
        if given.get("action") == "store_true":
            del given["metavar"], given["type"]
        elif isinstance(default, int | float | str):
            given["type"] = given["type"] or type(default)
            given["help"] += "" if "(default" in given["help"] or default == "" else " (default: %(default)s)"
        parser.add_argument(option.name or "--" + key.removesuffix("_s").replace("_", "-"), **given)
        hide(parser, *option.aliases, **given)


def hide(parser: argparse._ActionsContainer, *names: str, **given: Any) -> None:
    """Former names of an option: taken, not shown."""
    for name in names:
        parser.add_argument(name, **{**given, "help": argparse.SUPPRESS, "required": False})


def add_settings(parser: argparse.ArgumentParser, *classes: type, **helps: str) -> None:
    """An option for each field of settings that is in :data:`OPTIONS`, with its type and default; of a field that is True by
    default the option makes it False. ``helps`` are texts in place of the table's."""
    for cls in classes:
        for own in fields(cls):
            option = OPTIONS.get(own.name)
            if option is None:
                continue
            kinds = str(own.type).replace(" ", "").split("|")
            given: dict[str, Any] = {"help": helps.get(own.name, option.help)}
            if own.default is True:
                name = "--no-" + own.name.replace("_", "-")
                parser.add_argument(name, dest=f"no_{own.name}", action="store_true", **given)
                continue
            given |= {"required": True} if own.default is MISSING else {"default": own.default}
            if {"int", "str"} <= set(kinds):
                given |= {"type": auto_or_number, "metavar": "auto|N"}
            elif any(kind.startswith("Sequence") for kind in kinds):
                given["nargs"] = "+"
            else:
                given["type"] = option.type or (int if "int" in kinds else float if "float" in kinds else str)
            add(parser, own.name, **given)


def settings(args: Namespace, cls: type[Settings], **given: Any) -> Settings:
    """Settings as the options say; ``given`` are further fields, or other values."""
    values: dict[str, Any] = {}
    for own in fields(cls):  # type: ignore[arg-type]
        if own.name in OPTIONS:
            if hasattr(args, own.name):
                values[own.name] = getattr(args, own.name)
            elif hasattr(args, f"no_{own.name}"):
                values[own.name] = not getattr(args, f"no_{own.name}")
    return cls(**{**values, **given})


def given(args: Namespace, add_options: Callable[[Parser], None]) -> dict[str, str]:
    """Options of a verb with another value than their default: key -> name."""
    defaults = Parser()
    add_options(defaults)
    options = reversed([action for action in defaults._actions if action.option_strings])  # former names count least
    return {one.dest: one.option_strings[0] for one in options if getattr(args, one.dest, one.default) != one.default}


def refuse(args: Namespace, add_options: Callable[[Parser], None], taken: str, why: str) -> None:
    """CdmppError for a given option that is not ``taken`` here, rather than ignore it."""
    for key, name in given(args, add_options).items():
        if key not in taken.split():
            raise CdmppError(f"{name} {why}")


def networks_of(names: Iterable[str]) -> list[str]:
    """Names of networks, those of the zoo in place of ``zoo``."""
    from cdmpp.program.zoo import zoo_networks

    return [network for name in names for network in (zoo_networks() if name == "zoo" else [name])]


#: Columns of what is written to a file or a pipe.
_WIDTH = 100
#: Text of so few characters stays on one line where a table is wider than the terminal.
_WORD = 12
#: Seconds between two lines of progress where there is no terminal.
_EVERY_S = 30.0


def console(*, err: bool = False, quiet: bool = False) -> Console:
    """Of standard output, or of standard error; a quiet one shows nothing."""
    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH
    return Console(stderr=err, width=width, highlight=False, quiet=quiet)


def say(console: Console, text: str) -> None:
    """A sentence, which a terminal may wrap and a file holds as one line."""
    console.print(text, soft_wrap=not console.is_terminal)


def warn(console: Console, *notes: str) -> None:
    """Sentences about what a result rests on; empty ones are left out."""
    for note in filter(None, notes):
        console.print(note, style="yellow", markup=False, soft_wrap=not console.is_terminal)


def show_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], total: bool = False
) -> None:
    """Columns whose names begin with ``<`` are text, the others numbers; a ``?`` before that leaves a column out where every
    row has ``-``. The last row may be a total."""
    table, cells = Table(title=title), list(rows)
    shown = [i for i, name in enumerate(columns) if not name.startswith("?") or any(row[i] != "-" for row in cells)]
    for number in shown:
        name = columns[number].removeprefix("?")
        left = name.startswith("<")
        whole = not left or all(len(row[number]) <= _WORD for row in cells)
        justify: Literal["left", "right"] = "left" if left else "right"
        table.add_column(name.removeprefix("<"), justify=justify, overflow="fold", no_wrap=whole)
    for number, row in enumerate(cells, 1):
        table.add_row(*(row[i] for i in shown), style="bold" if total and number == len(cells) else None)
    console.print(table)


def counts_text(counts: Mapping[str, int]) -> str:
    """Such as ``3 build_error, 1 run_timeout``."""
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def interval_text(low_s: float | None, high_s: float | None) -> str:
    return "-" if low_s is None or high_s is None else f"{seconds_text(low_s)} to {seconds_text(high_s)}"


def number(value: Any, form: str = "g") -> str:
    return "-" if value is None else format(value, form)


class Bar:
    """Progress of a run: a bar on a terminal, elsewhere a line every half minute."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        bar = TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn()
        beside = TimeElapsedColumn(), TimeRemainingColumn(compact=True), TextColumn("{task.fields[text]}")
        self._progress = Progress(*bar, *beside, console=console, transient=True)
        self._task: Any = None
        self._first: tuple[float, int] | None = None
        self._last_line_s = time.monotonic()
        self._best = float("inf")

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._progress.stop()

    def say(self, line: str) -> None:
        """A line of news above the bar."""
        say(self._console, line)

    def update(self, done: int, total: int, text: str = "") -> None:
        """`done` of `total` are done; there is more to say about it."""
        now_s = time.monotonic()
        self._first = self._first or (now_s, done)
        if self._console.is_terminal:
            if self._task is None:
                self._progress.start()
                self._task = self._progress.add_task(self._what, text=text)
            self._progress.update(self._task, completed=done, total=total, text=text)
        elif now_s - self._last_line_s >= _EVERY_S:
            self._last_line_s = now_s
            rate = (done - self._first[1]) / max(now_s - self._first[0], 1e-9)
            parts = [f"{self._what}: {done} of {total}", f"{rate:.1f}/s", *([text] if text else [])]
            self.say(", ".join(parts))

    def follow(self, state: Any) -> None:
        """Take the progress of a profiler."""
        failed = f"failures: {counts_text(state.failures)}" if state.failures else ""
        self.update(state.done, state.total, failed)

    def epoch(self, line: Mapping[str, Any]) -> None:
        """Take a line of a training's history; one that is the best so far is news."""
        mape, text = line.get("valid_mape"), f"training loss {number(line.get('train_loss'), '.4f')}"
        if mape is not None:
            text += f", validation MAPE {percent(mape)}"
            if mape < self._best:
                self._best = mape
                self.say(f"epoch {int(line['epoch']):3d}  {text}  best so far")
            text += f", best {percent(self._best)}"
        self.update(int(line["epoch"]), int(line["epochs"]), text)

    def tuning(self, state: Any) -> None:
        """Take the progress of a tuning."""
        from cdmpp.tuner.config import curve_gain

        best, untuned = map(seconds_text, (state.latency_s, state.untuned_s))
        gain, costs = curve_gain(state.curve), state.costs
        expected = "" if gain is None else f", next minute -{100 * gain:.1f} %"
        energy = "" if costs.energy_j is None else f", {costs.energy_j:.0f} J"
        text = f"best {best}, untuned {untuned}, {costs.wall_s:.0f} s ({costs.cpu_s:.0f} of CPUs{energy}), "
        text += f"{costs.measurements} measured, {costs.dropped} dropped{expected}"
        self.update(state.costs.trials, state.objective.trials, text)
