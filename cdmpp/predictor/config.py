"""Configuration of a training run, read from YAML; unknown keys are errors, not ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cdmpp.errors import PredictorError, reason
from cdmpp.files import read_yaml


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """The network, see :mod:`cdmpp.predictor.network`."""

    #: Width, depth, attention heads and feed-forward width of the transformer encoder.
    dim: int = Field(128, ge=4)
    layers: int = Field(3, ge=1)
    heads: int = Field(4, ge=1)
    ffn_dim: int = Field(256, ge=1)
    #: Drop-out probability inside the encoder and the decoder.
    dropout: float = Field(0.05, ge=0, lt=1)
    #: Bins of the piecewise-linear encoding of each leaf feature, an input besides its value; 0 turns it off.
    bins: int = Field(0, ge=0)
    #: Pre-order positional encoding added to the leaves: ``standard`` frequencies or the ``paper``'s.
    positional: Literal["standard", "paper"] = "standard"
    #: How the device enters: ``film`` scales and shifts every leaf, ``none`` hides it from the network.
    device: Literal["film", "none"] = "film"
    #: Whether the decoder gets features of program and device together (:mod:`cdmpp.predictor.pair_features`).
    pairs: bool = True
    #: Fraction of the GPU examples in each batch for which the network gets only the features that carry over to GPUs it was
    #: not trained on (:data:`cdmpp.device.GENERAL_DEVICE_FEATURES`). Above 0, it gets only these for a GPU it never saw.
    general_part: float = Field(0.0, ge=0, le=1)
    #: Whether the network has a second decoder, which also gets the instruction counts of the compiled program
    #: (:mod:`cdmpp.program.codegen`) and learns from the programs with counts. It serves ``predict(..., compiled=True)``.
    compiled: bool = False
    #: Size of the pooled embedding.
    embedding_dim: int = Field(128, ge=1)
    #: Whether the network has a second head, used in training only, that predicts the instruction counts of the compiled
    #: program (:mod:`cdmpp.program.codegen`).
    codegen: bool = False
    #: Hidden width and number of hidden layers of the MLP from embedding and device to the label.
    decoder_dim: int = Field(256, ge=1)
    decoder_layers: int = Field(2, ge=0)

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.dim % self.heads or self.dim % 2:
            raise ValueError(f"dim must be even and a multiple of heads, got dim={self.dim}, heads={self.heads}")
        return self


class LabelConfig(_Section):
    """Label transform, see :mod:`cdmpp.predictor.encoding`.

    If ``relative``, latencies are first divided by an estimate (:func:`cdmpp.predictor.pair_features.estimate_s`), so that the
    network predicts an efficiency."""

    transform: Literal["box-cox", "log"] = "box-cox"
    relative: bool = False


class LossConfig(_Section):
    """Terms of the training loss and their weights, see :mod:`cdmpp.predictor.losses`."""

    #: Weights of the MSE of the transformed labels and of the MAPE of the seconds.
    mse_weight: float = Field(1.0, ge=0)
    mape_weight: float = Field(0.3, ge=0)
    #: Over-prediction factor above which the relative error grows linearly in the log ratio.
    mape_cap: float = Field(2.0, gt=1)
    #: Weight and highest moment of the central moment discrepancy between the embeddings of a batch and those of as many
    #: programs of ``data.adapt``. If it is used, batches are not sorted by length, as the embeddings of programs of one length
    #: are not a sample of their domain.
    cmd_weight: float = Field(0.0, ge=0)
    cmd_moments: int = Field(5, ge=1)
    #: Weight of the MSE of the standardised logarithms of the instruction counts, for the programs that have some; needs
    #: ``model.codegen``. Left out, with a warning, if no training program has any.
    codegen_weight: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> LossConfig:
        if self.mse_weight == 0 and self.mape_weight == 0:
            raise ValueError("mse_weight and mape_weight must not both be zero")
        return self


class TrainConfig(_Section):
    """Optimisation."""

    #: Maximum number of epochs, and number of epochs without a better validation MAPE after which training stops.
    epochs: int = Field(60, ge=1)
    patience: int = Field(15, ge=1)
    #: Which epoch's weights are kept: the ``best`` by validation MAPE, or the ``last``, whatever its validation MAPE
    #: (all epochs are then run). With few validation networks a handful of programs dominate the MAPE, and the end of the
    #: cosine schedule is the safer choice.
    select: Literal["best", "last"] = "best"
    #: Records per step.
    batch_size: int = Field(256, ge=1)
    #: For :mod:`cdmpp.predictor.optimizer`, with linear warm-up and cosine decay over ``epochs``; the gradient norm is clipped.
    learning_rate: float = Field(2e-3, gt=0)
    weight_decay: float = Field(1e-2, ge=0)
    warmup_fraction: float = Field(0.05, ge=0, lt=1)
    grad_clip: float = Field(1.0, gt=0)
    #: Decay per step of the averaged weights, which are validated and saved; 0 turns averaging off.
    ema_decay: float = Field(0.995, ge=0, lt=1)
    #: Seed of initialisation, record order and drop-out.
    seed: int = 0
    #: Number of networks that are trained, each with its own seed (``seed`` and up). If the compiled code is known, their
    #: predicted logarithms are averaged; without it the first network predicts alone, as tuning needs fast predictions.
    members: int = Field(1, ge=1)
    #: Number of torch threads; None keeps torch's setting.
    threads: int | None = Field(None, ge=1)
    #: Where to train: ``cpu``, ``cuda`` or ``auto``.
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    #: Precision of the network's matrix products in training: ``float32``, or ``bf16`` if the device has it (weights,
    #: losses and validation stay float32).
    precision: Literal["float32", "bf16"] = "float32"


class DataConfig(_Section):
    """Which records to train on: dataset folders (or folders of them), and devices (None: all)."""

    paths: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None
    #: Let the first network also learn from programs that were compiled for a training CPU but not measured on it
    #: (``cdmpp codegen --device``), or nowhere measured (``cdmpp profile --compile-only``). Their labels are predicted from the
    #: compiled code by the other networks, which are trained on the measured records.
    unmeasured: bool = False
    #: Datasets of the programs that ``loss.cmd_weight`` adapts to, and the devices that are to run them (None: the training
    #: CPUs). Labels are not needed (``cdmpp profile --compile-only``) and never used.
    adapt: tuple[str, ...] = ()
    adapt_devices: tuple[str, ...] | None = None


class SplitConfig(_Section):
    """A split specification for :meth:`cdmpp.dataset.Split.parse`."""

    spec: str = "by_network:heldout=4;seed=0"


class Config(_Section):
    """All settings of a training run: everything it depends on besides the records."""

    model: ModelConfig = ModelConfig()  # type: ignore[call-arg]
    label: LabelConfig = LabelConfig()
    loss: LossConfig = LossConfig()  # type: ignore[call-arg]
    train: TrainConfig = TrainConfig()  # type: ignore[call-arg]
    data: DataConfig = DataConfig()
    split: SplitConfig = SplitConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.loss.codegen_weight and not self.model.codegen:
            raise ValueError("loss.codegen_weight is above 0: it needs model.codegen")
        if self.data.unmeasured and (self.train.members < 2 or not self.model.compiled):
            raise ValueError("data.unmeasured needs another network's labels: train.members of 2, and model.compiled")
        return self


def config_from_dict(values: Any, source: str = "configuration") -> Config:
    """Build a configuration from nested dictionaries.

    Raises PredictorError for unknown keys and values out of range; the message names each with its path."""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise PredictorError(f"{source}: expected a mapping of sections, got {type(values).__name__}")
    try:
        return Config.model_validate(values)
    except ValidationError as err:
        raise PredictorError(f"{source}: " + "; ".join(_explain(e) for e in err.errors())) from err


def load_config(path: str | Path) -> Config:
    """Read a configuration from a YAML file; raises PredictorError if it is missing or wrong."""
    path = Path(path)
    try:
        values = read_yaml(path)
    except OSError as err:
        raise PredictorError(f"{path}: cannot read configuration: {reason(err)}") from err
    except ValueError as err:
        raise PredictorError(f"{path}: not valid YAML: {reason(err)}") from err
    return config_from_dict(values, str(path))


def dump_config(config: Config) -> str:
    """The configuration as YAML that :func:`load_config` reads back unchanged."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section: Any = Config
        for part in error["loc"][:-1]:
            section = section.model_fields[part].annotation
        known = ", ".join(section.model_fields)
        return f"unknown key '{where}' (known here: {known})"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
