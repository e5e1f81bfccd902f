"""Checkpoints of a training run in one safetensors file: weights, averages, optimiser state and progress.

One file, replaced atomically, so that a killed run leaves either the old checkpoint or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cdmpp.errors import PredictorError

CHECKPOINT_VERSION = 1

Tensors = dict[str, torch.Tensor]


@dataclass
class TrainerState:
    """Everything the next epoch depends on.

    Attributes
    ----------
    epoch, step
        Epochs and optimiser steps done.
    weights, average, best
        State dictionaries: current, exponentially averaged, and averaged at the best epoch.
    optimizer
        AdamW's state: parameter number -> name -> tensor.
    best_epoch, best_mape
        Epoch (from 1) and validation MAPE of ``best``; 0 and infinity before the first epoch.
    """

    epoch: int = 0
    step: int = 0
    weights: Tensors = field(default_factory=dict)
    average: Tensors = field(default_factory=dict)
    best: Tensors = field(default_factory=dict)
    optimizer: dict[int, Tensors] = field(default_factory=dict)
    best_epoch: int = 0
    best_mape: float = float("inf")


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically."""
    from safetensors.torch import save

    temporary = path.with_name(path.name + ".tmp")
    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with temporary.open("wb") as file:
        file.write(save(contiguous, metadata=dict(metadata)))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_tensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Read a safetensors file and its metadata; PredictorError if it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (OSError, SafetensorError, ValueError) as err:
        raise PredictorError(f"{path}: expected a safetensors file, cannot read it: {err}") from err


def save_checkpoint(path: Path, state: TrainerState, fingerprint: str) -> None:
    """Write a checkpoint; ``fingerprint`` identifies configuration and records."""
    tensors = {f"weights/{k}": v for k, v in state.weights.items()}
    tensors.update({f"average/{k}": v for k, v in state.average.items()})
    tensors.update({f"best/{k}": v for k, v in state.best.items()})
    for number, values in state.optimizer.items():
        tensors.update({f"optimizer/{number}/{k}": v for k, v in values.items()})
    progress = {
        "version": CHECKPOINT_VERSION,
        "fingerprint": fingerprint,
        "epoch": state.epoch,
        "step": state.step,
        "best_epoch": state.best_epoch,
        "best_mape": state.best_mape,
    }
    save_tensors(path, tensors, {"progress": json.dumps(progress)})


def load_checkpoint(path: Path, fingerprint: str) -> TrainerState:
    """Read a checkpoint.

    Raises
    ------
    PredictorError
        Damaged, of another version, or of another configuration or other records.
    """
    tensors, metadata = load_tensors(path)
    try:
        progress: dict[str, Any] = json.loads(metadata["progress"])
        if progress["version"] != CHECKPOINT_VERSION:
            raise PredictorError(
                f"{path}: checkpoint version {progress['version']}, expected {CHECKPOINT_VERSION}"
            )
        if progress["fingerprint"] != fingerprint:
            raise PredictorError(
                f"{path}: belongs to another configuration or other records; start a new run"
            )
        state = TrainerState(
            epoch=int(progress["epoch"]),
            step=int(progress["step"]),
            best_epoch=int(progress["best_epoch"]),
            best_mape=float(progress["best_mape"]),
        )
        for name, tensor in tensors.items():
            group, _, rest = name.partition("/")
            if group == "optimizer":
                number, _, key = rest.partition("/")
                state.optimizer.setdefault(int(number), {})[key] = tensor
            else:
                getattr(state, group)[rest] = tensor
    except (KeyError, ValueError, AttributeError) as err:
        raise PredictorError(f"{path}: not a complete cdmpp checkpoint: {err!r}") from err
    return state
