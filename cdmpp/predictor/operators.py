"""Latencies of library operators on devices that may never have been measured.

A small network says how far an operator stays behind the estimate of :mod:`cdmpp.predictor.mechanism`; it sees how full each
pipe is, not which device it is, so that it carries over. Several of them with other random starts are averaged. Labels are the
fastest kernel of an operator and, besides, the fastest of each framework.

How wrong it is on a device it was not trained on is found by leaving each out in turn (:func:`left_out`); devices that are nearly
the same stay together (:func:`families`). The intervals come from these errors, by operator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from cdmpp.device import Device, get_device
from cdmpp.errors import PredictorError, reason
from cdmpp.files import write_text
from cdmpp.predictor.mechanism import MECHANISM_FEATURES, mechanism
from cdmpp.program.operators import ELEMENT_BYTES, OPERATORS, SIZES

FloatArray = NDArray[np.float64]

#: The fastest kernel of any framework.
BEST = "best"
FRAMEWORKS = (BEST, "vllm", "sglang", "trtllm", "torch", "miopen", "triton", "nccl", "pipeweave")
_OPS, _DTYPES = tuple(OPERATORS), tuple(ELEMENT_BYTES)
WIDTH = len(MECHANISM_FEATURES) + len(_OPS) + len(_DTYPES) + len(FRAMEWORKS)
_FILE, _WEIGHTS = "operators.json", "operators.safetensors"
_FORMAT = 1
#: Standardised features are cut here: farther from the training data nothing is known.
_FAR = 4.0
#: Peaks and cores of one architecture closer than this make devices nearly the same.
_ALIKE = 0.15
#: Tables are cut to so many rows of one operator, data type, device and framework.
_ROWS = 6000


@dataclass(frozen=True)
class Errors:
    """Quantiles of log(measured / predicted) at 5, 50 and 95 %, of operators of one kind; how many they are of."""

    low: float
    middle: float
    high: float
    n: int


@dataclass(frozen=True)
class OperatorModel:
    """An ensemble, what standardises its features, the devices it was trained on, and its errors by operator: of devices
    trained on (``seen``) and of others (``unseen``)."""

    networks: Sequence[nn.Module]
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    devices: tuple[str, ...]
    seen: Mapping[str, Errors] = field(default_factory=dict)
    unseen: Mapping[str, Errors] = field(default_factory=dict)

    def predict(self, table: pd.DataFrame, device: str | Device, framework: str = BEST) -> FloatArray:
        """Seconds of each operator of a table (:func:`cdmpp.program.operators.operator_table`), float64 (n,).

        Raises
        ------
        UnknownDeviceError
            No such device.
        PredictorError
            No such framework.
        """
        if framework not in FRAMEWORKS:
            raise PredictorError(f"no framework {framework!r}; there are {', '.join(FRAMEWORKS)}")
        if not len(table):
            return np.zeros(0)
        resolved = get_device(device) if isinstance(device, str) else device
        rows, estimate = encode(table, resolved, framework)
        return estimate * np.exp(self._logs(rows))

    def interval(
        self, table: pd.DataFrame, device: str | Device, framework: str = BEST
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds, and the ends between which nine of ten operators of such a kind were; each float64 (n,)."""
        resolved = get_device(device) if isinstance(device, str) else device
        seconds = self.predict(table, resolved, framework)
        errors = self.seen if resolved.name in self.devices else self.unseen
        found = [errors.get(op) or errors.get("") or Errors(-1.0, 0.0, 1.0, 0) for op in table["op"]]
        low = np.exp([error.low for error in found]) * seconds
        return seconds, np.minimum(low, seconds), np.maximum(np.exp([e.high for e in found]) * seconds, seconds)

    def _logs(self, rows: NDArray[np.float32]) -> FloatArray:
        scaled = torch.from_numpy(np.clip((rows - self.mean) / self.std, -_FAR, _FAR))
        with torch.inference_mode():
            return np.mean(
                [network(scaled).squeeze(-1).double().numpy() for network in self.networks], axis=0
            )

    def save(self, folder: str | Path) -> None:
        """Write ``operators.json`` and ``operators.safetensors``; nothing in them can run code."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "format": _FORMAT,
            "features": list(MECHANISM_FEATURES),
            "frameworks": list(FRAMEWORKS),
            "ops": list(_OPS),
            "dtypes": list(_DTYPES),
            "mean": [float(v) for v in self.mean],
            "std": [float(v) for v in self.std],
            "devices": list(self.devices),
            "widths": [layer.out_features for layer in self.networks[0] if isinstance(layer, nn.Linear)],  # type: ignore[attr-defined]
            **{
                name: {op: vars(error) for op, error in errors.items()}
                for name, errors in (("seen", self.seen), ("unseen", self.unseen))
            },
        }
        write_text(folder / _FILE, json.dumps(state) + "\n")
        tensors = {
            f"{i}.{name}": value.half()
            for i, network in enumerate(self.networks)
            for name, value in network.state_dict().items()
        }
        save_file(tensors, folder / _WEIGHTS)

    @classmethod
    def load(cls, folder: str | Path) -> OperatorModel:
        """Back from :meth:`save` (PredictorError: missing, damaged, or of other features than this version's)."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        try:
            state = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            named = (state["features"], state["frameworks"], state["ops"], state["dtypes"])
            if named != (list(MECHANISM_FEATURES), list(FRAMEWORKS), list(_OPS), list(_DTYPES)):
                raise PredictorError(f"{folder} was trained with other features: train it again")
            tensors = load_file(folder / _WEIGHTS)
            networks = []
            for number in sorted({int(name.partition(".")[0]) for name in tensors}):
                network = _network(state["widths"][:-1])
                own = {
                    name.partition(".")[2]: value.float()
                    for name, value in tensors.items()
                    if name.startswith(f"{number}.")
                }
                network.load_state_dict(own)
                networks.append(network.eval())
            errors = {
                name: {op: Errors(**values) for op, values in state[name].items()}
                for name in ("seen", "unseen")
            }
            mean, std = (np.array(state[name], dtype=np.float32) for name in ("mean", "std"))
            return cls(tuple(networks), mean, std, tuple(state["devices"]), **errors)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as err:
            raise PredictorError(f"cannot read the operator model of {folder}: {reason(err)}") from err


def encode(
    table: pd.DataFrame, device: Device, framework: str | None = None
) -> tuple[NDArray[np.float32], FloatArray]:
    """What the network sees of operators on one device, float32 (n, WIDTH), and the estimate, (n,); each row's own framework
    where none is given."""
    features, estimate = mechanism(table, device)
    names = table["framework"].to_numpy(dtype=str) if framework is None else np.full(len(table), framework)
    flags = [
        np.asarray(values)[:, None] == np.array(known)
        for values, known in (
            (table["op"].to_numpy(dtype=str), _OPS),
            (table["dtype"].to_numpy(dtype=str), _DTYPES),
            (names, FRAMEWORKS),
        )
    ]
    return np.concatenate([features, *flags], axis=1).astype(np.float32), estimate


def training_table(table: pd.DataFrame, rows: int = _ROWS, seed: int = 0) -> pd.DataFrame:
    """Labels to learn: the fastest kernel of every operator and device, and the fastest of every framework; at most ``rows`` of
    one operator, data type, device and framework."""
    table = table.assign(framework=table["framework"].where(table["framework"].isin(FRAMEWORKS), "torch"))
    keys = ["device", "op", "dtype", "kv_dtype", *SIZES]
    number = table.groupby(keys, dropna=False, observed=True, sort=False).ngroup()
    fastest = table["seconds"].groupby(number).idxmin()
    of_framework = table["seconds"].groupby([number, table["framework"]]).idxmin()
    parts = [table.loc[fastest].assign(framework=BEST), table.loc[of_framework]]
    united = pd.concat(parts, ignore_index=True).sample(frac=1.0, random_state=seed)
    place = united.groupby(["op", "dtype", "kv_dtype", "device", "framework"], observed=True).cumcount()
    return united[place < rows].reset_index(drop=True)


def families(devices: Sequence[Device]) -> dict[str, int]:
    """Device -> number of its family: those of one architecture whose cores and peaks are nearly the same."""
    found: dict[str, int] = {}
    for i, device in enumerate(devices):
        alike = [
            other
            for other in devices[:i]
            if other.arch == device.arch
            and abs(math.log((other.cores or 1) / (device.cores or 1))) < _ALIKE
            and abs(math.log(_peak(other) / _peak(device))) < _ALIKE
        ]
        found[device.name] = found[alike[0].name] if alike else i
    return found


def _peak(device: Device) -> float:
    return max(device.peak_gflops.values(), default=1.0)


def train(
    table: pd.DataFrame,
    *,
    members: int = 4,
    epochs: int = 40,
    width: int = 128,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> OperatorModel:
    """Train on a :func:`training_table`; its errors are empty (see :func:`with_errors`).

    Raises
    ------
    PredictorError
        There is nothing to learn from.
    """
    if len(table) < 2:
        raise PredictorError("an operator model needs labels of operators to learn from")
    rows, target = _encoded(table)
    mean, std = rows.mean(0), rows.std(0)
    flags = len(MECHANISM_FEATURES)
    mean[flags:], std[flags:] = 0.0, 1.0
    std = np.where(std > 1e-6, std, 1e6).astype(np.float32)
    scaled = torch.from_numpy(np.clip((rows - mean) / std, -_FAR, _FAR))
    labels, weights = torch.from_numpy(target.astype(np.float32)), torch.from_numpy(_weights(table))
    networks = []
    for member in range(members):
        networks.append(_fit(scaled, labels, weights, width, epochs, seed + member))
        progress(member + 1, members)
    return OperatorModel(tuple(networks), mean, std, tuple(sorted(set(table["device"]))))


def _encoded(table: pd.DataFrame) -> tuple[NDArray[np.float32], FloatArray]:
    rows, target = np.empty((len(table), WIDTH), dtype=np.float32), np.empty(len(table))
    for name, at in table.groupby("device", observed=True).indices.items():
        part = table.iloc[at]
        rows[at], estimate = encode(part, get_device(str(name)))
        target[at] = np.log(part["seconds"].to_numpy(dtype=np.float64) / estimate)
    return rows, target


def _weights(table: pd.DataFrame) -> NDArray[np.float32]:
    """Groups of an operator, data type and device weigh as the root of their size, so that large ones do not rule."""
    size = table.groupby(["op", "dtype", "device"], observed=True)["seconds"].transform("size")
    weights = 1.0 / np.sqrt(size.to_numpy(dtype=np.float64))
    return (weights / weights.mean()).astype(np.float32)


def _network(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    before = WIDTH
    for width in widths:
        layers += [nn.Linear(before, width), nn.GELU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, 1))


def _fit(
    rows: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, width: int, epochs: int, seed: int
) -> nn.Module:
    torch.manual_seed(seed)
    network = _network([width, width])
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    batch = min(1024, len(rows))
    steps = epochs * max(1, len(rows) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(rows), generator=generator)
        for first in range(0, len(rows) - batch + 1, batch):
            at = order[first : first + batch]
            error = network(rows[at]).squeeze(-1) - labels[at]
            loss = (nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=0.1) * weights[at]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def left_out(
    table: pd.DataFrame,
    families_of: Mapping[str, int] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> FloatArray:
    """Predicted seconds of each row by a model that saw no device of its family, float64 (n,); options of :func:`train`."""
    names = sorted(set(table["device"]))
    families_of = families_of or families([get_device(name) for name in names])
    numbers = table["device"].map(families_of).to_numpy()
    out = np.full(len(table), np.nan)
    for done, number in enumerate(sorted(set(numbers))):
        mine = numbers == number
        model = train(table[~mine].reset_index(drop=True), **options)
        out[mine] = predict_rows(model, table[mine])
        progress(done + 1, len(set(numbers)))
    return out


def predict_rows(model: OperatorModel, table: pd.DataFrame) -> FloatArray:
    """Seconds of each row on its own device and by its own framework, float64 (n,)."""
    out = np.empty(len(table))
    names, frameworks = table["device"].to_numpy(dtype=str), table["framework"].to_numpy(dtype=str)
    for name, framework in sorted(set(zip(names, frameworks, strict=True))):
        at = np.flatnonzero((names == name) & (frameworks == framework))
        out[at] = model.predict(table.iloc[at].reset_index(drop=True), name, framework)
    return out


def errors_by_operator(table: pd.DataFrame, predicted_s: FloatArray) -> dict[str, Errors]:
    """Errors of predictions by operator, and of all under ""."""
    logs = np.log(table["seconds"].to_numpy(dtype=np.float64) / predicted_s)
    ops = table["op"].to_numpy(dtype=str)
    found = {}
    for op in ["", *sorted(set(ops))]:
        own = logs[(ops == op) | (op == "")]
        low, middle, high = np.quantile(own, [0.05, 0.5, 0.95])
        found[op] = Errors(float(low), float(middle), float(high), len(own))
    return found
