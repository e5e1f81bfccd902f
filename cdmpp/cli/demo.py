"""A first look at the main job: measure a small network here, predict it, learn from a part of it, compare, report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from torch import nn

from cdmpp.cli.learn import show_noise, show_scores
from cdmpp.cli.options import Bar
from cdmpp.dataset import load_datasets
from cdmpp.device import Device, get_device
from cdmpp.endtoend import network_tasks, predict_latency
from cdmpp.errors import CdmppError
from cdmpp.files import seconds_text
from cdmpp.predictor import Predictor, TrainingData, evaluate, finetune, gather, program_resolver
from cdmpp.predictor.baselines import XGBoostModel, evaluate_models
from cdmpp.profiler.compiled import collect_codegen
from cdmpp.profiler.session import ProfileConfig, profile
from cdmpp.program.network import Network
from cdmpp.report import write_report

#: Of the tasks, in order of their floating-point operations, every third is learned from; the others are scored.
_LEARN_ONE_IN = 3

_NEXT = """Try next (after . .venv/bin/activate):
  cdmpp latency resnet18 --device h200,a100-pcie-40gb,t4           rank GPUs that are not here
  cdmpp tune mlp --device this-cpu@1 --trials 64 --out runs/tuned  find fast schedules
  make train                                                       train on all data that ship"""


class DemoNetwork(nn.Module):
    """Convolutions, attention over the places of the image, and a gated layer, of sizes that no data that ship have."""

    def __init__(self, width: int = 44, hidden: int = 132) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 20, 3, stride=2, padding=1), nn.BatchNorm2d(20), nn.ReLU(),
            nn.Conv2d(20, 20, 3, padding=1, groups=20), nn.Conv2d(20, width, 1), nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.down, self.classes = (nn.LayerNorm(width), nn.Linear(hidden, width), nn.Linear(width, 90))
        self.gate, self.up = (nn.Linear(width, hidden) for _ in range(2))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.image(image).flatten(2).transpose(1, 2)
        attention = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1)
        x = self.norm(x + attention @ self.value(x))
        x = x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return torch.softmax(self.classes(x.mean(1)), -1)


def demo_network() -> Network:
    """The network that :func:`run_demo` measures."""
    return Network.from_torch(DemoNetwork().eval(), (torch.zeros(1, 3, 72, 72),), "demo-network")


def run_demo(
    console: Console,
    errors: Console,
    data: str | Sequence[str] = "data",
    out: str | Path = "runs/demo",
    network: Network | None = None,
    programs_per_task: int = 8,
) -> dict[str, Any]:
    """Show the main job on one core of this machine; gives the figures as JSON values. ``out/measured`` is a dataset, which
    another run goes on with; ``data`` are the datasets that ship, whose tasks in common with the network are counted."""
    started, out, device = time.perf_counter(), Path(out), get_device("this-cpu@1")
    network = network or demo_network()
    with errors.status("reading the weights and the data that ship"):
        predictor, shipped = Predictor.default(), set(load_datasets(data).tasks)

    console.print(f"[bold]1. Measure[/] programs of a small network on one core of this CPU, {device.name}")
    measured = _measure(errors, network, device, out, programs_per_task)
    tasks = set(measured.labels["task"])
    known = {"data": len(tasks & shipped), "weights": len(tasks & set(predictor.training["tasks"]))}
    console.print(
        f"{len(measured)} programs of {len(tasks)} tasks, kept in {out / 'measured'}. Of these tasks, {known['data']} are "
        f"among the {len(shipped)}\nof the data that ship, {known['weights']} among those that the weights were trained on.\n"
        f"Labels of this CPU {'were' if device.name in predictor.devices else 'were not'} in their training."
    )

    console.print("\n[bold]2. Predict[/] their latencies without running them")
    scores, learned, scored = _compare(errors, predictor, measured, device, out / "learned")
    ast, compiled, *_ = scores.values()
    console.print(
        f"Training (cdmpp and XGBoost): {len(learned)} programs of {learned['task'].nunique()} tasks. "
        f"Scored: {len(scored)} programs of {scored['task'].nunique()} others.\nCompiled: the instruction counts of "
        f"the compiled program are an input, too ({compiled['n_compiled']} of {len(scored)})."
    )
    rows = {name: score["overall"] for name, score in scores.items()}
    title = "error on the scored programs; pairwise: order of two programs"
    show_scores(console, title, "model", rows, brief=True)
    show_noise(console, ast["overall"])
    covered = [100 * score["overall"]["interval"]["covered"] for score in (ast, compiled)]
    console.print(
        f"{covered[0]:.0f} % of the labels lie in the 90 % intervals of cdmpp as it ships (compiled: {covered[1]:.0f} %).\n"
        f"Neighbours on this core slowed {int(scored['disturbed'].sum())} of the {len(scored)} scored labels down."
    )

    console.print("\n[bold]3. Predict[/] a scored program (compiled) and the unscheduled network")
    with errors.status("compiling the program, importing the network again"):
        examples = _examples(predictor, measured, scored, network, device)
    for name, values_s in examples.items():
        predicted, low, high, took = map(seconds_text, values_s)
        console.print(f"{name}: {predicted} (90 %: {low} to {high}), measured {took}")

    with errors.status("writing the report"):
        write_report(out / "learned", out / "report.html", measured)
    took_s = time.perf_counter() - started
    console.print(f"\nDone in {took_s:.0f} s. More about the errors after learning: {out / 'report.html'}\n{_NEXT}")
    split = {"learned_tasks": sorted(set(learned["task"])), "scored_tasks": sorted(set(scored["task"]))}
    return {"device": device.name, "known_tasks": known, **split, "models": scores, "examples": examples}


def _measure(errors: Console, network: Network, device: Device, out: Path, programs_per_task: int) -> TrainingData:
    """The network's tasks unscheduled and some programs of each, measured (CdmppError: a task does not run unscheduled)."""
    folder, objects = out / "measured", str(out / "objects")
    config = ProfileConfig(programs_per_task=programs_per_task, workers=1, object_cache=objects)
    for step in (replace(config, unscheduled=True), config):
        with Bar(errors, "measuring") as bar:
            say, update = bar.say if step.unscheduled else None, bar.follow
            profile([network], device=device, out=folder, config=step, resume=True, progress=update, notify=say)
    with Bar(errors, "reading compiled programs") as count:
        collect_codegen(folder, config, count.update)
    with Bar(errors, "reading ASTs") as count:
        measured = gather(folder, progress=count.update, disturbed=True)  # there are no others
    assert measured.view is not None, "a folder was gathered"
    if failed := measured.view.tasks.keys() - set(measured.labels["program"]):
        raise CdmppError(f"{len(failed)} tasks of {network.name} do not run here: cdmpp dataset {folder} says why")
    return measured


