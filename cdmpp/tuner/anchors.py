"""Labelled programs that a predictor was not trained on, as what learning while tuning must not make worse."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cdmpp.errors import TunerError
from cdmpp.tuner.online import Anchors

if TYPE_CHECKING:
    from cdmpp.device import Device


def load_anchors(
    paths: Sequence[str | Path],
    device: Device,
    trained_on: Collection[str] = (),
    *,
    most: int = 256,
    seed: int = 0,
) -> Anchors:
    """Programs of datasets with labels on a device, of tasks that a predictor was not trained on.

    Parameters
    ----------
    paths
        Dataset folders, or folders of them.
    device
        The device.
    trained_on
        Hashes of the predictor's training tasks (``predictor.training["tasks"]``).
    most
        So many programs at most, drawn at random.
    seed
        Of the drawing.

    Raises
    ------
    TunerError
        There are none.
    DatasetError
        A path holds no dataset.
    """
    from cdmpp.dataset import load_datasets
    from cdmpp.dataset.labels import label_table
    from cdmpp.predictor.data import collect_asts

    view = load_datasets(paths)
    records = view.records
    usable = (records["device"] == device.name) & (records["status"] == "ok")
    usable &= ~records["task"].isin(list(trained_on))
    nothing = TunerError(
        f"{', '.join(map(str, paths))}: no labels on {device.name} of tasks that the predictor was not trained on, "
        "which learning could be checked by"
    )
    if not usable.any():
        raise nothing
    labels = label_table(records[usable])
    labels = labels.sample(min(most, len(labels)), random_state=seed)
    asts = collect_asts(view, labels["program"])
    labels = labels[labels["program"].isin(list(asts))]
    if labels.empty:
        raise nothing
    return Anchors([asts[program] for program in labels["program"]], labels["latency_s"].to_numpy())
