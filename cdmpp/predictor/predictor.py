"""The trained predictor: programs and a device in, seconds out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray

from cdmpp.device import DEVICE_FEATURES, Device, device_features, get_device
from cdmpp.errors import PredictorError, ProgramError, raised_as
from cdmpp.files import read_text
from cdmpp.predictor import pair_features
from cdmpp.predictor.checkpoint import load_fields, save_fields
from cdmpp.predictor.encoding import COMPILED, WAVES, Correction, FeatureEncoder, LabelTransform, PairArrays, waves
from cdmpp.predictor.evidence import NO_EVIDENCE, DeviceScaling, Evidence, check_one_kind, combine
from cdmpp.predictor.network import LatencyNetwork, correction_inputs, predict_labels
from cdmpp.predictor.uncertainty import ALL_DEVICES, Calibration, Familiarity, check_coverage
from cdmpp.program import import_tvm
from cdmpp.program.ast import CompactAST, compact_asts
from cdmpp.program.codegen import is_counted
from cdmpp.program.types import Program, Task

if TYPE_CHECKING:
    from cdmpp.predictor.data import TrainingData

#: Default coverage of prediction intervals.
COVERAGE = 0.9

#: How near embeddings must be for corrections to treat programs alike (:func:`waves`), in units of the root of their width.
_REACH = 0.35
#: Features of a whole CPU, of which training has a few virtual machines: what the network makes of others was not learned.
_OF_THE_WHOLE = ("share_fraction", "cores", "l3_kb", "mem_gb")
#: Names of the facts of a device.
_FACTS = frozenset(fact.name for fact in fields(Device))
_DEFAULT_FOLDER = Path(__file__).parent / "weights" / "default"

#: Program -> its AST or PrimFunc.
Resolver = Callable[[Program], Any]


class Pairs(NamedTuple):
    """Programs on devices, ``asts[i]`` on ``devices[device_index[i]]``, int64 (n,), and the evidence about them."""

    asts: Sequence[CompactAST]
    devices: Sequence[str | Device]
    device_index: NDArray[np.int64]
    evidence: Evidence = NO_EVIDENCE

    @classmethod
    def of(cls, asts: Sequence[CompactAST], device: str | Device, evidence: Evidence = NO_EVIDENCE) -> Pairs:
        """Pairs of programs with one device."""
        return cls(asts, [device], np.zeros(len(asts), dtype=np.int64), evidence)


@dataclass(frozen=True)
class Predictor:
    """A trained latency model. Make one with :func:`cdmpp.predictor.train`, :meth:`load` or :meth:`default`.

    ``devices`` are those of training, ``specs`` the specifications of these and of finetuning; ``training`` summarises the
    training data and run (JSON values). :meth:`predict_interval` needs a calibration for each kind of evidence (none, compiled
    code, latencies on other devices, which ``scaling`` scales), :meth:`unfamiliar` needs ``familiarity``; all of these may be
    None. ``corrections`` (:mod:`cdmpp.predictor.correction`) are fitted to measurements after training: by device, and by
    whether the compiled code is known (``compiled``) or not (``ast``). ``members`` are networks trained with other seeds: if
    the code is known, the logarithms of all predictions are averaged; else ``network`` predicts alone, in a fraction of the
    time."""

    network: LatencyNetwork = field(repr=False)
    encoder: FeatureEncoder = field(repr=False)
    transform: LabelTransform
    devices: Sequence[str] = field(repr=False)
    training: Mapping[str, Any] = field(default_factory=dict, repr=False)
    calibration: Calibration | None = field(default=None, repr=False)
    familiarity: Familiarity | None = field(default=None, repr=False)
    specs: Mapping[str, Device] = field(default_factory=dict, repr=False)
    compiled_calibration: Calibration | None = field(default=None, repr=False, kw_only=True)
    scaling: DeviceScaling | None = field(default=None, repr=False, kw_only=True)
    measured_calibration: Calibration | None = field(default=None, repr=False, kw_only=True)
    corrections: Mapping[str, Mapping[str, Correction]] = field(default_factory=dict, repr=False, kw_only=True)
    members: Sequence[LatencyNetwork] = field(default=(), repr=False, kw_only=True)

    def predict(
        self,
        programs: Any,
        device: str | Device,
        *,
        resolver: Resolver | None = None,
        compiled: bool = False,
        measured: Mapping[str, ArrayLike] | None = None,
    ) -> Any:
        """Latency in seconds: a float for one program, a float64 array of shape (n,) for a list.

        Each of ``programs`` is a CompactAST, a TIR PrimFunc or IRModule, a :class:`~cdmpp.program.types.Task` (as it
        is, unscheduled) or, with a ``resolver`` (such as ``cdmpp.predictor.program_resolver(dataset)``), a
        :class:`~cdmpp.program.types.Program`. Predictions for a device not seen in training are extrapolations. A table
        (:func:`cdmpp.program.operators.operator_table`) of library operators is predicted by the operator model that ships.

        With ``compiled`` the programs are compiled for the device's target, on this machine and without being run, and the
        network also gets their instruction counts. This is more accurate and costs one compilation per program; x86 CPUs only.
        A program that does not compile is predicted without its code. ``measured`` holds latencies of the programs on other
        devices of the same kind (CPU, GPU): device -> seconds, float or (n,), NaN where unknown. They are scaled to this device
        and averaged with the prediction (:mod:`cdmpp.predictor.evidence`). ``compiled`` and ``measured`` cannot be combined.

        UnknownDeviceError: there is no such device. ProgramError: a program has no computation or cannot be read; ``compiled``
        with an AST or for a device that is not an x86 CPU. PredictorError: a Program without a resolver; evidence that is
        invalid or that this predictor cannot use."""
        if isinstance(programs, pd.DataFrame):
            return _of_operators(programs, device, compiled or measured)[0]
        items, many = _resolved(programs, resolver)
        evidence = self.evidence(items, device, compiled=compiled, measured=measured)
        seconds = self.predict_asts(_as_asts(items), device, evidence)
        return seconds if many else float(seconds[0])

    def evidence(
        self,
        programs: Sequence[Any],
        device: str | Device,
        *,
        compiled: bool = False,
        measured: Mapping[str, ArrayLike] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Evidence:
        """The evidence that ``predict(programs, device, compiled=..., measured=...)`` uses besides the ASTs; same errors.
        ``progress`` is called with the number of programs compiled so far and the number of all programs."""
        check_one_kind(compiled, measured is not None)
        if compiled:
            from cdmpp.program.codegen.counts import instruction_counts

            self.check_takes_code()
            return Evidence(code=instruction_counts(programs, self.device(device), progress))
        if measured is None:
            return NO_EVIDENCE
        self.check_scales()
        if not measured:
            raise PredictorError("measured= names no device: expected one at least, with latencies in seconds")
        target, elsewhere = self.device(device), []
        for name, values in measured.items():
            source = self.device(name)
            if source.name == target.name:
                raise PredictorError(f"{source.name} is the device asked for: what was measured needs no prediction")
            if source.kind != target.kind:
                raise PredictorError(
                    f"latencies on a {source.kind} ({source.name}) say too little of a {target.kind} ({target.name})"
                )
            elsewhere.append((source, _checked_seconds(values, len(programs), source.name)))
        return Evidence(elsewhere=elsewhere)

    def reads_code_of(self, device: Device) -> bool:
        """Whether compiled code can be used on a device: training had instruction counts, and the device's can be counted."""
        return bool(self.encoder.code_dim) and is_counted(device)

    def check_takes_code(self) -> None:
        """Raise PredictorError unless the network was trained with instruction counts."""
        if not self.encoder.code_dim:
            raise PredictorError("this predictor was trained without instruction counts (model.compiled)")

    def check_scales(self) -> None:
        """Raise PredictorError unless the predictor can scale latencies measured on other devices."""
        if self.scaling is None:
            raise PredictorError("this predictor was not taught to scale measured latencies: train it again")

    def predict_interval(
        self,
        programs: Any,
        device: str | Device,
        coverage: float = COVERAGE,
        resolver: Resolver | None = None,
        compiled: bool = False,
        measured: Mapping[str, ArrayLike] | None = None,
    ) -> tuple[Any, Any]:
        """Lower and upper latency in seconds between which a program's measured latency lies with probability ``coverage``:
        floats for one program, float64 arrays (n,) for a list. The prediction is between them, but not their middle.

        These are split conformal intervals: :mod:`cdmpp.predictor.uncertainty` says what is guaranteed and when it is not.
        Arguments and errors are those of :meth:`predict`; also PredictorError if the predictor was not calibrated, or was
        calibrated on too few tasks for this coverage."""
        check_coverage(coverage)
        if isinstance(programs, pd.DataFrame):
            return _of_operators(programs, device, compiled or measured or coverage != COVERAGE)[1:]
        items, many = _resolved(programs, resolver)
        evidence = self.evidence(items, device, compiled=compiled, measured=measured)
        calibration = self.calibration_of(evidence, device)
        if calibration is None:
            raise PredictorError("this predictor was not calibrated, so it has no intervals: train it again")
        ends = calibration.ends(self.device(device).name, coverage)
        pairs = Pairs.of(_as_asts(items), device, evidence)
        arrays = self._encoded(pairs)
        low, high = self.predict_pairs(pairs, arrays) * np.exp(ends[:, None] * self.difficulty(pairs, arrays))
        return (low, high) if many else (float(low[0]), float(high[0]))

    def calibration_of(self, evidence: Evidence = NO_EVIDENCE, device: str | Device | None = None) -> Calibration | None:
        """The calibration of predictions that use this kind of evidence (adapted to a ``device``); None if there is none."""
        known = self.calibration if evidence.code is None else self.compiled_calibration
        if evidence.elsewhere is not None:
            known = self.measured_calibration
        if known is None or device is None:
            return known
        found = self.device(device)
        # finetuning on a device makes it known if it learned a correction, which others of its kind do not get
        taught = {found.name} & self.corrections.keys()
        return known.for_device(found, {name: self.specs[name] for name in (*self.devices, *taught)})

    def difficulty(self, pairs: Pairs, arrays: PairArrays | None = None) -> NDArray[np.float64]:
        """Factor on the width of each pair's interval, 1 is usual, float64 (n,); ``arrays`` are the encoded pairs, if known."""
        calibration = self.calibration_of(pairs.evidence)
        if calibration is None or calibration.difficulty is None:
            return np.ones(len(pairs.asts))
        return calibration.difficulty.of(self.difficulty_inputs(pairs, arrays))

    def difficulty_inputs(self, pairs: Pairs, arrays: PairArrays | None = None) -> NDArray[np.float64]:
        """Features from which the expected error of each prediction is estimated, float64 (n, d)."""
        return np.concatenate(correction_inputs(self.network, self._encoded(pairs) if arrays is None else arrays), axis=1)

    def unfamiliar(self, programs: Any, device: str | Device) -> Any:
        """Whether programs on a device are far from the training data (:mod:`cdmpp.predictor.uncertainty`): a bool for one
        program, a bool array (n,) for a list. Arguments and errors are those of :meth:`predict`; also PredictorError if the
        predictor was saved without ``familiarity``."""
        if self.familiarity is None:
            raise PredictorError("this predictor does not know how far its training data reach: train it again")
        items, many = _resolved(programs, None)
        flags = self.familiarity.unfamiliar(self.encoder, _as_asts(items), self.device_vector(device))
        return flags if many else bool(flags[0])

    def predict_asts(
        self, asts: Sequence[CompactAST], device: str | Device, evidence: Evidence = NO_EVIDENCE
    ) -> NDArray[np.float64]:
        """Latencies in seconds of ASTs on one device, float64 (n,)."""
        return self.predict_pairs(Pairs.of(asts, device, evidence))

    def predict_rows(
        self, data: TrainingData, rows: NDArray[np.int64], evidence: Evidence = NO_EVIDENCE
    ) -> NDArray[np.float64]:
        """Latencies in seconds of these rows (n,) of a label table, float64 (n,)."""
        return self.predict_pairs(self.pairs_of_rows(data, rows, evidence))

    def pairs_of_rows(self, data: TrainingData, rows: NDArray[np.int64], evidence: Evidence = NO_EVIDENCE) -> Pairs:
        """The pairs of these rows (n,) of a label table."""
        table = data.labels.iloc[rows]
        names, index = np.unique(table["device"].to_numpy(dtype=str), return_inverse=True)
        return Pairs([data.asts[p] for p in table["program"]], [data.devices[name] for name in names], index, evidence)

    def predict_pairs(self, pairs: Pairs, arrays: PairArrays | None = None) -> NDArray[np.float64]:
        """Latencies of pairs in seconds, float64 (n,); ``arrays`` are the encoded pairs, if known. A predictor trained without
        instruction counts ignores them."""
        asts, devices, device_index, evidence = pairs
        arrays = self._encoded(pairs) if arrays is None else arrays
        has_code = arrays.has_code.numpy()
        labels = predict_labels((self.network, *self.members) if has_code.any() else (self.network,), arrays)
        known = [self.device(device) for device in devices]
        corrected = self.corrected([device.name for device in known], arrays)
        references = None
        if self.transform.relative:
            references = pair_features.references_s(pair_features.estimate_s, asts, known, device_index)
        logs = np.stack([np.log(self.transform.inverse(own, references)) for own in labels])
        seconds: NDArray[np.float64] = np.exp(np.where(has_code, logs.mean(axis=0), logs[0]) + corrected)
        return seconds if evidence.elsewhere is None else self._combined(pairs, seconds, evidence.elsewhere)

    def _combined(
        self, pairs: Pairs, predicted_s: NDArray[np.float64], elsewhere: Sequence[tuple[Device, NDArray[np.float64]]]
    ) -> NDArray[np.float64]:
        """Predictions of pairs combined with latencies measured on other devices (:mod:`cdmpp.predictor.evidence`)."""
        self.check_scales()
        assert self.scaling is not None
        asts, devices, device_index, _ = pairs
        # one program may be in many pairs: it is predicted once on each device where it was measured
        number = {id(ast): i for i, ast in enumerate(asts)}
        program = np.array([number[id(ast)] for ast in asts], dtype=np.int64)
        sources = []
        for source, measured_s in elsewhere:
            used = np.unique(program[~np.isnan(measured_s)])
            there_s, estimated_s = np.full(len(asts), np.nan), np.full(len(asts), np.nan)
            if len(used):
                chosen = [asts[i] for i in used]
                there_s[used] = self.predict_asts(chosen, source)
                estimated_s[used] = pair_features.estimate_s(chosen, source)
            sources.append((source, measured_s, there_s[program], estimated_s[program]))
        combined = predicted_s.copy()
        for index, device in enumerate(devices):
            here = np.flatnonzero(device_index == index)
            if len(here):
                target = self.device(device)
                chosen = [asts[i] for i in here.tolist()]
                known = [(source, a[here], b[here], c[here]) for source, a, b, c in sources]
                estimated_s = pair_features.estimate_s(chosen, target)
                combined[here] = combine(self.scaling, target, predicted_s[here], estimated_s, known)
                for source, measured_s, *_ in sources:
                    if pair_features.are_shares(source, target):
                        scaled = measured_s[here] * pair_features.share_ratio(chosen, measured_s[here], source, target)
                        combined[here] = np.where(np.isnan(scaled), combined[here], scaled)
        return combined

    def corrected(
        self, names: Sequence[str], arrays: PairArrays, embeddings: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """What corrections add to log latencies of pairs on devices of these names, (n,); ``embeddings`` (n, h) if known."""
        logs = np.zeros(len(arrays))
        if not any(name in self.corrections for name in names):
            return logs
        inputs = np.concatenate(self.correction_inputs(arrays, embeddings), axis=1)
        has_code = arrays.has_code.numpy()
        for number, name in enumerate(names):
            for kind, correction in self.corrections.get(name, {}).items():
                rows = (arrays.device == number) & (has_code == (kind == COMPILED))
                logs[rows] = correction.logs(inputs[rows])
        return logs

    def correction_inputs(
        self, arrays: PairArrays, embeddings: NDArray[np.float64] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Inputs of corrections: features (n, r), and embeddings with waves over them (n, h + WAVES), each scaled to a norm of
        about 1. The waves tell programs similar to the measured ones from the rest."""
        known, seen = correction_inputs(self.network, arrays, embeddings)
        units = math.sqrt(seen.shape[1] / 3), math.sqrt(WAVES / 2)
        return known, np.concatenate([seen / units[0], waves(seen, _REACH) / units[1]], axis=1)

    def encode_devices(self, devices: Sequence[str | Device]) -> NDArray[np.float32]:
        """Devices encoded for the network, float32 (m, device_dim)."""
        encoded = self.encoder.encode_devices(np.stack([self.device_vector(device) for device in devices]))
        unseen = [i for i, device in enumerate(devices) if self.uses_general_features_only(device)]
        encoded[unseen] = self.encoder.general_devices(encoded[unseen])
        return encoded

    def _encoded(self, pairs: Pairs) -> PairArrays:
        return self.encode(pairs.asts, pairs.devices, pairs.device_index, pairs.evidence.code)

    def encode(
        self,
        asts: Sequence[CompactAST],
        devices: Sequence[str | Device],
        device_index: NDArray[np.int64],
        counts: NDArray[np.float32] | None = None,
    ) -> PairArrays:
        """``asts[i]`` on ``devices[device_index[i]]`` encoded for the network; ``counts`` are instruction counts,
        (n, len(CODEGEN_FEATURES)), rows of NaN where unknown."""
        encoder, program = self.encoder, np.arange(len(asts))
        known = [self.device(device) for device in devices]
        pair = pair_features.pair_rows(asts, known, program, device_index) if encoder.pair_dim else None
        code = None
        if encoder.code_dim and counts is not None:
            code = pair_features.code_rows(counts, asts, known, program, device_index, self.transform.relative)
        arrays = PairArrays.encode(encoder, asts, self.encode_devices(devices), program, device_index, pair, code)
        if encoder.pair_dim:
            unseen = np.array([self.uses_general_features_only(device) for device in devices])[device_index]
            arrays.pair[unseen] *= torch.from_numpy(pair_features.GENERAL_PAIRS)
        return arrays

    def uses_general_features_only(self, device: str | Device) -> bool:
        """Whether the network gets only the features that carry over to GPUs it was not trained on."""
        if not self.network.config.general_part:
            return False
        found = self.device(device)
        return found.name not in self.devices and found.kind == "gpu"

    def device(self, device: str | Device) -> Device:
        """The specification of a device: by name that of training if there is one, else that of the device table, of a
        CPU with those facts only that some CPU in training has: what others mean was not learned.
        PredictorError: the device differs from the one that had its name in training."""
        if isinstance(device, str) and device in self.specs:
            return self.specs[device]
        found = get_device(device)
        known = self.specs.get(found.name)
        if known is not None and known.differences(found):
            raise PredictorError(
                f"{found.name} is not the device of that name that this predictor was trained on (training / now: "
                f"{', '.join(known.differences(found))})"
            )
        if known is not None and isinstance(device, str):
            return known
        if found.kind != "cpu":
            return found
        never = [name for name, highest in zip(DEVICE_FEATURES, self._cpu_range[1], strict=True) if np.isnan(highest)]
        unlearned: dict[str, Any] = dict.fromkeys(_FACTS.intersection(never))
        return replace(found, **unlearned)

    def device_vector(self, device: str | Device) -> NDArray[np.float64]:
        """Raw features of a device, where :data:`_OF_THE_WHOLE` of a CPU are kept within the range of the CPUs in training."""
        found = self.device(device)
        features = np.asarray(device_features(found), dtype=np.float64)
        within = np.isin(DEVICE_FEATURES, _OF_THE_WHOLE) & (found.kind == "cpu")
        return np.where(within, np.clip(features, *self._cpu_range), features)

    @cached_property
    def _cpu_range(self) -> NDArray[np.float64]:
        """Lowest and highest raw features of the CPUs in training, (2, n_device_features), NaN where all are unknown."""
        trained = (self.specs[name] for name in self.devices)
        cpus = [np.asarray(device_features(device), np.float64) for device in trained if device.kind == "cpu"]
        if not cpus:
            return np.repeat([[-np.inf], [np.inf]], len(DEVICE_FEATURES), axis=1)
        return np.stack([np.fmin.reduce(cpus), np.fmax.reduce(cpus)])

    def save(self, folder: str | Path) -> None:
        """Write ``predictor.json`` and ``weights.safetensors`` into a folder (made if missing)."""
        save_fields(Path(folder), {field.name: getattr(self, field.name) for field in fields(Predictor)})

    @classmethod
    def load(cls, folder: str | Path) -> Predictor:
        """Load a predictor folder, or the run folder that holds one. FeatureMismatchError: it was trained on another feature
        set than this cdmpp computes. PredictorError: it is missing, damaged, incomplete or of another version."""
        return cls(**load_fields(Path(folder)))

    @classmethod
    def default(cls) -> Predictor:
        """The predictor that ships with cdmpp; PredictorError if this installation has none."""
        if not _DEFAULT_FOLDER.is_dir():
            raise PredictorError(f"there is no default predictor in {_DEFAULT_FOLDER}: train one with cdmpp train")
        return _shipped(_DEFAULT_FOLDER)


_shipped = cache(Predictor.load)  # once a process


def predict(
    programs: Any,
    device: str | Device,
    predictor: Predictor | str | Path = "default",
    *,
    compiled: bool = False,
    measured: Mapping[str, ArrayLike] | None = None,
) -> Any:
    """:meth:`Predictor.predict` of a given predictor, of one in a folder, or of the one that ships (``"default"``)."""
    return load_predictor(predictor).predict(programs, device, compiled=compiled, measured=measured)


def predict_program_file(
    predictor: Predictor,
    path: str | Path,
    device: str | Device,
    *,
    compiled: bool = False,
    measured: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Predicted latency of one program (:func:`load_program`); ``compiled`` and ``measured`` as in :meth:`Predictor.predict`.
    ``low_s``, ``high_s`` and ``unfamiliar`` may be None; ``note`` is :func:`prediction_note`."""
    program = load_program(path)
    resolved = get_device(device)
    ast = compact_asts([program])[0]
    evidence = predictor.evidence([program], resolved, compiled=compiled, measured=measured)
    latency_s = float(predictor.predict_asts([ast], resolved, evidence)[0])
    low_s, high_s = seconds_interval(predictor, ast, latency_s, resolved, evidence)
    return {
        "program": str(path),
        "device": resolved.name,
        "latency_s": latency_s,
        "compiled": compiled,
        "measured": dict(measured or {}),
        "low_s": low_s,
        "high_s": high_s,
        "coverage": COVERAGE,
        "unfamiliar": None if predictor.familiarity is None else predictor.unfamiliar(ast, resolved),
        "note": prediction_note(predictor, resolved),
    }


def load_program(path: str | Path) -> Any:
    """Read a PrimFunc or IRModule from a file of TVM's JSON (ProgramError: the file is missing, or is not such JSON)."""
    tvm = import_tvm()
    with raised_as(ProgramError, f"cannot read {path}"):
        text = read_text(path)
    try:
        program = tvm.ir.load_json(text)
    except Exception as err:  # TVM raises its own error types for anything that is not its JSON
        raise ProgramError(f"{path} is no TIR: expected what tvm.ir.save_json(prim_func) writes") from err
    if not isinstance(program, tvm.tirx.PrimFunc | tvm.IRModule):
        raise ProgramError(f"{path} holds a {type(program).__name__}: expected a PrimFunc or an IRModule")
    return program


def seconds_interval(
    predictor: Predictor, ast: CompactAST, latency_s: float, device: Device, evidence: Evidence
) -> tuple[float, float] | tuple[None, None]:
    """Interval of a latency in seconds; two None if the predictor has none (:func:`prediction_note` says why)."""
    calibration = predictor.calibration_of(evidence, device)
    if calibration is None or not calibration.supports(COVERAGE):
        return None, None
    difficulty = float(predictor.difficulty(Pairs.of([ast], device, evidence))[0])
    low_s, high_s = (latency_s * np.exp(difficulty * calibration.ends(device.name, COVERAGE))).tolist()
    return low_s, high_s


def prediction_note(predictor: Predictor, device: Device) -> str:
    """Caveats about predictions and intervals on a device, empty if there are none."""
    notes = []
    seen = device.name in predictor.devices
    if not seen:
        known = len(predictor.devices)
        notes.append(f"{device.name} is not among the {known} devices of training: these are extrapolations")
    if predictor.calibration is None:
        notes.append("the predictor was not calibrated, so there are no intervals")
    elif not predictor.calibration.supports(COVERAGE):
        units = f"{predictor.calibration.pooled.units} {predictor.calibration.unit}s"
        notes.append(f"calibrated on {units}, too few for intervals of {100 * COVERAGE:g} %")
    elif predictor.calibration.basis(device.name, COVERAGE) == ALL_DEVICES:
        why = " because it has too few calibration records of its own" if seen else ""
        notes.append(f"intervals are those of all {device.kind.upper()}s of training pooled{why}")
    return "; ".join(notes)


def load_predictor(predictor: Predictor | str | Path) -> Predictor:
    """A predictor: the given one, one read from a folder, or the one that ships (``"default"``)."""
    if isinstance(predictor, Predictor):
        return predictor
    return Predictor.default() if predictor == "default" else Predictor.load(predictor)


def _as_asts(items: Sequence[Any]) -> list[CompactAST]:
    funcs = [item for item in items if not isinstance(item, CompactAST)]
    fresh = iter(compact_asts(funcs) if funcs else ())
    return [item if isinstance(item, CompactAST) else next(fresh) for item in items]


def _checked_seconds(values: ArrayLike, n: int, device: str) -> NDArray[np.float64]:
    """Latencies as float64 (n,), NaN where unknown. Raises PredictorError if a value is not a latency."""
    seconds = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if seconds.shape != (n,) or (seconds[~np.isnan(seconds)] <= 0).any() or np.isinf(seconds).any():
        raise PredictorError(f"latencies measured on {device}: expected {n} seconds above 0, NaN where there are none")
    return seconds


def _of_operators(table: pd.DataFrame, device: str | Device, more: Any) -> tuple[Any, Any, Any]:
    from cdmpp.predictor.operators import load_operator_model
    from cdmpp.program.operators import COLUMNS

    if not set(COLUMNS) <= set(table.columns):
        raise ProgramError("this is no table of operators: make one of it by cdmpp.program.operators.operator_table")
    if more:
        raise PredictorError(f"library operators take no compiled code or latencies; intervals are of {COVERAGE:g}")
    return load_operator_model("default", get_device(device).kind).interval(table, device)


def _resolved(programs: Any, resolver: Resolver | None) -> tuple[list[Any], bool]:
    """The programs as ASTs, PrimFuncs or IRModules, and whether a list was given."""
    many = isinstance(programs, list | tuple)
    items = []
    for program in programs if many else [programs]:
        if isinstance(program, Program):
            if resolver is None:
                raise PredictorError(f"program {program.hash} is a reference: pass resolver= to predict it")
            program = resolver(program)
        items.append(program.prim_func() if isinstance(program, Task) else program)
    return items, many
