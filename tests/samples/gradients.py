"""One step of a training whose loss has every term; what torchrun starts in a test: that step, then ``cdmpp train``."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdmpp.cli import learn, main
from cdmpp.predictor import training
from cdmpp.predictor.config import Config
from cdmpp.predictor.data import TrainingData, split_data
from cdmpp.predictor.processes import Processes
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.core import counts_key
from tests.samples.training import make_data, small_config

SPEC = "by_network:heldout=net0;valid=0.2;seed=0"
#: Rows of a batch; of a batch of one row the second process has none.
ROWS = (33, 1)


def whole_loss() -> tuple[Config, TrainingData]:
    """CMD, both decoders and the head for instruction counts, which a third of the programs has; its gradients are small."""
    config = small_config(SPEC, {"dropout": 0.0, "compiled": True, "codegen": True}, grad_clip=1e9)
    loss = config.loss.model_copy(update={"cmd_weight": 0.5, "codegen_weight": 0.3})
    data, rng = make_data(6, 12), np.random.default_rng(0)
    counts = {
        (program, counts_key(device)): rng.integers(1, 9, len(CODEGEN_FEATURES)).astype(np.float32)
        for program in list(data.asts)[::3]
        for device in data.devices.values()
    }
    return config.model_copy(update={"loss": loss}), replace(data, codegen=counts, unlabelled=make_data(6, 12, seed=1).asts)


def gradients(rows: int, processes: Processes | None = None) -> dict[str, torch.Tensor]:
    """Of one step on a batch of so many rows, after a step on others."""
    config, data = whole_loss()
    trainer = training.prepare(config, data, split_data(SPEC, data), processes=processes).trainer
    chosen = np.random.default_rng(1).permutation(len(trainer._train))
    trainer._step(chosen[-rows:], 1e-3)
    trainer._step(chosen[:rows], 1e-3)
    return {name: p.grad.clone() for name, p in trainer.network.named_parameters() if p.grad is not None}


def train_command(out: Path, command: list[str]) -> int:
    """The command, in a group of processes that first writes its gradients, and keeps the run as of its first epoch."""
    train, bar = training._train_network, learn.Bar.epoch

    def after_gradients(*args: Any) -> Any:
        for rows in ROWS:
            torch.save(gradients(rows, args[-1]), out / f"{rows}-{args[-1].rank}")
        return train(*args)

    def copying(self: learn.Bar, line: dict[str, Any]) -> None:
        bar(self, line)
        if line["epoch"] == 1:
            shutil.copytree(out / "run", out / "cut")

    training._train_network, learn.Bar.epoch = after_gradients, copying  # type: ignore[assignment, method-assign]
    return main(command)


if __name__ == "__main__":
    sys.exit(train_command(Path(sys.argv[1]), sys.argv[2:]))
