"""Labels of PyTorch's own kernels: those of a small network and of a list, and what is kept when a run dies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from cdmpp.dataset.operators import load_operators
from cdmpp.errors import CdmppError, DatasetError, ProfilerError
from cdmpp.profiler import library
from cdmpp.profiler.engine import SamplingPlan
from cdmpp.profiler.library import measure_operators, profile_library
from cdmpp.profiler.machine import usable_cores
from cdmpp.program.network import Network
from tests.samples.command import Command

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("real_machine")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SamplingPlan(min_sample_s=1e-4, min_samples=2, max_samples=2, max_wait_s=0.0)
    monkeypatch.setattr(library, "_PLAN", plan)


def network(width: int = 96) -> Network:
    module = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    return Network.from_torch(module, [torch.randn(4, 64)])


def test_operators_are_measured_warm_and_cold_and_a_run_goes_on(tmp_path: Path) -> None:
    before = usable_cores()
    report = profile_library([network(), network()], out=tmp_path / "l")
    assert (report.new, report.labels, report.failures) == (3, 5, {}) and usable_cores() == before
    table = load_operators(tmp_path / "l")
    assert sorted(table["framework"]) == ["torch"] * 3 + ["torch-cold"] * 2
    assert set(table["device"]) == {report.device} and (table["seconds"].between(1e-8, 0.1)).all()
    assert set(table["kernel"]) == {"linear", "relu"}
    with pytest.raises(DatasetError, match="go on with --resume"):
        profile_library([network()], out=tmp_path / "l")
    partial = tmp_path / "l" / "measured.jsonl"
    in_the_second_round = "".join(partial.read_text().splitlines(keepends=True)[:7])
    partial.write_text(in_the_second_round + '{"key": "half a li')
    with pytest.raises(DatasetError, match=r"holds labels of .*@1, not of another"):  # though it was killed before its dataset
        library._known(tmp_path / "l", SimpleNamespace(name="another"), True)  # type: ignore[arg-type]
    again = profile_library([network(), network(80)], out=tmp_path / "l", resume=True)
    assert (again.new, again.labels) == (5, 10), "what was measured twice is not measured again"
    rounds, table = pd.read_json(partial, lines=True), load_operators(tmp_path / "l")
    seconds = rounds.groupby(["kernel", "n", "framework", "k"], dropna=False)["seconds"].agg(["size", "min", "max"])
    assert (seconds["size"] == 2).all() and sorted(table["seconds"]) == pytest.approx(sorted(seconds["min"]))
    assert table["noise"].max() >= 0.999 * (seconds["max"] / seconds["min"] - 1).max()


def test_what_a_kernel_refuses_is_counted_and_other_devices_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: object, *rest: object) -> object:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(library, "_measured", refuse)
    with pytest.raises(ProfilerError, match="no operator could be measured: gemm: no such kernel"):
        profile_library([network()], out=tmp_path / "l")

    for device in ("h200", "graviton3@1"):
        with pytest.raises(ProfilerError, match="is not this machine's CPU"):
            profile_library([network()], device, tmp_path / "l")


LIST = """op,dtype,m,n,k,batch,heads,kv_heads,head_dim,sequences,tokens,kv_tokens,pairs,longest,in_channels,out_channels,height,width,kernel_h,kernel_w,out_h,out_w,backward,stride
gemm,float32,32,48,64,,,,,,,,,,,,,,,,,,,
gemm,bfloat16,32,48,64,2,,,,,,,,,,,,,,,,,,
attention,float32,,,,,4,2,16,2,16,16,72,8,,,,,,,,,,
attention,float32,,,,,4,2,16,2,2,64,64,32,,,,,,,,,,
attention,float32,,,,,4,2,16,2,16,16,50,8,,,,,,,,,,
conv,float32,,,,2,,,,,,,,,8,4,9,9,3,3,5,5,0,4
conv,float32,,,,2,,,,,,,,,8,4,9,9,3,3,9,9,2,1
layernorm,float32,8,64,,,,,,,,,,,,,,,,,,,,
grouped_gemm,float32,8,64,8,4,,,,,,,,,,,,,,,,,,
lstm,float32,4,16,8,2,,,,,5,,,,,,,,,,,,,
copy,float32,1,64,,,,,,,,,,,,,,,,,,,,
"""  # noqa: E501


def ten_microseconds(function: Callable[[], Any]) -> Callable[[int], float]:
    function()  # what is asked of PyTorch must run
    return lambda times: 1e-5 * times


def test_a_list_becomes_a_dataset_of_the_device(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(LIST)
    report = measure_operators(tmp_path / "list.csv", tmp_path / "out", "mi210", clock=ten_microseconds)
    assert report.labels == 9 and sum(report.failures.values()) == 2  # a window, and experts
    table = load_operators(tmp_path / "out")
    assert table["seconds"].tolist() == pytest.approx([1e-5] * 9)
    copied, layers = (library.function_of(table[table["op"] == op].iloc[0].to_dict())() for op in ("copy", "lstm"))
    assert len(layers) == 2 and copied.untyped_storage().nbytes() == 4 * 64  # a new tensor, even of a single row
    assert set(table["device"]) == {"mi210"} and set(table["framework"]) == {"torch"} and table["noise"].max() < 1e-9
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["versions"]["torch"] and meta["devices"]["mi210"]["arch"] == "cdna2"


def test_a_list_that_takes_too_long_goes_on(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(LIST)

    def slow(function: Callable[[], Any]) -> Callable[[int], float]:
        time.sleep(0.01)
        return ten_microseconds(function)

    asked = partial(measure_operators, tmp_path / "list.csv", tmp_path / "out", "mi210", clock=slow)
    assert 0 < asked(max_seconds=0.02).new < 8
    with pytest.raises(DatasetError, match="go on with --resume"):
        asked()
    report = asked(resume=True)
    assert 0 < report.new < report.labels == 9


def test_this_cpu_is_measured_for_real_and_no_gpu_is_one_line(tmp_path, command: Command, monkeypatch) -> None:
    path, out, used, clock = tmp_path / "list.csv", tmp_path / "out", set(), library.wall_clock
    monkeypatch.setattr(library, "wall_clock", lambda f: used.add((torch.get_num_threads(), len(usable_cores()))) or clock(f))
    path.write_text("op,dtype,kernel,m,n,k\ngemm,float32,,64,64,64\ngemm,float32,linear,64,64,64\n")
    command("finetune", "--tasks", "2", "--device", "epyc-7763@1", "--out", tmp_path / "few.csv")
    assert "few.csv --device epyc-7763@1 --out DIR\n" in command.out
    command("measure", path, "--device", "this-cpu@1", "--out", out)
    assert 0 < load_operators(out)["seconds"][0] < 0.1 and used == {(1, 1)}, "on the cores of the share"
    assert set(load_operators(out)["kernel"]) == {"", "linear"}, "one has a bias"
    assert "no GPU here that PyTorch can use" in command.error("measure", path, "--out", tmp_path / "gpu")
    assert "no graviton3@1 here" in command.error("measure", path, "--out", tmp_path / "gpu", "--device", "graviton3@1")
    (out / "measured.jsonl").write_text("{}\n")
    for to, said in ((out, "measured.jsonl is damaged"), (path, "cannot write")):
        assert said in command.error("measure", path, "--device", "this-cpu@1", "--out", to, "--resume")
    path.write_text("op,dtype,m,n,k\ngemm,float32,64,64,\n")
    with pytest.raises(CdmppError, match="row 1: gemm needs k"):
        measure_operators(path, tmp_path / "wrong", "this-cpu@1")
