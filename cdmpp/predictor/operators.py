"""Latencies of library operators on devices that may never have been measured.

:mod:`cdmpp.predictor.mechanism` computes how busy an operator keeps each pipe of a device. A few constants per kind of
operator, fitted over all devices, turn that into an estimate. A few small networks, which are averaged, learn to correct it.
The correction counts in full on devices of training. On others it is scaled by the factor that helped on left-out families of
devices (:func:`train`), which is 0 where there are too few. The errors on left-out families also give the intervals.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from cdmpp.dataset.operators import TORCH, TORCH_CALLS, TORCH_COLD
from cdmpp.device import Device, get_device
from cdmpp.errors import PredictorError, raised_as
from cdmpp.files import read_json, write_text
from cdmpp.predictor.checkpoint import load_tensors, save_tensors
from cdmpp.predictor.encoding import Correction, waves
from cdmpp.predictor.mechanism import MECHANISM_FEATURES, Constants, Mechanism, least_s, mechanism, without_unit
from cdmpp.program.aten import runs_without_onednn
from cdmpp.program.operators import ELEMENT_BYTES, OPERATORS, SIZES, WEIGHTS_ONLY, operator_table, operator_text

from cdmpp.predictor.solvers import (  # isort: skip
    FRAMEWORK, OPERATOR, VENDOR, SolverModel, fit_network, fit_solvers, network_of, standardised,
)  # fmt: skip

FloatArray = NDArray[np.float64]

#: Operators of one device, the logarithms of their seconds, and the weight of each.
_Labels = tuple[Mechanism, FloatArray, float]
#: Stands for the fastest kernel of any framework.
BEST = "best"
FRAMEWORKS = (BEST, "vllm", "sglang", "trtllm", TORCH, "miopen", "triton", "nccl", "pipeweave", TORCH_COLD)
_OPS, _DTYPES = tuple(OPERATORS), tuple(ELEMENT_BYTES)
#: Largest head dimension for which PyTorch has an attention kernel.
_LONGEST_HEAD = 256
#: Data types for which libraries have separate kernels for matrix products.
_NARROW = ("fp8", "fp8_block", "fp8_static", "nvfp4", "int8", "sq")
#: Head dimension above which attention has other kernels.
_LONG_HEAD = 128
_FILE, _WEIGHTS, _MEASURED = "operators.json", "operators.safetensors", "measured.parquet"
#: The most operators of one kind and device that are stored with a model.
_KEPT_ROWS = 120
#: Devices of one architecture are nearly the same if the logarithms of their peaks and cores differ by less than this, and
#: those of their bandwidths by less than three times this: an H200 is an H100 with other memory.
_ALIKE = 0.15
#: Factors of the networks' correction that are tried on left-out devices, and how many times the estimate's error it may make
#: on a family: for element-wise operators it was a fifth on two of seven families, and two to three times on two others.
_TRUST, _HARM = (0.0, 0.25, 0.5, 0.75, 1.0), 1.05
#: With fewer families of devices to leave out the correction is not used on unseen devices: with three families of GPUs it
#: doubled the error of attention. CPUs all run the same kernels of PyTorch, so one may say something about another.
_FAMILIES_TO_TRUST = {"gpu": 4, "cpu": 1}
#: Bounds of :class:`Constants`, in their order; how strongly a fit is pulled to their defaults, and that of one vendor to those
#: of all vendors (chosen on left-out GPUs).
_LOW = np.log([0.05, 0.2, 0.03, 0.05, 1.0, 1.0, 500.0, 10.0])
_HIGH = np.log([1.3, 1.2, 1.5, 3.0, 8.0, 6.0, 40_000.0, 20_000.0])
_PULL, _PULL_VENDOR, _OUTLIER = 0.02, 0.03, 0.15
#: Index of the cycles of a launch among the constants; how much more strongly they are pulled; and how much more where no label
#: is as short as this (seconds), as they would then absorb other differences.
_LAUNCH, _PULL_LAUNCH, _SHORT, _PULL_UNSEEN = 6, 5.0, 2e-5, 500.0
#: Start of the fit, and its pull, for attention and products with several weights in turn: a cache keeps all such data or none.
#: Start of an all-reduce, whose rounds and bytes wait for each other: also the lower bound of its norm.
_STREAMS, _KEPT_PULL, _ROUNDS = Constants(kept=1.0, kept_power=7.0), 0.3, Constants(norm=0.5)
#: Single calls of PyTorch are labels only if they take this many times as long as the shortest (this quantile): the host takes
#: 25 to 45 us to launch an operator that a GPU runs in 1 to 3 if it is small. In longer calls 0.6 of the shortest is host time.
#: Subtracting that, and keeping calls from twice the shortest on, tripled the errors of small operators on left-out GPUs.
_HOSTED, _SHORTEST = 4.0, 0.02
#: Kinds without labels -> the kind whose constants they use. RMS norm is one pass of an engine's fused kernel over its rows,
#: unlike PyTorch's layer norm, which makes two.
_ALIKE_KINDS = {
    "elementwise": "elementwise float32",
    **dict.fromkeys(("silu_mul", "embedding", "rmsnorm"), "elementwise"),
    "layernorm": "layernorm float32",
    "softmax": "softmax float32",
}
#: Kinds of attention -> the kind they are fitted together with, and the kind whose constants they use despite own labels: fp8
#: on an L40S has labels of TRT-LLM alone, which is slower than others in bfloat16, so they say nothing about other GPUs.
_FITTED_WITH = {"attention prefill long": "attention prefill"}
_SERVED_BY = {**_FITTED_WITH, "attention prefill narrow": "attention prefill"}
#: The most operators of one kind and device that constants are fitted to.
_FITTED_ROWS = 3000
#: Relative noise at which a label weighs half as much in training as one without noise.
_NOISE = 0.1
#: Operands this many times as large as a cache are not in it; no kernel reads memory this many times as fast as its bandwidth.
_TOO_LARGE, _TOO_FAST = 1.25, 1.1
#: With a single family of devices its operators are split into this many parts, which are left out in turn.
_FOLDS = 5
#: A framework that usually takes longer than the fastest by this fraction says nothing about the fastest if it measured alone.
_SLOW = 0.1
#: Tables are cut to this many rows of one operator, data type, device and framework.
_ROWS = 2500
#: Width of a Gaussian kernel over the numeric features of operators, in standard deviations of each.
_REACH = 0.5
#: ATen operators with fewer labels have no input of their own: networks cannot distinguish them from others of their kind.
_LEAST_LABELS = 10
#: Rows of a training step, fewest epochs; width of the networks, number of steps, and highest rate. CPU labels are of one
#: framework and repeat to within a few per cent: twice the steps, 12 times the rate, or a width of 400 do not help further.
_BATCH, _LEAST_EPOCHS, _SIZE = 1024, 14, {"gpu": (96, 2600, 0.003), "cpu": (256, 5000, 0.018)}
#: The most operators of one device, data type and direction that solvers are learned from; prefix of the names of their
#: networks' tensors; and the least probability of being able to run with which a solver is listed.
_SOLVER_ROWS, _OF_SOLVERS, _CAN_RUN = 900, "solvers", 0.3


@dataclass(frozen=True)
class Errors:
    """Quantiles of log(measured / predicted) at 5, 50 and 95 %, over ``n`` operators of one kind."""

    low: float
    middle: float
    high: float
    n: int


@dataclass(frozen=True)
class OperatorModel:
    """Constants by kind of operator; networks, with the mean and std of their inputs; the kinds with labels by device; and by
    kind a factor of the networks' correction elsewhere (``trust``), errors there (``unseen``), of rows left out (``seen``)."""

    constants: Mapping[str, Constants]
    networks: Sequence[nn.Module]
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    devices: Mapping[str, Sequence[str]]
    #: Names of the networks' inputs by group, a subset of those that this version knows.
    inputs: Sequence[Sequence[str]] = field(default_factory=lambda: _INPUTS)
    trust: Mapping[str, float] = field(default_factory=dict)
    seen: Mapping[str, Errors] = field(default_factory=dict)
    unseen: Mapping[str, Errors] = field(default_factory=dict)
    solvers: SolverModel | None = None
    #: Some of the training operators, with ``device`` and ``seconds``.
    measured: pd.DataFrame | None = None
    #: By device: a correction fitted to a few of its operators (:mod:`cdmpp.predictor.measurements`), and the errors left then.
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    left: Mapping[str, Errors] = field(default_factory=dict)

    def predict(self, table: pd.DataFrame, device: str | Device, framework: str = BEST) -> FloatArray:
        """Predict the seconds of each operator of a table (:func:`cdmpp.program.operators.operator_table`), float64 (n,).

        Raises UnknownDeviceError; PredictorError for an unknown framework or a device whose kind (CPU, GPU) has no labels."""
        if framework not in FRAMEWORKS:
            raise PredictorError(f"no framework {framework!r}; there are {', '.join(FRAMEWORKS)}")
        if not len(table):
            return np.zeros(0)
        resolved = get_device(device)
        if resolved.kind not in {get_device(name).kind for name in self.devices}:
            raise PredictorError(f"these library operators are of no {resolved.kind.upper()}, as {resolved.name} is")
        estimate, logs = self.parts(table, resolved, framework)
        measured = self.measured_on(resolved)
        parts = np.array([1.0 if kind in measured else self.trust.get(kind, 0.0) for kind in kinds(table)])
        # no correction of a narrow type that runs in another, unless it was measured so: fp8 does not behave like int8
        own = () if self.measured is None else self.measured["dtype"][self.measured["device"] == resolved.name]
        lacking = [dtype for dtype in _NARROW if dtype not in set(own) and without_unit(resolved, dtype)]
        parts[table["dtype"].isin(lacking)] = 0.0
        logs = logs * parts
        if (taught := self.corrections.get(resolved.name)) is not None:
            logs = logs + taught.logs(np.concatenate(self.traits(table, resolved), axis=1))
        alone = ((table["op"] == "all_reduce") & (table["num_workers"] < 2)).to_numpy()  # one rank has nothing to add up
        return np.where(alone, 0.0, np.maximum(estimate * np.exp(logs), least_s(table, resolved)))

    def measured_on(self, device: Device) -> set[str]:
        """Kinds of operators with labels on a device, or on as many cores of a CPU of the same microarchitecture."""
        alike = [name for name in self.devices if _cores(get_device(name)) == _cores(device)]
        return {kind for name in alike for kind in self.devices[name]}

    def traits(self, table: pd.DataFrame, device: Device) -> tuple[FloatArray, FloatArray]:
        """Features for comparing operators, which depend on no label: flags of their kinds, (n, kinds), and random Fourier
        features (``waves``) of the networks' numeric inputs, (n, WAVES)."""
        flags = kinds(table)[:, None] == np.array(sorted(kind for kind in self.constants if "@" not in kind))
        return flags.astype(np.float64), waves(self._numbers(table, device), _REACH)

    def _numbers(self, table: pd.DataFrame, device: Device) -> FloatArray:
        """The networks' numeric inputs, standardised, (n, inputs)."""
        names = self.inputs[0]
        rows = encode(table, device, BEST, {}, [names])[0]
        return standardised(rows, self.mean[: len(names)], self.std[: len(names)]).double().numpy()

    def parts(
        self, table: pd.DataFrame, device: Device | None = None, framework: str | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """The estimate in seconds, and the networks' correction, which is added to its logarithm, each float64 (n,). A device
        or framework of None stands for each row's own."""
        rows, estimate = encode(table, device, framework, self.constants, self.inputs)
        return estimate, self.logs(rows)

    def logs(self, rows: NDArray[np.float32]) -> FloatArray:
        """The networks' correction of encoded operators, which is added to the logarithm of the estimate, float64 (n,)."""
        scaled = standardised(rows, self.mean, self.std)
        with torch.inference_mode():
            logs = [network(scaled).squeeze(-1).double().numpy() for network in self.networks]
        return np.mean(logs, axis=0) if logs else np.zeros(len(rows))

    def explain(self, table: pd.DataFrame, device: str | Device) -> pd.DataFrame:
        """Explain what bounds each operator: the busiest part of the device (``bound``) and its ``part`` of the estimate; the
        share of core slots with work in the waves of 128 x 128 tiles of a product (``full``); the learned ``correction``, a
        factor; the likely ``kernel`` ("" if none is known); and the ``nearest`` measured operator, the device it was measured
        ``on``, and how ``far`` it is in standard deviations of the training data (NaN if none of its kind was measured)."""
        resolved = get_device(device)
        seen, of_kind = mechanism(table, resolved), kinds(table)
        bound, part = np.empty(len(table), dtype=object), np.empty(len(table))
        for kind in np.unique(of_kind):
            at = of_kind == kind
            constants, own = constants_of(kind, self.constants, resolved.vendor), seen.take(at)
            busy = own.parts(constants)
            longest = np.argmax(list(busy.values()), axis=0)
            bound[at] = np.array(list(busy), dtype=object)[longest]
            part[at] = np.max(list(busy.values()), axis=0) / own.estimate(constants)
        estimate, _ = self.parts(table, resolved, BEST)
        idle = seen.features[:, MECHANISM_FEATURES.index("idle_128x128")]
        full = np.where(seen.matrix_s > 0, np.exp(-idle), np.nan)
        correction = self.predict(table, resolved) / estimate
        first = self.kernels(table, resolved).drop_duplicates("row").set_index("row")["kernel"].astype(object)
        kernel = first.reindex(range(len(table)), fill_value="").to_numpy()
        found = {"bound": bound, "part": part, "full": full, "correction": correction, "kernel": kernel}
        return pd.DataFrame({**found, **self._nearest(table, resolved)})

    def _nearest(self, table: pd.DataFrame, device: Device) -> dict[str, NDArray[Any]]:
        """The nearest measured operator of the same kind, or of the kind whose constants it uses, by numeric inputs."""
        from scipy.spatial.distance import cdist

        nearest, on = np.full((2, len(table)), "", dtype=object)
        far = np.full(len(table), np.nan)
        asked = self._numbers(table, device)
        known = self.measured if self.measured is not None else table[:0].assign(device="")
        of_known = kinds(known)
        for kind, at in table.groupby(kinds(table)).indices.items():
            like = str(kind) if kind in of_known else _ALIKE_KINDS.get(str(kind), "")
            own = known[of_known == like].reset_index(drop=True)
            if own.empty:
                continue
            there = np.empty((len(own), asked.shape[1]))
            for name, mine in own.groupby("device").indices.items():
                there[mine] = self._numbers(own.iloc[mine], get_device(str(name)))
            apart = cdist(asked[at], there) / math.sqrt(asked.shape[1])
            best = apart.argmin(axis=1)
            far[at], on[at] = apart[np.arange(len(at)), best], own["device"].to_numpy()[best]
            nearest[at] = [operator_text(row) for row in own.iloc[best].to_dict("records")]
        return {"nearest": nearest, "on": on, "far": far}

    def kernels(self, table: pd.DataFrame, device: str | Device) -> pd.DataFrame:
        """List the solvers that may run each convolution on an AMD GPU, the fastest first: ``row`` of the table, ``kernel``,
        ``seconds`` (:meth:`predict` for the fastest), and ``can_run``, its probability to run. Other operators have none."""
        resolved = get_device(device)
        at = np.flatnonzero((table["op"] == OPERATOR).to_numpy() & (resolved.vendor == VENDOR))
        if self.solvers is None or not len(at):
            return pd.DataFrame({"row": [], "kernel": [], "seconds": [], "can_run": []})
        part = table.iloc[at]
        logs, can_run = self.solvers.rank(encode(part, resolved, FRAMEWORK, self.constants, self.inputs)[0])
        allowed = can_run >= np.minimum(_CAN_RUN, can_run.max(axis=1, keepdims=True))
        row, solver = np.nonzero(allowed)
        fastest = np.where(allowed, logs, np.inf).min(axis=1)
        seconds = self.predict(part, resolved)[row] * np.exp(logs - fastest[:, None])[row, solver]
        names = np.array(self.solvers.names, dtype=object)[solver]
        found = {"row": at[row], "kernel": names, "seconds": seconds, "can_run": can_run[row, solver]}
        return pd.DataFrame(found).sort_values(["row", "seconds"], ignore_index=True)

    def interval(
        self, table: pd.DataFrame, device: str | Device, framework: str = BEST
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds, and the low and high ends between which nine of ten operators of the same kind were, each float64 (n,)."""
        resolved = get_device(device)
        seconds = self.predict(table, resolved, framework)
        measured = self.measured_on(resolved)
        found = [
            self.left.get(resolved.name) or errors.get(kind) or errors.get("") or Errors(-1.0, 0.0, 1.0, 0)
            for kind in kinds(table)
            for errors in (self.seen if kind in measured else self.unseen,)
        ]
        low, high = (np.exp([getattr(error, end) for error in found]) for end in ("low", "high"))
        return seconds, np.minimum(low, 1.0) * seconds, np.maximum(high, 1.0) * seconds

    def save(self, folder: str | Path) -> None:
        """Write ``operators.json`` and ``operators.safetensors``; nothing in them can run code."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        records = {name: getattr(self, name) for name in ("constants", "seen", "unseen", "left")}
        state: dict[str, Any] = {
            "inputs": self.inputs,
            "mean": [float(v) for v in self.mean],
            "std": [float(v) for v in self.std],
            "devices": {name: list(of_device) for name, of_device in self.devices.items()},
            "trust": dict(self.trust),
            "corrections": {name: correction.to_json() for name, correction in self.corrections.items()},
            **{name: {kind: vars(value) for kind, value in group.items()} for name, group in records.items()},
        }
        tensors = _tensors(self.networks)
        if (solvers := self.solvers) is not None:
            numbers = {name: [float(f"{v:.6g}") for v in getattr(solvers, name)] for name in ("mean", "std")}
            state["solvers"] = {"names": list(solvers.names), **numbers}
            tensors |= _tensors(solvers.networks, _OF_SOLVERS)
        write_text(folder / _FILE, json.dumps(state) + "\n")
        save_tensors(folder / _WEIGHTS, tensors, {})
        if self.measured is not None:
            small = self.measured.astype(dict.fromkeys((*SIZES, "seconds"), "float32"))
            small.to_parquet(folder / _MEASURED, compression="zstd", compression_level=19, index=False)

    @classmethod
    def load(cls, folder: str | Path) -> OperatorModel:
        """Read what :meth:`save` wrote. Raises PredictorError if it is missing, damaged, or has features unknown here."""
        folder = Path(folder)
        sentence = f"cannot read the operator model of {folder}"
        with raised_as(PredictorError, sentence, KeyError, TypeError, RuntimeError):
            state = read_json(folder / _FILE)
            known = [*zip(state["inputs"], [MECHANISM_FEATURES, *_INPUTS[1:4]], strict=False)]
            known += [(own, list(vars(Constants()))) for own in state["constants"].values()]
            if any(set(own) - set(names) for own, names in known):
                raise PredictorError(f"{folder} was trained with other features: train it again")
            tensors, _ = load_tensors(folder / _WEIGHTS)
            solvers = None
            if of_solvers := state.get("solvers"):
                mean, std = (np.array(of_solvers[name], dtype=np.float32) for name in ("mean", "std"))
                solvers = SolverModel(tuple(of_solvers["names"]), _networks(tensors, _OF_SOLVERS), mean, std)
            return cls(
                constants={kind: Constants(**values) for kind, values in state["constants"].items()},
                networks=_networks(tensors),
                mean=np.array(state["mean"], dtype=np.float32),
                std=np.array(state["std"], dtype=np.float32),
                devices=dict(state["devices"]),
                inputs=state["inputs"],
                trust=state["trust"],
                seen={kind: Errors(**values) for kind, values in state["seen"].items()},
                unseen={kind: Errors(**values) for kind, values in state["unseen"].items()},
                solvers=solvers,
                corrections={name: Correction.from_json(own) for name, own in state.get("corrections", {}).items()},
                left={name: Errors(**values) for name, values in state.get("left", {}).items()},
                measured=operator_table(pd.read_parquet(folder / _MEASURED)) if (folder / _MEASURED).exists() else None,
            )


def _tensors(networks: Sequence[nn.Module], prefix: str = "") -> dict[str, torch.Tensor]:
    """Weights of networks by name, in half precision."""
    states = [(f"{prefix}{i}", network.state_dict()) for i, network in enumerate(networks)]
    return {f"{number}.{name}": value.half() for number, state in states for name, value in state.items()}


def _networks(tensors: Mapping[str, torch.Tensor], prefix: str = "") -> tuple[nn.Module, ...]:
    """Networks rebuilt from what :func:`_tensors` gave."""
    found: list[nn.Module] = []
    while f"{prefix}{len(found)}.0.weight" in tensors:
        start = f"{prefix}{len(found)}."
        own = {name.removeprefix(start): v.float() for name, v in tensors.items() if name.startswith(start)}
        width, inputs = own["0.weight"].shape
        found.append(network_of(inputs, width, len(own["4.weight"])))
        found[-1].load_state_dict(own)
    return tuple(network.eval() for network in found)


def load_operator_model(spec: str | Path = "default", kind: str = "gpu") -> OperatorModel:
    """Load the operator model that ships for a kind of device (``"default"``), or a folder's (PredictorError: it has none)."""
    return OperatorModel.load(spec) if str(spec) != "default" else _shipped(kind)


@functools.cache
def _shipped(kind: str) -> OperatorModel:
    return OperatorModel.load(Path(__file__).parent / "weights" / {"gpu": "operators", "cpu": "operators-cpu"}[kind])


#: Names of the networks' inputs by group, against which a file is checked.
_INPUTS: list[list[str]] = [
    [name for name in MECHANISM_FEATURES if name not in ("m", "n")],
    list(_OPS),
    list(_DTYPES),
    list(FRAMEWORKS),
    [],
]


def inputs_of(table: pd.DataFrame) -> list[list[str]]:
    """Names of the inputs of networks that learn from a table. On CPUs they include the sizes ``m`` and ``n`` and the ATen
    operators, several of which may be one operator of ours."""
    if any(get_device(name).kind == "gpu" for name in set(table["device"])) or "kernel" not in table:
        return _INPUTS
    own = [_kernels(mine, get_device(str(name))) for name, mine in table.groupby("device")]
    often = pd.Series(np.concatenate(own)).value_counts()
    return [list(MECHANISM_FEATURES), *_INPUTS[1:4], sorted(map(str, often.index[often >= _LEAST_LABELS]))]


def _kernels(table: pd.DataFrame, device: Device) -> NDArray[np.str_]:
    """The ATen operator of each row ("" if unknown); convolutions that a CPU runs without oneDNN have names of their own."""
    if "kernel" not in table:
        return np.full(len(table), "")
    own = (device.kind == "cpu") and runs_without_onednn(table, device.share)
    return np.char.add(table["kernel"].to_numpy(dtype=str), np.where(own, " without oneDNN", ""))


def kinds(table: pd.DataFrame) -> NDArray[np.str_]:
    """The kind of each operator; each kind has its own constants. It is the operator, for attention with whether a sequence has
    more than one query, and with what has separate kernels: data types of one byte or of four, quantised weights alone, long
    heads. Attention of one query is bound by the keys that it reads, whatever the arithmetic is in."""
    op, dtype = table["op"].to_numpy(dtype=str), table["dtype"].to_numpy(dtype=str)
    single = (table["tokens"] <= table["sequences"]).to_numpy()
    attends, narrow = op == "attention", np.isin(dtype, _NARROW)
    of_phase = np.select([attends & single, attends], [" decode", " prefill"], "")
    masks = [
        narrow & np.isin(op, ("gemm", "attention", "conv")) & ~(attends & single),
        np.isin(dtype, WEIGHTS_ONLY),
        attends & (table["head_dim"] > _LONG_HEAD).to_numpy(),
        np.isin(dtype, ("float32", "float64")),
    ]
    own = np.select(masks, [" narrow", " weights only", " long", " float32"], "")
    return np.char.add(np.char.add(op, of_phase), own)


def constants_of(kind: str, constants: Mapping[str, Constants], vendor: str = "") -> Constants:
    """Constants of a kind, else of its operator, each time the vendor's own if there are any; else the defaults."""
    asked = (name for one in (kind, kind.partition(" ")[0]) for name in (f"{one}@{vendor}", one))
    return next((constants[name] for name in asked if name in constants), Constants())


def encode(
    table: pd.DataFrame,
    device: Device | None,
    framework: str | None,
    constants: Mapping[str, Constants],
    inputs: Sequence[Sequence[str]] = (),
) -> tuple[NDArray[np.float32], FloatArray]:
    """The networks' inputs of operators, float32 (n, inputs), and the estimate in seconds, (n,); None: each row's own."""
    inputs = inputs or _INPUTS
    estimate = np.empty(len(table))
    if device is None:
        rows = np.empty((len(table), sum(map(len, inputs))), dtype=np.float32)
        for name, at in table.groupby("device").indices.items():
            rows[at], estimate[at] = encode(table.iloc[at], get_device(str(name)), framework, constants, inputs)
        return rows, estimate
    seen = mechanism(table, device)
    names = table["framework"].to_numpy(dtype=str) if framework is None else np.full(len(table), framework)
    features, *groups = inputs
    op, dtype = table["op"].to_numpy(dtype=str), table["dtype"].to_numpy(dtype=str)
    # only convolutions have labels in float16; of other operators libraries have the same kernels for both types of 16 bits
    dtype = np.where((dtype == "float16") & (op != "conv"), "bfloat16", dtype)
    values = (op, dtype, names, _kernels(table, device))
    flags = [own[:, None] == np.array(known, dtype=str) for own, known in zip(values, groups, strict=False)]
    numbers = seen.features[:, [MECHANISM_FEATURES.index(name) for name in features]]
    of_kind = kinds(table)
    for kind in np.unique(of_kind):
        at = of_kind == kind
        estimate[at] = seen.take(at).estimate(constants_of(kind, constants, device.vendor))
    return np.concatenate([numbers, *flags], axis=1).astype(np.float32), estimate


def training_table(table: pd.DataFrame, rows: int = _ROWS, seed: int = 0) -> pd.DataFrame:
    """Select training labels: the fastest kernel of every operator and device, and the fastest of every framework; at most
    ``rows`` of one operator, data type, device and framework. For CPUs there are only PyTorch's own.

    If all frameworks that measured an operator are usually slower than others, its fastest kernel is unknown. For attention,
    where a framework has several kernels, this is decided by kernel. Attention to a single key is left out: it has no kernel
    of its own, but was timed with those for many queries. So are single calls dominated by the host's time, products that read
    weights faster than memory can deliver them, and PyTorch's RMS norm in 16 bits: its 128 threads a row take 3 us for 2048
    columns and 7 for 8192, and engines have their own. Nor is its attention of one query or long heads taken as the fastest."""
    if all(get_device(name).kind == "cpu" for name in set(table["device"])):
        return table.assign(framework=table["framework"].replace(TORCH, BEST)).reset_index(drop=True)
    shortest = table["seconds"].groupby([table[name] for name in ("device", "op", "framework")], observed=True)
    hosted = (table["framework"] == TORCH_CALLS) & (table["seconds"] < _HOSTED * shortest.transform("quantile", _SHORTEST))
    of_torch, norm = table["framework"] == TORCH, (table["op"] == "rmsnorm") & (table["dtype"] != "float32")
    single = (table["op"] == "attention") & ((table["longest"] <= 1) | ((table["head_dim"] > _LONGEST_HEAD) & of_torch))
    table = table.assign(framework=table["framework"].where(table["framework"].isin(FRAMEWORKS), TORCH))
    table = table[~(hosted | single | (norm & of_torch) | _kept(table))].reset_index(drop=True)
    attends, kernel = table["op"] == "attention", table["kernel"] if "kernel" in table else table["framework"]
    source = table["framework"].where(~attends, table["framework"] + " " + kernel.fillna("").astype(str))
    keys = ["device", "op", "dtype", "kv_dtype", *SIZES]
    number = table.groupby(keys, dropna=False, observed=True, sort=False).ngroup()
    best = table["seconds"].groupby(number)
    several = source.groupby(number).transform("nunique") > 1
    above = (table["seconds"] / best.transform("min")).where(several)
    of_source = [*(table[name] for name in keys[:4]), kinds(table), source]
    slow = above.groupby(of_source, dropna=False).transform("median") > 1 + _SLOW
    unknown = slow.groupby(number).transform("all") & (attends | ~several)
    fastest = best.idxmin()
    short = (table["tokens"] <= table["sequences"]) | (table["head_dim"] > _LONG_HEAD)
    unknown |= attends & short & (table["framework"] == TORCH) & (table["dtype"] != "float32")
    fastest = fastest[~unknown.loc[fastest].to_numpy()]
    of_framework = table["seconds"].groupby([number, table["framework"]]).idxmin()
    parts = [table.loc[fastest].assign(framework=BEST), table.loc[of_framework]]
    united = pd.concat(parts, ignore_index=True).sample(frac=1.0, random_state=seed)
    groups = ["op", "dtype", "kv_dtype", "device", "framework"]
    return united[united.groupby(groups, observed=True).cumcount() < rows].reset_index(drop=True)


def _kept(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Products whose weights a benchmark left in the cache, although all weights that it takes in turn are too large for it:
    some of TRT-LLM's on an L40S are three times as fast as its memory."""
    kept, products = np.zeros(len(table), dtype=bool), np.flatnonzero(table["op"] == "gemm")
    for name, own in table.iloc[products].groupby("device").indices.items():
        at = products[own]
        seen = mechanism(table.iloc[at], get_device(str(name)))
        kept[at] = (seen.turn > _TOO_LARGE) & (seen.memory_s > _TOO_FAST * table["seconds"].to_numpy()[at])
    return kept


def families(devices: Sequence[Device]) -> dict[str, int]:
    """Device -> number of its family: shares of one device, or devices of one architecture that are nearly the same."""
    found: dict[str, int] = {}
    for i, device in enumerate(devices):
        alike = [
            other
            for other in devices[:i]
            if other.base == device.base
            or (
                other.arch == device.arch
                and abs(math.log((other.cores or 1) / (device.cores or 1))) < _ALIKE
                and abs(math.log(_peak(other) / _peak(device))) < _ALIKE
                and abs(math.log((other.bandwidth_gb_s or 1) / (device.bandwidth_gb_s or 1))) < 3 * _ALIKE
            )
        ]
        found[device.name] = found[alike[0].name] if alike else i
    return found


def _peak(device: Device) -> float:
    return max(device.peak_gflops.values(), default=1.0)


def train(
    table: pd.DataFrame,
    *,
    members: int = 4,
    epochs: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[OperatorModel, pd.DataFrame]:
    """Train on a :func:`training_table`, and also without each family of devices in turn; ``epochs`` replaces the usual number.

    Returns the model, and the table with predictions made without the row's family: ``left_out_s`` with the trust derived from
    the other families, ``left_out_estimate_s`` by the estimate alone. Raises PredictorError if there is too little to learn."""
    operator = table.groupby(["op", "dtype", *SIZES], dropna=False, observed=True).ngroup().to_numpy()
    if len(table) < _FOLDS or not operator.any():
        raise PredictorError("an operator model needs labels of operators to learn from")
    fold = (np.random.default_rng(seed).permutation(operator.max() + 1) % _FOLDS)[operator]
    table = table.reset_index(drop=True)
    device_kind = get_device(str(table["device"][0])).kind
    _, steps, _ = _SIZE[device_kind]
    epochs = epochs or max(_LEAST_EPOCHS, round(steps * _BATCH / len(table)))
    family = table["device"].map(families([get_device(name) for name in sorted(set(table["device"]))])).to_numpy()
    one_family = len(set(family)) < 2
    part = fold if one_family else family
    numbers = sorted(set(part))
    total = len(numbers) + 1 + (not one_family)

    def left_out(mine: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
        return _fitted(table[~mine].reset_index(drop=True), max(1, members // 2), epochs, seed).parts(table[mine])

    estimate, logs = np.empty(len(table)), np.empty(len(table))
    for done, number in enumerate(numbers):
        progress(done, total)
        estimate[part == number], logs[part == number] = left_out(part == number)
    progress(len(numbers), total)
    if one_family:  # no other family can tell how far to trust the networks: they count in full everywhere
        left = table.assign(left_out_s=estimate * np.exp(logs), left_out_estimate_s=estimate)
        errors = _errors(left.assign(framework=BEST), left["left_out_s"])
        trust = dict.fromkeys(map(str, np.unique(kinds(table))), 1.0)
        return replace(_fitted(table, members, epochs, seed), trust=trust, seen=errors), left
    measured, kind = np.log(table["seconds"].to_numpy(dtype=np.float64)) - np.log(estimate), kinds(table)
    least = _FAMILIES_TO_TRUST[device_kind]
    trust = {str(k): _trust(measured, logs, kind == k, family, least) for k in np.unique(kind)}
    trusted = np.empty(len(table))
    for number in numbers:
        for k in np.unique(kind[family == number]):
            at = (family == number) & (kind == k)
            trusted[at] = _trust(measured, logs, (kind == k) & (family != number), family, least)
    left = table.assign(left_out_s=estimate * np.exp(trusted * logs), left_out_estimate_s=estimate)
    model = replace(_fitted(table, members, epochs, seed), trust=trust, unseen=_errors(left, left["left_out_s"]))
    progress(total - 1, total)
    estimate, logs = left_out(fold == 0)  # operators left out on all devices
    return replace(model, seen=_errors(table[fold == 0], estimate * np.exp(logs))), left


def train_solvers(
    operators: pd.DataFrame,
    seconds: FloatArray,
    names: Sequence[str],
    constants: Mapping[str, Constants],
    inputs: Sequence[Sequence[str]] = (),
    seed: int = 0,
) -> SolverModel:
    """Learn which solver is fast from all that were timed (:func:`solver_times`)."""
    encoded, estimate = encode(operators, None, FRAMEWORK, constants, inputs)
    return fit_solvers(encoded, np.log(seconds / estimate[:, None]), names, seed)


def solver_times(table: pd.DataFrame, rows: int = _SOLVER_ROWS, seed: int = 0) -> tuple[pd.DataFrame, FloatArray, list[str]]:
    """Select convolutions on devices, at most ``rows`` of a device, data type and direction; with the seconds of each solver,
    (n, solvers), NaN where it did not run, and the solvers' names. Raises PredictorError if the table has none."""
    table = table[(table["framework"] == FRAMEWORK) & (table["op"] == OPERATOR)].reset_index(drop=True)
    if table.empty:
        raise PredictorError(f"no {OPERATOR} by {FRAMEWORK} in it")
    keys = ["device", "op", "dtype", "kv_dtype", *SIZES]
    number = table.groupby(keys, dropna=False, observed=True, sort=False).ngroup().to_numpy()
    operators = table.iloc[np.unique(number, return_index=True)[1]].reset_index(drop=True)
    drawn = operators.sample(frac=1.0, random_state=seed)
    drawn = drawn[drawn.groupby(["device", "dtype", "backward"]).cumcount() < rows]
    names, solver = np.unique(table["kernel"].to_numpy(dtype=str), return_inverse=True)
    seconds = np.full((len(operators), len(names)), np.nan)
    slowest_first = np.argsort(-table["seconds"].to_numpy(), kind="stable")
    seconds[number[slowest_first], solver[slowest_first]] = table["seconds"].to_numpy()[slowest_first]
    return drawn.reset_index(drop=True), seconds[drawn.index], names.tolist()


def with_what_was_measured(model: OperatorModel, table: pd.DataFrame, learned: pd.DataFrame) -> OperatorModel:
    """Add to a model the solvers of a table of all measurements, if any, and some of the operators that it ``learned`` from."""
    solvers = None
    if ((table["framework"] == FRAMEWORK) & (table["op"] == OPERATOR)).any():
        solvers = train_solvers(*solver_times(table), model.constants, model.inputs)
    best = learned[learned["framework"] == BEST].reset_index(drop=True)
    kept = best[best.groupby([kinds(best), "device"]).cumcount() < _KEPT_ROWS].reset_index(drop=True)
    kept = kept[["op", "dtype", "kv_dtype", *SIZES, "device", "seconds"]]
    return replace(model, solvers=solvers, measured=kept)


def left_out_errors(
    left: pd.DataFrame, by: Sequence[str] = ("kind", "dtype", "device"), predicted: str = "left_out_s"
) -> list[dict[str, Any]]:
    """Errors in the second result of :func:`train` on the fastest kernels by kind, data type and device, as fractions; or in
    another column ``predicted``, by other columns."""
    best = left[left["framework"] == BEST]
    best = best.assign(kind=kinds(best), error=(best[predicted] / best["seconds"] - 1).abs())
    groups = best.groupby(list(by), observed=True)["error"]
    return groups.agg(median_ape="median", mape="mean", n="size").reset_index().to_dict("records")


def evaluate_operators(table: pd.DataFrame, predictor: str | Path = "default") -> dict[str, Any]:
    """Errors on the fastest kernel of every operator and device of a table (:func:`training_table`), by the model that
    :func:`load_operator_model` finds for the kind of the device; the result is the content of ``cdmpp evaluate --json``.
    ``seen_in_training`` says of a device that the model learned from labels of it; ``left_out`` counts ``rows`` of slower
    kernels, and of times that are not of the fastest kernel alone. PredictorError: nothing can be scored."""
    parts, by = [], ("device", "kind", "dtype", "seen_in_training")
    model_of = functools.cache(functools.partial(load_operator_model, predictor))  # a folder is read once, not for every device
    for name, own in table.groupby("device"):
        device = get_device(str(name))
        model, learned = model_of(device.kind), training_table(own, len(own))
        best = learned[learned["framework"] == BEST]
        seen = bool(model.measured_on(device)) or device.name in model.corrections
        parts.append(best.assign(predicted_s=model.predict(best, device), seen_in_training=seen))
    if not any(map(len, parts)):
        raise PredictorError("no operator can be scored: the fastest kernel of none is known")
    scored = pd.concat(parts)
    overall, groups = (left_out_errors(scored, columns, "predicted_s") for columns in (by[3:], by))
    return {"overall": overall, "groups": groups, "rows": len(table), "left_out": len(table) - len(scored)}


def _fitted(table: pd.DataFrame, members: int, epochs: int, seed: int) -> OperatorModel:
    width, _, rate = _SIZE[get_device(str(table["device"][0])).kind]
    constants = fit_constants(table)
    inputs = inputs_of(table)
    rows, estimate = encode(table, None, None, constants, inputs)
    target = np.log(table["seconds"].to_numpy(dtype=np.float64) / estimate)
    mean, std = rows.mean(0), rows.std(0)
    flags = len(inputs[0])
    mean[flags:], std[flags:] = 0.0, 1.0
    std = np.where(std > 1e-6, std, 1e6).astype(np.float32)
    scaled = standardised(rows, mean, std)
    # a group of one operator, data type and device weighs the square root of its size, so that large ones do not dominate
    weights = table.groupby(["op", "dtype", "device"])["seconds"].transform("size").to_numpy(dtype=np.float64) ** -0.5
    noise = table.get("noise", pd.Series(0.0, table.index)).fillna(0).to_numpy(dtype=np.float64)
    weights = weights / (1 + (noise / _NOISE) ** 2)
    labels, weights = (torch.from_numpy(x.astype(np.float32)) for x in (target, weights / weights.mean()))

    def loss(found: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        huber = nn.functional.huber_loss(found.squeeze(-1), labels[at], reduction="none", delta=0.1)
        return (huber * weights[at]).mean()

    networks = [fit_network(scaled, 1, width, epochs, seed + member, loss, rate) for member in range(members)]
    of_kind = pd.Series(kinds(table)).groupby(table["device"].to_numpy())
    devices = {str(name): sorted(set(own)) for name, own in of_kind}
    return OperatorModel(constants, tuple(networks), mean, std, devices, inputs)


def fit_constants(table: pd.DataFrame) -> dict[str, Constants]:
    """Fit constants of each kind to the fastest kernels of all devices, which weigh the same. If there are GPUs of several
    vendors, whose libraries differ, each vendor gets its own too (``gemm float32@amd``). A kind without labels gets others'."""
    found: dict[str, Constants] = {}
    of_kind = pd.Series(kinds(table)).replace(_FITTED_WITH).to_numpy(dtype=str)
    best = (table["framework"] == BEST).to_numpy()
    for kind in np.unique(of_kind[best]):
        part = table[best & (of_kind == kind)].reset_index(drop=True)
        devices: list[tuple[Device, _Labels]] = []
        for name, at in part.groupby("device").indices.items():
            at = at[:_FITTED_ROWS]
            target = np.log(part["seconds"].to_numpy(dtype=np.float64)[at])
            device = get_device(str(name))
            devices.append((device, (mechanism(part.iloc[at], device), target, 1 / math.sqrt(len(at)))))
        start, pull = (_ROUNDS if kind == "all_reduce" else Constants()), np.full(len(_LOW), _PULL)
        ordered = str(kind).startswith(("attention", "gemm")) and kind != "gemm float32"
        if ordered and devices[0][0].kind == "gpu":
            start, pull[3:5] = _STREAMS, _KEPT_PULL  # kept and kept_power
        found[str(kind)] = _fit([labels for _, labels in devices], start, pull)
        vendors = sorted({device.vendor for device, _ in devices if device.kind == "gpu"})
        for vendor in vendors if len(vendors) > 1 else ():
            own = {device.name: labels for device, labels in devices if device.vendor == vendor}
            found[f"{kind}@{vendor}"] = _fit(list(own.values()), found[str(kind)], np.full(len(_LOW), _PULL_VENDOR))
    found |= {kind: found[like] for kind, like in _SERVED_BY.items() if like in found}
    for kind, like in _ALIKE_KINDS.items():
        if kind not in found:
            there = {name.removeprefix(like): own for name, own in found.items() if name.partition("@")[0] == like}
            found |= {kind + vendor: own for vendor, own in there.items()}
    return found


def _fit(devices: Sequence[_Labels], like: Constants, pull: FloatArray) -> Constants:
    """Fit constants that are pulled to ``like`` with the strengths ``pull`` (of each constant)."""
    from scipy.optimize import least_squares

    start, pull, shortest = like.vector(), pull.copy(), min(float(np.exp(y.min())) for _, y, _ in devices)
    pull[_LAUNCH] *= _PULL_LAUNCH if shortest < _SHORT else _PULL_UNSEEN

    def off(logs: FloatArray) -> FloatArray:
        scaled = [((np.log(m.estimate(Constants.of(logs))) - y) / _OUTLIER, w * _OUTLIER) for m, y, w in devices]
        # beyond _OUTLIER the squares grow only in proportion to the errors
        soft = [w * np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1)) for error, w in scaled]
        return np.concatenate([*soft, pull * (logs - start)])

    low = np.minimum(_LOW, start)
    inside = np.clip(start, low + 1e-6, _HIGH - 1e-6)
    return Constants.of(least_squares(off, inside, bounds=(low, _HIGH), max_nfev=40, ftol=1e-4).x)


def _cores(device: Device) -> tuple[str, float] | str:
    return (device.arch, device.share) if device.kind == "cpu" else device.name


def _trust(measured: FloatArray, logs: FloatArray, rows: NDArray[np.bool_], family: NDArray[Any], least: int) -> float:
    """The best factor of the networks' correction on left-out devices, of those that make no family of devices much worse.
    Families weigh the same; 0 if there are fewer than ``least``."""
    groups = sorted(set(family[rows]))
    if len(groups) < least:
        return 0.0
    off = np.stack([np.abs(measured - part * logs) for part in _TRUST], axis=1)
    errors = np.array([off[rows & (family == group)].mean(axis=0) for group in groups])
    harmless = (errors <= _HARM * errors[:, :1]).all(axis=0)
    return _TRUST[int(np.argmin(np.where(harmless, errors.mean(axis=0), np.inf)))]


def _errors(table: pd.DataFrame, predicted_s: Any) -> dict[str, Errors]:
    """Errors of predictions of the fastest kernels by kind, and of all under ""."""
    best = (table["framework"] == BEST).to_numpy()
    logs = pd.Series(np.log(table["seconds"].to_numpy(dtype=np.float64) / np.asarray(predicted_s))[best])
    groups = [("", logs), *logs.groupby(kinds(table)[best])]
    return {str(kind): Errors(*[*own.quantile([0.05, 0.5, 0.95]).tolist(), len(own)]) for kind, own in groups}
