"""The figures of a report, each as the bytes of a PNG.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; markers and line styles differ besides,
so that a print in black and white can be read.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import PredictorError
from cdmpp.report.content import seconds_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours (without yellow, which is too pale on white) with a marker each.
_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "^"),
    ("#009E73", "s"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
)
_OTHERS = ("#777777", "x")
_BLUE, _RED = _STYLES[0][0], _STYLES[1][0]

_DPI = 160

#: Upper ends of the bars of regrets, fractions; a last bar takes the rest.
_REGRETS = (0.0, 0.05, 0.10, 0.20, 0.50, 1.0, 3.0)


def scatter_figure(records: pd.DataFrame, noise_floor: float | None) -> bytes:
    """Predicted against measured latency, and their ratio, both logarithmic, by family.

    Parameters
    ----------
    records
        Columns ``latency_s``, ``predicted_s``, ``family``.
    noise_floor
        Fraction; drawn as a band where known.
    """
    figure = _figure(11.0, 5.2)
    left, right = figure.subplots(1, 2)
    low = 0.8 * float(records[["latency_s", "predicted_s"]].min().min())
    high = 1.25 * float(records[["latency_s", "predicted_s"]].max().max())
    line = np.asarray([low, high])
    for axes, identity in ((left, line), (right, np.ones(2))):
        axes.fill_between(line, 0.8 * identity, 1.2 * identity, color="#dddddd", label="±20 %", zorder=0)
        if noise_floor:
            band = ((1 - noise_floor) * identity, (1 + noise_floor) * identity)
            label = f"noise floor ±{100 * noise_floor:.1f} %"
            # its edge makes a floor below the width of a line visible
            axes.fill_between(line, *band, color="#888888", linewidth=3, label=label, zorder=1)
        axes.plot(line, identity, color="black", linewidth=0.8, label="exact", zorder=2)
    # Many records hide each other: smaller and fainter the more there are.
    size, alpha = (14, 0.8) if len(records) < 500 else (8, 0.5)
    for name, colour, marker, rows in _by_family(records):
        for axes, value in (
            (left, rows["predicted_s"]),
            (right, rows["predicted_s"] / rows["latency_s"]),
        ):
            axes.scatter(
                rows["latency_s"], value, s=size, alpha=alpha, color=colour, marker=marker, linewidths=0.7,
                label=f"{name} ({len(rows)})", zorder=3,
            )  # fmt: skip
    for axes in (left, right):
        _log_seconds(axes, "x")
        axes.set_xlim(low, high)
        axes.set_xlabel("measured latency")
        axes.grid(color="#eeeeee", zorder=-1)
    _log_seconds(left, "y")
    left.set(ylim=(low, high), ylabel="predicted latency", title="Predicted against measured")
    _log_ratio(right, records["predicted_s"] / records["latency_s"])
    right.set(ylabel="predicted / measured", title="How many times too slow or too fast")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return _png(figure)


def history_figure(history: Sequence[Mapping[str, Any]], noise_floor: float | None) -> bytes:
    """Training loss and validation MAPE against epoch and wall time."""
    figure = _figure(11.0, 5.0)
    panels: Any = figure.subplots(2, 2, sharey="row", sharex="col")
    epochs = np.asarray([line["epoch"] for line in history])
    elapsed, unit = np.cumsum([line["elapsed_s"] for line in history]), "seconds"
    if elapsed[-1] >= 300:
        elapsed, unit = elapsed / 60, "minutes"
    mapes = np.asarray([100 * line["valid_mape"] for line in history])
    best = int(mapes.argmin())
    for column, (x, label) in enumerate(((epochs, "epoch"), (elapsed, f"training time in {unit}"))):
        loss, error = panels[0][column], panels[1][column]
        loss.plot(x, [line["train_loss"] for line in history], color=_BLUE, marker=".", linewidth=1.2)
        error.plot(x, mapes, color=_RED, marker=".", linestyle="--", linewidth=1.2)
        best_label = f"best: {mapes[best]:.1f} % (epoch {epochs[best]})"
        error.plot(x[best], mapes[best], "o", color="black", markerfacecolor="none", label=best_label)
        if noise_floor:
            floor_label = f"noise floor {100 * noise_floor:.1f} %"
            error.axhline(100 * noise_floor, color="#777777", linestyle=":", label=floor_label)
        error.set_xlabel(label)
        for axes in (loss, error):
            axes.grid(color="#eeeeee")
    panels[0][0].set_ylabel("training loss")
    panels[1][0].set(ylabel="validation MAPE in %")
    _log_numbers(panels[1][0])
    panels[1][0].legend(frameon=False, fontsize=9)
    return _png(figure)


def ranking_figure(ranking: Sequence[Mapping[str, Any]]) -> bytes:
    """How many tasks have which top-1 regret and which pairwise accuracy."""
    figure = _figure(11.0, 3.8)
    left, right = figure.subplots(1, 2)
    regrets = np.asarray([row["top1_regret"] for row in ranking])
    upper = np.asarray([*_REGRETS, np.inf])
    bars = np.bincount(np.searchsorted(upper, regrets - 1e-12), minlength=len(upper))
    names = ["none", *(f"to {100 * r:g} %" for r in _REGRETS[1:]), "more"]
    drawn = left.bar(names, bars, color=_BLUE, edgecolor="black", linewidth=0.5)
    left.bar_label(drawn, fontsize=8)
    left.tick_params(axis="x", labelsize=8)
    left.set(
        xlabel="top-1 regret (slower than the task's best by)",
        ylabel="tasks",
        title=f"Top-1 regret by task, median {100 * np.median(regrets):.1f} %",
    )
    accuracy = np.asarray([r["pairwise_accuracy"] for r in ranking if r["pairwise_accuracy"] is not None])
    if len(accuracy):
        right.hist(100 * accuracy, bins=np.arange(0, 101, 5), color=_RED, edgecolor="black", linewidth=0.5)
        middle = 100 * float(np.median(accuracy))
        right.axvline(middle, color="black", label=f"median {middle:.1f} %")
        right.axvline(50, color="black", linestyle=":", label="a coin's 50 %")
        right.legend(frameon=False, fontsize=9, loc="upper left")
    right.set(
        xlim=(0, 100), xlabel="pairwise accuracy in %", ylabel="tasks", title="Pairwise accuracy by task"
    )
    return _png(figure)


def coverage_figure(coverage: Sequence[Mapping[str, Any]]) -> bytes:
    """Coverage reached against the coverage asked for, and the width of the intervals."""
    figure = _figure(11.0, 4.2)
    left, right = figure.subplots(1, 2)
    nominal = [100 * entry["coverage"] for entry in coverage]
    left.plot([0, 100], [0, 100], color="black", linewidth=0.8, label="as promised")
    covered = [100 * entry["covered"] for entry in coverage]
    left.plot(nominal, covered, color=_BLUE, marker="o", label="of the records")
    by_task = [100 * entry["covered_by_task"] for entry in coverage]
    left.plot(nominal, by_task, color=_RED, marker="^", linestyle="--", label="every task weighing the same")
    low = min(45.0, *(value - 5 for value in [*covered, *by_task]))
    left.set(
        xlim=(45, 100),
        ylim=(max(0.0, low), 102),
        xlabel="coverage asked for in %",
        ylabel="coverage reached in %",
        title="Below the line: intervals too narrow",
    )
    left.legend(frameon=False, fontsize=9, loc="upper left")
    right.plot(nominal, [entry["width"] for entry in coverage], color=_BLUE, marker="o")
    right.set(xlabel="coverage asked for in %", ylabel="high / low", title="Median width")
    _log_numbers(right)
    for axes in (left, right):
        axes.grid(color="#eeeeee")
    return _png(figure)


def _by_family(records: pd.DataFrame) -> list[tuple[str, str, str, pd.DataFrame]]:
    """Name, colour, marker and records of the most frequent families; the rest together, first."""
    families = records["family"].value_counts().index.tolist()
    shown = families[: len(_STYLES)]
    rest = records[~records["family"].isin(shown)]
    styled = [
        (name, *style, records[records["family"] == name])
        for name, style in zip(shown, _STYLES, strict=False)
    ]
    return [*([("other families", *_OTHERS, rest)] if len(rest) else []), *styled]


def _log_seconds(axes: Axes, axis: str) -> None:
    from matplotlib.ticker import NullFormatter

    axes.set_xscale("log") if axis == "x" else axes.set_yscale("log")
    ticks = axes.xaxis if axis == "x" else axes.yaxis
    ticks.set_major_formatter(lambda value, _: seconds_text(value))
    ticks.set_minor_formatter(NullFormatter())


def _log_numbers(axes: Axes) -> None:
    """A logarithmic y axis with ticks at 1, 2, 5, 10 and so on, or finer ones where it spans less."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low > 8 else tuple(range(1, 10))))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _log_ratio(axes: Axes, ratios: pd.Series) -> None:
    from matplotlib.ticker import NullFormatter

    reach = 1.2 * float(np.exp(np.abs(np.log(ratios)).max()))
    axes.set_yscale("log")
    axes.set_ylim(1 / max(reach, 2.0), max(reach, 2.0))
    # 1.2 and 1 would be one blot where the axis spans decades
    steps = [s for s in (1.2, 2, 5, 10, 100, 1000) if s <= reach and (s > 1.2 or reach < 4)]
    axes.set_yticks([*(1 / s for s in steps[::-1]), 1, *steps])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise PredictorError(
            "a report draws with matplotlib, which is not installed: pip install 'cdmpp[report]'"
        ) from err
    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without a date and a version in it, the same numbers give the same file.
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()
