"""The model of library operators: its mechanism, training with devices left out, what ships, and serving steps by it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.dataset.operators import write_operators
from cdmpp.device import get_device, load_table
from cdmpp.endtoend.serving import Serving, predict_operators, predict_serving
from cdmpp.errors import NetworkError, PredictorError, ProgramError
from cdmpp.predictor.measurements import candidates, choose, teach
from cdmpp.predictor.mechanism import Constants, least_s, mechanism, pipe, without_unit
from cdmpp.predictor.predictor import Predictor, predict
from cdmpp.program.llm import MODELS
from cdmpp.program.operators import attention, operator_table, work
from tests.samples.command import Command

from cdmpp.predictor.operators import (  # isort: skip
    BEST, OperatorModel, _trust, constants_of, families, fit_constants, kinds, left_out_errors, load_operator_model,
    solver_times, train, train_solvers, training_table, with_what_was_measured,
)  # fmt: skip

SHIPPED = load_operator_model()


def gemms(sizes: list[tuple[int, int, int]], dtype: str = "bfloat16") -> pd.DataFrame:
    return operator_table([{"op": "gemm", "dtype": dtype, "m": m, "n": n, "k": k} for m, n, k in sizes])


@given(size=st.tuples(*[st.integers(1, 20_000)] * 3), name=st.sampled_from(["h200", "t4", "mi300x", "p4", "rtx-4090"]))
def test_no_product_beats_its_device(size: tuple[int, int, int], name: str) -> None:
    device, table = get_device(name), gemms([size])
    least_s = work(table)["matrix"][0] / (1e9 * pipe(device, "bfloat16")[0])
    assert least_s <= mechanism(table, device).estimate(Constants())[0] < np.inf


def test_nothing_is_faster_than_memory_delivers_what_caches_cannot_hold() -> None:
    table = operator_table([{"op": "softmax", "dtype": "bfloat16", "m": 2**20, "n": 8192}])
    assert SHIPPED.predict(table, "l40s")[0] >= (2 * 2 * 2**20 * 8192 - 96 * 2**20) / 864e9  # 96 MB of cache, 864 GB/s
    assert least_s(table, replace(get_device("l40s"), l2_kb=None))[0] == 0, "what caches hold is not known"


def test_waves_make_steps_and_blocks_of_attention_are_dealt_out() -> None:
    a100, l40s = get_device("a100-sxm4-80gb"), get_device("l40s")  # 108 and 142 cores
    full, more = mechanism(gemms([(128 * 27, 256 * 4, 8192), (128 * 27 + 1, 256 * 4, 8192)]), a100).matrix_s
    assert 1.05 < more / full < 2.1  # of 0.03 % more operations
    many = [(27, 128, 512, False), (28, 128, 512, False), (27, 192, 512, False), (108, 64, 1024, True)]
    rows = [{**attention(heads, heads, dim, [n], [n], causal=mask), "kv_dtype": ""} for heads, dim, n, mask in many]
    rows += [{**attention(8, 1, 128, [1], [n]), "kv_dtype": kv} for n, kv in ((36352, ""), (36352, "fp8"), (128, ""))]
    table = operator_table([{"op": "attention", "dtype": "bf16", **row} for row in rows])
    seen, others = mechanism(table, l40s), mechanism(table, a100)
    # blocks of 128 queries, 64 of long heads: one a core, or also 0.75 of the longest; with 704 of up to 1024 keys on average
    waves = np.array([1, 112 / 108 + 0.75, 216 / 108 + 0.75, 8 + 0.75 * 1024 / 704])
    work_s = [others.special_s * 16e6 * a100.working_mhz, others.matrix_s * 1e9 * pipe(a100, "bfloat16")[0]]
    scores = waves * [512 * 128, 512 * 128, 512 * 64, 704 * 128]
    assert work_s[0][:4] == pytest.approx(scores) and others.blocks[:4] == pytest.approx(waves * [1, 1, 0.5**0.2, 1])
    assert work_s[1][:4] == pytest.approx(4 * 108 * scores * [192, 192, 256, 128])
    # 1.4 times as long where 192 do not fit; two splits of 128 keys a core for 8 heads padded to 16
    work_s = seen.matrix_s * 1e9 * pipe(l40s, "bfloat16")[0] / 142 / 4
    assert work_s[[2, 4, 5]] == pytest.approx([1.4 * 64 * 512 * (216 / 142 + 0.75) * 256, *[2 * 16 * 128 * 128] * 2])
    assert seen.blocks[4:] == pytest.approx([2, 3.6, 1]) and seen.launches[3:] == pytest.approx([1, 1.5, 2.7, 1])
    assert others.launches[6] == 1.5  # FlashAttention alone was measured
    assert mechanism(table[:1], get_device("epyc-zen4-2.6ghz@1")).blocks == 27 * 4 + 1  # none of this on a CPU


def test_rows_are_read_again_from_the_nearest_that_has_room() -> None:
    known = ("softmax", 1024, 2, 0), ("softmax", 16384, 2, 2), ("layernorm", 1024, 2, 1), ("layernorm", 8192, 3, 0)
    for op, n, memory, cache in known:
        seen = mechanism(gemms([(8000, n, 1)], "float32").assign(op=op), get_device("t4"))  # 64 KB a core, and 4 MB
        assert seen.memory_s[0] == pytest.approx(memory * 4 * 8000 * n / 320e9) and seen.blocks[0] == 200, (op, n)
        assert seen.again_s[0] == pytest.approx(cache * seen.cache_s[0] / 2), (op, n)


def test_constants_are_a_vendors_and_calls_that_the_host_made_long_do_not_count() -> None:
    table = gemms([(2**i, 4096, 1) for i in range(18)], "float32").assign(op="elementwise", framework="torch-calls")
    true = dict.fromkeys(["a100-pcie-40gb", "t4"], Constants()) | {"mi100": Constants(memory=0.4)}
    kernels = [mechanism(table, get_device(d)).estimate(own) for d, own in true.items()]
    long = [np.maximum(seconds + 1.5e-5, 3e-5) for seconds in kernels]  # half of 30 us before the GPU begins
    called = pd.concat([table.assign(device=d, seconds=s) for d, s in zip(true, long, strict=True)], ignore_index=True)
    every = training_table(called)
    assert 0 < len(every) < len(training_table(called.replace("torch-calls", "torch"))) == 2 * len(called)
    assert every["seconds"].min() > 1.19e-4 and set(every["framework"]) == {"best", "torch"}
    amd, nvidia = (constants_of("elementwise float32", fit_constants(every), vendor) for vendor in ("amd", "nvidia"))
    assert amd.memory < 0.5 < nvidia.memory and nvidia.cycles == pytest.approx(Constants().cycles, rel=0.2)
    assert constants_of("rmsnorm", fit_constants(every), "nvidia") == nvidia


def test_weights_take_turns_in_the_cache_and_labels_of_weights_that_stayed_there_do_not_count() -> None:
    device, own = get_device("l40s"), Constants(kept=1.0, kept_power=7.0)  # 96 MB, which five times 16 MB fit in
    table = gemms([(1, 2048, 4096), (1, 3072, 4096)])
    fits, large = mechanism(table, device).estimate(own)
    assert large > 2.0 * fits and mechanism(table.assign(dtype="float32"), device).turn[1] < 0.51
    took = mechanism(table, device).memory_s
    every = table.assign(device="l40s", framework="trtllm", seconds=took * [1.2, 1.2])
    kept = every.assign(seconds=took * [0.6, 0.6]).set_axis([7, 5])  # of any index
    assert len(training_table(every)) == 4 and training_table(kept)["n"].tolist() == [2048, 2048]
    rows = operator_table([{"op": op, "dtype": "bf16", "m": 512, "n": 512, "k": 512} for op in ("softmax", "gemm")])
    halved, whole = (mechanism(rows, replace(device, mcpu=mcpu)).turn for mcpu in ("sm_80", "sm_86"))
    assert halved == pytest.approx(whole * [2.0, 1.0])  # products do not notice that an A100's cache has two halves


def test_winograd_power_and_switches_change_what_is_reached_and_a_missing_unit_is_said_and_replaced() -> None:
    mi50, three = get_device("mi50"), convolutions("", [3])
    assert mechanism(three.assign(stride=4), mi50).matrix_s == pytest.approx(1.6 * mechanism(three, mi50).matrix_s)
    bf16, fp32 = (mechanism(three.assign(dtype=t, backward=2), mi50).matrix_s for t in ("bfloat16", "float32"))
    assert bf16 == pytest.approx(fp32, rel=0.2)
    assert "has no unit for fp8: bfloat16_matrix is used" in without_unit(get_device("a100-sxm4-80gb"), "fp8")
    four, int8 = (gemms([(1, 4096, 14336)], "nvfp4"), "a100-sxm4-80gb"), (three.assign(dtype="int8"), "mi50")
    corrected = [SHIPPED.predict(*of)[0] / SHIPPED.parts(of[0], get_device(of[1]), BEST)[0][0] for of in (four, int8)]
    assert corrected[0] == 1.0 != corrected[1]  # int8 was measured on an MI50, although it has no unit for it
    having = {"h100-sxm": "fp8", "mi210": "float32", "t4": "float32"}
    assert not any(without_unit(get_device(name), dtype) for name, dtype in having.items())
    assert pipe(get_device("vega-64"), "float16") == (get_device("vega-64").peak_gflops["float32"], "float32")
    assert pipe(get_device("mi50"), "float16")[1] == "float16"  # it has a dot instruction
    assert pipe(get_device("mi50"), "bfloat16")[0] < get_device("mi50").peak_gflops["float32"]
    hot, cool = (mechanism(gemms([(8192,) * 3]), replace(get_device("h20"), tdp_w=w)).matrix_s for w in (100, 400))
    assert hot / cool == pytest.approx(1.27, abs=0.005)  # (400 W / 1.9e-5 W / 148,000 GFLOP/s / 16 bits / 4 nm) ** 0.3
    sends = [{"op": "all_reduce", "dtype": "bfloat16", "bytes": 4e8, "num_workers": n} for n in (2, 4, 8)]
    for gpu, rounds in ("h20", (1, 1.25, 1.125)), ("a100-sxm4-80gb", (1, 1.5, 1.75)), ("h100-pcie", (1, 1.5, 1.75)):
        once_s = 4e8 / (1e9 * (get_device(gpu).link_gb_s or 0) / 2)  # the switches of Hopper's NVLink add up
        assert mechanism(operator_table(sends), get_device(gpu)).memory_s == pytest.approx(once_s * np.array(rounds))
    assert not any(SHIPPED.interval(operator_table([{**sends[0], "num_workers": 1}]), "h200")), "one rank adds nothing"


def labels(factors: dict[str, float], n: int = 60) -> pd.DataFrame:
    """Labels by the mechanism itself, times a factor a device."""
    sizes = np.random.default_rng(0).integers(16, 4096, (n, 3)).tolist()
    table = gemms([tuple(size) for size in sizes])
    took = {name: mechanism(table, get_device(name)).estimate(Constants(peak=0.6)) for name in factors}
    parts = [table.assign(device=name, framework="vllm", seconds=by * took[name]) for name, by in factors.items()]
    return pd.concat(parts, ignore_index=True)


def test_training_leaves_families_out_and_comes_back_from_files(tmp_path: Path) -> None:
    table = training_table(labels(dict.fromkeys(["a100-pcie-40gb", "l40s", "h100-sxm"], 1.0)))
    assert set(table["framework"]) == {BEST, "vllm"}
    model, left = train(table, members=1, epochs=3)
    assert model.trust == {"gemm": 0.0}  # three families are too few to trust the networks on others
    assert max(row["median_ape"] for row in left_out_errors(left)) < 0.05  # constants carry over
    assert 0 < model.seen["gemm"].n < model.unseen["gemm"].n / 3  # on a fifth, left out of another training
    model.save(tmp_path)
    again, unseen = OperatorModel.load(tmp_path), gemms([(64, 64, 64), (4096, 4096, 4096)])
    assert again.predict(unseen, "h200") == pytest.approx(model.predict(unseen, "h200"), rel=1e-2)
    seconds, low, high = model.interval(unseen, "h200")
    assert (low <= seconds).all() and (seconds <= high).all()
    with pytest.raises(PredictorError, match="no framework 'xla'"):
        model.predict(unseen, "h200", "xla")
    with pytest.raises(PredictorError, match="of no CPU, as epyc-7742@1 is"):
        model.predict(unseen, "epyc-7742@1")
    (tmp_path / "operators.json").write_text("{}")
    with pytest.raises(PredictorError, match="cannot read the operator model"):
        OperatorModel.load(tmp_path)


@pytest.mark.parametrize(("worst", "part"), [(0.1, 1.0), (1.04, 1.0), (3.0, 0.0)])
def test_networks_that_make_one_family_much_worse_are_not_trusted(worst: float, part: float) -> None:
    """On three families of four what the network says halves the error; on one it errs `worst` times as much."""
    family, measured = np.repeat(np.arange(4), 10), np.ones(40)
    logs = np.where(family == 0, 1 - worst, 0.5)
    assert _trust(measured, logs, np.ones(40, dtype=bool), family, 4) == part
    assert _trust(measured, logs, np.ones(40, dtype=bool), family, 5) == 0


def convolutions(device: str, windows: list[int], dtype: str = "float16") -> pd.DataFrame:
    rows = [
        {"op": "conv", "dtype": dtype, "batch": 8, "in_channels": c, "out_channels": c, "height": 28, "width": 28,
         "out_h": 28, "out_w": 28, "kernel_h": k, "kernel_w": k} for k in windows for c in range(32, 512, 8)
    ]  # fmt: skip
    return operator_table(rows).assign(device=device, framework="miopen")


def test_the_faster_solver_is_named_on_a_gpu_never_seen(tmp_path: Path) -> None:
    parts = []
    for name in ("mi210", "mi100"):
        table = convolutions(name, [1, 3])
        one = (table["kernel_h"] == 1).to_numpy()
        parts += [table.assign(kernel="A", seconds=np.where(one, 1e-4, 3e-4)), table.assign(kernel="B", seconds=2e-4)]
        parts.append(table[~one].assign(kernel="C NHWC", seconds=9e-4))  # runs windows of 3 x 3 alone
    every = pd.concat(parts, ignore_index=True)
    operators, seconds, names = solver_times(every)
    assert names == ["A", "B", "C NHWC"] and len(operators) == 2 * 120 and np.isnan(seconds[:, 2]).sum() == 120
    model = replace(SHIPPED, solvers=train_solvers(operators, seconds, names, SHIPPED.constants, SHIPPED.inputs))
    model.save(tmp_path)
    ranked = OperatorModel.load(tmp_path).kernels(asked := convolutions("", [1, 3]), "mi300x")
    first = ranked.drop_duplicates("row")
    assert (first["kernel"] == ["A"] * 60 + ["B"] * 60).mean() > 0.95
    assert first["seconds"].to_numpy() == pytest.approx(model.predict(asked, "mi300x"), rel=1e-2)
    assert (ranked.loc[ranked["kernel"] == "C NHWC", "row"] >= 60).mean() > 0.95
    assert model.explain(asked, "mi300x")["kernel"].tolist()[:1] == ["A"]
    assert model.kernels(asked, "h200").empty and set(model.explain(asked, "h200")["kernel"]) == {""}


def test_the_nearest_measured_operator_and_how_far_it_is() -> None:
    every = labels(dict.fromkeys(["a100-pcie-40gb", "l40s"], 1.0)).assign(kernel="")
    model = with_what_was_measured(train(training_table(every), members=1, epochs=1)[0], every, training_table(every))
    known = model.measured[model.measured["device"] == "l40s"].head(3)
    why = model.explain(operator_table(known.drop(columns=["device", "seconds"])), "l40s")
    assert why["far"].tolist() == pytest.approx([0, 0, 0], abs=1e-5) and set(why["on"]) == {"l40s"}
    assert why["nearest"][0].startswith("gemm ") and why["nearest"][0].endswith(" bfloat16")
    assert model.explain(gemms([(10**6, 64, 64)]), "l40s")["far"][0] > 0.3 and model.solvers is None
    assert np.isnan(model.explain(gemms([(8, 8, 1)]).assign(op="rmsnorm"), "l40s")["far"][0]), "no norm was measured"


def test_few_operators_teach_a_device_what_they_have_in_common(tmp_path: Path) -> None:
    device, here = get_device("h200"), labels({"h200": 1.0})
    own = here.assign(seconds=2.5 * SHIPPED.predict(here, device))
    assert SHIPPED.predict(here.assign(dtype="float16"), device) == pytest.approx(own["seconds"] / 2.5), "the same kernels"
    chosen = choose(*SHIPPED.traits(own, device), 12)
    assert len(set(chosen)) == 12 and len(choose(*SHIPPED.traits(own, device), 99, "kmeans")) == len(own)
    model, fit = teach(SHIPPED, own.iloc[chosen], device)
    assert fit.before == pytest.approx(0.6, abs=0.01) and fit.error < 0.1
    model.save(tmp_path)
    rest = own.drop(own.index[chosen])
    assert OperatorModel.load(tmp_path).predict(rest, device) == pytest.approx(rest["seconds"].to_numpy(), rel=0.1)
    assert model.predict(rest, "l40s") == pytest.approx(SHIPPED.predict(rest, "l40s")), "other devices stay"
    _, low, high = teach(SHIPPED, own, device)[0].interval(rest, device)
    assert (high / low < 1.3).all(), "intervals are those of operators left out"
    with pytest.raises(PredictorError, match="no operators measured on h100-sxm"):
        teach(SHIPPED, own, get_device("h100-sxm"))
    with pytest.raises(PredictorError, match="cannot choose 0 operators"):
        choose(*SHIPPED.traits(own, device), 0)


def test_what_is_proposed_can_be_measured_on_the_device() -> None:
    every = labels(dict.fromkeys(["a100-pcie-40gb", "l40s"], 1.0)).assign(kernel="")
    narrow, experts = every.assign(dtype="fp8", kv_dtype="fp8"), every.assign(op="grouped_gemm")
    every = pd.concat([every, narrow, experts], ignore_index=True)
    model = with_what_was_measured(SHIPPED, every, training_table(every))
    assert set(candidates(model, get_device("h200"))["dtype"]) == {"bfloat16", "fp8"}
    assert set(candidates(model, get_device("mi210"))[["op", "dtype"]].agg(" ".join, axis=1)) == {"gemm bfloat16"}
    with pytest.raises(PredictorError, match="keeps no operators"):
        candidates(replace(model, measured=None), get_device("h200"))


def test_a_slow_framework_alone_does_not_say_what_is_fastest() -> None:
    fast, slow = labels({"l40s": 1.0}), labels({"l40s": 2.0}).assign(framework="trtllm")
    assert (training_table(pd.concat([fast[1:], slow], ignore_index=True))["framework"] == BEST).sum() == len(fast) - 1
    table = operator_table([{"op": "attention", "dtype": "bf16", **attention(1, 1, 64, [1], [n])} for n in (1, 8, 9)])
    fast, slow = (table.assign(device="l40s", framework="vllm", kernel=f"{by}", seconds=by) for by in (1.0, 2.0))
    learned = training_table(pd.concat([fast[:2], slow], ignore_index=True))  # a key alone; both; the slow kernel alone
    assert learned.loc[learned["framework"] == BEST, ["longest", "seconds"]].to_numpy().tolist() == [[8, 1]]


def test_of_one_family_operators_are_left_out_and_networks_count_elsewhere(tmp_path: Path) -> None:
    model, left = train(training_table(labels({"mi210": 2.0, "mi250x": 2.0})), members=2, epochs=40)
    assert model.trust == {"gemm": 1.0} and not model.unseen
    assert 0 < (left["left_out_s"] / left["seconds"] - 1).abs().median() < 0.1
    model.save(tmp_path)
    one, low, high = model.interval(gemms([(512, 512, 512)]), "mi100")
    assert OperatorModel.load(tmp_path).predict(gemms([(512, 512, 512)]), "mi100") == pytest.approx(one, rel=1e-2)
    assert high / low > 4, "nothing says how far off it is there"


def test_noisy_labels_weigh_less() -> None:
    table, errors = labels({"mi210": 1.0}), []
    wrong = np.arange(len(table)) % 3 == 0
    table.loc[wrong, "seconds"] *= 3
    for noise in (0.0, 1.0):
        model, _ = train(training_table(table.assign(noise=noise * wrong)), members=1, epochs=60)
        errors.append(np.abs(model.predict(table[~wrong], "mi210") / table["seconds"][~wrong] - 1).mean())
    assert errors[1] < 0.7 * errors[0]


def test_a_model_with_fewer_inputs_than_this_version_knows_is_read(tmp_path: Path) -> None:
    older = copy.deepcopy(SHIPPED)
    for network in older.networks:
        network[0].weight = torch.nn.Parameter(network[0].weight[:, :-1])
    inputs = [*SHIPPED.inputs[:3], SHIPPED.inputs[3][:-1], []]
    replace(older, inputs=inputs, mean=SHIPPED.mean[:-1], std=SHIPPED.std[:-1]).save(tmp_path)
    one = gemms([(64, 64, 64)])
    assert OperatorModel.load(tmp_path).predict(one, "h200") == pytest.approx(SHIPPED.predict(one, "h200"), rel=1e-2)
    saved = (tmp_path / "operators.json").read_text()
    for known in ('"longest"', '"kept_power"'):  # an input, and a constant
        (tmp_path / "operators.json").write_text(saved.replace(known, '"moonshine"'))
        with pytest.raises(PredictorError, match="trained with other features"):
            OperatorModel.load(tmp_path)


def test_nearly_equal_devices_are_one_family_and_what_has_kernels_of_its_own_is_a_kind() -> None:
    found = families([get_device(name) for name in ("mi210", "mi250x", "mi100", "h100-sxm", "a100-pcie-40gb")])
    assert found["mi210"] == found["mi250x"] != found["mi100"] and found["h100-sxm"] != found["a100-pcie-40gb"]
    rows = [{"op": "gemm", "dtype": dtype, "m": 8, "n": 8, "k": 8} for dtype in ("bf16", "fp8", "int4_wo", "fp32")]
    assert kinds(operator_table(rows)).tolist() == ["gemm", "gemm narrow", "gemm weights only", "gemm float32"]


def test_what_ships_knows_every_gpu_of_the_table() -> None:
    table = gemms([(1, 8192, 8192), (4096, 8192, 8192)])
    for device in load_table().rows:
        if device.kind == "gpu" and device.bandwidth_gb_s and device.peak_gflops:
            one, many = SHIPPED.predict(table, device)
            weights_s = 8192**2 * 2 / (1e9 * device.bandwidth_gb_s)
            flop_s = work(table)["matrix"][1] / (1e9 * pipe(device, "bfloat16")[0])
            assert 0.2 * weights_s < one < 60 * weights_s + 1e-4, device.name
            assert 0.9 * flop_s < many < 12 * flop_s + 1e-4, device.name
    found = predict(table, "h200"), *Predictor.default().predict_interval(table, "h200")
    np.testing.assert_array_equal(found, SHIPPED.interval(table, "h200"))
    with pytest.raises(PredictorError, match="no compiled code"):
        predict(table, "h200", compiled=True)
    with pytest.raises(ProgramError, match=r"make one of it by cdmpp\.program\.operators\.operator_table"):
        predict(table[["op", "dtype", "m", "n", "k"]], "h200")


def test_a_few_cores_of_a_large_cpu_are_like_those_that_were_measured() -> None:
    sizes = {"in_channels": 64, "out_channels": 64, **dict.fromkeys(("height", "width", "out_h", "out_w"), 56)}
    conv = {"op": "conv", "batch": 1, **sizes, "kernel_h": 3, "kernel_w": 3, "stride": 1, "dilation": 1, "groups": 1}
    rows = [conv, {"op": "gemm", "m": 64, "n": 512, "k": 512}, {"op": "elementwise", "m": 64, "n": 4096}]
    model, table = load_operator_model("default", "cpu"), operator_table(pd.DataFrame(rows).assign(dtype="float32"))
    measured = model.predict(table, "epyc-zen4-2.6ghz@1")
    assert np.abs(np.log(model.predict(table, "epyc-9654@1") / measured)).max() < 0.1
    for device in load_table().rows:
        if device.kind == "cpu":
            ratio = model.predict(table, f"{device.name}@1") / measured
            assert ((ratio > 1 / 12) & (ratio < 12)).all(), f"{device.name}: {ratio}"


def test_serving_steps_add_up() -> None:
    ask = {"dtype": "bf16", "batch": 4, "seq": 512}
    (prefill,) = predict_serving("llama-3.1-8b", ["h200"], SHIPPED, Serving(**ask))
    (decode,) = predict_serving("llama-3.1-8b", ["h200"], SHIPPED, Serving(**ask, phase="decode", past=512))
    (whole,) = predict_serving("llama-3.1-8b", ["h200"], SHIPPED, Serving(**ask, generate=64), prices={"h200": 3.6})
    assert prefill.latency_s == pytest.approx(sum(prefill.by_op.values()))
    assert whole.first_token_s == pytest.approx(prefill.latency_s)
    assert whole.per_token_s == pytest.approx(decode.latency_s, rel=0.1)
    assert whole.price_per_million_tokens == pytest.approx(1000 / whole.tokens_per_s)
    assert decode.low_s < decode.latency_s < decode.high_s
    assert decode.latency_s > 0.9 * 16.06 / get_device("h200").bandwidth_gb_s  # two bytes of 8 billion parameters
    (fits,) = predict_serving("llama-3.1-8b", ["t4", "h200"], SHIPPED, Serving(), prices={"t4": 1.0})
    assert fits.device == "h200" and "t4, which have 16 GB" in fits.notes[-1] and "price is given for h200" in fits.notes[-2]
    assert fits.memory_gb == pytest.approx(sum(fits.memory_parts_gb.values()))
    packed = [predict_serving("gpt-oss-20b", ["h200"], SHIPPED, Serving(dtype))[0].notes for dtype in ("bf16", "fp8")]
    assert ["gpt-oss-20b are published in mxfp4" in " ".join(notes) for notes in packed] == [True, False]
    bf16, fp16 = (predict_serving("qwen3-8b", ["t4"], SHIPPED, Serving(t, tp=4))[0].notes for t in ("bf16", "fp16"))
    assert "is used instead; it has one for --dtype fp16" in " ".join(bf16) and "no unit" not in " ".join(fp16)
    tiny, long = replace(get_device("t4"), mem_gb=2.0), Serving(seq=3000, tp=4, phase="decode", past=1_200_000)
    for model, devices, asked, said in (
        ("qwen2.5-7b", ["t4"], long, "used: --dtype fp8 --kv-dtype fp8 would fit"),  # 28 heads are no 8 ranks
        ("qwen2.5-7b", [tiny], Serving(tp=4), r"\(3.8 weights, 0.0 KV cache, .*as the weights alone do not, would fit"),
        ("llama-3.1-70b", ["t4", "h200"], Serving(), "1 t4.*--tp 16 would fit; .*141 GB.*--tp 2 would fit"),
        ("llama-3.1-70b", ["a100"], Serving(tp=2, batch=64, seq=8192), "used: --tp 8 --batch 17 would fit"),
        ("llama-3.1-8b", ["h200"], Serving(batch=0), "--batch is 0"),
        ("llama-3.1-8b", ["h200"], Serving(phase="decode", generate=4), "leave out --phase decode"),
        ("llama-3.1-8b", ["epyc-7742@1"], Serving(), "for GPUs only, and epyc-7742@1 is a CPU: give a GPU"),
    ):
        with pytest.raises(NetworkError, match=said):
            predict_serving(model, devices, SHIPPED, asked)


def test_lists_leave_the_share_of_unknown_operators_open(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "step.csv"
    path.write_text("op,m,n,k,count,phase,step\ngemm,8,4096,4096,2,a,0\nrmsnorm,8,4096,,1,a,1\nmystery,,,,1,b,2")
    (report,) = predict_operators(path, ["NVIDIA L40S"], lambda kind: SHIPPED)
    each = {row["name"]: row["latency_s"] for row in report.operators}
    assert report.latency_s == pytest.approx(2 * each["gemm"] + each["rmsnorm"])
    assert [step["latency_s"] for step in report.steps[:2]] == pytest.approx([2 * each["gemm"], each["rmsnorm"]])
    assert report.steps[2]["latency_s"] is report.by_phase["b"] is None and "1 of 3 steps" in report.notes[1]
    assert report.unknown == {"mystery": 1} and "25%" in " ".join(report.notes)
    assert report.operators[0]["bound"] in ("memory and caches", "launch")
    assert [row["row"] for row in report.operators] == [1, 2]
    path.write_text("op,m,n,k\nmystery,8,8,8\n")
    (nothing,) = predict_operators(path, ["l40s"], lambda kind: SHIPPED)
    assert nothing.latency_s is nothing.low_s is None and nothing.unknown == {"mystery": 1} and nothing.by_name() == []
    page = tmp_path / "step.html"
    shares = command.json("latency", path, "--device", "h200", "--runtime", "torch", "--shares", "--html", page)
    assert shares["smallest_share"] is None and shares["by_latency"] == [] and "unknown: no time" in command.out
    assert "h200: unknown" in page.read_text()
    lacking = "x,4,4,4\ngemm,4,4,", "row 2: gemm needs k"
    for rows, said in (lacking, ("gemm,8,inf,8", "row 1: n is inf, expected a number from 0 to")):
        path.write_text(f"op,m,n,k\n{rows}\n")
        with pytest.raises(ProgramError, match=said):
            predict_operators(path, ["l40s"], lambda kind: SHIPPED)


def test_a_list_on_a_cpu_is_priced_by_its_operators(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "step.csv"
    path.write_text("op,m,n,k,count\ngemm,128,512,256,2\n")
    ask = "latency", path, "--device", "h200,epyc-zen4-2.6ghz@1,H200"
    found, usual, narrow = (command.json(*ask, *more)["reports"] for more in (("--dtype", "float32"), (), ("--dtype", "bf16")))
    took = {report["device"]: report["latency_s"] for report in found}
    assert len(found) == 2 and "--layers is -1" in command.error(*ask, "--layers", "-1")
    assert usual[0]["dtype"] == "bfloat16" and usual[1] == found[1] and usual[1]["notes"] == []
    assert narrow[1]["notes"][0].startswith("on CPUs only float32 was measured: bfloat16 can")
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-8b"]))
    assert command.json("latency", tmp_path, "--device", "h200")["network"] == tmp_path.name
    path.write_text("op,bytes,num_workers,count\nall_reduce,4096,1,9\n")
    assert command.json("latency", path, "--device", "h200,t4")["by_latency"] == ["h200", "t4"], "both take no time"
    table = operator_table([{"op": "gemm", "dtype": "float32", "m": 128, "n": 512, "k": 256}])
    for name, model in (("h200", SHIPPED), ("epyc-zen4-2.6ghz@1", load_operator_model(kind="cpu"))):
        assert took[name] == pytest.approx(2 * model.predict(table, name)[0])


def test_from_a_list_to_a_corrected_latency_and_its_picture(tmp_path: Path, command: Command) -> None:
    listed, data, taught, page = (tmp_path / name for name in ("h200.csv", "labels", "taught", "page/step.html"))
    ask = ["finetune", "--device", "h200", "--tasks", "40", "--out"]
    command(*ask, listed)
    assert "expected --tasks K and --out FILE.csv" in command.error(*ask, tmp_path / "folder")
    table = operator_table(pd.read_csv(listed))
    assert len(table) == 40 and len(set(kinds(table))) > 4
    slow = table.assign(device="h200", framework="torch", seconds=3 * SHIPPED.predict(table, "h200"))
    write_operators(data, slow)
    command("finetune", "--data", data, "--device", "h200", "--out", taught)
    (before,) = predict_serving("llama-3.1-8b", ["h200"], SHIPPED, Serving())
    step = ["latency", "llama-3.1-8b", "--device", "h200", "--predictor", taught, "--explain"]
    after = command.json(*step, "--html", page)
    assert after["latency_s"] == pytest.approx(3 * before.latency_s, rel=0.15)
    assert "corrected by operators that were measured on it" in " ".join(after["notes"])
    (qkv,) = (row for row in after["operators"] if row["name"] == "qkv")
    assert qkv["nearest"].startswith("gemm ") and qkv["far"] > 0
    text = page.read_text()
    assert "data:image/png;base64" in text and "nearest measured" in text and "matrix or FMA units" in text


def test_folders_of_operators_are_counted_scored_and_chosen_from(tmp_path: Path, command: Command) -> None:
    data = tmp_path / "data"
    table = labels(dict.fromkeys(["h200", "h100-pcie", "epyc-zen4-2.6ghz@1"], 1.0), 40)
    table["framework"] = table["framework"].mask(table["device"].str.startswith("epyc"), "torch")
    for name, own in table.groupby("device"):
        model = load_operator_model(kind=get_device(str(name)).kind)
        write_operators(data / str(name), own.assign(seconds=2 * model.predict(own, str(name))))
    found = command.json("dataset", data)
    assert len(found["datasets"]) == 3 and found["total"]["rows"] == 120
    assert found["total"]["devices"]["h200"] == 40 and found["total"]["frameworks"] == {"vllm": 80, "torch": 40}
    scores = command.json("evaluate", "--data", data)
    assert {row["device"]: row["seen_in_training"] for row in scores["groups"]} == {
        "h200": True, "h100-pcie": False, "epyc-zen4-2.6ghz@1": True,
    }  # fmt: skip
    assert [row["n"] for row in scores["overall"]] == [40, 80] and "in training" in command.out
    assert [row["mape"] for row in scores["overall"]] == pytest.approx([0.5, 0.5], abs=1e-4)
    write_operators(data / "h200", pd.concat([own, own.assign(seconds=2 * own["seconds"])]), replace=True)
    scores = command.json("evaluate", "--data", data)
    assert (scores["rows"], scores["left_out"]) == (160, 40) and "40 of 160 rows are left out" in command.out
    assert "--part, --by: of programs" in command.error("evaluate", "--data", data, "--part", "test", "--by", "task")
    assert "does not: expected datasets of one kind" in command.error("dataset", data, tmp_path)
    teach_h200 = ["finetune", "--data", data, "--device", "h200", "--out", tmp_path / "taught"]
    assert command.json(*teach_h200, "--tasks", "30", "--select", "random")["operators"] == 30
    assert "expected a number K" in command.error(*teach_h200, "--select", "random")
