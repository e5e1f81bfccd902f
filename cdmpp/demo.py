"""The main job on the data that ships: train, compare on networks never seen, predict a program."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import CdmppError

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_DATA = "data"


def run_demo(console: Console, config_path: str, data: Sequence[str] | None, out: str) -> dict[str, Any]:
    """Train on datasets, compare with baselines on held-out networks, predict one of their programs.

    Raises
    ------
    CdmppError
        The data or the configuration is not there.
    """
    from cdmpp.cli_render import CountBar, TrainTable, show_metrics, show_summary
    from cdmpp.predictor import evaluate, gather, load_config, split_data
    from cdmpp.predictor.baselines import CdmppModel, TaskMedian, XGBoostModel, evaluate_models
    from cdmpp.predictor.baselines.per_store import collect_per_store
    from cdmpp.predictor.run import train

    folders = list(data or [DEFAULT_DATA])
    if not all(Path(f).is_dir() for f in folders) or not Path(config_path).exists():
        raise CdmppError(
            f"the demo needs {', '.join(folders)} and {config_path}: run it in a checkout of the project, "
            "or say where they are with --data and --config"
        )
    config = load_config(config_path)
    with CountBar(console, "compact ASTs that are not stored yet") as bar:
        gathered = gather(folders, config.data, bar.update)
    assert gathered.view is not None, "folders were gathered"
    show_summary(console, gathered.view.summary())
    split = split_data(config.split.spec, gathered)
    held_out = ", ".join(split.held_out)
    console.print(
        f"\n[bold]1. Train[/] on {len(split.train)} records, validate on {len(split.valid)}; held out, with every task "
        f"they contain: {held_out}"
    )
    started = time.perf_counter()
    run = Path(out)
    if (run / "predictor").exists():
        console.print(f"(taking the predictor of {run}; remove the folder to train anew)")
    with TrainTable(console) as table:
        result = train(config, gathered, out, progress=table.update, resume=True)
    console.print(f"trained in {time.perf_counter() - started:.0f} s")

    console.print("\n[bold]2. Compare[/] on the held-out networks, all models trained on the same records")
    with CountBar(console, "the baseline's features that are not stored yet") as bar:
        vectors = collect_per_store(gathered.view, gathered.labels["program"].unique(), bar.update)
    models = [
        CdmppModel(predictor=result.predictor),
        XGBoostModel(vectors=vectors, seed=config.train.seed),
        TaskMedian(),
    ]
    scores = {
        **evaluate_models(models[:1], gathered, split, fit=False),
        **evaluate_models(models[1:], gathered, split),
    }
    rows = {name: found["overall"] for name, found in scores.items()}
    if result.predictor.encoder.code_dim and gathered.counted(split.test).any():
        told = evaluate(result.predictor, gathered, split, by=(), compiled=True)
        ours, *others = rows.items()
        rows = dict([ours, ("cdmpp, compiled", told["overall"]), *others])
    show_metrics(console, f"held-out networks: {held_out}", rows)
    if "cdmpp, compiled" in rows:
        console.print(
            "compiled: told the instructions that the compiler makes of each program, still without running it"
        )

    console.print("\n[bold]3. Predict[/] a program of a held-out network, without running it")
    example = _example(gathered, split.test)
    program, device = example["program"], example["device"]
    seconds = float(result.predictor.predict(gathered.asts[program], device))
    console.print(
        f"program {program} (task {example['name']} of {', '.join(example['networks'])}) on {device}:\n"
        f"  predicted {1e6 * seconds:.1f} us, measured {1e6 * example['latency_s']:.1f} us"
    )
    return {
        "split": split.spec,
        "models": scores,
        "example": {**example, "predicted_s": seconds},
    }


def _example(data: Any, rows: Any) -> dict[str, Any]:
    """The test record of median latency, so that the choice is nobody's."""
    table = data.labels.iloc[rows].sort_values(["latency_s", "program"])
    row = table.iloc[len(table) // 2]
    task = data.view.tasks[row["task"]]
    return {
        "program": str(row["program"]),
        "device": str(row["device"]),
        "latency_s": float(row["latency_s"]),
        "name": task.name,
        "networks": sorted(task.networks),
    }
