"""What all verbs show their results with: tables of at most 100 columns, sentences, and progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cdmpp.files import seconds_text

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
        best, untuned = map(seconds_text, (state.latency_s, state.untuned_s))
        gain, costs = state.curve.gain(), state.costs
        expected = "" if gain is None else f", next minute -{100 * gain:.1f} %"
        energy = "" if costs.energy_j is None else f", {costs.energy_j:.0f} J"
        text = f"best {best}, untuned {untuned}, {costs.wall_s:.0f} s ({costs.cpu_s:.0f} of CPUs{energy}), "
        text += f"{costs.measurements} measured, "
        text += f"{costs.dropped} dropped{expected}"
        self.update(state.costs.trials, state.objective.trials, text)
