"""Synthetic programs, whose latency is a known function of two leaf features and the device's clock; a small network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cdmpp.device import Device
from cdmpp.predictor.config import Config, config_from_dict
from cdmpp.predictor.data import TrainingData
from cdmpp.program.ast import LEAF_FEATURES, CompactAST
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.core import counts_key

CPU = Device(
    name="c", base="c", kind="cpu", vendor="intel", model="c", share=1.0, cores=4, cores_used=1.0,
    clock_mhz=2000.0, simd_bits=256, fma=True, lanes_per_core=16, l1_kb=32.0, l2_kb=512.0, l3_kb=8192.0,
    bandwidth_gb_s=10.0, peak_gflops={"float32": 64.0},
)  # fmt: skip


def program(*leaves: dict[str, float]) -> CompactAST:
    """Leaves with the features given."""
    usual = {"iterations": 1.0, "parallel": 1.0, "hold": 1.0, "tile_points": 1.0}
    vectors = np.zeros((len(leaves), len(LEAF_FEATURES)), dtype=np.float32)
    for vector, leaf in zip(vectors, leaves, strict=True):
        for name, value in {**usual, **leaf}.items():
            vector[LEAF_FEATURES.index(name)] = value
    return CompactAST(vectors, np.arange(1, len(leaves) + 1, dtype=np.int32), len(leaves) + 1)


def make_ast(rng: np.random.Generator, n_leaves: int, scale: float = 1.0) -> CompactAST:
    leaves = np.zeros((n_leaves, len(LEAF_FEATURES)), dtype=np.float32)
    leaves[:, :10] = np.exp(rng.uniform(0, 8, (n_leaves, 10))) * scale
    leaves[:, 10] = rng.integers(0, 2, n_leaves)
    positions = np.cumsum(rng.integers(1, 9, n_leaves)).astype(np.int32)
    return CompactAST(leaves=leaves, positions=positions, n_nodes=int(positions[-1]) + 1)


def make_device(name: str, clock_mhz: float) -> Device:
    return Device(
        name=name, base=name, kind="cpu", vendor="intel", model=name, share=1.0, cores=2, cores_used=1,
        clock_mhz=clock_mhz, simd_bits=256,
    )  # fmt: skip


def make_data(n_tasks: int = 12, per_task: int = 30, seed: int = 0) -> TrainingData:
    rng = np.random.default_rng(seed)
    devices = {"slow": make_device("slow", 1000.0), "fast": make_device("fast", 4000.0)}
    asts, rows = {}, []
    for task in range(n_tasks):
        n_leaves = int(rng.integers(1, 5))
        for i in range(per_task):
            program = f"p{task:03d}_{i:03d}"
            ast = asts[program] = make_ast(rng, n_leaves)
            # latency: the work of every leaf, four times slower where its flag is off
            work = (ast.leaves[:, 0] * np.where(ast.leaves[:, 10] > 0, 1.0, 4.0)).sum()
            for name, device in devices.items():
                rows.append((program, f"t{task:03d}", name, 1e-6 * work * 1000 / device.clock_mhz, 0.01, "random"))
    labels = pd.DataFrame(rows, columns=["program", "task", "device", "latency_s", "noise", "origin"])
    labels = labels.assign(n_records=1, error_floor=0.005)
    networks = {f"t{task:03d}": (f"net{task % 4}",) for task in range(n_tasks)}
    families = {"net0": "cnn", "net1": "cnn", "net2": "transformer", "net3": "mlp"}
    return TrainingData(labels, asts, devices, networks, families)


def small_config(spec: str = "within_task;seed=1", model: dict[str, Any] | None = None, **training: Any) -> Config:
    """A network that learns :func:`make_data` in a second; `training` changes epochs and the like."""
    size = {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 32, "embedding_dim": 16, "decoder_dim": 32}
    settings = {"epochs": 4, "batch_size": 64, "learning_rate": 0.01, "threads": 1, **training}
    settings.setdefault("patience", settings["epochs"])
    return config_from_dict({"model": {**size, **(model or {})}, "train": settings, "split": {"spec": spec}})


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """The configuration with other values of some fields of its sections."""
    found = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=found)


def with_counts(data: TrainingData, counts: Mapping[str, float]) -> TrainingData:
    """Data with as many of each instruction as said of these programs, on all devices."""
    codes = {counts_key(device) for device in data.devices.values()}
    rows = {program: np.full(len(CODEGEN_FEATURES), number, dtype=np.float32) for program, number in counts.items()}
    return replace(data, codegen={(program, code): row for program, row in rows.items() for code in codes})


def change_state(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit what a predictor's folder says besides its weights."""
    path = folder / "predictor.json"
    state = json.loads(path.read_text())
    edit(state)
    path.write_text(json.dumps(state))
