"""Bounds and estimates without learning, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cdmpp.device import get_device
from cdmpp.predictor import split_data
from cdmpp.predictor.baselines import make_model
from cdmpp.predictor.pair_features import are_shares, estimate_s, roofline_s, share_ratio
from tests.samples.training import CPU, make_data, program


def test_roofline_is_the_longer_of_arithmetic_and_memory() -> None:
    compute = program({"program_flops": 64e6, "program_bytes": 1e6})
    memory = program({"program_flops": 1.0, "program_bytes": (8192 << 10) + 1e7})
    cached = program({"program_flops": 0.0, "program_bytes": 1e6})
    assert roofline_s([compute, memory, cached], CPU) == pytest.approx([1e-3, 1e-3, 1e-8])
    assert roofline_s([compute], replace(CPU, launch_overhead_us=5.0)) == pytest.approx([1.005e-3])


def test_estimate_takes_the_slowest_resource_of_each_leaf_and_adds_leaves() -> None:
    # 256-bit registers and 16 lanes: two pipes, so 1e6 instructions are 5e5 cycles of 0.5 ns.
    arithmetic = {"iterations": 8e6, "fp_instructions_32b": 1e6, "fp_instructions_packed": 8e6}
    loads = {"iterations": 8e6, "mem_instructions_32b": 4e6}  # two a cycle
    lines = {"iterations": 1.0, "moved_32kb": 32e6}  # 32 bytes a cycle from the second level
    found = estimate_s([program(arithmetic), program(loads), program(lines), program(arithmetic, loads)], CPU)
    assert found == pytest.approx([2.5e-4, 1e-3, 5e-4, 1.25e-3])


def test_chains_wait_unless_others_overlap_them() -> None:
    # One accumulator updated 1e6 times: 4 cycles each. Runs of two updates, of two instructions each, overlap 50-fold.
    chain = {"iterations": 1e6, "fp_instructions_32b": 1e6, "fp_instructions_packed": 1e6, "mem_instructions_32b": 1e6}
    held = program({**chain, "chain": 1e6, "hold": 1e6})
    short = program({**chain, "chain": 1e6, "hold": 2})
    assert estimate_s([held, short], CPU) == pytest.approx([4e6 / 2e9, 0.5e6 / 2e9])


SSE = replace(CPU, simd_bits=128, fma=False, lanes_per_core=8)


def test_only_multiply_adds_are_split_and_copied_where_there_are_no_fused_ones() -> None:
    arithmetic = {"iterations": 4e6, "fp_instructions_16b": 1e6, "fp_instructions_packed": 4e6}
    sums, products = program({**arithmetic, "op_fadd": 1.0}), program({**arithmetic, "op_fma": 1.0})
    # Two pipes: 0.5e6 cycles of additions, or 1e6 of multiplications and additions (3e6 instructions at four a cycle).
    assert estimate_s([sums, products], SSE) == pytest.approx([2.5e-4, 5e-4])
    assert estimate_s([products], replace(SSE, fma=True)) == pytest.approx([2.5e-4])
    loads = program({**arithmetic, "op_fma": 1.0, "mem_instructions_16b": 1.9e6})
    assert estimate_s([loads], SSE) == pytest.approx([4.9e6 / 4 / 2e9])


def test_side_by_side_statements_fill_no_wider_registers_than_there_are() -> None:
    # One instruction for eight float32 with 32 bytes is one for four with 16.
    each = {"op_fadd": 1.0, "fp_instructions_16b": 8e6, "fp_instructions_32b": 8e6, "fp_instructions_packed": 1e6}
    packed = program({"iterations": 8e6, "itemsize": 4.0, **each})
    assert estimate_s([packed], CPU) == pytest.approx([2.5e-4])
    assert estimate_s([packed], SSE) == pytest.approx([5e-4])


def test_special_functions_are_called_one_element_at_a_time_whatever_the_registers() -> None:
    calls = program({"iterations": 1e6, "special": 1e6})
    assert estimate_s([calls], CPU) == estimate_s([calls], SSE) == pytest.approx([6e6 / 2e9])


def test_gathers_cost_where_microcode_slows_them_down() -> None:
    # 1e6 loads that stride along a loop that a compiler can vectorise: 0.5 cycles each, and half of them in
    # gathers of eight that take 25.
    strided = {
        "iterations": 1e6, "mem_instructions_16b": 1e6, "mem_instructions_32b": 1e6, "loop1_extent": 64.0,
        "loop2_extent": 64.0, "slot1_loads": 1.0, "slot1_stride_1": 7.0, "slot1_stride_2": 1.0,
        "slot1_register_elements": 1e6,
    }  # fmt: skip
    slow = replace(CPU, arch="cascadelake")
    plain, gathered = 0.5e6 / 2e9, (0.5e6 + 25e6 / 16) / 2e9
    assert estimate_s([program(strided)], slow) == pytest.approx([gathered])
    for kept in (
        {"slot1_stride_1": 1.0},
        {"slot1_stores": 1.0},
        {"loop1_reduction": 1.0},
        {"loop1_extent": 3.0, "loop2_extent": 3.0},
        {"loop1_extent": 16.0},  # unrolled: the loop around it counts, and has stride 1
        {"vectorized": 8.0},
    ):
        assert estimate_s([program({**strided, **kept})], slow) == pytest.approx([plain]), kept
    around = program({**strided, "loop1_extent": 16.0, "slot1_stride_1": 1.0, "slot1_stride_2": 7.0})
    assert estimate_s([around], slow) == pytest.approx([gathered])
    for other in (CPU, replace(CPU, arch="zen4"), replace(SSE, arch="cascadelake")):
        assert estimate_s([program(strided)], other) == pytest.approx([plain])


def test_parallel_loops_fill_the_cores_they_are_given() -> None:
    work = {"iterations": 8e6, "mem_instructions_32b": 4e6}
    found = estimate_s([program({**work, "parallel": n}) for n in (1, 4, 5)], replace(CPU, cores_used=4.0))
    started = 2450 / 2e9
    assert found == pytest.approx([1e-3, 0.25e-3 + started, 1e-3 * 2 / 5 + started])


def test_a_latency_on_some_cores_tells_that_on_others() -> None:
    one, two = (replace(CPU, base="cpu", cores_used=cores) for cores in (1.0, 2.0))
    asts = [program({"parallel": 3}), program({"parallel": 3}, {"parallel": 3, "nest_index": 1}), program({})]
    ratio, started = share_ratio(asts, np.full(3, 2e-5), one, two), 2450 / 2e9 / 2e-5
    assert ratio == pytest.approx([1.04 * 2 / 3 + started, 1.04 * 2 / 3 + 2 * started, 1.0])
    assert share_ratio(asts, 2e-5 * ratio, two, one) == pytest.approx(1 / ratio)
    assert np.isnan(share_ratio(asts, np.full(3, 6e-6), two, one)).tolist() == [False, True, False]
    assert are_shares(one, two) and not are_shares(one, replace(two, isa="x86-64-v2")) and not are_shares(one, CPU)


@pytest.mark.parametrize("device", ["h200", "v100", "a100", "xeon-cascadelake-2.5ghz@1"])
@pytest.mark.parametrize("reference", [roofline_s, estimate_s])
def test_references_are_finite_positive_and_never_below_the_bound(reference: Any, device: str) -> None:
    asts = list(make_data(2, 3).asts.values())
    found = reference(asts, get_device(device))
    assert found.shape == (6,)
    assert np.isfinite(found).all() and (found > 0).all()
    assert (found >= roofline_s(asts, get_device(device))).all()


def test_the_baseline_learns_one_factor_a_device() -> None:
    data = make_data()
    split = split_data("by_task:seed=0", data)
    model = make_model("roofline")
    model.fit(data, split)
    for device in data.devices:
        rows = np.asarray([i for i in split.train if data.labels["device"][i] == device])
        ratio = data.labels["latency_s"].to_numpy()[rows] / model.predict(data, rows)
        assert np.median(np.log(ratio)) == pytest.approx(0.0, abs=1e-9)
        factor = model.predict(data, rows) / data.reference_s(rows, roofline_s)
        assert factor == pytest.approx(factor[0])
