"""The model card of a predictor: what it was trained on, its error on unseen programs, and its limits.

    python benchmarks/model_card.py --card cdmpp/predictor/weights/default/README.md --json model_card.json

Every figure is computed here, on the test part of the split that the predictor was trained with; those of ``--json`` have
95 % intervals over tasks. ``in interval`` is the fraction of labels inside the predictor's 90 % intervals, ``below it`` the
fraction that is faster. ``operators`` groups tasks by their heaviest fused operator. ``no training task within 1.26``: no
training task with the same operators and ranks has all extents within that ratio. Disturbed labels count only where stated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import common
import numpy as np

from cdmpp.dataset.split import architecture
from cdmpp.predictor import Predictor, TrainingData, gather
from cdmpp.predictor.evaluation import rows_to_score, score
from cdmpp.predictor.evidence import Evidence
from cdmpp.predictor.predictor import load_predictor
from cdmpp.predictor.uncertainty import interval_metrics
from cdmpp.program import import_tvm
from cdmpp.program.types import Task

_COLUMNS = (
    ("n", "n", "{:d}"),
    ("mape", "MAPE", "{:.1%}"),
    ("median_ape", "median APE", "{:.1%}"),
    ("pairwise_accuracy", "pairwise", "{:.2f}"),
    ("top1_regret", "top-1 regret", "{:.1%}"),
    ("top1_regret_of_32", "of 32", "{:.1%}"),
    ("noise_floor_mape", "noise floor", "{:.1%}"),
    ("in interval", "in interval", "{:.1%}"),
    ("below it", "below it", "{:.1%}"),
)
#: Operators to group tasks by, the heaviest first.
_OPERATORS = ("conv", "matmul", "dense", "pool", "softmax", "norm", "mean", "sum")
#: Tasks are near if all extents are within this ratio.
_NEAR, _FAR = 1.26, "no training task within 1.26"


def table(groups: dict[str, dict[str, Any]], kind: str = "") -> str:
    """A Markdown table with one line for each group of a kind."""
    lines = [[kind, *(title for _, title, _ in _COLUMNS)]]
    for name, scores in groups.items():
        if name.startswith(kind or "all"):
            cells = [form.format(scores[k]) if scores.get(k) is not None else "-" for k, _, form in _COLUMNS]
            lines.append([name.removeprefix(kind).strip(), *cells])
    return common.markdown_table(lines)


def card(predictor: Predictor, ast: dict[str, Any], **told: Any) -> str:
    """``model_card.md`` filled in with scores by group: ``ast`` alone; ``told``: with compiled code, or latencies elsewhere."""
    training = predictor.training
    names = training["networks"]
    networks, resized = sorted({architecture(name) for name in names}), sum("@" in name for name in names)
    shortest, longest = training["latency_s_range"]
    return Template(Path(__file__).with_suffix(".md").read_text(encoding="utf-8")).substitute(
        {name: table(groups, "device") for name, groups in told.items()},
        size=f"{sum(t.numel() for t in predictor.network.parameters()) / 1e6:.1f}",
        members=1 + len(predictor.members),
        feature_set=predictor.encoder.feature_set,
        records=f"{training['records']:,}",
        programs=f"{training['programs']:,}",
        tasks=f"{len(training['tasks']):,}",
        networks=f"{len(networks)} networks, {resized} times at other sizes or batches: {', '.join(networks)}",
        devices="\n".join(f"- {name}: {n:,} labels" for name, n in training["records_by_device"].items()),
        shortest=f"{shortest:.2g}",
        longest=f"{longest:.2g}",
        all=table(ast),
        **{name: training[name] for name in ("epochs", "seed", "split")},
        **{f"by_{kind}": table(ast, kind) for kind in ("network", "family", "device", "operators")},
    )


def structure(task: Task) -> tuple[tuple[Any, ...], np.ndarray]:
    """The fused operators of a task and the ranks of its parameters, and the logarithms of all their extents."""
    shapes = [[int(extent) for extent in param.shape] for param in import_tvm().ir.load_json(task.tir_json).params]
    return (re.sub(r"\d+", "", task.name), *map(len, shapes)), np.log([extent for shape in shapes for extent in shape])


def far_tasks(tasks: Iterable[Task], known: Iterable[Task]) -> set[str]:
    """Hashes of the tasks that none of the known ones is near."""
    alike = defaultdict(list)
    for task in known:
        name, extents = structure(task)
        alike[name].append(extents)
    found = set()
    for task in tasks:
        name, extents = structure(task)
        apart = [np.abs(other - extents).max(initial=0.0) for other in alike[name]]
        if min(apart, default=np.inf) > np.log(_NEAR):
            found.add(task.hash)
    return found


def grouped(predictor: Predictor, data: TrainingData, rows: np.ndarray, kinds: Iterable[str]) -> dict[str, np.ndarray]:
    """Group -> which of the rows are in it, bool (n,): all, far tasks, by operator, by each of ``kinds``, disturbed labels."""
    assert data.view is not None
    task, tasks = data.labels["task"].iloc[rows], data.view.tasks
    far = far_tasks([tasks[t] for t in set(task)], [tasks[t] for t in predictor.training["tasks"] if t in tasks])
    found = {"all": np.ones(len(rows), dtype=bool), _FAR: task.isin(far).to_numpy()}
    of_task = {t: next((name for name in _OPERATORS if name in tasks[t].name), "others") for t in set(task)}
    found |= {f"operators {name}": (task.map(of_task) == name).to_numpy() for name in (*_OPERATORS, "others")}
    for kind in kinds:
        members = data.members(kind, rows)
        for name in sorted({name for names in members for name in names if kind == "device" or "@" not in name}):
            found[f"{kind} {name}"] = np.array([name in names for names in members])
    disturbed = data.labels["disturbed"].iloc[rows].to_numpy()
    found = {name: inside & ~disturbed for name, inside in found.items()}
    found |= {"all, and disturbed labels": np.ones(len(rows), dtype=bool), "disturbed labels": disturbed}
    return {name: inside for name, inside in found.items() if inside.any()}


def main() -> None:
    args = common.arguments(__doc__, __file__).parse_args()
    predictor = load_predictor(args.predictor)
    data = gather(args.data, disturbed=True)
    split, rows = rows_to_score(predictor, data, None)
    groups = grouped(predictor, data, rows, ("network", "family", "device"))
    figures, told = [], {}
    for title, key, given in (
        ("from the AST", "ast", {}),
        ("with compiled code", "compiled", {"compiled": True}),
        ("with latencies elsewhere", "elsewhere", {"measured": True}),
    ):
        evidence = Evidence.of_rows(data, rows, **given)
        known = evidence.known(len(rows))
        predicted_s = predictor.predict_rows(data, rows, evidence)
        difficulty = predictor.difficulty(predictor.pairs_of_rows(data, rows, evidence))
        told[key] = scores = {}
        for name, inside in groups.items():
            if given and name.startswith(("network", "family")):
                continue
            labels, own_s = data.labels.iloc[rows[inside]], predicted_s[inside]
            interval = interval_metrics(
                partial(predictor.calibration_of, evidence), labels["latency_s"][known[inside]], own_s[known[inside]],
                labels["task"][known[inside]], labels["device"][known[inside]], difficulty=difficulty[inside & known],
            ) if (inside & known).any() else None  # fmt: skip
            scores[name] = own = score(data, rows[inside], own_s, ())["overall"]
            own["in interval"], own["below it"] = (interval["covered"], interval["below"]) if interval else (None, None)
            shown, ends = f"{title}, {name}".removesuffix(", all"), common.accuracy_intervals(labels, own_s)
            values = {metric: own.get(metric) for metric in (*common.TITLES, "in interval", "below it")}
            figures.append(common.figure(shown, values, own["n"], interval=ends))
    if args.card:
        args.card.write_text(card(predictor, **told), encoding="utf-8")
    made = common.provenance(__file__, args.data, args.predictor, [predictor.training["seed"]])
    common.report(args.json, made, figures, split=split)


if __name__ == "__main__":
    common.start(main)
