"""Which labels train, validate and test."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.dataset.labels import label_fingerprint
from cdmpp.errors import SplitError

if TYPE_CHECKING:
    import pandas as pd

#: Kinds of splits, and the column whose values may not be shared by train (or valid) and test.
KINDS: dict[str, str] = {
    "by_network": "task",
    "by_task": "task",
    "by_device": "device",
    "within_task": "program",
}

#: The parts of a split; ``adapt`` may be empty, and its labels are not to be used.
PARTS: tuple[str, ...] = ("train", "valid", "test", "adapt")

#: Task hash -> networks it occurs in; a :class:`~cdmpp.program.types.Task` will do as the value.
TaskNetworks = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers of a label table for training, validation and test. Everything fitted is fitted on train.

    Attributes
    ----------
    kind
        One of :data:`KINDS`.
    spec
        What :meth:`parse` makes the same split of, choices spelt out:
        ``by_network:heldout=a+b;valid=c;seed=0``.
    seed
        Of the random choices.
    train, valid, test
        Sorted row numbers, int64.
    held_out
        Networks (``by_network``) or devices (``by_device``) that are held out; empty for the other kinds.
    allowed_tasks
        ``by_device``: tasks whose labels on the held-out devices may train (few-shot).
    fingerprint
        Of the label table (:func:`cdmpp.dataset.labels.label_fingerprint`).
    adapt
        Rows of what is held out whose programs may be looked at, but not their labels (domain adaptation),
        sorted, int64. None of their programs is in test. Compare models with and without adaptation on the same
        split: these rows are not tested.
    """

    kind: str
    spec: str
    seed: int
    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    test: NDArray[np.int64]
    held_out: tuple[str, ...] = ()
    allowed_tasks: tuple[str, ...] = ()
    fingerprint: str = ""
    adapt: NDArray[np.int64] = field(default_factory=lambda: row_array(()))

    @staticmethod
    def parse(
        spec: str,
        labels: pd.DataFrame,
        networks: TaskNetworks | None = None,
        families: Mapping[str, str] | None = None,
    ) -> Split:
        """Make the split that a specification names: see :func:`cdmpp.dataset.split_spec.parse_split`."""
        from cdmpp.dataset.split_spec import parse_split

        return parse_split(spec, labels, networks, families)

    def part(self, name: str) -> NDArray[np.int64]:
        """``train``, ``valid``, ``test`` or ``adapt`` (SplitError for another name)."""
        if name not in PARTS:
            raise SplitError(f"a split has no part {name!r}; it has {', '.join(PARTS)}")
        rows: NDArray[np.int64] = getattr(self, name)
        return rows

    def check_disjoint(self, labels: pd.DataFrame, networks: TaskNetworks | None = None) -> None:
        """Make sure that nothing of the test part is known in training.

        Parameters
        ----------
        labels
            The label table that the split was made of.
        networks
            Task -> networks; needed for ``by_network``.

        Raises
        ------
        SplitError
            The table is another one, a part holds a row twice or shares one with another part, or train,
            valid and test share what they must not (see :data:`KINDS`), or adapt and test share a program;
            for ``by_network`` also if a task of a held-out network is in train or valid.
        """
        self.check_table(labels)
        rows = np.concatenate([self.part(name) for name in PARTS])
        if len(rows) and (rows.min() < 0 or rows.max() >= len(labels)):
            raise SplitError(f"split {self.spec} has rows outside of the {len(labels)} labels")
        if len(np.unique(rows)) != len(rows):
            raise SplitError(f"split {self.spec} has a row twice")
        column = KINDS[self.kind]
        for known, hidden in (("train", "test"), ("valid", "test"), ("train", "valid")):
            unit = "task" if self.kind == "by_device" and hidden == "valid" else column
            shared = self._units(labels, known, unit, hidden) & set(labels[unit].iloc[self.part(hidden)])
            if shared:
                some = ", ".join(sorted(shared)[:3])
                raise SplitError(f"split {self.spec}: {len(shared)} {unit}s in {known} and {hidden}: {some}")
        seen = set(labels["program"].iloc[self.adapt]) & set(labels["program"].iloc[self.test])
        if seen:
            some = ", ".join(sorted(seen)[:3])
            raise SplitError(f"split {self.spec}: {len(seen)} programs in adapt and test: {some}")
        if self.kind == "by_network":
            self._check_networks(labels, networks)

    def _units(self, labels: pd.DataFrame, part: str, unit: str, hidden: str) -> set[str]:
        table = labels.iloc[self.part(part)]
        if self.kind == "by_device" and hidden == "test" and self.allowed_tasks:
            table = table[~table["task"].isin(self.allowed_tasks)]
        return set(table[unit])

    def _check_networks(self, labels: pd.DataFrame, networks: TaskNetworks | None) -> None:
        if networks is None:
            raise SplitError("checking a by_network split needs the networks of each task")
        held = set(self.held_out)
        for part in ("train", "valid"):
            for task in sorted(set(labels["task"].iloc[self.part(part)])):
                leaked = held & {architecture(n) for n in networks_of(networks, task)}
                if leaked:
                    name = ", ".join(sorted(leaked))
                    raise SplitError(
                        f"split {self.spec}: task {task} of held-out network {name} is in {part}"
                    )

    def check_table(self, labels: pd.DataFrame) -> None:
        """Make sure that the row numbers are of this label table (SplitError)."""
        if self.fingerprint and label_fingerprint(labels) != self.fingerprint:
            raise SplitError(f"split {self.spec} was made of another label table ({self.fingerprint})")

    def describe(self, labels: pd.DataFrame) -> dict[str, Any]:
        """Labels, tasks, programs and devices of each part, and what is held out."""
        parts = {}
        for name in self._parts():
            table = labels.iloc[self.part(name)]
            parts[name] = {
                "labels": len(table),
                **{f"{column}s": int(table[column].nunique()) for column in ("task", "program", "device")},
            }
        return {
            "split": self.spec,
            "kind": self.kind,
            "seed": self.seed,
            "held_out": list(self.held_out),
            **parts,
        }

    def to_json(self) -> str:
        """As JSON text."""
        value = {
            "kind": self.kind,
            "spec": self.spec,
            "seed": self.seed,
            "held_out": list(self.held_out),
            "allowed_tasks": list(self.allowed_tasks),
            "fingerprint": self.fingerprint,
            **{name: self.part(name).tolist() for name in self._parts()},
        }
        return json.dumps(value)

    def _parts(self) -> tuple[str, ...]:
        return PARTS if len(self.adapt) else PARTS[:3]

    @classmethod
    def from_json(cls, text: str) -> Split:
        """Inverse of :meth:`to_json` (SplitError for another text)."""
        try:
            value = json.loads(text)
            if value["kind"] not in KINDS:
                raise SplitError(f"no split {value['kind']!r}; there are {', '.join(KINDS)}")
            return cls(
                kind=value["kind"],
                spec=value["spec"],
                seed=int(value["seed"]),
                held_out=tuple(value["held_out"]),
                allowed_tasks=tuple(value["allowed_tasks"]),
                fingerprint=value["fingerprint"],
                train=row_array(value["train"]),
                valid=row_array(value["valid"]),
                test=row_array(value["test"]),
                adapt=row_array(value.get("adapt", ())),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise SplitError(f"not a split: {error}") from error


def row_array(rows: Iterable[int]) -> NDArray[np.int64]:
    """Row numbers as a sorted int64 array."""
    return np.sort(np.asarray(list(rows), dtype=np.int64))


def networks_of(networks: TaskNetworks, task: str) -> tuple[str, ...]:
    """The networks of a task; () if it is unknown."""
    value: Any = networks.get(task, ())
    return tuple(getattr(value, "networks", value))


def architecture(network: str) -> str:
    """A network without its size and batch (``resnet18@s160b4`` -> ``resnet18``): what a split holds out together."""
    return network.split("@", 1)[0]
