"""Splits of training data from their specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdmpp.dataset import Split
    from cdmpp.predictor.data import TrainingData


def split_data(spec: str, data: TrainingData) -> Split:
    """The split of the data's label table that a specification names, checked to be disjoint.

    Parameters
    ----------
    spec
        As :meth:`cdmpp.dataset.Split.parse` takes it: ``by_network:heldout=a,b;seed=0``.

    Raises
    ------
    SplitError
        The specification is malformed, or a part would be empty or not disjoint.
    """
    from cdmpp.dataset import Split

    return Split.parse(spec, data.labels, data.networks, data.families)
