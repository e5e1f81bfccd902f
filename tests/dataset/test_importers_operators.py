"""Public measurements of library operators: units and conventions of each source, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cdmpp.dataset.importers import import_operators
from cdmpp.dataset.operators import load_operators
from cdmpp.errors import DatasetError
from cdmpp.files import read_yaml
from cdmpp.program.operators import work

ROWS = read_yaml(Path(__file__).with_name("rows.yaml"))["operators"]
GEMM, ATTENTION, CONV, NEUSIGHT, MOE, COLLECTIVE = ROWS.values()
DECODE = {**ATTENTION, "op": "attention_generation", "seq": 1}


def imported(tmp_path: Path, source: str, *rows: dict[str, Any]) -> pd.DataFrame:
    tmp_path.mkdir(exist_ok=True)
    pd.DataFrame(rows).to_parquet(tmp_path / "file.parquet")
    import_operators(source, tmp_path / "file.parquet", tmp_path / "out")
    return load_operators(tmp_path / "out")


def test_serving_operators_are_those_of_aiconfigurator(tmp_path: Path) -> None:
    table = imported(tmp_path, "aiconfigurator", GEMM, ATTENTION, DECODE, {**GEMM, "suspect_group": True})
    assert sorted(table["device"]) == ["a100-sxm4-80gb", "l40s", "l40s"]  # the suspect one is left out
    found = table.sort_values("tokens").to_dict("records")
    assert [row["tokens"] for row in found[:2]] == [2, 200]
    assert [row["pairs"] for row in found[:2]] == [2 * 8, 2 * 100 * 101 / 2]  # past counts for generation alone
    assert found[0]["kv_dtype"] == "fp8" and found[0]["dtype"] == "bfloat16"
    assert (found[2]["m"], found[2]["n"], found[2]["k"]) == (64, 4096, 1024)


def test_convolutions_experts_and_collectives_keep_their_conventions(tmp_path: Path) -> None:
    conv = imported(tmp_path / "a", "miopen", CONV)
    assert conv.loc[0, ["device", "kernel", "backward", "stride"]].tolist() == [
        "mi210", "ConvBinWinogradRxS", 2.0, 4.0,
    ]  # fmt: skip
    assert work(conv)["matrix"][0] == 2 * 2 * 32 * 4 * 5 * 16 * 9
    moe = imported(tmp_path / "b", "pipeweave", MOE)
    assert moe.loc[0, ["batch", "m", "n", "k"]].tolist() == [8, 20, 1024, 256]
    ring = imported(tmp_path / "c", "pipeweave", COLLECTIVE)
    assert ring.loc[0, ["op", "bytes", "num_workers"]].tolist() == ["all_reduce", 4096, 4]
    # NeuSight's M x N times N x K, and milliseconds
    linear = imported(tmp_path / "d", "neusight-operators", NEUSIGHT)
    assert linear.loc[0, ["batch", "m", "n", "k", "seconds"]].tolist() == [1, 64, 512, 256, 0.002]


@pytest.mark.parametrize(("source", "row", "message"), [
    ("aiconfigurator", {**GEMM, "m": 8e3, "n": 8e3, "k": 8e3, "seconds": 1e-4}, "row 2: gemm in 0.0001 s .* faster"),
    ("aiconfigurator", {**DECODE, "batch": 512, "past": 65536, "seconds": 1e-3}, "row 2: attention in 0.001 s .* faster"),
    ("aiconfigurator", {**GEMM, "seconds": 0.0}, "row 2: seconds is 0.0"),
    ("aiconfigurator", {**GEMM, "m": 1, "n": 8, "k": 8, "seconds": 2e-7}, "row 2: gemm in 2e-07 s .* faster"),
    ("aiconfigurator", {**GEMM, "past": "many"}, "row 2: past is many, expected a number"),
    ("aiconfigurator", {**GEMM, "m": -1}, "file.parquet: row 2: m is -1"),
    ("pipeweave", {**COLLECTIVE, "bytes_per_rank": 10**9, "seconds": 1e-3}, "row 2: all_reduce in 0.001 s .* faster"),
    ("pipeweave", {**COLLECTIVE, "num_workers": 1}, "row 2: num_workers is 1, expected 2 or more"),
    ("miopen", {**CONV, "direction": "sideways"}, "row 2: direction is sideways, expected one of forward"),
    ("miopen", {**CONV, "pad_h": 1, "oh": 5}, r"row 2: oh is 5, expected \(h \+ 2 pad_h"),
    ("miopen", GEMM, "no file of miopen: it has no column solver"),
    ("miopen", {name: value for name, value in CONV.items() if name != "kh"}, "kh"),
])  # fmt: skip
def test_files_that_cannot_be_are_refused(source: str, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=message):
        imported(tmp_path, source, {**row, "suspect_group": True}, row)
