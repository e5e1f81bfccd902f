"""The training loop: deterministic in its seed, resumable after any epoch with the same result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.batching import PackedPrograms, training_batches
from cdmpp.predictor.checkpoint import TrainerState
from cdmpp.predictor.config import Config
from cdmpp.predictor.losses import HybridLoss
from cdmpp.predictor.network import LatencyNetwork, predict_labels
from cdmpp.predictor.transforms import LabelTransform

#: Called after every epoch with that epoch's line of the history.
ProgressCallback = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class LabelledArrays:
    """Labelled (program, device) pairs as arrays.

    Attributes
    ----------
    packed
        The encoded programs.
    device_rows
        float32 (devices, device_dim), encoded.
    program, device
        int64 (n,): program number and row of ``device_rows`` of each pair.
    latency_s
        float64 (n,), the labels.
    reference_s
        float64 (n,), where the label transform is relative.
    """

    packed: PackedPrograms
    device_rows: torch.Tensor
    program: NDArray[np.int64]
    device: NDArray[np.int64]
    latency_s: NDArray[np.float64]
    reference_s: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.latency_s)

    def take(self, rows: NDArray[np.int64]) -> LabelledArrays:
        """The pairs with these numbers; programs and devices are shared."""
        reference_s = None if self.reference_s is None else self.reference_s[rows]
        return LabelledArrays(
            self.packed,
            self.device_rows,
            self.program[rows],
            self.device[rows],
            self.latency_s[rows],
            reference_s,
        )

    def predict(self, network: LatencyNetwork, transform: LabelTransform) -> NDArray[np.float64]:
        """Predicted seconds of every pair, shape (n,)."""
        labels = predict_labels(network, self.packed, self.program, self.device_rows, self.device)
        return transform.inverse(labels, self.reference_s)


def learning_rate(step: int, total_steps: int, peak: float, warmup_fraction: float) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0: a function of the step, so resuming needs no state."""
    warmup = max(1, round(total_steps * warmup_fraction))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def pick_device(name: str) -> torch.device:
    """``cpu``, ``cuda`` or ``auto`` -> a torch device; PredictorError where CUDA is asked for and missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise PredictorError("train.device is cuda, but torch sees no CUDA device; use cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class Trainer:
    """Trains one network.

    Parameters
    ----------
    config
        The configuration.
    transform
        Label transform fitted on the training labels.
    train, valid
        Training and validation pairs.
    leaf_dim, device_dim
        Widths of the encoded features.
    """

    def __init__(
        self,
        config: Config,
        transform: LabelTransform,
        train: LabelledArrays,
        valid: LabelledArrays,
        leaf_dim: int,
        device_dim: int,
    ) -> None:
        if not len(train) or not len(valid):
            raise PredictorError(
                f"training needs training and validation records, got {len(train)} and {len(valid)}"
            )
        self._config = config.train
        self._transform = transform
        self._train, self._valid = train, valid
        self._where = pick_device(config.train.device)
        with seeded(config.train.seed):
            self.network = LatencyNetwork(config.model, leaf_dim, device_dim).to(self._where)
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=config.train.learning_rate, weight_decay=config.train.weight_decay
        )
        self._loss = HybridLoss(config.loss, transform)
        self._target = torch.from_numpy(transform.forward(train.latency_s, train.reference_s)).float()
        self._log_latency = torch.from_numpy(np.log(train.latency_s)).float()
        self._log_reference = (
            None if train.reference_s is None else torch.from_numpy(np.log(train.reference_s)).float()
        )
        self._average = {k: v.detach().clone() for k, v in self.network.state_dict().items()}
        self._state = TrainerState()

    @property
    def best_weights(self) -> dict[str, torch.Tensor]:
        """Weights of the best epoch so far (averaged if averaging is on)."""
        return self._state.best

    def fit(
        self,
        checkpoint: Callable[[TrainerState], None] | None = None,
        progress: ProgressCallback | None = None,
    ) -> TrainerState:
        """Train until the last epoch or until patience runs out.

        Parameters
        ----------
        checkpoint
            Called with the full state after every epoch, before ``progress``.
        progress
            Called with the history line of every epoch.
        """
        config = self._config
        with torch_threads(config.threads):
            while self._state.epoch < config.epochs and not self.out_of_patience():
                line = self._run_epoch()
                if checkpoint is not None:
                    checkpoint(self.state())
                if progress is not None:
                    progress(line)
        return self.state()

    def out_of_patience(self) -> bool:
        """Whether validation has not improved for ``patience`` epochs."""
        return self._state.epoch - self._state.best_epoch >= self._config.patience

    def state(self) -> TrainerState:
        """The full state, to be saved."""
        self._state.weights = self.network.state_dict()
        self._state.average = self._average
        optimizer = self._optimizer.state_dict()["state"]
        self._state.optimizer = {int(number): dict(values) for number, values in optimizer.items()}
        return self._state

    def restore(self, state: TrainerState) -> None:
        """Continue from a saved state; PredictorError if it belongs to another network."""
        try:
            self.network.load_state_dict(state.weights)
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": state.optimizer, "param_groups": groups})
        except (RuntimeError, KeyError, ValueError) as err:
            raise PredictorError(f"checkpoint does not fit the network: {err}") from err
        self._average = {k: v.to(self._where) for k, v in state.average.items()}
        self._state = state

    def _run_epoch(self) -> dict[str, Any]:
        config, state = self._config, self._state
        started = time.perf_counter()
        rng = np.random.default_rng([config.seed, state.epoch])
        batches = training_batches(self._train.packed.lengths[self._train.program], config.batch_size, rng)
        # the number of batches is the same in every epoch
        total_steps = config.epochs * len(batches)
        loss_sum = 0.0
        with seeded(config.seed * 100_003 + state.epoch + 1):
            self.network.train()
            for rows in batches:
                rate = learning_rate(state.step, total_steps, config.learning_rate, config.warmup_fraction)
                loss_sum += self._step(rows, rate) * len(rows)
        state.epoch += 1
        mape = self._validate()
        if not math.isfinite(mape):
            raise PredictorError(f"training diverged in epoch {state.epoch}: validation MAPE is {mape}")
        if mape < state.best_mape:
            state.best_mape, state.best_epoch = mape, state.epoch
            state.best = {k: v.detach().clone() for k, v in self._average.items()}
        elapsed_s = time.perf_counter() - started
        return {
            "epoch": state.epoch,
            "epochs": config.epochs,
            "step": state.step,
            "train_loss": loss_sum / len(self._train),
            "valid_mape": mape,
            "best_mape": state.best_mape,
            "best_epoch": state.best_epoch,
            "learning_rate": rate,
            "elapsed_s": round(elapsed_s, 3),
            "samples_per_s": round(len(self._train) / elapsed_s, 1),
        }

    def _step(self, rows: NDArray[np.int64], rate: float) -> float:
        data, where = self._train, self._where
        index = torch.from_numpy(rows)
        batch = data.packed.batch(data.program[rows]).to(where)
        device = data.device_rows[torch.from_numpy(data.device[rows])].to(where)
        reference = None if self._log_reference is None else self._log_reference[index].to(where)
        label = self.network(batch, device)
        loss = self._loss(label, self._target[index].to(where), self._log_latency[index].to(where), reference)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self._config.grad_clip)
        self._optimizer.step()
        self._state.step += 1
        self._update_average()
        return float(loss.detach())

    def _update_average(self) -> None:
        # the decay grows with the steps, so that early averages forget the initial weights
        step = self._state.step
        decay = min(self._config.ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, value in self.network.state_dict().items():
                self._average[name].lerp_(value, 1 - decay)

    def _validate(self) -> float:
        current = {k: v.detach().clone() for k, v in self.network.state_dict().items()}
        self.network.load_state_dict(self._average)
        predicted_s = self._valid.predict(self.network, self._transform)
        self.network.load_state_dict(current)
        return float(np.mean(np.abs(predicted_s / self._valid.latency_s - 1)))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's global generator seeded inside, and as it was outside."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Run with this many torch threads (None: as many as before)."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
