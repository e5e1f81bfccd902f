"""Splits of labels into train, valid and test. A split is specified as text, ``kind:key=value;key=value``; all take ``seed``:

``by_network``
    Tests on networks whose tasks appear nowhere in training. Every task of a held-out network is in test, even if a
    training network has it too; a network is held out at every size and batch (``resnet18@b4`` goes with ``resnet18``).
    ``heldout`` is a list of names joined by ``+`` or ``,``, or how many networks to choose (four, or fewer if there are
    fewer than six networks). Chosen networks are of different families if possible and leave at least half of the tasks to
    training. ``valid`` is a list of names, or the minimum fraction of the other labels for validation networks (0.1); if
    only one network is left, tasks are drawn from it. ``others`` (0) concerns tasks of no network, such as operators measured
    alone: this fraction of them is tested, and as many are in valid.
``by_device``
    Tests on devices that appear nowhere in training. Training may have the same programs, measured on other devices, also on
    other numbers of cores of the same CPU unless they are held out too. ``heldout`` are names or aliases (default: one is
    chosen); ``tasks`` are hashes of tasks whose labels on these devices train (few-shot); ``valid`` is a fraction of the
    training devices' tasks (0.1).
``by_task``
    Tests on tasks that appear nowhere in training; ``test`` (0.2) and ``valid`` (0.1) are fractions of the tasks.
``within_task``
    Tests on new programs of tasks that are in training; ``test`` (0.2) and ``valid`` (0.1) are fractions of the programs.
    The easiest of the four: it shows how well the predictor fits, not how it does on new tasks.

Choices depend on a hash of the seed and the *names* to choose from, so data added later moves few tasks to another part.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.dataset.view import label_fingerprint
from cdmpp.device import get_device
from cdmpp.errors import SplitError, UnknownDeviceError

_LOG = logging.getLogger(__name__)

#: Kind of split -> the label column of which train (or valid) and test may not share a value.
KINDS = {"by_network": "task", "by_task": "task", "by_device": "device", "within_task": "program"}
_KEYS: dict[str, tuple[str, ...]] = {
    "by_network": ("heldout", "valid", "others", "seed"),
    "by_task": ("test", "valid", "seed"),
    "by_device": ("heldout", "tasks", "valid", "seed"),
    "within_task": ("test", "valid", "seed"),
}

#: The parts of a split.
PARTS: tuple[str, ...] = ("train", "valid", "test")

#: Number of networks that ``by_network`` holds out by default.
DEFAULT_HELD_OUT_NETWORKS = 4
#: Maximum share of the tasks for chosen test networks: the first value if it admits enough networks, else the second.
_TEST_SHARES = (0.35, 0.5)
#: Of this many random choices, the first that tests at least this share of the tasks is taken.
_CHOICES = 8
_MIN_TEST_SHARE = 0.15
#: Maximum share of the training labels for validation networks.
_MAX_VALID_SHARE = 0.25

#: Task hash -> networks it occurs in. The value may also be a :class:`~cdmpp.program.types.Task`.
TaskNetworks = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Split:
    """A split of a label table, as row numbers (sorted, int64). Everything that is fitted must be fitted on train.

    ``spec`` makes the same split again: it names all choices. ``held_out`` are networks (``by_network``) or devices
    (``by_device``), ``allowed_tasks`` the tasks whose labels on held-out devices may be in train. ``fingerprint`` is
    :func:`cdmpp.dataset.view.label_fingerprint` of the label table."""

    kind: str
    spec: str
    seed: int
    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    test: NDArray[np.int64]
    held_out: tuple[str, ...] = ()
    allowed_tasks: tuple[str, ...] = ()
    fingerprint: str = ""

    @staticmethod
    def parse(
        spec: str, labels: pd.DataFrame, networks: TaskNetworks | None = None, families: Mapping[str, str] | None = None
    ) -> Split:
        """Split a label table as the text `spec` says (see the module), and check that the parts are disjoint.

        ``by_network`` needs `networks`, and uses `families` (network -> family) to choose networks. SplitError if the text is
        malformed, no given name has a label (if only some have none: a warning), or train or test would be empty."""
        kind, options = read_spec(spec)
        if not len(labels):
            raise SplitError("there are no labels to split")
        if kind == "by_device":
            return _by_device(labels, **options)
        if kind != "by_network":
            return _by_unit(kind, labels, **options)
        if networks is None:
            raise SplitError("a by_network split needs the networks of each task")
        return _by_network(labels, networks, families or {}, **options)

    def check_disjoint(self, labels: pd.DataFrame, networks: TaskNetworks | None = None) -> None:
        """Check that training knows nothing of the test part; ``by_network`` needs `networks`. SplitError if the split was made
        of another table, parts share a row or what :data:`KINDS` names, or a held-out network has a task in train or valid."""
        self.check_table(labels)
        rows = np.concatenate([getattr(self, name) for name in PARTS])
        if len(rows) and (rows.min() < 0 or rows.max() >= len(labels)):
            raise SplitError(f"split {self.spec} has rows outside of the {len(labels)} labels")
        if len(np.unique(rows)) != len(rows):
            raise SplitError(f"split {self.spec} has a row twice")
        for known, hidden in (("train", "test"), ("valid", "test"), ("train", "valid")):
            unit = "task" if self.kind == "by_device" and hidden == "valid" else KINDS[self.kind]
            table = labels.iloc[getattr(self, known)]
            if self.kind == "by_device" and hidden == "test" and self.allowed_tasks:
                table = table[~table["task"].isin(self.allowed_tasks)]
            shared = sorted(set(table[unit]) & set(labels[unit].iloc[getattr(self, hidden)]))
            if shared:
                what = f"{len(shared)} {unit}s in {known} and {hidden}"
                raise SplitError(f"split {self.spec}: {what}: {', '.join(shared[:3])}")
        if self.kind == "by_network" and networks is None:
            raise SplitError("checking a by_network split needs the networks of each task")
        for part in ("train", "valid") if self.kind == "by_network" else ():
            for task in sorted(set(labels["task"].iloc[getattr(self, part)])):
                name = ", ".join(sorted(set(self.held_out) & _architectures(networks or {}, task)))
                if name:
                    raise SplitError(f"split {self.spec}: task {task} of held-out network {name} is in {part}")

    def check_table(self, labels: pd.DataFrame) -> None:
        """Raise SplitError if the split was made of another label table."""
        if self.fingerprint and label_fingerprint(labels) != self.fingerprint:
            raise SplitError(f"split {self.spec} was made of another label table ({self.fingerprint})")

    def to_json(self) -> str:
        """The split as JSON text."""
        names = ("kind", "spec", "seed", "held_out", "allowed_tasks", "fingerprint", *PARTS)
        return json.dumps({name: getattr(self, name) for name in names}, default=lambda rows: rows.tolist())

    @classmethod
    def from_json(cls, text: str) -> Split:
        """Inverse of :meth:`to_json` (SplitError if the text is no split)."""
        try:
            value = dict(json.loads(text))
            if value["kind"] not in KINDS:
                raise SplitError(f"no split {value['kind']!r}; there are {', '.join(KINDS)}")
            value["seed"] = int(value["seed"])
            value |= {name: tuple(value[name]) for name in ("held_out", "allowed_tasks")}
            value |= {name: np.sort(np.asarray(value[name], dtype=np.int64)) for name in PARTS}
            return cls(**{known.name: value[known.name] for known in fields(cls)})
        except (ValueError, KeyError, TypeError) as error:
            raise SplitError(f"not a split: {error}") from error


def _by_network(
    labels: pd.DataFrame,
    networks: TaskNetworks,
    families: Mapping[str, str],
    heldout: Collection[str] | int | None = None,
    valid: float | Collection[str] = 0.1,
    others: float = 0.0,
    seed: int = 0,
) -> Split:
    task_rows = {str(task): int(n) for task, n in labels["task"].value_counts().sort_index().items()}
    members = {task: _architectures(networks, task) for task in task_rows}
    every = sorted(set().union(*members.values()))
    if isinstance(heldout, int) or heldout is None:
        held = _choose_networks(every, members, heldout, seed, families)
    else:
        held = _known_names(map(architecture, heldout), every, "network")
    test_tasks = {task for task, names in members.items() if names & set(held)}
    rest = {task: names for task, names in members.items() if task not in test_tasks}
    if isinstance(valid, float | int):
        chosen = _validation(rest, task_rows, float(valid), seed)
        valid_tasks = set() if chosen else _draw(rest, float(valid), seed, "valid")
    else:
        chosen = _known_names(map(architecture, valid), every, "network")
        valid_tasks = set()
    valid_tasks |= {task for task, names in rest.items() if names & set(chosen)}
    options = {"heldout": held, "valid": chosen or valid, "others": others}
    if others:
        _check_fractions(others, others)
        alone = {task for task, names in members.items() if not names}
        test_alone = _draw(alone, others, seed, "test")
        valid_tasks = (valid_tasks - alone) | _draw(alone - test_alone, others / (1 - others), seed, "valid")
        test_tasks |= test_alone
    is_test, is_valid = labels["task"].isin(test_tasks), labels["task"].isin(valid_tasks)
    return _split("by_network", options, seed, labels, is_test, is_valid, networks)


def _by_device(
    labels: pd.DataFrame, heldout: Collection[str] | None = None, tasks: Collection[str] = (), valid: float = 0.1, seed: int = 0
) -> Split:
    _check_fractions(0.0, valid)
    devices = sorted(set(labels["device"]))
    if heldout is None:
        if len(devices) < 2:
            raise SplitError("by_device needs labels of at least two devices")
        held = [ordered(devices, seed, "device")[0]]
    else:
        held = [_device_name(name, devices) for name in heldout]
    column = labels["task"]
    allowed = sorted(set(tasks))
    unknown = set(allowed) - set(column)
    if unknown:
        raise SplitError(f"by_device: no label of task {', '.join(sorted(unknown)[:3])}")
    on_held = labels["device"].isin(held)
    valid_tasks = _draw(set(column[~on_held]) - set(allowed), valid, seed, "valid")
    is_test, is_valid = on_held & ~column.isin(allowed), ~on_held & column.isin(valid_tasks)
    options = {"heldout": held, "tasks": allowed, "valid": valid}
    return _split("by_device", options, seed, labels, is_test, is_valid)


def _by_unit(kind: str, labels: pd.DataFrame, test: float = 0.2, valid: float = 0.1, seed: int = 0) -> Split:
    """A split by tasks (``by_task``) or programs (``within_task``)."""
    _check_fractions(test, valid)
    column = labels[KINDS[kind]]
    tested = _draw(set(column), test, seed, "test")
    validated = _draw(set(column) - tested, valid / (1 - test), seed, "valid")
    return _split(kind, {"test": test, "valid": valid}, seed, labels, column.isin(tested), column.isin(validated))


def _split(
    kind: str,
    options: Mapping[str, Any],
    seed: int,
    labels: pd.DataFrame,
    is_test: pd.Series,
    is_valid: pd.Series,
    networks: TaskNetworks | None = None,
) -> Split:
    """Make a split: its parts and its specification, which leaves out ``tasks`` and ``others`` if empty or 0."""
    texts = [
        f"{name}={'+'.join(value) if isinstance(value, list) else f'{value:g}'}"
        for name, value in options.items()
        if value or name not in ("tasks", "others")
    ]
    spec = f"{kind}:{';'.join(texts)};seed={seed}"
    masks = {"train": ~(is_test | is_valid), "valid": is_valid, "test": is_test}
    for name in ("train", "test"):
        if not masks[name].any():
            raise SplitError(f"split {spec}: nothing is left to {name} of {len(labels)} labels")
    split = Split(
        kind=kind,
        spec=spec,
        seed=seed,
        held_out=tuple(options.get("heldout", ())),
        allowed_tasks=tuple(options.get("tasks", ())),
        fingerprint=label_fingerprint(labels),
        **{name: np.flatnonzero(mask.to_numpy()).astype(np.int64) for name, mask in masks.items()},
    )
    split.check_disjoint(labels, networks)
    return split


def _choose_networks(
    every: Sequence[str], members: Mapping[str, set[str]], number: int | None, seed: int, families: Mapping[str, str]
) -> list[str]:
    """Networks to hold out, preferably of different families and with few tasks, never with more than half of the tasks."""
    wanted = number if number is not None else DEFAULT_HELD_OUT_NETWORKS if len(every) >= 6 else max(1, len(every) // 3)
    if wanted < 1 or len(every) <= wanted:
        raise SplitError(f"by_network cannot hold out {wanted} of {len(every)} networks; by_task splits one network")
    family = {architecture(name): kind for name, kind in families.items()}
    best: tuple[int, float, list[str]] = (0, 0.0, [])
    for attempt in range(_CHOICES):
        chosen = _fitting(ordered(every, seed, f"network{attempt}"), members, wanted, family)
        share = _count(members, chosen) / len(members)
        best = max(best, (len(chosen), min(share, _MIN_TEST_SHARE), chosen), key=lambda choice: choice[:2])
    if not best[0] or (number is not None and best[0] < number):
        raise SplitError(
            f"by_network cannot hold out {wanted} of {len(every)} networks and leave half of the tasks to "
            "training; name the networks, or use by_task"
        )
    return sorted(best[2])


def _fitting(order: Sequence[str], groups: Mapping[str, set[str]], wanted: int, family: Mapping[str, str]) -> list[str]:
    """The first networks in this order that are of different families and have few tasks in total."""
    chosen: list[str] = []
    used: set[str] = set()
    for share in _TEST_SHARES:
        for new_family_only in (True, False):
            for name in order:
                kind = family.get(name)
                if len(chosen) == wanted or name in chosen or (new_family_only and kind in used):
                    continue
                if _count(groups, [*chosen, name]) <= share * len(groups):
                    chosen.append(name)
                    used.update([kind] if kind is not None else [])
    return chosen


def _count(members: Mapping[str, set[str]], networks: Collection[str]) -> int:
    """How many of the tasks occur in any of the networks."""
    return sum(not names.isdisjoint(networks) for names in members.values())


def _validation(rest: Mapping[str, set[str]], task_rows: Mapping[str, int], fraction: float, seed: int) -> list[str]:
    """Networks that have about this fraction of the remaining labels; none if each network alone has too many."""
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


def _key(name: str, seed: int, purpose: str) -> float:
    """A number in [0, 1) that depends on nothing but the arguments."""
    digest = hashlib.sha256(f"{purpose}:{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def ordered(names: Iterable[str], seed: int, purpose: str) -> list[str]:
    """The names in a random order that depends on nothing but the arguments."""
    return sorted(names, key=lambda name: (_key(name, seed, purpose), name))


def _draw(names: Collection[str], fraction: float, seed: int, purpose: str) -> set[str]:
    """Random names, about this fraction of them. At least one, if the fraction is above 0 and there are several names."""
    drawn = {name for name in names if _key(name, seed, purpose) < fraction}
    if not drawn and fraction > 0 and len(names) > 1:
        drawn = {ordered(names, seed, purpose)[0]}
    return drawn


def architecture(network: str) -> str:
    """A network's name without size and batch (``resnet18@s160b4`` -> ``resnet18``); splits hold it out at all of them."""
    return network.split("@", 1)[0]


