"""What baselines that are torch networks share: the same inputs as ours, one training loop, prediction."""

from __future__ import annotations

import math
import statistics
import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.baselines.base import LatencyModel
from cdmpp.predictor.config import LossConfig, TrainConfig, config_from_dict

if TYPE_CHECKING:
    import torch
    from torch import nn

    from cdmpp.dataset import Split
    from cdmpp.predictor.batching import LabelledArrays
    from cdmpp.predictor.data import TrainingData
    from cdmpp.predictor.encoding import FeatureEncoder
    from cdmpp.predictor.trainer import ProgressCallback
    from cdmpp.predictor.transforms import LabelTransform


class NetworkModel(LatencyModel):
    """A network from a padded batch and the device to one standardised label a program.

    Features, their scaling and the label transform are made by the function that makes them for
    :class:`~cdmpp.predictor.baselines.ours.CdmppModel`, on the training part alone.

    Parameters
    ----------
    train
        Optimisation, with the seed; the fields mean what they mean for our own network.
    loss
        Weights of MSE and MAPE.
    max_seconds
        Training stops after this time; the learning rate then falls with the time spent.
    progress
        Called with the history line of every epoch.

    Attributes
    ----------
    network_
        The network with the weights of the best epoch; None before :meth:`fit`.
    history_
        One line an epoch, keys as those of :class:`cdmpp.predictor.trainer.Trainer`.
    samples_per_s_
        Training records a second: the median over the epochs, validation included.
    """

    #: Label transform, see :class:`cdmpp.predictor.config.LabelConfig`.
    label: Literal["box-cox", "log"] = "box-cox"

    def __init__(
        self,
        train: TrainConfig,
        loss: LossConfig,
        max_seconds: float | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        if max_seconds is not None and not max_seconds > 0:
            raise PredictorError(f"max_seconds must be above 0, got {max_seconds}")
        self.train, self.loss = train, loss
        self.max_seconds = max_seconds
        self._progress = progress
        self.network_: nn.Module | None = None
        self.encoder_: FeatureEncoder
        self.transform_: LabelTransform
        self.history_: list[dict[str, Any]] = []
        self.samples_per_s_: float = math.nan

    @abstractmethod
    def make_network(self, train: LabelledArrays, leaf_dim: int, device_dim: int) -> nn.Module:
        """The untrained network for these training pairs.

        It is called as ``network(batch, context)`` with a :class:`~cdmpp.predictor.batching.PaddedBatch` and a
        :class:`~cdmpp.predictor.batching.Context`, and gives standardised labels, shape (batch,).
        """

    def check_programs(self, arrays: LabelledArrays) -> None:
        """Called with pairs before they are predicted; warns of what the network cannot take."""

    def fit(self, data: TrainingData, split: Split) -> None:
        from cdmpp.predictor.trainer import seeded, torch_threads
        from cdmpp.predictor.training import prepare

        # the baselines are what others published: they do not see what we compute of program and device together
        config = config_from_dict({"model": {"pairs": False}, "label": {"transform": self.label}})
        inputs = prepare(config, data, split)
        self.encoder_, self.transform_ = inputs.encoder, inputs.transform
        train, valid = (inputs.arrays.take(np.asarray(rows)) for rows in (split.train, split.valid))
        with seeded(self.train.seed):
            network = self.make_network(train, self.encoder_.leaf_dim, self.encoder_.device_dim)
        self.check_programs(valid)
        loop = _Loop(network, train, valid, self.transform_, self.train, self.loss, self.max_seconds)
        with torch_threads(self.train.threads):
            self.history_ = loop.run(self._progress)
        self.samples_per_s_ = statistics.median(line["samples_per_s"] for line in self.history_)
        self.network_ = network.cpu()

    def predict(self, data: TrainingData, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        from cdmpp.predictor.data import subset
        from cdmpp.predictor.training import encode

        if self.network_ is None:
            raise PredictorError(f"model {self.name} is not fitted")
        arrays = encode(subset(data, np.asarray(rows)), self.encoder_)
        self.check_programs(arrays)
        return _predict(arrays, self.network_, self.transform_)


def _predict(arrays: LabelledArrays, network: nn.Module, transform: LabelTransform) -> NDArray[np.float64]:
    from cdmpp.predictor.network import predict_labels

    return transform.inverse(predict_labels(network, arrays), arrays.reference_s)


@dataclass
class _Loop:
    """AdamW with linear warm-up and cosine decay, clipped gradients, averaged weights, early stopping."""

    network: nn.Module
    train: LabelledArrays
    valid: LabelledArrays
    transform: LabelTransform
    config: TrainConfig
    loss: LossConfig
    max_seconds: float | None

    def run(self, progress: ProgressCallback | None) -> list[dict[str, Any]]:
        """Train; leaves the network with the weights of the best epoch and returns the history."""
        import torch

        from cdmpp.predictor.losses import HybridLoss
        from cdmpp.predictor.trainer import pick_device

        if len(self.train) < 2:
            raise PredictorError(f"training needs at least two training records, got {len(self.train)}")
        config = self.config
        self._where = pick_device(config.device)
        self.network.to(self._where)
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self._loss = HybridLoss(self.loss, self.transform)
        self._target = torch.from_numpy(self.transform.forward(self.train.latency_s)).float()
        self._log_latency = torch.from_numpy(np.log(self.train.latency_s)).float()
        self._average = {k: v.detach().clone() for k, v in self.network.state_dict().items()}
        self._step_count = 0
        self._started = time.perf_counter()
        history: list[dict[str, Any]] = []
        best: dict[str, torch.Tensor] = {}
        best_mape, best_epoch = math.inf, 0
        for epoch in range(1, config.epochs + 1):
            line = self._epoch(epoch)
            if not math.isfinite(line["valid_mape"]):
                raise PredictorError(
                    f"training diverged in epoch {epoch}: validation MAPE is {line['valid_mape']}"
                )
            if line["valid_mape"] < best_mape:
                best_mape, best_epoch = line["valid_mape"], epoch
                best = {k: v.detach().clone() for k, v in self._weights().items()}
            history.append({**line, "best_mape": best_mape, "best_epoch": best_epoch})
            if progress is not None:
                progress(history[-1])
            if epoch - best_epoch >= config.patience or self._out_of_time():
                break
        self.network.load_state_dict(best)
        self.network.eval()
        return history

    def _epoch(self, epoch: int) -> dict[str, Any]:
        from cdmpp.predictor.batching import training_batches
        from cdmpp.predictor.trainer import learning_rate, seeded

        config, started = self.config, time.perf_counter()
        rng = np.random.default_rng([config.seed, epoch])
        batches = training_batches(self.train.packed.lengths[self.train.program], config.batch_size, rng)
        total_steps = config.epochs * len(batches)
        # batch normalisation has no statistics of a single record: another one is left over in every epoch
        batches = [rows for rows in batches if len(rows) > 1]
        seen, loss_sum = 0, 0.0
        with seeded(config.seed * 100_003 + epoch):
            self.network.train()
            for rows in batches:
                step = self._step_count
                if self.max_seconds is not None:
                    spent = min(1.0, (time.perf_counter() - self._started) / self.max_seconds)
                    step = max(step, int(spent * total_steps))
                rate = learning_rate(step, total_steps, config.learning_rate, config.warmup_fraction)
                loss_sum += self._step(rows, rate) * len(rows)
                seen += len(rows)
                if self._out_of_time():
                    break
        mape = self._validate()
        elapsed_s = time.perf_counter() - started
        return {
            "epoch": epoch,
            "epochs": config.epochs,
            "step": self._step_count,
            "train_loss": loss_sum / max(seen, 1),
            "valid_mape": mape,
            "learning_rate": rate,
            "elapsed_s": round(elapsed_s, 3),
            "samples_per_s": round(seen / elapsed_s, 1),
        }

    def _step(self, rows: NDArray[np.int64], rate: float) -> float:
        import torch

        data, where = self.train, self._where
        index = torch.from_numpy(rows)
        label = self.network(*data.batch(rows, where))
        loss = self._loss(label, self._target[index].to(where), self._log_latency[index].to(where))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.grad_clip)
        self._optimizer.step()
        self._step_count += 1
        if self.config.ema_decay:
            self._update_average()
        return float(loss.detach())

    def _update_average(self) -> None:
        import torch

        # as our trainer does: early averages forget the initial weights
        decay = min(self.config.ema_decay, (1 + self._step_count) / (10 + self._step_count))
        with torch.no_grad():
            for name, value in self.network.state_dict().items():
                if value.is_floating_point():
                    self._average[name].lerp_(value, 1 - decay)
                else:  # batch normalisation counts its batches
                    self._average[name].copy_(value)

    def _weights(self) -> dict[str, torch.Tensor]:
        return self._average if self.config.ema_decay else self.network.state_dict()

    def _validate(self) -> float:
        current = {k: v.detach().clone() for k, v in self.network.state_dict().items()}
        self.network.load_state_dict(self._weights())
        predicted_s = _predict(self.valid, self.network, self.transform)
        self.network.load_state_dict(current)
        return float(np.mean(np.abs(predicted_s / self.valid.latency_s - 1)))

    def _out_of_time(self) -> bool:
        return self.max_seconds is not None and time.perf_counter() - self._started >= self.max_seconds
