"""The figures of a report, as caption -> PNG. Each has one panel, so that a narrow page can stack them.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; markers and line styles differ too.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import PredictorError
from cdmpp.files import seconds_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

#: Okabe and Ito's colours (without yellow, which is too pale on white) with a marker each.
_STYLES = (("#0072B2", "o"), ("#D55E00", "^"), ("#009E73", "s"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))
#: Name for the families that have no style of their own.
_OTHERS = "other families"
_BLUE, _RED = _STYLES[0][0], _STYLES[1][0]

#: Hatches, used along with the colours; the most operators that are drawn.
_HATCHES, _BARS = ("", "///", "...", "xx", "\\\\", "++"), 20
#: Upper ends of the bins of the regret histogram, as fractions; a last bin takes the rest.
_REGRETS = (0.0, 0.05, 0.10, 0.20, 0.50, 1.0, 3.0)


def scatter_figures(records: pd.DataFrame, noise_floor: float | None) -> dict[str, bytes]:
    """Draw predicted against measured latency, and their ratio, both logarithmic, by family (columns ``latency_s``,
    ``predicted_s``, ``family``); the noise floor, a fraction, is drawn as a band if known."""
    low = 0.8 * float(records[["latency_s", "predicted_s"]].min().min())
    high = 1.25 * float(records[["latency_s", "predicted_s"]].max().max())
    ratio = records["predicted_s"] / records["latency_s"]
    reach = max(2.0, 1.2 * float(np.exp(np.abs(np.log(ratio)).max())))
    latency = _panel("Predicted against measured", "measured latency", "predicted latency")
    times = _panel("How many times too slow or too fast", "measured latency", "predicted / measured")
    line = np.asarray([low, high])
    for axes, values, exact in ((latency, records["predicted_s"], line), (times, ratio, np.ones(2))):
        axes.fill_between(line, 0.8 * exact, 1.2 * exact, color="#dddddd", label="±20 %", zorder=0)
        if noise_floor:
            band = ((1 - noise_floor) * exact, (1 + noise_floor) * exact)
            label = f"noise floor ±{100 * noise_floor:.1f} %"
            # the edge line keeps a band visible that is narrower than a line
            axes.fill_between(line, *band, color="#888888", linewidth=3, label=label, zorder=1)
        axes.plot(line, exact, color="black", linewidth=0.8, label="exact", zorder=2)
        _scatter_by_family(axes, records, values)
        axes.set(xscale="log", xlim=(low, high))
        _in_seconds(axes.xaxis)
        axes.figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    latency.set(yscale="log", ylim=(low, high))
    _in_seconds(latency.yaxis)
    times.set_ylim(1 / reach, reach)
    _log_numbers(times)
    return {
        "Predicted against measured latency, by family": _png(latency),
        "Predicted over measured latency against measured, by family": _png(times),
    }


def history_figures(history: Sequence[Mapping[str, Any]], noise_floor: float | None) -> dict[str, bytes]:
    """Draw training loss and validation MAPE against the epoch."""
    epochs = [line["epoch"] for line in history]
    mapes = [100 * line["valid_mape"] for line in history]
    best = int(np.argmin(mapes))
    loss = _panel("Training loss", "epoch", "loss")
    loss.plot(epochs, [line["train_loss"] for line in history], color=_BLUE, marker=".", linewidth=1.2)
    error = _panel("Validation MAPE", "epoch", "MAPE in %")
    error.plot(epochs, mapes, color=_RED, marker=".", linestyle="--", linewidth=1.2)
    best_label = f"best: {mapes[best]:.1f} % (epoch {epochs[best]})"
    error.plot(epochs[best], mapes[best], "o", color="black", markerfacecolor="none", label=best_label)
    if noise_floor:
        floor_label = f"noise floor {100 * noise_floor:.1f} %"
        error.axhline(100 * noise_floor, color="#777777", linestyle=":", label=floor_label)
    error.legend(frameon=False, fontsize=9)
    _log_numbers(error)
    for axes in (loss, error):
        axes.locator_params(axis="x", integer=True)
    return {"Training loss against epoch": _png(loss), "Validation MAPE against epoch": _png(error)}


def ranking_figures(ranking: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Draw histograms of top-1 regret and pairwise accuracy over the tasks."""
    regrets = np.asarray([row["top1_regret"] for row in ranking])
    upper = np.asarray([*_REGRETS, np.inf])
    bars = np.bincount(np.searchsorted(upper, regrets - 1e-12), minlength=len(upper))
    names = ["none", *(f"to {100 * r:g} %" for r in _REGRETS[1:]), "more"]
    title = f"Top-1 regret by task, median {100 * np.median(regrets):.1f} %"
    regret = _panel(title, "slower than the task's best by", "tasks")
    drawn = regret.bar(names, bars, color=_BLUE, edgecolor="black", linewidth=0.5)
    regret.bar_label(drawn, fontsize=8)
    regret.tick_params(axis="x", labelsize=8)

    pairwise = _panel("Pairwise accuracy by task", "pairwise accuracy in %", "tasks")
    accuracy = np.asarray([r["pairwise_accuracy"] for r in ranking if r["pairwise_accuracy"] is not None])
    if len(accuracy):
        pairwise.hist(100 * accuracy, bins=list(range(0, 101, 5)), color=_RED, edgecolor="black", linewidth=0.5)
        middle = 100 * float(np.median(accuracy))
        pairwise.axvline(middle, color="black", label=f"median {middle:.1f} %")
        pairwise.axvline(50, color="black", linestyle=":", label="a coin's 50 %")
        pairwise.legend(frameon=False, fontsize=9, loc="upper left")
    pairwise.set_xlim(0, 100)
    return {
        "Histogram of top-1 regret over the tasks": _png(regret),
        "Histogram of pairwise accuracy over the tasks": _png(pairwise),
    }