def _architectures(networks: TaskNetworks, task: str) -> set[str]:
    """The architectures of a task's networks; empty if the task is unknown."""
    value: Any = networks.get(task, ())
    return {architecture(name) for name in getattr(value, "networks", value)}


def read_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """The kind of a split, and arguments for the function that makes it (SplitError if the text is malformed)."""
    kind, _, rest = (part.strip() for part in spec.partition(":"))
    if kind not in KINDS:
        raise SplitError(f"no split {kind!r}; there are {', '.join(KINDS)}")
    arguments: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(";"))):
        key, equals, text = (part.strip() for part in item.partition("="))
        if key not in _KEYS[kind]:
            raise SplitError(f"split {spec!r}: {kind} has no {key!r}, only {', '.join(_KEYS[kind])}")
        if not equals or not text:
            raise SplitError(f"split {spec!r}: {key} has no value; write {key}=...")
        if key in arguments:
            raise SplitError(f"split {spec!r}: {key} is given twice")
        arguments[key] = _argument(spec, kind, key, text)
    return kind, arguments


def _argument(spec: str, kind: str, key: str, text: str) -> Any:
    names = [name.strip() for name in re.split(r"[+,]", text) if name.strip()]
    if key in ("heldout", "tasks"):
        return int(text) if kind == "by_network" and text.isdigit() else names
    try:
        return int(text) if key == "seed" else float(text)
    except ValueError:
        if key == "seed":
            raise SplitError(f"seed must be a whole number, got {text!r}") from None
        if (kind, key) == ("by_network", "valid"):
            return names
        raise SplitError(f"split {spec!r}: {key} must be a fraction, got {text!r}") from None


def _check_fractions(test: float, valid: float) -> None:
    if not (0 <= test < 1 and 0 <= valid < 1 and test + valid < 1):
        raise SplitError(f"fractions test={test:g} and valid={valid:g} must be at least 0 and below 1 together")


def _known_names(names: Iterable[str], every: Collection[str], what: str) -> list[str]:
    """The given names that have labels, sorted. SplitError if none has; only a warning if some have none, because the
    specification of a predictor's split must also work on data with only some of its networks."""
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
    if name not in devices:
        with contextlib.suppress(UnknownDeviceError):
            name = get_device(name).name
    return _known_names([name], devices, "device")[0]
