"""Feature encoding: standardised on training, constants dropped, outliers clipped, missing values flagged."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cdmpp.errors import FeatureMismatchError, PredictorError
from cdmpp.predictor import encoding
from cdmpp.predictor.encoding import ColumnScaler, FeatureEncoder, signed_log1p


def make_encoder(leaves, devices, clip=4.0):
    leaves, devices = np.asarray(leaves, np.float32), np.asarray(devices, np.float64)
    names = [f"column{i}" for i in range(9)]
    parts = {"leaf": (leaves, names[: leaves.shape[1]]), "device": (devices, names[: devices.shape[1]])}
    return FeatureEncoder.fit("test/1", parts, clip)


def test_signed_log_keeps_sign_and_zero():
    assert signed_log1p(np.array([0.0, np.e - 1, 1 - np.e])) == pytest.approx([0.0, 1.0, -1.0])


def test_leaves_are_standardised_on_the_fitted_rows():
    leaves = np.exp(np.random.default_rng(0).normal(size=(500, 3)) * 2).astype(np.float32)
    encoded = make_encoder(leaves, [[1.0], [2.0]], clip=100.0).encode_leaves(leaves)
    assert encoded.dtype == np.float32
    assert encoded.mean(0) == pytest.approx(0, abs=1e-5)
    assert encoded.std(0) == pytest.approx(1, abs=1e-4)


def test_what_is_unlike_training_stays_within_it():
    encoder = make_encoder([[1.0, 5.0], [9.0, 5.0]], [[1.0], [2.0]])
    assert encoder.encode_leaves(np.array([[1.0, 5.0], [1.0, 1e6]]))[:, 1].tolist() == [0.0, 0.0]
    encoder = make_encoder([[1.0], [2.0]], [[1.0], [2.0]], clip=4.0)
    assert encoder.encode_leaves(np.array([[1e30], [-1e30]])).ravel().tolist() == [4.0, -4.0]
    encoder = make_encoder([[1.0], [2.0]], [[160.0, 3.0], [320.0, 3.0]], clip=8.0)
    values = encoder.encode_devices(np.array([[160.0, 3.0], [320.0, 3.0], [20.0, 9.0], [1e9, 1.0]]))[:, :2]
    assert values == pytest.approx(np.array([[-1, 0], [1, 0], [-1, 0], [1, 0]]), abs=1e-6)


def test_missing_device_values_become_the_mean_with_a_flag():
    encoder = make_encoder([[1.0], [2.0]], [[10.0, 1.0], [1000.0, np.nan], [100.0, 3.0]])
    encoded = encoder.encode_devices(np.array([[10.0, np.nan], [np.nan, 1.0]]))
    assert encoded.shape == (2, encoder.device_dim) == (2, 4)
    assert encoded[0, 1] == 0 and encoded[1, 0] == 0
    assert encoded[0, 0] < 0  # 10 is the smallest of the fitted devices
    assert encoded[:, 2:].tolist() == [[0, 1], [1, 0]]
    encoder = make_encoder([[1.0], [2.0]], [[1.0, np.nan], [2.0, np.nan]])  # missing on all: constant
    assert encoder.encode_devices(np.array([[1.0, 7.0]]))[0, 1] == 0


@given(
    hnp.arrays(np.float64, (6, 3), elements=st.floats(-1e12, 1e12)),
    hnp.arrays(np.float64, (4, 3), elements=st.floats(-1e30, 1e30) | st.just(np.nan)),
)
def test_scaled_values_are_always_finite_and_bounded(fitted, rows):
    scaler = ColumnScaler.fit(fitted, "abc", clip=5.0)
    encoded = scaler.transform(rows)
    with mock.patch.object(encoding, "_ROWS_AT_ONCE", 3):  # four rows take two steps
        np.testing.assert_array_equal(scaler.transform(rows), encoded)
    assert np.isfinite(encoded).all()
    assert np.abs(encoded).max() <= 5.0


def test_round_trip_through_json_and_arrays():
    rng = np.random.default_rng(1)
    leaves, devices = rng.exponential(100, (50, 4)), rng.exponential(100, (3, 2))
    encoder = make_encoder(leaves, devices)
    again = FeatureEncoder.from_arrays(json.loads(json.dumps(encoder.to_json())), encoder.to_arrays())
    assert (again.encode_leaves(leaves) == encoder.encode_leaves(leaves)).all()
    assert (again.encode_devices(devices) == encoder.encode_devices(devices)).all()
    assert again.feature_set == "test/1"


def test_errors_say_what_is_wrong():
    encoder = make_encoder([[1.0, 2.0], [3.0, 4.0]], [[1.0], [2.0]])
    with pytest.raises(FeatureMismatchError, match=r"\(n, 2\)"):
        encoder.encode_leaves(np.zeros((3, 5)))
    with pytest.raises(PredictorError, match="row 1, column 0"):
        encoder.encode_leaves(np.array([[1.0, 1.0], [np.nan, 1.0]]))