def _compare(
    errors: Console, predictor: Predictor, measured: TrainingData, device: Device, out: Path
) -> tuple[dict[str, dict[str, Any]], pd.DataFrame, pd.DataFrame]:
    """Model -> what ``evaluate`` gives; the labels that were learned from, and those that were scored."""
    assert measured.view is not None, "a folder was gathered"
    work = {task.hash: (task.flops, task.bytes, task.hash) for task in measured.view.tasks.values()}
    tasks = sorted(set(measured.labels["task"]), key=work.__getitem__)[::_LEARN_ONE_IN]
    shutil.rmtree(out, ignore_errors=True)  # of an earlier demo
    with errors.status("learning"):
        result = finetune(predictor, measured, device.name, out, tasks=tasks)
    tuned, split = result.predictor, result.split
    assert tuned is not None and split is not None, "some tasks are learned from, and others left"
    scores = {}
    for name, model in (("cdmpp as it ships", predictor), ("cdmpp after learning", tuned)):
        scores[name] = evaluate(model, measured, split, by=())
        scores[f"{name}, compiled"] = evaluate(model, measured, split, by=(), compiled=True)
    with errors.status("extracting TVM's features and training XGBoost"):
        trees = evaluate_models([XGBoostModel(), XGBoostModel("ast-codegen")], measured, split)
    scores["XGBoost on TVM's features"], scores["XGBoost on ours, compiled"] = trees.values()
    return scores, measured.labels.iloc[split.train], measured.labels.iloc[split.test]


def _examples(
    predictor: Predictor, measured: TrainingData, scored: pd.DataFrame, network: Network, device: Device
) -> dict[str, tuple[float, ...]]:
    """The scored program of median latency and the whole network: seconds predicted, of an interval, and measured."""
    assert measured.view is not None, "a folder was gathered"
    row = scored.sort_values(["latency_s", "program"]).iloc[len(scored) // 2]
    program, resolver = measured.view.programs[row["program"]], program_resolver(measured.view)
    predicted_s = predictor.predict(program, device, resolver=resolver, compiled=True)
    interval_s = predictor.predict_interval(program, device, resolver=resolver, compiled=True)
    source = network_tasks(network)
    report = predict_latency(source, device, predictor)
    # the program that is a task without a schedule has the task's hash
    alone_s = measured.labels.set_index("program")["latency_s"]
    took_s = sum(runs * alone_s[task] for task, runs in source.graph.task_weights().items())
    assert report.low_s is not None and report.high_s is not None, "the weights that ship have intervals"
    return {
        measured.view.tasks[program.task_hash].name: (predicted_s, *interval_s, float(row["latency_s"])),
        f"{network.name}, task by task": (report.latency_s, report.low_s, report.high_s, float(took_s)),
    }
