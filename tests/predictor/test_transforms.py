"""Label transforms: known answers, round trips, safety outside the training range."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cdmpp.errors import LabelError
from cdmpp.predictor.encoding import RANGE_FACTOR, LabelTransform, fit_transform, transform_from_json

LATENCIES = np.exp(np.random.default_rng(0).gamma(2.0, 1.2, 400) - 11)
latency_lists = st.lists(st.floats(1e-7, 1e2), min_size=2, max_size=40)


def test_transforms_are_the_textbook_formulas():
    transform = LabelTransform("box-cox", 0.0, 1.0, -20.0, 20.0, lambda_=0.5, log_scale=math.log(2.0))
    # ((8 / 2)**0.5 - 1) / 0.5 = 2
    assert transform.forward([8.0]) == pytest.approx([2.0])
    assert transform.inverse([2.0]) == pytest.approx([8.0])
    transform = fit_transform("box-cox", LATENCIES)
    # lambda is invariant to the unit, so scipy on microseconds agrees
    assert transform.lambda_ == pytest.approx(stats.boxcox_normmax(LATENCIES * 1e6, method="mle"), abs=1e-3)
    assert transform.lambda_ < -0.01  # these labels are skewed in the logarithm too
    assert fit_transform("log", [1.0, math.e**2]).forward([1.0, math.e, math.e**2]) == pytest.approx([-1.0, 0.0, 1.0])
    of_equal_labels = fit_transform("box-cox", [1e-3] * 5)
    assert of_equal_labels.inverse(of_equal_labels.forward([1e-3])) == pytest.approx([1e-3])


@pytest.mark.parametrize("kind", ["box-cox", "log"])
def test_training_labels_become_standard_and_come_back(kind):
    transform = fit_transform(kind, LATENCIES)
    labels = transform.forward(LATENCIES)
    assert labels.mean() == pytest.approx(0, abs=1e-9)
    assert labels.std() == pytest.approx(1)
    assert transform_from_json(json.loads(json.dumps(transform.to_json()))) == transform
    # the inverse in torch agrees, and has a gradient
    labels = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    logs = transform.log_inverse(labels)
    assert logs.detach().numpy() == pytest.approx(np.log(transform.inverse(labels.detach().numpy())), rel=1e-9)
    logs.sum().backward()
    assert (labels.grad > 0).all()


@given(values=latency_lists, kind=st.sampled_from(["box-cox", "log"]))
def test_round_trip_and_order(values, kind):
    transform = fit_transform(kind, values)
    labels = transform.forward(values)
    assert transform.inverse(labels) == pytest.approx(values, rel=1e-6)
    order = np.argsort(values, kind="stable")
    assert (np.diff(labels[order]) >= -1e-12).all()


@given(values=latency_lists, label=st.floats(-1e6, 1e6), kind=st.sampled_from(["box-cox", "log"]))
def test_inverse_is_always_a_latency_near_the_training_range(values, label, kind):
    transform = fit_transform(kind, values)
    (latency_s,) = transform.inverse([label])
    assert np.isfinite(latency_s)
    assert min(values) / RANGE_FACTOR * 0.99 <= latency_s <= max(values) * RANGE_FACTOR * 1.01
    log_s = float(transform.log_inverse(torch.tensor([label], dtype=torch.float32))[0])
    assert math.isfinite(log_s)


def test_relative_transform_divides_by_the_reference():
    reference_s = LATENCIES / np.tile([2.0, 8.0], len(LATENCIES) // 2)
    transform = fit_transform("log", LATENCIES, reference_s)
    assert transform_from_json(transform.to_json()) == transform and transform.relative
    labels = transform.forward(LATENCIES, reference_s)
    assert labels == pytest.approx(np.tile([-1.0, 1.0], len(LATENCIES) // 2))
    assert transform.inverse(labels, reference_s) == pytest.approx(LATENCIES)
    logs = transform.log_inverse(torch.from_numpy(labels), torch.from_numpy(np.log(reference_s)))
    assert logs.numpy() == pytest.approx(np.log(LATENCIES))
    with pytest.raises(LabelError, match="every reference"):
        transform.inverse(labels)


@pytest.mark.parametrize("bad", [[math.nan], [1.0, 0.0], [-1e-3], [math.inf]])
def test_bad_labels_are_refused(bad):
    with pytest.raises(LabelError):
        fit_transform("box-cox", bad)
    with pytest.raises(LabelError):
        fit_transform("log", LATENCIES).forward(bad)
    with pytest.raises(LabelError, match="at least one"):
        fit_transform("log", [])
