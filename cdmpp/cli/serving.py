"""``cdmpp latency`` of a language model's configuration, or of a list of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cdmpp.cli.options import Namespace, Parser, add, interval_text, number, percent, say, show_table, warn
from cdmpp.files import seconds_text

if TYPE_CHECKING:
    from cdmpp.endtoend.serving import ServingReport


def add_options(sub: Parser) -> None:
    """What a serving step is of; shown as a group of its own."""
    group = sub.add_argument_group("language models (config.json or a name) and lists of operators")
    dtype = "data type of weights and products, such as bf16 or fp8 (default: bf16, on CPUs fp32)"
    add(group, "dtype", metavar="T", default=None, type=str, help=dtype)
    add(group, "kv_dtype", metavar="T", default="bf16", help="data type of keys and values")
    add(group, "framework", default="best", metavar="F", help="serving engine: best of all, vllm, sglang, trtllm")
    add(group, "phase", choices=("prefill", "decode"), default="prefill", help="kind of step")
    add(group, "batch", default=1, help="number of sequences")
    add(group, "seq", default=512, metavar="N", help="new tokens of each sequence in a prefill")
    past = "tokens that each sequence has already; 0 in a decode step alone: as many as --seq"
    add(group, "past", default=0, metavar="N", help=past)
    add(group, "generate", default=0, metavar="N", help="predict a prefill and N tokens generated after it")
    add(group, "tp", default=1, metavar="N", help="tensor parallelism: devices that each layer is split over")
    explain = "what bounds each operator, the likely kernel, and the nearest operator that was measured"
    add(group, "explain", action="store_true", help=explain)
    add(group, "html", metavar="FILE", help="write the result as a page with a picture")


def run(args: Namespace, devices: Sequence[str], console: Console, errors: Console) -> Any:
    """Predict, show and give as JSON values; one device's numbers also stand on top."""
    from cdmpp.endtoend.latency import read_prices
    from cdmpp.endtoend.serving import Serving, predict_operators, predict_serving
    from cdmpp.predictor.operators import load_operator_model

    with errors.status("predicting operators"):
        if args.network.lower().endswith((".parquet", ".csv")):
            model_of = partial(load_operator_model, args.predictor)
            reports = predict_operators(args.network, devices, model_of, dtype=args.dtype, framework=args.framework)
        else:
            model = load_operator_model(args.predictor)
            given = {name: getattr(args, name) for name in ("kv_dtype", "phase", "batch", "seq", "past")}
            serving = Serving(dtype=args.dtype or "bfloat16", generate=args.generate, tp=args.tp, **given)
            prices = None if args.price is None else read_prices(args.price)
            reports = predict_serving(args.network, devices, model, serving, framework=args.framework, prices=prices)
    alone = len(reports) == 1 or reports[0].latency_s is None  # the same operators are known on all devices
    for report in reports if alone else ():
        _show(console, report, args.explain)
    if not alone:
        more = {
            "?tokens/s": lambda report: number(report.tokens_per_s, ".4g"),
            "?a million tokens": lambda report: number(report.price_per_million_tokens, ".4g"),
        }
        dtypes = " and ".join(dict.fromkeys(report.dtype for report in reports))
        title = f"{reports[0].network} on {len(reports)} devices, {dtypes}"
        show_ranked(console, title, reports, more)
    if args.html is not None:
        from cdmpp.report import write_serving

        write_serving(reports, args.html)
        say(console, f"Written to {args.html}.")
    noted = reports[-1:] if args.shares else reports
    warn(console, *dict.fromkeys(note for report in noted for note in report.notes))
    ranked = sorted((one for one in reports if one.latency_s is not None), key=lambda report: report.latency_s or 0.0)
    rows = [asdict(report) for report in reports]
    top = rows[0] if len(rows) == 1 else {"network": reports[0].network}
    return {**top, "by_latency": [report.device for report in ranked], "reports": rows}


def _show(console: Console, report: ServingReport, explain: bool) -> None:
    """What the operators of each name take on one device."""
    found = report.by_name()
    rows = [
        [row["phase"], row["name"], f"{row['runs']:g}", seconds_text(row["together"] / max(row["runs"], 1e-9)),
         seconds_text(row["together"]), percent(row["share"])]
        for row in found
    ]  # fmt: skip
    title = f"{report.network} on {report.device}, {report.dtype}, kernels of {report.framework}"
    headings = ["<phase", "<operator", "runs", "each", "together", "part"]
    if explain:
        headings = [*headings[:2], "each", "part", "<bound by", "for", "cores", "learned"]
        rows = [[*cells[:2], cells[3], cells[5]] for cells in rows]
        for cells, row in zip(rows, found, strict=True):
            cells += (row["bound"], percent(row["part"]), percent(row["full"]), number(row["correction"], ".2f"))
    show_table(console, title, headings, rows)
    if explain:
        of_name = [
            (row["name"], *(row[key] or "-" for key in ("kernel", "nearest", "on")), number(row["far"], ".2f")) for row in found
        ]
        columns = ("<operator", "?<likely kernel", "<nearest measured", "<on", "far")
        show_table(console, "nearest operators measured, how far in standard deviations", columns, of_name)
    total = f"[bold]{seconds_text(report.latency_s)}[/], 90 % interval {interval_text(report.low_s, report.high_s)}"
    say(console, "unknown: no time is known of any operator" if report.latency_s is None else total)
    for text, value in (("first token", report.first_token_s), ("each further token", report.per_token_s)):
        if value is not None:
            say(console, f"{text}: {seconds_text(value)}")
    if report.tokens_per_s is not None:
        say(console, f"{report.tokens_per_s:.4g} tokens a second")
    if report.price_per_million_tokens is not None:
        say(console, f"a million tokens cost {report.price_per_million_tokens:.4g}")
    if report.memory_gb is not None:
        say(console, f"{report.memory_gb:.1f} GB of memory on each device")


def show_ranked(console: Console, title: str, reports: Sequence[Any], more: Mapping[str, Callable[[Any], str]]) -> None:
    """Devices, the fastest first: their latency, its interval, and ``more`` columns (as of :func:`show_table`)."""
    ranked = sorted(reports, key=lambda report: report.latency_s)
    rows = [
        (
            report.device,
            seconds_text(report.latency_s),
            interval_text(report.low_s, report.high_s),
            number(report.latency_s / ranked[0].latency_s if ranked[0].latency_s else None, ".2f"),
            *(cell(report) for cell in more.values()),
        )
        for report in ranked
    ]
    show_table(console, title, ("<device", "latency", "90 % interval", "times the fastest", *more), rows)
