"""The four kinds of clean splits.

Choices depend on the seed and on the *names* of what is chosen from (a hash of both), not on the order of the
labels: more data later moves few tasks from one part to another.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cdmpp.dataset.labels import label_fingerprint
from cdmpp.dataset.split import Split, TaskNetworks, architecture, networks_of, row_array
from cdmpp.errors import SplitError

if TYPE_CHECKING:
    import pandas as pd

_LOG = logging.getLogger(__name__)

#: Networks that ``by_network`` holds out unless told otherwise.
DEFAULT_HELD_OUT_NETWORKS = 4

#: Chosen test networks should take at most so much of the tasks; if that is too little, at most so much.
_TEST_SHARES = (0.35, 0.5)

#: Of so many random choices, the first is taken that tests this share of the tasks at least.
_CHOICES = 8
_MIN_TEST_SHARE = 0.15

#: A validation network may take at most so much of the training labels.
_MAX_VALID_SHARE = 0.25


def by_network(
    labels: pd.DataFrame,
    networks: TaskNetworks,
    held_out: Collection[str] | int | None = None,
    seed: int = 0,
    valid: float | Collection[str] = 0.1,
    families: Mapping[str, str] | None = None,
    adapt: float = 0.0,
    others: float = 0.0,
) -> Split:
    """Test on networks whose tasks appear nowhere in training.

    Every task that occurs in a held-out network is a test task, also where a training network has it too. A
    network is held out at every size and batch (``resnet18@b4`` goes with ``resnet18``).

    Parameters
    ----------
    labels
        Label table.
    networks
        Task -> networks.
    held_out
        Names, or how many to choose; None chooses four (fewer if there are fewer than six networks). Chosen
        networks are of different families as far as ``families`` and the number allow, and leave at least
        half of the tasks to training.
    valid
        Names of the validation networks, or the fraction of the other labels they should have at least.
        Their tasks are in no other part. With a single network left to train on, validation tasks are drawn
        from it.
    families
        Network -> family.
    adapt
        Fraction of the held-out networks' programs that go to the unlabelled part in place of test.
    others
        Fraction of the tasks of no network, such as operators that were measured alone, to test on, and as many to
        validate on; the rest of them is trained on.

    Raises
    ------
    SplitError
        No task has any of the names (some: a warning), too few networks to choose from, or nothing would be
        left to train on or to test.
    """
    task_rows = _task_rows(labels)
    members = {task: {architecture(n) for n in networks_of(networks, task)} for task in task_rows}
    every = sorted(set().union(*members.values()))
    if isinstance(held_out, int) or held_out is None:
        held = _choose_networks(every, members, held_out, seed, families or {})
    else:
        held = _known_names(map(architecture, held_out), every, "network")
    test_tasks = {task for task, names in members.items() if names & set(held)}
    rest = {task: names for task, names in members.items() if task not in test_tasks}
    if isinstance(valid, float | int):
        chosen = _validation_networks(rest, task_rows, float(valid), seed)
        valid_text = "+".join(chosen) if chosen else f"{valid:g}"
    else:
        chosen = _known_names(map(architecture, valid), every, "network")
        valid_text = "+".join(chosen)
    if chosen:
        valid_tasks = {task for task, names in rest.items() if names & set(chosen)}
    else:
        valid_tasks = _draw(rest, float(valid), seed, "valid") if isinstance(valid, float | int) else set()
    spec = f"by_network:heldout={'+'.join(held)};valid={valid_text}{_adapt_text(adapt)}"
    if others:
        _check_fractions(others, others)
        alone = {task for task, names in members.items() if not names}
        test_alone = _draw(alone, others, seed, "test")
        valid_tasks = (valid_tasks - alone) | _draw(alone - test_alone, others / (1 - others), seed, "valid")
        test_tasks |= test_alone
        spec += f";others={others:g}"
    spec += f";seed={seed}"
    split = _by_tasks("by_network", spec, seed, labels, test_tasks, valid_tasks, tuple(held), adapt)
    split.check_disjoint(labels, networks)
    return split


def by_task(labels: pd.DataFrame, test: float = 0.2, valid: float = 0.1, seed: int = 0) -> Split:
    """Test on tasks that appear nowhere in training; fractions are of the tasks.

    Raises
    ------
    SplitError
        Fewer than two tasks (three with validation), or fractions that leave nothing to train on.
    """
    _check_fractions(test, valid)
    tasks = set(_task_rows(labels))
    test_tasks = _draw(tasks, test, seed, "test")
    valid_tasks = _draw(tasks - test_tasks, valid / (1 - test), seed, "valid")
    spec = f"by_task:test={test:g};valid={valid:g};seed={seed}"
    split = _by_tasks("by_task", spec, seed, labels, test_tasks, valid_tasks)
    split.check_disjoint(labels)
    return split


def by_device(
    labels: pd.DataFrame,
    held_out: Collection[str] | None = None,
    allowed_tasks: Collection[str] = (),
    valid: float = 0.1,
    seed: int = 0,
    adapt: float = 0.0,
) -> Split:
    """Test on devices that appear nowhere in training.

    The held-out devices' programs may well be in training, measured on other devices: that is the question
    asked. Validation tasks are drawn from the training devices; few have enough devices to spare one.

    Parameters
    ----------
    held_out
        Device names, aliases included; None chooses one.
    allowed_tasks
        Few-shot: labels of these tasks on the held-out devices go to training.
    valid
        Fraction of the tasks.
    adapt
        Fraction of the held-out devices' programs (those of allowed tasks aside) that go to the unlabelled part
        in place of test.

    Raises
    ------
    SplitError
        No label is of the devices or tasks named, or nothing would be left to train on or to test.
    """
    _check_fractions(0.0, valid)
    devices = sorted(set(labels["device"]))
    if held_out is None:
        if len(devices) < 2:
            raise SplitError("by_device needs labels of at least two devices")
        held = [ordered(devices, seed, "device")[0]]
    else:
        held = [_device_name(name, devices) for name in held_out]
    tasks = labels["task"]
    allowed = sorted(set(allowed_tasks))
    unknown = set(allowed) - set(tasks)
    if unknown:
        raise SplitError(f"by_device: no label of task {', '.join(sorted(unknown)[:3])}")
    on_held = labels["device"].isin(held).to_numpy()
    shots = on_held & tasks.isin(allowed).to_numpy()
    candidates = set(tasks[~on_held]) - set(allowed)
    valid_tasks = _draw(candidates, valid, seed, "valid")
    is_valid = ~on_held & tasks.isin(valid_tasks).to_numpy()
    is_test = on_held & ~shots
    spec = f"by_device:heldout={'+'.join(held)}"
    spec += f";tasks={'+'.join(allowed)}" if allowed else ""
    spec += f";valid={valid:g}{_adapt_text(adapt)};seed={seed}"
    split = _split("by_device", spec, seed, labels, is_test, is_valid, held, allowed, adapt)
    split.check_disjoint(labels)
    return split


def within_task(labels: pd.DataFrame, test: float = 0.2, valid: float = 0.1, seed: int = 0) -> Split:
    """Test on programs that are not in training, of tasks that are; fractions are of the programs.

    The easiest of the four: it tells how well the predictor fits, not what it knows of new work.

    Raises
    ------
    SplitError
        Too few programs, or fractions that leave nothing to train on.
    """
    _check_fractions(test, valid)
    programs = set(labels["program"])
    test_programs = _draw(programs, test, seed, "test")
    valid_programs = _draw(programs - test_programs, valid / (1 - test), seed, "valid")
    is_test = labels["program"].isin(test_programs).to_numpy()
    is_valid = labels["program"].isin(valid_programs).to_numpy()
    spec = f"within_task:test={test:g};valid={valid:g};seed={seed}"
    split = _split("within_task", spec, seed, labels, is_test, is_valid)
    split.check_disjoint(labels)
    return split


def _choose_networks(
    every: Sequence[str],
    members: Mapping[str, set[str]],
    number: int | None,
    seed: int,
    families: Mapping[str, str],
) -> list[str]:
    """Networks to hold out: of different families and with few tasks first, never with more than half."""
    few = max(1, len(every) // 3)
    wanted = number if number is not None else DEFAULT_HELD_OUT_NETWORKS if len(every) >= 6 else few
    if wanted < 1 or len(every) <= wanted:
        raise SplitError(
            f"by_network cannot hold out {wanted} of {len(every)} networks; by_task splits a single network"
        )
    family = {architecture(name): kind for name, kind in families.items()}
    best: tuple[int, float, list[str]] = (0, 0.0, [])
    for attempt in range(_CHOICES):
        order = ordered(every, seed, f"network{attempt}")
        chosen = _first_fitting(order, members, wanted, family)
        held = set(chosen)
        share = sum(bool(names & held) for names in members.values()) / len(members)
        best = max(best, (len(chosen), min(share, _MIN_TEST_SHARE), chosen), key=lambda choice: choice[:2])
    if not best[0] or (number is not None and best[0] < number):
        raise SplitError(
            f"by_network cannot hold out {wanted} of {len(every)} networks and leave half of the tasks to "
            "training; name the networks, or use by_task"
        )
    return sorted(best[2])


def _first_fitting(
    order: Sequence[str], members: Mapping[str, set[str]], wanted: int, family: Mapping[str, str]
) -> list[str]:
    """The first networks in this order that are of different families and have few tasks together."""
    chosen: list[str] = []
    used: set[str] = set()
    for share in _TEST_SHARES:
        for new_family_only in (True, False):
            for name in order:
                kind = family.get(name)
                if len(chosen) == wanted or name in chosen or (new_family_only and kind in used):
                    continue
                held = {*chosen, name}
                if sum(bool(names & held) for names in members.values()) <= share * len(members):
                    chosen.append(name)
                    used.update([kind] if kind is not None else [])
    return chosen


def _validation_networks(
    rest: Mapping[str, set[str]], task_rows: Mapping[str, int], fraction: float, seed: int
) -> list[str]:
    """Networks with about the fraction of the labels that are left; none if every one would take too much."""
    _check_fractions(0.0, fraction)
    total = sum(task_rows[task] for task in rest)
    chosen: list[str] = []
    for name in ordered(set().union(*rest.values()) if rest else (), seed, "valid"):
        taken = sum(task_rows[task] for task, names in rest.items() if names & set(chosen))
        if taken >= fraction * total:
            break
        more = sum(task_rows[task] for task, names in rest.items() if names & {*chosen, name})
        if more <= max(_MAX_VALID_SHARE, 2 * fraction) * total and more < total:
            chosen.append(name)
    return sorted(chosen)


def _by_tasks(
    kind: str,
    spec: str,
    seed: int,
    labels: pd.DataFrame,
    test_tasks: Collection[str],
    valid_tasks: Collection[str],
    held_out: Sequence[str] = (),
    adapt: float = 0.0,
) -> Split:
    is_test, is_valid = (labels["task"].isin(tasks).to_numpy() for tasks in (test_tasks, valid_tasks))
    return _split(kind, spec, seed, labels, is_test, is_valid, held_out, adapt=adapt)


def _split(
    kind: str,
    spec: str,
    seed: int,
    labels: pd.DataFrame,
    is_test: np.ndarray,
    is_valid: np.ndarray,
    held_out: Sequence[str] = (),
    allowed_tasks: Sequence[str] = (),
    adapt: float = 0.0,
) -> Split:
    is_train = ~(is_test | is_valid)
    programs = labels["program"]
    is_adapt = is_test & programs.isin(_draw(set(programs[is_test]), adapt, seed, "adapt")).to_numpy()
    is_test = is_test & ~is_adapt
    for name, mask in (("train", is_train), ("test", is_test)):
        if not mask.any():
            raise SplitError(f"split {spec}: nothing is left to {name} of {len(labels)} labels")
    return Split(
        kind=kind,
        spec=spec,
        seed=seed,
        train=row_array(np.flatnonzero(is_train)),
        valid=row_array(np.flatnonzero(is_valid)),
        test=row_array(np.flatnonzero(is_test)),
        held_out=tuple(held_out),
        allowed_tasks=tuple(allowed_tasks),
        fingerprint=label_fingerprint(labels),
        adapt=row_array(np.flatnonzero(is_adapt)),
    )


def _task_rows(labels: pd.DataFrame) -> dict[str, int]:
    """Task -> number of its labels (SplitError for an empty table)."""
    if not len(labels):
        raise SplitError("there are no labels to split")
    return {str(task): int(n) for task, n in labels["task"].value_counts().sort_index().items()}


def _key(name: str, seed: int, purpose: str) -> float:
    """A number in [0, 1) that depends on nothing but the arguments."""
    digest = hashlib.sha256(f"{purpose}:{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def ordered(names: Iterable[str], seed: int, purpose: str) -> list[str]:
    """The names in a random order that hangs on nothing but the arguments."""
    return sorted(names, key=lambda name: (_key(name, seed, purpose), name))


def _draw(names: Collection[str], fraction: float, seed: int, purpose: str) -> set[str]:
    """About the fraction of the names; at least one if any is wanted and one is left."""
    drawn = {name for name in names if _key(name, seed, purpose) < fraction}
    if not drawn and fraction > 0 and len(names) > 1:
        drawn = {ordered(names, seed, purpose)[0]}
    return drawn


def _adapt_text(adapt: float) -> str:
    """For the specification; SplitError for no fraction. Specifications without adaptation do not mention it."""
    if not 0 <= adapt < 1:
        raise SplitError(f"fraction adapt={adapt:g} must be at least 0 and below 1")
    return f";adapt={adapt:g}" if adapt else ""


def _check_fractions(test: float, valid: float) -> None:
    if not (0 <= test < 1 and 0 <= valid < 1 and test + valid < 1):
        raise SplitError(
            f"fractions test={test:g} and valid={valid:g} must be at least 0 and below 1 together"
        )


def _known_names(names: Iterable[str], every: Collection[str], what: str) -> list[str]:
    """The names that have labels, sorted; SplitError if none has, a warning if some have not.

    The specification of a predictor's split must serve on data that have some of its networks only.
    """
    asked = sorted(set(names))
    found = [name for name in asked if name in every]
    if not asked:
        raise SplitError(f"no {what} is named")
    unknown = [name for name in asked if name not in every]
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(every), n=3, cutoff=0.4) or sorted(every)[:3]
        message = f"no label is of {what} {' or '.join(unknown)}; there are {', '.join(near)}, ..."
        if not found:
            raise SplitError(message)
        _LOG.warning("%s", message)
    return found


def _device_name(name: str, devices: Collection[str]) -> str:
    from cdmpp.device import get_device
    from cdmpp.errors import UnknownDeviceError

    if name in devices:
        return name
    try:
        canonical = get_device(name).name
    except UnknownDeviceError:
        canonical = name
    return _known_names([canonical], devices, "device")[0]
