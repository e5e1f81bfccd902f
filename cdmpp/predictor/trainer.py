"""The training loop: deterministic for a given seed, and resumable after any epoch with the same result."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import AdamW

from cdmpp.errors import PredictorError, raised_as
from cdmpp.predictor.checkpoint import TrainerState
from cdmpp.predictor.config import Config
from cdmpp.predictor.encoding import Context, LabelledArrays, LabelTransform, PaddedBatch, PairArrays, training_batches
from cdmpp.predictor.losses import central_moment_discrepancy, hybrid_loss
from cdmpp.predictor.network import LatencyNetwork, predict_labels
from cdmpp.predictor.optimizer import MuonAdamW
from cdmpp.predictor.processes import Processes, pick_device
from cdmpp.program.codegen import STATIC_FEATURES

logger = logging.getLogger(__name__)

#: Called after every epoch with its line of the history.
ProgressCallback = Callable[[dict[str, Any]], None]

#: Other pairs of an epoch for each taught pair (see :class:`Trainer`): more taught ones make GPUs and compiled code worse.
_OTHERS_PER_TAUGHT = 8

#: Standard deviation of logarithms below which an instruction count is taken as constant.
_CONSTANT_STD = 1e-5


def learning_rate(step: int, total_steps: int, peak: float, warmup_fraction: float) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0: a function of the step alone, so resuming needs no state."""
    warmup = max(1, round(total_steps * warmup_fraction))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class _Truth(NamedTuple):
    """Targets of predicted labels, (n,) each: standardised labels, logarithms of the latency in seconds, and logarithms of
    the reference (None where labels are not relative to one)."""

    target: torch.Tensor
    log_latency: torch.Tensor
    log_reference: torch.Tensor | None

    def of(self, chosen: torch.Tensor, where: torch.device) -> _Truth:
        """The targets of chosen rows, given by indices or bool (n,), on a torch device."""
        return _Truth(*(None if values is None else values[chosen].to(where) for values in self))  # type: ignore[arg-type]


