"""The model card of a predictor: what it was trained on, its error on what it never saw, and its limits.

    python benchmarks/model_card.py --card cdmpp/predictor/weights/default/README.md --json model_card.json

Every figure is computed here, on the test part of the split that the predictor was trained with; those of ``--json`` have
95 % intervals over tasks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import TITLES, Figure, accuracy_intervals, arguments, figure, markdown_table, provenance, report

from cdmpp.dataset.split import architecture
from cdmpp.predictor import Predictor, TrainingData, evaluate, gather
from cdmpp.predictor.predictor import load_predictor
from cdmpp.predictor.scaling import predict_rows_scaled
from cdmpp.predictor.scoring import predict_rows, rows_to_score

_SOURCES = (
    "The labels of Xeon and EPYC are our own and ship with cdmpp (`data/`). Those of GPUs are public measurements, which do "
    "not: operators of PyTorch (NeuSight: Lee et al., ASPLOS'25; MIT licence; P4, P100, V100, T4, A100, MI100, MI210) and "
    "scheduled kernels, convolution, dedispersion and GEMM (the AutoTuning Association's benchmark hub; MIT licence; the other "
    "GPUs). `configs/default.yaml` has the commands.",
)
_COLUMNS = (
    ("n", "n", "{:d}"),
    ("mape", "MAPE", "{:.1%}"),
    ("median_ape", "median APE", "{:.1%}"),
    ("pairwise_accuracy", "pairwise", "{:.2f}"),
    ("top1_regret", "top-1 regret", "{:.1%}"),
    ("top1_regret_of_32", "of 32", "{:.1%}"),
    ("noise_floor_mape", "noise floor", "{:.1%}"),
)


def table(groups: dict[str, dict[str, Any]], what: str) -> list[str]:
    """Markdown lines, one a group."""
    lines = [[what, *(title for _, title, _ in _COLUMNS)]]
    for name, scores in groups.items():
        cells = [form.format(scores[k]) if scores.get(k) is not None else "-" for k, _, form in _COLUMNS]
        lines.append([name, *cells])
    return markdown_table(lines).splitlines()


def card(
    predictor: Predictor,
    scores: dict[str, Any],
    compiled: dict[str, Any] | None,
    elsewhere: dict[str, Any] | None,
    weights_bytes: int,
) -> str:
    """The card as Markdown; ``compiled`` are the scores with the compiled programs' instructions, ``elsewhere`` those with
    latencies on other devices."""
    training, overall, groups = predictor.training, scores["overall"], scores["groups"]
    interval = overall["interval"]
    networks = sorted({architecture(name) for name in training["networks"]})
    others = sum("@" in name for name in training["networks"])
    resized = f", {others} times at other sizes or batches" if others else ""
    lines = [
        "# Model card",
        "",
        f"Weights: {weights_bytes / 1e6:.1f} MB, feature set `{predictor.encoder.feature_set}`, "
        f"{training['epochs']} epochs, seed {training['seed']}.",
        "",
        "## Training data",
        "",
        f"{training['records']:,} labels of {training['programs']:,} programs, {len(training['tasks']):,} tasks of "
        f"{len(networks)} networks{resized}: {', '.join(networks)}.",
        "",
        *(f"- {name}: {n:,} labels" for name, n in training["records_by_device"].items()),
        "",
        f"Latencies from {training['latency_s_range'][0]:.2g} to {training['latency_s_range'][1]:.2g} s.",
        "",
        *_SOURCES,
        "",
        "## Error on networks and operators it never saw",
        "",
        f"Test part of `{training['split']}`: no task of these networks, and none of so many "
        "of the operators and kernels that belong to no network, is in training or validation. "
        "The noise floor is what a perfect predictor would score on these labels. Top-1 regret: how much slower the "
        "program predicted fastest is than the fastest one, mean over tasks; of 32: median over those with at least 32.",
        "",
        *table({"all": overall}, ""),
        "",
        *table({name: scores for name, scores in groups["network"].items() if "@" not in name}, "network"),
        "",
        *table(groups["family"], "family"),
        "",
        *table(groups["device"], "device"),
        "",
    ]
    if interval is not None:
        lines += [
            f"Its {interval['coverage']:.0%} intervals held {interval['covered']:.1%} of these measurements. "
            "Validation tasks and tasks of new networks are not exchangeable, so this may be off for yours.",
            "",
        ]
    if compiled is not None:
        cpus = {
            name: found
            for name, found in compiled["groups"]["device"].items()
            if predictor.device(name).kind == "cpu"
        }
        lines += [
            "### Told the instructions of the compiled programs",
            "",
            "The same records of CPUs, each program compiled (not run) and its instructions counted: "
            f"`predict(..., compiled=True)`. Of {compiled['n_compiled']:,} the counts were at hand, the others are predicted "
            "without.",
            "",
            *table(cpus, "device"),
            "",
        ]
    if elsewhere is not None:
        held = elsewhere["overall"]["interval"]
        lines += [
            "### Told what the programs took on other devices",
            "",
            "The same records, each program's latencies on the other devices of its kind given: `predict(..., measured=...)`. "
            f"{elsewhere['n_measured']:,} of the programs were measured elsewhere, the others are predicted without.",
            *([f"Intervals of {held['coverage']:.0%} held {held['covered']:.1%} of them."] if held else []),
            "",
            *table(elsewhere["groups"]["device"], "device"),
            "",
        ]
    lines += [
        "## Limits",
        "",
        "- float32 alone. Scheduled programs it knows from one Xeon (Cascade Lake; one core, two, and with 128-bit SIMD) "
        "and, of GPUs, from two kernels; of GPUs it knows single operators run by libraries. What it says of a GPU that is not "
        "in the list is an extrapolation: `benchmarks/cross_device.py` measures how far off it is when one is left out. "
        "`Predictor.unfamiliar` tells.",
        "- A few programs are off by 3x and more, mostly where the compiler turns strided loads into gathers or spills "
        "registers, which the AST does not show.",
        "",
        "Made by `python benchmarks/model_card.py`.",
        "",
    ]
    return "\n".join(lines)


def figures(
    name: str, scores: dict[str, Any], data: TrainingData, rows: np.ndarray, predicted_s: np.ndarray
) -> list[Figure]:
    """Of all test records and of every group, with intervals over tasks."""
    groups = {name: (scores["overall"], np.arange(len(rows)))}
    for grouping, found in scores["groups"].items():
        members = data.members(grouping, rows)
        for group, own in found.items():
            inside = np.flatnonzero([group in names for names in members])
            groups[f"{name}, {grouping} {group}"] = (own, inside)
    return [
        figure(
            title,
            {metric: own.get(metric) for metric in TITLES},
            own["n"],
            interval=accuracy_intervals(data.labels.iloc[rows[inside]], predicted_s[inside]),
        )
        for title, (own, inside) in groups.items()
    ]


def main() -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--predictor", default="default", metavar="DIR")
    add("--data", nargs="+", default=["data"], metavar="DIR")
    add("--card", type=Path, metavar="FILE", help="the card as Markdown")
    args = parser.parse_args()
    predictor = load_predictor(args.predictor)
    data = gather(args.data)
    _, rows = rows_to_score(predictor, data, None)
    scores = evaluate(predictor, data, by=("network", "family", "device"))
    found = figures("from the AST", scores, data, rows, predict_rows(predictor, data, rows))
    compiled = elsewhere = None
    if predictor.encoder.code_dim:
        compiled = evaluate(predictor, data, by=("device",), compiled=True)
        predicted_s = predict_rows(predictor, data, rows, compiled=True)
        found += figures("with compiled code", compiled, data, rows, predicted_s)
    if predictor.scaling:
        elsewhere = evaluate(predictor, data, by=("device",), measured=True)
        predicted_s, _ = predict_rows_scaled(predictor, data, rows)
        found += figures("with latencies elsewhere", elsewhere, data, rows, predicted_s)
    if args.card:
        size = sum(t.nbytes for t in predictor.network.state_dict().values())
        args.card.write_text(card(predictor, scores, compiled, elsewhere, size), encoding="utf-8")
    made = provenance(__file__, args.data, args.predictor, [predictor.training["seed"]])
    report(args.json, made, found, split=scores["split"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
