"""The model card of a predictor: what it was trained on, its error on what it never saw, and its limits.

    python benchmarks/model_card.py --card cdmpp/predictor/weights/default/README.md --json model_card.json

Every figure is computed here, on the test part of the split that the predictor was trained with; those of ``--json`` have
95 % intervals over tasks.
"""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

import common
import numpy as np

from cdmpp.dataset.split import architecture
from cdmpp.predictor import Predictor, TrainingData, evaluate, gather
from cdmpp.predictor.evaluation import rows_to_score
from cdmpp.predictor.evidence import Evidence
from cdmpp.predictor.predictor import load_predictor

Scores = dict[str, Any]
_COLUMNS = (
    ("n", "n", "{:d}"),
    ("mape", "MAPE", "{:.1%}"),
    ("median_ape", "median APE", "{:.1%}"),
    ("pairwise_accuracy", "pairwise", "{:.2f}"),
    ("top1_regret", "top-1 regret", "{:.1%}"),
    ("top1_regret_of_32", "of 32", "{:.1%}"),
    ("noise_floor_mape", "noise floor", "{:.1%}"),
)


def table(groups: dict[str, dict[str, Any]], what: str) -> str:
    """Markdown, a line a group."""
    lines = [[what, *(title for _, title, _ in _COLUMNS)]]
    for name, scores in groups.items():
        cells = [form.format(scores[k]) if scores.get(k) is not None else "-" for k, _, form in _COLUMNS]
        lines.append([name, *cells])
    return common.markdown_table(lines)


def card(predictor: Predictor, scores: Scores, compiled: Scores | None, elsewhere: Scores | None) -> str:
    """``model_card.md`` filled in; the scores with compiled code and with latencies elsewhere may be missing."""
    training, groups = predictor.training, scores["groups"]
    networks = sorted({architecture(name) for name in training["networks"]})
    others = sum("@" in name for name in training["networks"])
    resized = f", {others} times at other sizes or batches" if others else ""
    parts = {"intervals": "", "compiled": "", "elsewhere": ""}
    interval = scores["overall"]["interval"]
    if interval is not None:
        parts["intervals"] = (
            f"Its {interval['coverage']:.0%} intervals held {interval['covered']:.1%} of these measurements. "
            "Validation tasks and tasks of new networks are not exchangeable, so this may be off for yours.\n\n"
        )
    if compiled is not None:
        by_device = compiled["groups"]["device"].items()
        cpus = {name: found for name, found in by_device if predictor.device(name).kind == "cpu"}
        parts["compiled"] = (
            "### Told the instructions of the compiled programs\n\n"
            "The same records of CPUs, each program compiled (not run) and its instructions counted: "
            f"`predict(..., compiled=True)`. Of {compiled['n_compiled']:,} the counts were at hand, the others are "
            "predicted without.\n\n"
            f"{table(cpus, 'device')}\n\n"
        )
    if elsewhere is not None:
        held = elsewhere["overall"]["interval"]
        of_held = f"\nIntervals of {held['coverage']:.0%} held {held['covered']:.1%} of them." if held else ""
        parts["elsewhere"] = (
            "### Told what the programs took on other devices\n\n"
            "The same records, each program's latencies on the other devices of its kind given: `predict(..., measured=...)`. "
            f"{elsewhere['n_measured']:,} of the programs were measured elsewhere, the others are predicted without."
            f"{of_held}\n\n"
            f"{table(elsewhere['groups']['device'], 'device')}\n\n"
        )
    shortest, longest = training["latency_s_range"]
    template = Template(Path(__file__).with_suffix(".md").read_text(encoding="utf-8"))
    return template.substitute(
        parts,
        size=f"{sum(t.numel() for t in predictor.network.parameters()) / 1e6:.1f}",
        members=f"{1 + len(predictor.members)}",
        feature_set=predictor.encoder.feature_set,
        epochs=training["epochs"],
        seed=training["seed"],
        records=f"{training['records']:,}",
        programs=f"{training['programs']:,}",
        tasks=f"{len(training['tasks']):,}",
        networks=f"{len(networks)} networks{resized}: {', '.join(networks)}",
        devices="\n".join(f"- {name}: {n:,} labels" for name, n in training["records_by_device"].items()),
        shortest=f"{shortest:.2g}",
        longest=f"{longest:.2g}",
        split=training["split"],
        all=table({"all": scores["overall"]}, ""),
        by_network=table({name: own for name, own in groups["network"].items() if "@" not in name}, "network"),
        by_family=table(groups["family"], "family"),
        by_device=table(groups["device"], "device"),
    )


def figures(
    name: str, scores: Scores, data: TrainingData, rows: np.ndarray, predicted_s: np.ndarray
) -> list[common.Figure]:
    """Of all test records and of every group, with intervals over tasks."""
    groups = {name: (scores["overall"], np.arange(len(rows)))}
    for grouping, found in scores["groups"].items():
        members = data.members(grouping, rows)
        for group, own in found.items():
            if "@" not in group or grouping == "device":
                inside = np.flatnonzero([group in names for names in members])
                groups[f"{name}, {grouping} {group}"] = (own, inside)
    return [
        common.figure(
            title,
            {metric: own.get(metric) for metric in common.TITLES},
            own["n"],
            interval=common.accuracy_intervals(data.labels.iloc[rows[inside]], predicted_s[inside]),
        )
        for title, (own, inside) in groups.items()
    ]


def main() -> None:
    args = common.arguments(__doc__, __file__).parse_args()
    predictor = load_predictor(args.predictor)
    data = gather(args.data)
    _, rows = rows_to_score(predictor, data, None)
    scores = evaluate(predictor, data, by=("network", "family", "device"))
    found = figures("from the AST", scores, data, rows, predictor.predict_rows(data, rows))
    given: dict[str, Scores | None] = {"compiled": None, "measured": None}
    for option, name, knows in (
        ("compiled", "with compiled code", predictor.encoder.code_dim),
        ("measured", "with latencies elsewhere", predictor.scaling and data.labels["device"].nunique() > 1),
    ):
        if knows:
            given[option] = own = evaluate(predictor, data, by=("device",), **{option: True})
            predicted_s = predictor.predict_rows(data, rows, Evidence.of_rows(data, rows, **{option: True}))
            found += figures(name, own, data, rows, predicted_s)
    if args.card:
        args.card.write_text(card(predictor, scores, given["compiled"], given["measured"]), encoding="utf-8")
    made = common.provenance(__file__, args.data, args.predictor, [predictor.training["seed"]])
    common.report(args.json, made, found, split=scores["split"])


if __name__ == "__main__":
    common.start(main)
