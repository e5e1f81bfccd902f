"""Splits by text: ``kind:key=value;key=value``.

``by_network``
    ``heldout`` (names joined by ``+`` or ``,``, or a number), ``valid`` (fraction of the labels, or names),
    ``adapt`` (fraction of the held-out networks' programs that may be looked at without their labels), ``others``
    (fraction of the tasks of no network that are tested, and as many validated)
``by_task``
    ``test``, ``valid`` (fractions of the tasks)
``by_device``
    ``heldout`` (names), ``tasks`` (few-shot: hashes), ``valid`` (fraction of the tasks), ``adapt`` (as above, of
    the held-out devices' programs)
``within_task``
    ``test``, ``valid`` (fractions of the programs)

All take ``seed``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cdmpp.dataset.split import KINDS, Split, TaskNetworks
from cdmpp.dataset.split_makers import by_device, by_network, by_task, within_task
from cdmpp.errors import SplitError

if TYPE_CHECKING:
    import pandas as pd

_KEYS: dict[str, tuple[str, ...]] = {
    "by_network": ("heldout", "valid", "adapt", "others", "seed"),
    "by_task": ("test", "valid", "seed"),
    "by_device": ("heldout", "tasks", "valid", "adapt", "seed"),
    "within_task": ("test", "valid", "seed"),
}


def parse_split(
    spec: str,
    labels: pd.DataFrame,
    networks: TaskNetworks | None = None,
    families: Mapping[str, str] | None = None,
) -> Split:
    """The split of a label table that a text names, checked to be disjoint.

    Parameters
    ----------
    spec
        See the module; ``by_network`` alone is a specification too.
    labels
        Label table.
    networks
        Task -> networks (or -> Task); needed for ``by_network``.
    families
        Network -> family; used when ``by_network`` chooses.

    Raises
    ------
    SplitError
        The text is malformed (the message says what is known), or the split cannot be made.
    """
    kind, options = read_spec(spec)
    arguments: dict[str, Any] = {"seed": _whole("seed", options["seed"])} if "seed" in options else {}
    for name in ("test", "valid", "adapt", "others"):
        if name in options and _is_number(options[name]):
            arguments[name] = float(options[name])
    if "adapt" in options and "adapt" not in arguments:
        raise SplitError(f"split {spec!r}: adapt must be a fraction, got {options['adapt']!r}")
    if "others" in options and "others" not in arguments:
        raise SplitError(f"split {spec!r}: others must be a fraction, got {options['others']!r}")
    if kind in ("by_task", "within_task"):
        for name in ("test", "valid"):
            if name in options and name not in arguments:
                raise SplitError(f"split {spec!r}: {name} must be a fraction, got {options[name]!r}")
        return (by_task if kind == "by_task" else within_task)(labels, **arguments)
    if kind == "by_device":
        if "valid" in options and "valid" not in arguments:
            raise SplitError(f"split {spec!r}: valid must be a fraction, got {options['valid']!r}")
        held_out = _names(options["heldout"]) if "heldout" in options else None
        return by_device(labels, held_out, _names(options.get("tasks", "")), **arguments)
    if networks is None:
        raise SplitError("a by_network split needs the networks of each task")
    if "valid" in options and "valid" not in arguments:
        arguments["valid"] = _names(options["valid"])
    held: list[str] | int | None = None
    if "heldout" in options:
        text = options["heldout"]
        held = int(text) if text.isdigit() else _names(text)
    return by_network(labels, networks, held, families=families, **arguments)


def read_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Kind and options of a specification (SplitError if it is malformed)."""
    kind, _, rest = spec.strip().partition(":")
    if kind not in KINDS:
        raise SplitError(f"no split {kind!r}; there are {', '.join(KINDS)}")
    options: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in rest.split(";"))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in _KEYS[kind]:
            raise SplitError(f"split {spec!r}: {kind} has no {key!r}, only {', '.join(_KEYS[kind])}")
        if not equals or not value:
            raise SplitError(f"split {spec!r}: {key} has no value; write {key}=...")
        if key in options:
            raise SplitError(f"split {spec!r}: {key} is given twice")
        options[key] = value
    return kind, options


def _names(text: str) -> list[str]:
    return [name.strip() for name in re.split(r"[+,]", text) if name.strip()]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SplitError(f"{name} must be a whole number, got {text!r}") from None