def coverage_figures(coverage: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Draw the coverage reached, and the width of the intervals, against the coverage asked for."""
    nominal = [100 * entry["coverage"] for entry in coverage]
    covered = [100 * entry["covered"] for entry in coverage]
    by_task = [100 * entry["covered_by_task"] for entry in coverage]
    asked = "coverage asked for in %"
    reached = _panel("Below the line: intervals too narrow", asked, "coverage reached in %")
    reached.plot([0, 100], [0, 100], color="black", linewidth=0.8, label="as promised")
    reached.plot(nominal, covered, color=_BLUE, marker="o", label="of the records")
    reached.plot(nominal, by_task, color=_RED, marker="^", linestyle="--", label="every task weighing the same")
    low = max(0.0, min(45.0, *(value - 5 for value in [*covered, *by_task])))
    reached.set(xlim=(45, 100), ylim=(low, 102))
    reached.legend(frameon=False, fontsize=9, loc="upper left")

    width = _panel("Median width", asked, "high / low")
    width.plot(nominal, [entry["width"] for entry in coverage], color=_BLUE, marker="o")
    _log_numbers(width)
    return {
        "Coverage reached against coverage asked for": _png(reached),
        "Width of intervals against coverage asked for": _png(width),
    }


def bound_figures(rows: Sequence[Mapping[str, Any]], title: str) -> dict[str, bytes]:
    """Draw the seconds ``together`` of operators (``label``), the first and longest on top, coloured by their ``bound``."""
    shown = rows[:_BARS]
    axes = _panel(title, "", "")
    figure: Any = axes.figure
    figure.set_size_inches(7.2, 1.3 + 0.3 * len(shown))
    bounds = list(dict.fromkeys(row["bound"] for row in shown))
    for (colour, _), hatch, bound in zip(_STYLES * 2, _HATCHES * 2, bounds, strict=False):
        own = {i: row["together"] for i, row in enumerate(shown) if row["bound"] == bound}
        axes.barh(list(own), list(own.values()), color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=bound)
    axes.set_yticks(range(len(shown)), [row["label"] for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: seconds_text(value) if value else "0")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return {"Time of each operator by what bounds it": _png(axes)}


def _scatter_by_family(axes: Axes, records: pd.DataFrame, values: pd.Series) -> None:
    """Draw values against measured latency, with one style per family; rarer families share one and are drawn first."""
    # Many points hide each other, so they are smaller and fainter if there are many.
    size, alpha = (14, 0.8) if len(records) < 500 else (8, 0.5)
    styles = dict(zip(records["family"].value_counts().index, _STYLES, strict=False))
    names = records["family"].where(records["family"].isin(styles), _OTHERS)
    for name in sorted(names.unique(), key=[_OTHERS, *styles].index):
        rows = names == name
        colour, marker = styles.get(name, ("#777777", "x"))
        axes.scatter(
            records["latency_s"][rows], values[rows], s=size, alpha=alpha, color=colour, marker=marker,
            linewidths=0.7, label=f"{name} ({rows.sum()})", zorder=3,
        )  # fmt: skip


def _in_seconds(axis: Axis) -> None:
    from matplotlib.ticker import NullFormatter

    axis.set_major_formatter(lambda value, _: seconds_text(value))
    axis.set_minor_formatter(NullFormatter())


def _log_numbers(axes: Axes) -> None:
    """Make the y axis logarithmic, with ticks at 1, 2, 5, 10 and so on, or finer ones if it spans less."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low > 8 else tuple(range(1, 10))))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _panel(title: str, xlabel: str, ylabel: str) -> Axes:
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise PredictorError("a report draws with matplotlib, which is not installed: pip install 'cdmpp[report]'") from err
    axes = Figure(figsize=(5.4, 4.3), layout="constrained").subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    return axes


def _png(axes: Axes) -> bytes:
    buffer = io.BytesIO()
    # The file contains no date or version, so the same numbers give the same file.
    figure: Any = axes.figure
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()
