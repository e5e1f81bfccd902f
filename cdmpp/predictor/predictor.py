"""The trained predictor: programs and a device in, seconds out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.encoding import FeatureEncoder
from cdmpp.predictor.familiarity import Familiarity
from cdmpp.predictor.scaling import DeviceScaling, predict_scaled
from cdmpp.predictor.transforms import LabelTransform
from cdmpp.predictor.uncertainty import Calibration, check_coverage
from cdmpp.program.types import Program, Task

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor.network import LatencyNetwork
    from cdmpp.program.ast import CompactAST

_DEFAULT_FOLDER = Path(__file__).parent / "weights" / "default"

#: Program -> its AST or PrimFunc.
Resolver = Callable[[Program], Any]


@dataclass(frozen=True)
class Predictor:
    """A trained latency model. Make one with :func:`cdmpp.predictor.train`, :meth:`load` or :meth:`default`.

    Attributes
    ----------
    network
        The network, with its weights.
    encoder, transform
        Feature encoder and label transform fitted on the training data.
    devices
        Devices seen in training: name -> raw device features, as :func:`cdmpp.device.device_features` gave
        them.
    specs
        The same devices' specifications.
    training
        Summary of the training data and run (JSON values): records, tasks, split, validation error.
    calibration, familiarity
        What :meth:`predict_interval` and :meth:`unfamiliar` need; None for a predictor that was saved before
        there were any (:func:`cdmpp.predictor.uncertainty.calibrated` adds them).
    compiled_calibration
        The same as ``calibration``, of predictions that are told the instructions of the compiled program; None for a
        predictor that takes none.
    scaling, measured_calibration
        How latencies measured on other devices are scaled, and ``calibration`` of predictions that are told some; None for
        one that was not taught, and of the calibration where no program was measured on two devices.
    device_factors
        Device -> what the network's latencies there are multiplied by, 1 for all others: by how much a device that came to
        a trained network is slower than expected (:mod:`cdmpp.predictor.finetuning`).
    """

    network: LatencyNetwork = field(repr=False)
    encoder: FeatureEncoder = field(repr=False)
    transform: LabelTransform
    devices: Mapping[str, NDArray[np.float64]] = field(repr=False)
    training: Mapping[str, Any] = field(default_factory=dict, repr=False)
    calibration: Calibration | None = field(default=None, repr=False)
    familiarity: Familiarity | None = field(default=None, repr=False)
    specs: Mapping[str, Device] = field(default_factory=dict, repr=False)
    compiled_calibration: Calibration | None = field(default=None, repr=False, kw_only=True)
    scaling: DeviceScaling | None = field(default=None, repr=False, kw_only=True)
    measured_calibration: Calibration | None = field(default=None, repr=False, kw_only=True)
    device_factors: Mapping[str, float] = field(default_factory=dict, repr=False, kw_only=True)

    def predict(
        self,
        programs: Any,
        device: str | Device,
        *,
        resolver: Resolver | None = None,
        compiled: bool = False,
        measured: Mapping[str, ArrayLike] | None = None,
    ) -> Any:
        """Latency in seconds.

        Parameters
        ----------
        programs
            One program or a list of them, each a CompactAST, a TIR PrimFunc or IRModule, a
            :class:`~cdmpp.program.types.Task` (as it is, unscheduled) or, with ``resolver``, a
            :class:`~cdmpp.program.types.Program`.
        device
            A device name or a Device. Devices that were not seen in training are extrapolated to.
        resolver
            Gives the AST or PrimFunc of a Program (such as ``cdmpp.predictor.program_resolver(dataset)``).
        compiled
            Compile the programs for the device's target, on this machine and without running them, and tell the network
            their instructions: more accurate, at the price of a compilation each. x86 CPUs only; a program that does
            not compile is predicted without.
        measured
            What the programs took on other devices of the same kind (CPU, GPU): a device -> seconds, float or (n,), NaN where
            unknown. They are scaled and weighed in (:mod:`cdmpp.predictor.scaling`). Not together with ``compiled``.

        Returns
        -------
        A float for one program, a float64 array of shape (n,) for a list.

        Raises
        ------
        UnknownDeviceError
            No such device.
        ProgramError
            A program has no computation or cannot be read; ``compiled`` with an AST or a device that is no x86 CPU.
        PredictorError
            A Program was given without a resolver; ``compiled`` with a predictor that was not trained to be told instructions;
            ``measured`` on a device of another kind, or what are no
            latencies (:func:`cdmpp.predictor.scaling.predict_scaled`).
        """
        many = isinstance(programs, list | tuple)
        items = [_resolved(program, resolver) for program in (programs if many else [programs])]
        if measured is not None:
            _check_alone(compiled)
            scaled = predict_scaled(self, _as_asts(items, None), device, measured)
            return scaled if many else float(scaled[0])
        counts = self.compiled_counts(items, device) if compiled else None
        seconds = self.predict_features(_as_asts(items, None), device, counts)
        return seconds if many else float(seconds[0])

    def compiled_counts(self, programs: Sequence[Any], device: str | Device) -> NDArray[np.float32]:
        """Instructions of PrimFuncs and IRModules compiled for a device's target, float32 (n, len(CODEGEN_FEATURES)),
        rows of NaN where one does not compile; what ``predict(..., compiled=True)`` tells the network.

        Raises
        ------
        PredictorError, ProgramError
            As :meth:`predict` does.
        """
        from cdmpp.program.codegen.counts import instruction_counts

        self.check_told()
        return instruction_counts(programs, self.device(device))

    def check_told(self) -> None:
        """PredictorError unless the network was trained to be told a program's instructions."""
        if not self.encoder.code_dim:
            raise PredictorError(
                "this predictor was not trained to be told a program's instructions (model.compiled)"
            )

    def predict_interval(
        self,
        programs: Any,
        device: str | Device,
        coverage: float = 0.9,
        resolver: Resolver | None = None,
        compiled: bool = False,
        measured: Mapping[str, ArrayLike] | None = None,
    ) -> tuple[Any, Any]:
        """Lowest and highest latency in seconds that the measurement of a program falls between.

        Split conformal, see :mod:`cdmpp.predictor.uncertainty` for what is guaranteed and when it is not. The
        prediction is the interval's geometric middle.

        Parameters
        ----------
        programs, device, resolver, compiled, measured
            As :meth:`predict` takes them.
        coverage
            Part of the measurements that should fall between, above 0 and below 1.

        Returns
        -------
        ``(low, high)``: floats for one program, float64 arrays of shape (n,) for a list.

        Raises
        ------
        PredictorError
            The predictor was not calibrated, or on too few tasks for this coverage; a coverage out of range.
        UnknownDeviceError, ProgramError
            As :meth:`predict` does.
        """
        check_coverage(coverage)
        if compiled:
            self.check_told()
        calibration = self.calibration_of(compiled, measured is not None)
        if calibration is None:
            raise PredictorError("this predictor was not calibrated, so it has no intervals: train it again")
        factor = math.exp(calibration.half_width(self.device_name(device), coverage))
        seconds = self.predict(programs, device, resolver=resolver, compiled=compiled, measured=measured)
        return seconds / factor, seconds * factor

    def calibration_of(self, compiled: bool = False, measured: bool = False) -> Calibration | None:
        """The calibration of a kind of prediction, see :meth:`predict`; None where there is none."""
        if measured:
            _check_alone(compiled)
            return self.measured_calibration
        return self.compiled_calibration if compiled else self.calibration

    def unfamiliar(self, programs: Any, device: str | Device, *, resolver: Resolver | None = None) -> Any:
        """Whether programs on a device are far from the training data, so that little speaks for the prediction.

        What is far is defined in :mod:`cdmpp.predictor.familiarity`.

        Parameters
        ----------
        programs, device, resolver
            As :meth:`predict` takes them.

        Returns
        -------
        A bool for one program, a bool array of shape (n,) for a list.

        Raises
        ------
        PredictorError
            The predictor was saved without what this needs.
        UnknownDeviceError, ProgramError
            As :meth:`predict` does.
        """
        if self.familiarity is None:
            raise PredictorError(
                "this predictor does not know how far its training data reach: train it again"
            )
        many = isinstance(programs, list | tuple)
        asts = _as_asts(programs if many else [programs], resolver)
        flags = self.familiarity.unfamiliar(self.encoder, asts, self.device_vector(device))
        return flags if many else bool(flags[0])

    def predict_features(
        self,
        asts: Sequence[CompactAST],
        device: str | Device,
        counts: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float64]:
        """Latencies in seconds of ASTs on one device, float64 (n,); what :meth:`predict` calls."""
        return self.predict_pairs(asts, [device], np.zeros(len(asts), dtype=np.int64), counts)

    def predict_pairs(
        self,
        asts: Sequence[CompactAST],
        devices: Sequence[str | Device],
        device_index: NDArray[np.int64],
        counts: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float64]:
        """Latencies in seconds of ``asts[i]`` on ``devices[device_index[i]]``, float64 (n,).

        ``counts`` are the instructions of the compiled programs, (n, len(CODEGEN_FEATURES)), rows of NaN where they
        are not known; a predictor that takes none ignores them.
        """
        import torch

        from cdmpp.predictor.batching import PackedPrograms
        from cdmpp.predictor.network import predict_labels

        device_index = np.asarray(device_index)
        packed = PackedPrograms.pack(asts, self.encoder)
        encoded = torch.from_numpy(self.encode_devices(devices))
        pair = torch.from_numpy(self.encode_pairs(asts, devices, device_index, counts))
        labels = predict_labels(self.network, packed, np.arange(len(asts)), encoded, device_index, pair)
        factors = np.array([self.device_factor(device) for device in devices])[device_index]
        return self.transform.inverse(labels, self._references_s(asts, devices, device_index)) * factors

    def device_factor(self, device: str | Device) -> float:
        """What the network's latencies on a device are multiplied by."""
        return self.device_factors.get(self.device_name(device), 1.0)

    def encode_devices(self, devices: Sequence[str | Device]) -> NDArray[np.float32]:
        """Devices as the network takes them, float32 (m, device_dim)."""
        encoded = self.encoder.encode_devices(np.stack([self.device_vector(device) for device in devices]))
        unseen = [i for i, device in enumerate(devices) if self.told_less(device)]
        encoded[unseen] = self.encoder.general_devices(encoded[unseen])
        return encoded

    def encode_pairs(
        self,
        asts: Sequence[CompactAST],
        devices: Sequence[str | Device],
        device_index: NDArray[np.int64],
        counts: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """What is known of ``asts[i]`` and ``devices[device_index[i]]`` together, encoded, float32 (n, joint_dim);
        ``counts`` as of :meth:`predict_pairs`."""
        from cdmpp.predictor.instruction_time import code_rows
        from cdmpp.predictor.pair_features import pair_rows

        encoder, known = self.encoder, [self.device(device) for device in devices]
        encoded = np.zeros((len(asts), encoder.joint_dim), np.float32)
        if encoder.pair_dim:
            pairs = encoder.encode_pairs(pair_rows(asts, known, np.arange(len(asts)), device_index))
            unseen = np.array([self.told_less(device) for device in devices])[device_index]
            pairs[unseen] *= encoder.general_pairs()
            encoded[:, : encoder.pair_dim] = pairs
        if encoder.code_dim and counts is not None:
            codes = code_rows(counts, asts, known, np.arange(len(asts)), device_index)
            encoded[:, encoder.pair_dim :] = encoder.encode_codes(*codes)
        return encoded

    def told_less(self, device: str | Device) -> bool:
        """Whether the network was taught to do without the rest of what is known of a GPU it never saw."""
        if not self.network.config.general_part:
            return False
        return self.device_name(device) not in self.devices and self.device(device).kind == "gpu"

    def _references_s(
        self, asts: Sequence[CompactAST], devices: Sequence[str | Device], device_index: NDArray[np.int64]
    ) -> NDArray[np.float64] | None:
        """What predicted labels are relative to, seconds (n,); None for a predictor of the latency itself."""
        from cdmpp.predictor.roofline import references_s

        if not self.transform.relative:
            return None
        known = [self.device(device) for device in devices]
        return references_s(self.transform.relative_to, asts, [known[i] for i in device_index])

    def device(self, device: str | Device) -> Device:
        """A device by its name: as in training where it was seen, else of the device table.

        Raises
        ------
        PredictorError
            It is not the device that had its name in training.
        """
        from cdmpp.device import get_device

        if isinstance(device, str) and device in self.specs:
            return self.specs[device]
        found = get_device(device) if isinstance(device, str) else device
        known = self.specs.get(found.name)
        if known is not None and known.differences(found):
            raise PredictorError(
                f"{found.name} is not the device of that name that this predictor was trained on (training / now: "
                f"{', '.join(known.differences(found))})"
            )
        return known if known is not None and isinstance(device, str) else found

    def device_vector(self, device: str | Device) -> NDArray[np.float64]:
        """Raw features of a device: as in training where its name was seen, else of its specification."""
        from cdmpp.device import device_features

        if isinstance(device, str) and device in self.devices:
            return self.devices[device]
        return np.asarray(device_features(self.device(device)), dtype=np.float64)

    def device_name(self, device: str | Device) -> str:
        """Canonical name of a device: a training device's is taken as it is, aliases are resolved."""
        if isinstance(device, str):
            return device if device in self.devices else self.device(device).name
        return device.name

    def save(self, folder: str | Path) -> None:
        """Write ``predictor.json`` and ``weights.safetensors`` into a folder (made if missing)."""
        from cdmpp.predictor.predictor_store import save_predictor

        save_predictor(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> Predictor:
        """Load a predictor folder, or the run folder that holds one.

        Raises
        ------
        FeatureMismatchError
            It was trained on another feature set than this cdmpp computes.
        PredictorError
            Missing, damaged, incomplete or of another version.
        """
        from cdmpp.predictor.predictor_store import read_predictor

        return read_predictor(Path(folder))

    @classmethod
    def default(cls) -> Predictor:
        """The predictor that ships with cdmpp; PredictorError where this installation has none."""
        if not _DEFAULT_FOLDER.is_dir():
            raise PredictorError(
                f"this installation ships no default predictor (expected in {_DEFAULT_FOLDER}); "
                "train one with cdmpp train"
            )
        return cls.load(_DEFAULT_FOLDER)


def predict(
    programs: Any,
    device: str | Device,
    predictor: Predictor | str | Path = "default",
    *,
    compiled: bool = False,
    measured: Mapping[str, ArrayLike] | None = None,
) -> Any:
    """Latency in seconds: :meth:`Predictor.predict` with the predictor that ships, or another.

    Parameters
    ----------
    predictor
        A predictor, its folder, or ``"default"``.
    compiled
        Tell it what a compiler makes of the programs.
    measured
        Tell it what the programs took on other devices.
    """
    return load_predictor(predictor).predict(programs, device, compiled=compiled, measured=measured)


def _check_alone(compiled: bool) -> None:
    if compiled:
        raise PredictorError(
            "a prediction is told the instructions (compiled) or measured latencies, not both"
        )


def load_predictor(predictor: Predictor | str | Path) -> Predictor:
    """A predictor as it is, read from its folder, or the one that ships (``"default"``)."""
    if isinstance(predictor, Predictor):
        return predictor
    return Predictor.default() if predictor == "default" else Predictor.load(predictor)


def _as_asts(programs: Sequence[Any], resolver: Resolver | None) -> list[CompactAST]:
    from cdmpp.program.ast import CompactAST, compact_asts

    items = [_resolved(program, resolver) for program in programs]
    funcs = [item for item in items if not isinstance(item, CompactAST)]
    fresh = iter(compact_asts(funcs) if funcs else ())
    return [item if isinstance(item, CompactAST) else next(fresh) for item in items]


def _resolved(program: Any, resolver: Resolver | None) -> Any:
    """An AST or what one can be made of."""
    if isinstance(program, Program):
        if resolver is None:
            raise PredictorError(f"program {program.hash} is a reference: pass resolver= to predict it")
        program = resolver(program)
    return program.prim_func() if isinstance(program, Task) else program
