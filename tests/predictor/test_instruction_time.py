"""How long counted instructions take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cdmpp.device import get_device
from cdmpp.predictor.instruction_time import CODE_FEATURES, TIME_FEATURES, code_features, code_rows
from cdmpp.predictor.roofline import estimate_s
from cdmpp.program.codegen import CODEGEN_FEATURES

XEON = "xeon-cascadelake-2.5ghz@1"


def counts(**run: float) -> np.ndarray:
    row = np.zeros(len(CODEGEN_FEATURES), dtype=np.float32)
    for kind, number in run.items():
        row[CODEGEN_FEATURES.index(f"run_{kind}")] = number
    return row


def times(row: np.ndarray, ast, device) -> dict[str, float]:
    features, _ = code_features(row[None], [ast], device)
    return dict(zip(CODE_FEATURES, features[0], strict=True))


@pytest.fixture(scope="module")
def ast(data):
    return next(iter(data.asts.values()))


def test_known_answer_of_the_busiest_unit(ast) -> None:
    device = replace(get_device(XEON), clock_mhz=1000.0, simd_bits=512, lanes_per_core=32.0)
    found = times(counts(fma_z=100, load_y=300, load_z=20, store_z=30, shuffle=90, all=800), ast, device)
    assert found["arithmetic_ns"] == 50  # two units of 16 lanes
    assert found["load_ns"] == 160 and found["store_ns"] == 30 and found["shuffle_ns"] == 90
    assert found["issue_ns"] == found["instruction_ns"] == 200  # four a cycle


def test_a_core_with_one_wide_unit_takes_twice_as_long(ast) -> None:
    device = get_device(XEON)
    assert device.simd_bits == 512
    row = counts(fma_z=1000, all=1000)
    one = times(row, ast, replace(device, lanes_per_core=16.0))
    two = times(row, ast, replace(device, lanes_per_core=32.0))
    assert one["instruction_ns"] == pytest.approx(2 * two["instruction_ns"])


def test_slow_instructions_come_on_top_and_gathers_are_slower_where_microcode_guards_them(ast) -> None:
    device = get_device(XEON)
    plain, gathers = times(counts(all=400), ast, device), times(counts(all=400, gather=10), ast, device)
    assert gathers["instruction_ns"] > plain["instruction_ns"]
    other = replace(device, arch="icelake-client")
    assert times(counts(gather=10), ast, other)["slow_ns"] < gathers["slow_ns"]


def test_times_scale_with_counts_and_excess_is_their_ratio_to_the_estimate(data) -> None:
    asts, device = list(data.asts.values())[:6], get_device(XEON)
    rows = np.random.default_rng(0).integers(100, 10_000, (6, len(CODEGEN_FEATURES))).astype(np.float32)
    features, excess = code_features(rows, asts, device)
    twice, _ = code_features(2 * rows, asts, device)
    start = len(CODEGEN_FEATURES)
    assert np.allclose(twice[:, start:], 2 * features[:, start:])
    ratio = features[:, CODE_FEATURES.index("instruction_ns")] / (1e9 * estimate_s(asts, device))
    assert np.allclose(excess, np.clip(np.log(ratio), -4, 4))


def test_rows_of_several_devices_equal_those_of_each_and_unknown_stays_unknown(data) -> None:
    asts = list(data.asts.values())[:4]
    devices = [get_device(XEON), get_device("epyc-zen4-2.6ghz@1")]
    program, device = np.array([0, 1, 2, 3, 0]), np.array([0, 1, 0, 1, 1])
    rows = np.random.default_rng(1).integers(1, 999, (5, len(CODEGEN_FEATURES))).astype(np.float32)
    rows[2] = np.nan
    features, excess = code_rows(rows, asts, devices, program, device)
    assert features.shape == (5, len(CODEGEN_FEATURES) + len(TIME_FEATURES))
    assert np.isnan(features[2]).all() and np.isnan(excess[2])
    for i in (0, 1, 3, 4):
        alone, over = code_features(rows[i : i + 1], [asts[program[i]]], devices[device[i]])
        assert np.allclose(features[i], alone[0]) and excess[i] == pytest.approx(over[0])


def test_a_core_takes_what_its_loops_take_where_that_is_longer_than_its_busiest_unit(ast) -> None:
    device = replace(get_device(XEON), clock_mhz=1000.0)
    row = counts(all=400)
    row[CODEGEN_FEATURES.index("loop_cycles")], row[CODEGEN_FEATURES.index("loop_chain")] = 350, 300
    found = times(row, ast, device)
    assert (
        found["issue_ns"] == 100
        and found["chain_ns"] == 300
        and found["loops_ns"] == found["instruction_ns"] == 350
    )
    row[CODEGEN_FEATURES.index("loop_cycles")] = 50
    assert times(row, ast, device)["instruction_ns"] == 100
