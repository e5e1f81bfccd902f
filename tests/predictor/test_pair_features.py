"""What is computed of program and device together, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cdmpp.device import Device, get_device
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.core import core_of, with_overlap
from tests.samples.training import CPU, make_data, program

from cdmpp.predictor.pair_features import (  # isort: skip
    ABSENT, CODE_FEATURES, LOOP_CODE_FEATURES, PAIR_FEATURES, TIME_PARTS, CodeRows, ProgramView, code_rows, estimate_s,
    pair_rows, power_headroom, roofline_s,
)  # fmt: skip

GPU = Device(
    name="g", base="g", kind="gpu", vendor="nvidia", model="g", share=1.0, cores=10, cores_used=10.0,
    lanes_per_core=64, l2_kb=1000.0, shared_kb=64.0, max_threads_per_core=2048, bandwidth_gb_s=100.0,
    peak_gflops={"float32": 1000.0}, tdp_w=100.0, process_nm=10.0,
)  # fmt: skip


def matmul(batch: int, rows: int, columns: int, depth: int, **more: float) -> dict[str, float]:
    """The main leaf of a batched product of matrices, innermost loop first."""
    flops = 2.0 * batch * rows * columns * depth
    return {
        "flops": flops, "program_flops": flops, "iterations": flops / 2, "op_fma": 1.0, "reduction": depth,
        "loop1_extent": depth, "loop1_reduction": 1.0, "loop2_extent": columns, "loop3_extent": rows,
        "loop4_extent": batch, "program_bytes": 4e6, "itemsize": 4.0, **more,
    }  # fmt: skip


def pair_features(asts, device: Device) -> np.ndarray:
    return pair_rows(asts, [device], np.arange(len(asts)), np.zeros(len(asts), int))


def features(leaf: dict[str, float], device: Device = GPU) -> dict[str, float]:
    (row,) = pair_features([program(leaf)], device)
    return dict(zip(PAIR_FEATURES, row, strict=True))


def test_tiles_and_waves_of_a_product_of_matrices() -> None:
    found = features(matmul(2, 100, 300, 64))
    # 128 x 128: 1 x 3 tiles of each of two products on ten cores; 256 x 256: 1 x 2 of each
    assert found["waves_128"] == pytest.approx(600) and found["waves_256"] == pytest.approx(400)
    assert found["idle_128"] == pytest.approx(1e4 / 6)
    assert found["padding_128"] == pytest.approx(1000 * 6 * 128**2 / (2 * 100 * 300), rel=1e-6)
    assert found["filled_lanes"] == pytest.approx(1000 * 60_000 / 640)
    assert (found["columns"], found["rows"], found["batch"], found["depth"]) == (300, 100, 2, 64)
    assert (found["columns_aligned"], found["rows_aligned"], found["depth_aligned"]) == (4, 4, 64)
    assert (found["on_gpu"], found["by_library"], found["blocks_per_core"]) == (1, 1, 0)


def test_times_and_caches() -> None:
    found = features(matmul(1, 100, 100, 500, program_allocated=1e6))
    assert found["compute_ns"] == pytest.approx(1e4)  # 1e7 operations at 1000 GFLOP/s
    assert found["memory_ns"] == pytest.approx(3e4)  # 3 MB, without what is allocated, at 100 GB/s
    assert found["intensity"] == pytest.approx(1000 / 3)
    assert found["last_cache"] == pytest.approx(1000 * 3e6 / (1000 * 1024))
    assert np.isnan(found["launch_ns"])


def test_a_power_limit_slows_arithmetic_where_it_binds() -> None:
    # Tesla V100 for PCIe: 250 W for 14,000 GFLOP/s in 12 nm is the measure.
    usual = replace(GPU, tdp_w=250.0, process_nm=12.0, peak_gflops={"float32": 14e3})
    assert power_headroom(usual) == pytest.approx(1.0)
    assert power_headroom(replace(GPU, tdp_w=None)) is None
    headroom = power_headroom(GPU)
    assert headroom is not None and headroom > 1
    tight = replace(GPU, tdp_w=100.0 / headroom / 2)
    leaf = matmul(1, 1280, 1280, 500)
    assert features(leaf, tight)["power_ns"] == pytest.approx(2 * features(leaf)["power_ns"])
    assert features(leaf, tight)["compute_ns"] == features(leaf)["compute_ns"]
    assert estimate_s([program(leaf)], tight)[0] == pytest.approx(2 * estimate_s([program(leaf)], GPU)[0], rel=0.02)
    assert roofline_s([program(leaf)], tight) == roofline_s([program(leaf)], GPU)


def test_matrix_units_serve_libraries_alone() -> None:
    device = replace(GPU, peak_gflops={"float32": 1000.0, "float32_matrix": 4000.0})
    leaf = matmul(1, 1000, 1000, 1000)
    assert features(leaf, device)["compute_ns"] == pytest.approx(features(leaf)["compute_ns"] / 4)
    scheduled = {**leaf, "block_idx": 100.0, "thread_idx": 256.0}
    assert features(scheduled, device)["compute_ns"] == pytest.approx(features(leaf)["compute_ns"])
    added = {**leaf, "reduction": 1.0, "loop1_reduction": 0.0}
    assert features(added, device)["compute_ns"] == pytest.approx(features(leaf)["compute_ns"])


def test_blocks_of_a_scheduled_program() -> None:
    leaf = matmul(1, 100, 100, 100, block_idx=95.0, thread_idx=512.0, program_shared=30.0 * 1024)
    found = features(leaf)
    # 2,048 threads hold four blocks, 64 KB two
    assert found["resident_blocks"] == 2 and found["blocks_per_core"] == pytest.approx(9500)
    assert found["block_waves"] == pytest.approx(4750) and found["block_idle"] == pytest.approx(1000 * 5 / 4.75)
    assert found["by_library"] == 0


def test_balance_of_parallel_loops_on_a_cpu() -> None:
    four = replace(CPU, cores_used=4.0)
    leaf = matmul(1, 64, 64, 64)
    assert features({**leaf, "parallel": 5.0}, four)["balance"] == pytest.approx(1000 * 5 / 8)
    assert features({**leaf, "parallel": 8.0}, four)["balance"] == pytest.approx(1000)


def test_a_convolution_is_tiled_over_all_its_outputs() -> None:
    leaf = {
        **matmul(1, 7, 7, 9), "loop1_extent": 3.0, "loop2_extent": 3.0, "loop2_reduction": 1.0,
        "loop3_extent": 7.0, "loop4_extent": 7.0, "loop5_extent": 512.0,
    }  # fmt: skip
    view = ProgramView.of([program(leaf)])
    assert view.windowed.all() and view.outputs == 7 * 7 * 512
    assert view.tiles(128) == np.ceil(7 * 7 * 512 / 128**2)


@pytest.mark.parametrize("device", ["h200", "mi100", "h200@0.25", "xeon-cascadelake-2.5ghz@1"])
def test_rows_of_many_are_those_of_each(device: str) -> None:
    asts = list(make_data(2, 3).asts.values())
    known = get_device(device)
    together = pair_features(asts, known)
    assert together.shape == (len(asts), len(PAIR_FEATURES))
    assert (together[~np.isnan(together)] >= 0).all() and not np.isinf(together).any()
    np.testing.assert_array_equal(together, np.concatenate([pair_features([ast], known) for ast in asts]))
    other = get_device("a100")
    program_number, device_number = np.array([1, 0, 1, 4]), np.array([0, 1, 1, 0])
    rows = pair_rows(asts, [known, other], program_number, device_number)
    np.testing.assert_array_equal(rows[0], together[1])
    np.testing.assert_array_equal(rows[1], pair_features(asts, other)[0])
    np.testing.assert_array_equal(rows[3], together[4])
    assert pair_features([], known).shape == (0, len(PAIR_FEATURES))


XEON = "xeon-cascadelake-2.5ghz@1"


def counts(**known: float) -> np.ndarray:
    row = np.zeros(len(CODEGEN_FEATURES), dtype=np.float32)
    for name, number in known.items():
        row[CODEGEN_FEATURES.index(name)] = number
    return row


def code_features(rows: np.ndarray, asts, device) -> CodeRows:
    return code_rows(rows, asts, [device], np.arange(len(asts)), np.zeros(len(asts), int), True)


@pytest.fixture(scope="module")
def ast(data):
    return next(iter(data.asts.values()))


def test_cycles_on_a_core_are_times_on_a_device(ast) -> None:
    device = replace(get_device(XEON), clock_mhz=2000.0, measured={}, l2_kb=1024, l3_kb=20000, bandwidth_gb_s=16.0)
    row = counts(
        core_cycles=350, unit_cycles=300, front_cycles=100, call_cycles=20, outside_cycles=70, lines_1024k=50, lines_16384k=4,
        loop0_runs=50, loop0_cycles=4, loop0_units=3, loop0_front=4, loop0_trips=10,
    )  # fmt: skip
    rows = code_features(row[None], [ast], device)
    found = dict(zip(CODE_FEATURES, rows.program[0], strict=True))
    assert [found[f"{name}_ns"] for name in ("core", "unit", "front", "call", "chain")] == [175, 150, 50, 10, 0]
    assert (found["beyond_l2_ns"], found["beyond_l3_ns"]) == (200, 16)  # 64 bytes a line
    loop = dict(zip(LOOP_CODE_FEATURES, rows.loops[0, 0], strict=True))
    assert (loop["units_per_cycle"], loop["entries"], loop["part"]) == (0.75, 5, pytest.approx(200 / 350))
    parts = dict(zip(TIME_PARTS, np.exp(rows.times[0]) * 1e9 * estimate_s([ast], device)[0], strict=True))
    assert parts["loop0"] == pytest.approx(100) and parts["outside"] == pytest.approx(35)
    assert parts["other_loops"] == pytest.approx((350 - 70 - 200) / 2), "the whole is the sum of its parts"
    assert rows.times[0, TIME_PARTS.index("loop1")] == ABSENT


def test_what_caches_fetch_by_the_ast_and_pages_take_times_of_their_own() -> None:
    device = replace(get_device(XEON), clock_mhz=2000.0, measured={}, l1_kb=32, l2_kb=1024)
    moved = {"moved_32kb": 6400, "conflict_32kb": 64_000, "moved_512kb": 3200, "conflict_1mb": 32_000}
    # of a column whose rows are 2 KB apart, every other line is in the same one of 64 sets
    column = {"slot2_itemsize": 4, "slot2_stride_1": -512, "slot2_register_elements": 500}
    leaf = program(matmul(1, 8, 1024, 1024, **moved, **column, pages_1536=7))
    for loads, few_sets in ((1e4, 11 * 500 / 2), (100, 11 * 100)):
        times = code_features(counts(core_cycles=1, run_load_s=loads)[None], [leaf], device).times[0]
        parts = dict(zip(TIME_PARTS, np.exp(times) * 1e9 * estimate_s([leaf], device)[0], strict=True))
        found = [parts[name] for name in ("l1_misses", "l2_misses", "crowded_lines", "pages", "few_sets")]
        assert found == pytest.approx([64_000 / 64 / 2, 32_000 / 64 / 2, 5 * 28_800 / 64 / 2, 10 * 7 / 2, few_sets / 2])
    few_rows = program(matmul(1, 8, 1024, 16, **moved, **column))
    assert code_features(counts(run_load_s=1e4)[None], [few_rows], device).times[0, -2] == ABSENT, "16 ways hold them"


def test_a_chain_overlaps_with_that_of_the_next_entry_as_far_as_the_window_reaches() -> None:
    core = core_of("znver4")
    loop = {"runs": 100, "trips": 8, "instructions": 20, "units": 1, "chain": 16, "cycles": 16}
    whole = counts(core_cycles=2000, chain_cycles=1600, **{f"loop0_{name}": value for name, value in loop.items()})
    found = dict(zip(CODEGEN_FEATURES, with_overlap(whole[None], core)[0], strict=True))
    # counted was that 160 instructions, half of the window, are over in half of the time
    assert core.window == 320 and found["loop0_chain"] == pytest.approx(32 * 160 / (160 + 224)) == found["loop0_cycles"]
    assert found["core_cycles"] == pytest.approx(2000 - 100 * (16 - 40 / 3)) and found["loop0_units"] == 1
    assert found["chain_cycles"] == pytest.approx(1600 - 100 * (16 - 40 / 3))


def test_rows_of_several_devices_equal_those_of_each_and_unknown_stays_unknown(data) -> None:
    asts = list(data.asts.values())[:4]
    devices = [get_device(XEON), get_device("epyc-zen4-2.6ghz@1")]
    program, device = np.array([0, 1, 2, 3, 0]), np.array([0, 1, 0, 1, 1])
    rows = np.random.default_rng(1).integers(1, 999, (5, len(CODEGEN_FEATURES))).astype(np.float32)
    rows[2] = np.nan
    together = code_rows(rows, asts, devices, program, device, True)
    assert all(np.isnan(part[2]).all() for part in together)
    for i in (0, 1, 3, 4):
        alone = code_features(rows[i : i + 1], [asts[program[i]]], devices[device[i]])
        assert all(np.allclose(part[i], own[0]) for part, own in zip(together, alone, strict=True))
        seconds = code_rows(rows, asts, devices, program, device, False).times[i]
        of_estimate = alone.times[0] + np.log(estimate_s([asts[program[i]]], devices[device[i]]))
        assert np.where(alone.times[0] > ABSENT, of_estimate, ABSENT) == pytest.approx(seconds)
