"""GPUs that were never trained on: the network is told of them only what carries over, and was taught to do with that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cdmpp.device import DEVICE_FEATURES, GENERAL_DEVICE_FEATURES
from cdmpp.predictor.data import split_data
from cdmpp.predictor.pair_features import GENERAL_PAIR_FEATURES, PAIR_FEATURES
from cdmpp.predictor.training import prepare
from tests.samples.training import changed, make_data, make_device


@pytest.fixture(scope="module")
def mixed():
    """Records of a CPU and of two GPUs that differ in the second-level cache."""
    data = make_data(n_tasks=6, per_task=10)
    gpu = replace(make_device("slow", 1000.0), kind="gpu", vendor="nvidia", l2_kb=1024.0)
    labels = data.labels
    third = labels[labels["device"] == "slow"].assign(device="third")
    devices = {**data.devices, "slow": gpu, "third": replace(gpu, name="third", base="third", l2_kb=4096.0)}
    return replace(data, labels=type(labels)(np.concatenate([labels, third]), columns=labels.columns).astype(
        labels.dtypes
    ), devices=devices)  # fmt: skip


def fitted(mixed, config, part, epochs=2):
    config = changed(config, model={"general_part": part}, train={"epochs": epochs})
    return prepare(config, mixed, split_data("within_task:seed=0", mixed))


def test_all_but_what_carries_over_is_missing(mixed, config):
    found = fitted(mixed, config, 0.5)
    general = found.arrays.general
    rows = {name: i for i, name in enumerate(sorted(mixed.devices))}
    assert torch.equal(general.device_rows[rows["fast"]], found.arrays.device_rows[rows["fast"]]), "a CPU"
    values, missing = np.split(general.device_rows[rows["third"]].numpy(), 2)
    told, flags = np.split(found.arrays.device_rows[rows["third"]].numpy(), 2)
    for i, name in enumerate(DEVICE_FEATURES):
        if name in GENERAL_DEVICE_FEATURES:
            assert (values[i], missing[i]) == (told[i], flags[i]), name
        else:
            assert (values[i], missing[i]) == (0, 1), name
    kept = dict(zip(PAIR_FEATURES, general.pair_keep[rows["third"]].numpy(), strict=True))
    assert {name for name, keep in kept.items() if keep} == set(GENERAL_PAIR_FEATURES)
    assert general.pair_keep[rows["fast"]].all()


def test_examples_of_a_batch_are_taken_as_unseen(mixed, config):
    arrays = fitted(mixed, config, 0.5).arrays
    rows = np.arange(len(arrays))
    unseen = rows % 2 == 0
    _, plain = arrays.batch(rows, torch.device("cpu"))
    _, less = arrays.batch(rows, torch.device("cpu"), unseen)
    on_gpu = np.isin(arrays.device, [i for i, n in enumerate(sorted(mixed.devices)) if n != "fast"])
    differs = ((plain.device != less.device).any(dim=1) | (plain.pair != less.pair).any(dim=1)).numpy()
    assert np.array_equal(differs, unseen & on_gpu)
    assert fitted(mixed, config, 0.0).arrays.general is None


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_an_unseen_gpu_is_predicted_from_what_carries_over(mixed, config, part):
    found = fitted(mixed, config, part)
    found.trainer.fit()
    predictor = found.predictor(found.trainer.network.state_dict(), {})
    asts = list(mixed.asts.values())[:8]
    one = replace(mixed.devices["slow"], name="unseen", l2_kb=512.0)
    same = np.array_equal(predictor.predict(asts, one), predictor.predict(asts, replace(one, l2_kb=16384.0)))
    assert same == (part > 0), "the cache is not among what carries over"
    seen = predictor.predict(asts, "slow")
    assert not np.array_equal(seen, predictor.predict(asts, "third")), "of a GPU it knows it is told all"
    faster = predictor.predict(asts, replace(one, kind="cpu", clock_mhz=3000.0))
    assert not np.array_equal(faster, predictor.predict(asts, replace(one, kind="cpu"))), "and of any CPU"