class Trainer:
    """Trains one network.

    ``transform`` was fitted on the training labels. ``adapt`` are pairs of the domain to adapt to, without labels (for
    ``loss.cmd_weight``). The last ``taught`` training pairs are of programs measured on other devices only; an epoch has some
    of them. ``make_network`` makes another network, called as ``network(batch, context)`` and trained on the loss of its labels
    alone. The learning rate falls so that training ends after ``max_seconds``. ``processes`` train together (None: this one
    alone), which needs our network and no ``max_seconds``.

    Raises PredictorError without training or validation pairs."""

    def __init__(
        self,
        config: Config,
        transform: LabelTransform,
        train: LabelledArrays,
        valid: LabelledArrays,
        adapt: PairArrays | None = None,
        taught: int = 0,
        make_network: Callable[[], nn.Module] | None = None,
        max_seconds: float | None = None,
        processes: Processes | None = None,
    ) -> None:
        if not len(train) or not len(valid):
            raise PredictorError(f"training needs training and validation records, got {len(train)} and {len(valid)}")
        self._config = config.train
        self._transform = transform
        self._train, self._valid = train, valid
        self._terms = config.loss
        self._adapt = adapt
        self._taught = taught
        self._processes = processes or Processes(pick_device(config.train.device))
        self._where = self._processes.where
        if config.train.precision == "bf16" and not _has_bf16(self._where):
            raise PredictorError(f"train.precision is bf16, which this {self._where.type} has no arithmetic for")
        with seeded(config.train.seed):
            self.network: nn.Module = LatencyNetwork(config.model, *train.widths) if make_network is None else make_network()
        self.network.to(self._where)
        self._general_part = config.model.general_part
        self._max_seconds, self._started = max_seconds, time.perf_counter()
        if isinstance(self.network, LatencyNetwork):
            self.network.fit_bins(train)
        optimizer = MuonAdamW if isinstance(self.network, LatencyNetwork) else partial(AdamW, fused=True)
        self._optimizer = optimizer(self.network.parameters(), weight_decay=config.train.weight_decay)
        self._truth = _Truth(
            torch.from_numpy(transform.forward(train.latency_s, train.reference_s)).float(),
            torch.from_numpy(np.log(train.latency_s)).float(),
            None if train.reference_s is None else torch.from_numpy(np.log(train.reference_s)).float(),
        )
        self._codegen = _codegen_targets(train.codegen) if config.loss.codegen_weight else None
        self._average = {k: v.detach().clone() for k, v in self.network.state_dict().items()}
        self._state = TrainerState()

    def fit(self, progress: ProgressCallback | None = None) -> TrainerState:
        """Train to the last epoch or until patience runs out. ``progress`` is called after every epoch with its line."""
        config, state = self._config, self._state
        with torch_threads(config.threads):
            self._started = time.perf_counter()
            while state.epoch < config.epochs and state.epoch - state.best_epoch < config.patience:
                line = self._run_epoch()
                if progress is not None:
                    progress(line)
                if self._time_spent() >= 1:
                    break
        return self.state()

    def _time_spent(self) -> float:
        """Fraction of ``max_seconds`` that has passed, 0 without a limit."""
        return 0.0 if self._max_seconds is None else (time.perf_counter() - self._started) / self._max_seconds

    def state(self) -> TrainerState:
        """The full state for a checkpoint."""
        self._state.weights = self.network.state_dict()
        self._state.average = self._average
        optimizer = self._optimizer.state_dict()["state"]
        self._state.optimizer = {int(number): dict(values) for number, values in optimizer.items()}
        return self._state

    def restore(self, state: TrainerState) -> None:
        """Continue from a saved state. Raises PredictorError if it belongs to another network."""
        with raised_as(PredictorError, "the checkpoint fits neither network nor optimiser", KeyError, RuntimeError):
            self.network.load_state_dict(dict(state.weights))
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": state.optimizer, "param_groups": groups})
        self._average = {k: v.to(self._where) for k, v in state.average.items()}
        self._state = state

    def _run_epoch(self) -> dict[str, Any]:
        config, state = self._config, self._state
        started = time.perf_counter()
        batches = self.epoch_batches(np.random.default_rng([config.seed, state.epoch]))
        # the number of batches is the same in every epoch
        total_steps = config.epochs * len(batches)
        pairs, sums = 0, np.zeros(2)
        # each process has its own drop-out; that of the first is the same as without other processes
        with seeded(config.seed * 100_003 + state.epoch + 1 + (self._processes.rank << 40)):
            self.network.train()
            for rows in batches:
                step = max(state.step, int(min(1.0, self._time_spent()) * total_steps))
                rate = learning_rate(step, total_steps, config.learning_rate, config.warmup_fraction)
                sums += np.multiply(self._step(rows, rate), len(rows))
                pairs += len(rows)
                if self._time_spent() >= 1:
                    break
        state.epoch += 1
        mape = self._validate()
        if not math.isfinite(mape):
            raise PredictorError(f"training diverged in epoch {state.epoch}: validation MAPE is {mape}")
        if mape < state.best_mape or config.select == "last":
            state.best_mape, state.best_epoch = mape, state.epoch
            state.best = {k: v.detach().clone() for k, v in self._average.items()}
        elapsed_s = time.perf_counter() - started
        return {
            "epoch": state.epoch,
            "epochs": config.epochs,
            "step": state.step,
            "train_loss": sums[0] / pairs,
            **({"train_cmd": sums[1] / pairs} if self._terms.cmd_weight else {}),
            "valid_mape": mape,
            "best_mape": state.best_mape,
            "best_epoch": state.best_epoch,
            "learning_rate": rate,
            "elapsed_s": round(elapsed_s, 3),
            "samples_per_s": round(pairs / elapsed_s, 1),
        }

    def epoch_batches(self, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        """Batches of similar length: all training pairs once, but only some of the taught ones, as many in every epoch."""
        others = len(self._train) - self._taught
        drawn = rng.permutation(self._taught)[: others // _OTHERS_PER_TAUGHT]
        pairs = np.concatenate([np.arange(others), others + drawn])
        # with CMD, batches are not sorted by length: see LossConfig
        lengths = self._train.packed.lengths[self._train.program[pairs]] * (not self._terms.cmd_weight)
        batches = [pairs[chosen] for chosen in training_batches(lengths, self._config.batch_size, rng)]
        # batch normalisation has no statistics for a batch of one pair; every epoch leaves out a different pair
        return [rows for rows in batches if len(rows) > 1] or batches

    def _as_unseen(self, size: int) -> NDArray[np.bool_] | None:
        """Mask of this step's examples that get only features that carry over to other devices; resuming draws the same."""
        part = self._general_part
        if not part or self._train.general is None:
            return None
        rng = np.random.default_rng([self._config.seed, self._state.step, 2])
        drawn: NDArray[np.bool_] = rng.random(size) < part
        return drawn

    def _step(self, rows: NDArray[np.int64], rate: float) -> tuple[float, float]:
        """Do one update, and return the loss and its CMD term before weighting."""
        where, index = self._where, torch.from_numpy(rows)
        own, unseen = self._processes.part(len(rows)), self._as_unseen(len(rows))
        batch, context = self._train.batch(rows[own], where, None if unseen is None else unseen[own])
        truth = self._truth.of(index, where)
        bf16 = self._config.precision == "bf16"
        with torch.autocast(where.type, torch.bfloat16) if bf16 else nullcontext():
            if isinstance(self.network, LatencyNetwork):
                loss, cmd = self._all_terms(self.network, batch, context, truth, index)
            else:
                loss, cmd = self._label_loss(self.network(batch, context).float(), truth), torch.zeros(())
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._processes.add_gradients(self.network)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self._config.grad_clip)
        self._optimizer.step()
        self._state.step += 1
        update_average(self._average, self.network, self._state.step, self._config.ema_decay)
        return float(loss.detach()), float(cmd.detach())

    def _all_terms(
        self, network: LatencyNetwork, batch: PaddedBatch, context: Context, truth: _Truth, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of our network on the batch of pairs with these indices, (n,), and its CMD term before weighting. ``batch`` and
        ``context`` hold this process's part of the pairs."""
        terms, gathered, n = self._terms, self._processes.gathered, len(index)
        embedding = network.embed(batch, context.device)
        loss = self._label_loss(gathered(network.decode_plain(embedding, context), n), truth)
        counted = self._train.has_code[index].to(self._where)
        if counted.any():
            own = context.has_code
            # detached: an encoder that learns from both decoders makes larger errors with both
            compiled = network.decode_compiled(embedding[own].detach(), context.take(own))
            loss = loss + self._label_loss(gathered(compiled, n, counted), truth.of(counted, self._where))
        if self._codegen is not None and network.codegen is not None:
            counts = self._codegen[index].to(self._where)
            known = ~torch.isnan(counts)
            errors = (gathered(network.codegen(embedding), n) - counts.nan_to_num()) ** 2 * known
            loss = loss + terms.codegen_weight * errors.sum() / known.sum().clamp(min=1)
        cmd = torch.zeros(())
        if self._adapt is not None:
            # the draw depends on seed and step alone, so that a resumed run draws the same
            rng = np.random.default_rng([self._config.seed, self._state.step, 1])
            rows = rng.choice(len(self._adapt), min(n, len(self._adapt)), replace=False)
            programs, there = self._adapt.batch(rows[self._processes.part(len(rows))], self._where)
            target = gathered(network.embed(programs, there.device), len(rows))
            cmd = central_moment_discrepancy(gathered(embedding, n), target, terms.cmd_moments)
            loss = loss + terms.cmd_weight * cmd
        return loss, cmd

    def _label_loss(self, label: torch.Tensor, truth: _Truth) -> torch.Tensor:
        """Loss of predicted labels (n,)."""
        return hybrid_loss(self._terms, self._transform, label, *truth)

    def _validate(self) -> float:
        current = {k: v.detach().clone() for k, v in self.network.state_dict().items()}
        self.network.load_state_dict(self._average)
        n = len(self._valid)
        own = self._valid.without_code().take(self._processes.part(n))
        labels = self._processes.gathered(torch.from_numpy(predict_labels([self.network], own)[0]).to(self._where), n)
        predicted_s = self._transform.inverse(labels.double().cpu().numpy(), self._valid.reference_s)
        self.network.load_state_dict(current)
        return float(np.mean(np.abs(predicted_s / self._valid.latency_s - 1)))


def update_average(average: dict[str, torch.Tensor], network: nn.Module, step: int, most: float) -> None:
    """Move averaged weights towards a network's after a step; ``most`` is the final decay."""
    # the decay grows with the steps, so that early averages forget the initial weights
    decay = min(most, (1 + step) / (10 + step))
    with torch.no_grad():
        for name, value in network.state_dict().items():
            if value.is_floating_point():
                average[name].lerp_(value, 1 - decay)
            else:  # batch normalisation counts its batches
                average[name].copy_(value)


def _has_bf16(where: torch.device) -> bool:
    """Whether a device multiplies bfloat16 numbers in hardware."""
    if where.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _codegen_targets(counts: NDArray[np.float32] | None) -> torch.Tensor | None:
    """Standardised logarithms of instruction counts, float32 (n, len(STATIC_FEATURES)); NaN for a program without counts, None
    if no program has any. How often instructions run is left out: it follows from the program's extents, which the AST has."""
    if counts is None or np.isnan(counts).all():
        logger.warning(
            "the training programs have no instruction counts, so the network does not learn them: cdmpp codegen DIR makes them"
        )
        return None
    logs = np.log1p(counts[:, : len(STATIC_FEATURES)])
    std = np.nanstd(logs, axis=0)
    return torch.from_numpy((logs - np.nanmean(logs, axis=0)) / np.where(std > _CONSTANT_STD, std, 1.0)).float()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generator inside the block, and restore it afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Run the block with this many torch threads (None: as many as before)."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
