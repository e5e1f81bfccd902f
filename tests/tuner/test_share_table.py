"""Tuned at x run at, with measurements that are made up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from cdmpp.cli import main
from cdmpp.cli.tune import devices_with_shares
from cdmpp.device import Device
from cdmpp.errors import TunerError
from cdmpp.profiler.engine import BuildJob
from cdmpp.profiler.machine import usable_cores
from cdmpp.tuner.measure import Measurer
from cdmpp.tuner.prepare import device_of_this_machine
from cdmpp.tuner.report import write_report
from cdmpp.tuner.results import TuneReport
from cdmpp.tuner.share_table import best_elsewhere, best_programs, share_table
from cdmpp.tuner.tuning import TuneConfig, tune_tasks
from tests.samples.programs import matmul_task
from tests.samples.tuning import FakeEngine, made_up_latency_s, tune_config

pytestmark = pytest.mark.usefixtures("on_zen3")
two_cores = pytest.mark.skipif(len(usable_cores()) < 2, reason="there is one core: no two shares")

WEIGHTS = {matmul_task(32).hash: 1.0, matmul_task(48).hash: 3.0}


def other_latency_s(digest: str) -> float:
    """At the other share other programs are fast."""
    return made_up_latency_s(digest[::-1])


@pytest.fixture(scope="module")
def tunings(on_zen3: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the same two tasks, for one core and for two."""
    folders = {}
    for device, latency_s in (("this-cpu@1", made_up_latency_s), ("this-cpu@2", other_latency_s)):
        out = tmp_path_factory.mktemp("tuning") / "t"
        tasks = [(matmul_task(n), WEIGHTS[matmul_task(n).hash]) for n in (32, 48)]
        with Measurer(FakeEngine(latency_s)) as measurer:
            report = tune_tasks(
                "toy", tasks, device=device, out=out, config=tune_config(12), measurer=measurer
            )
        write_report(report, out)
        folders[device_of_this_machine(device).name] = out
    return folders


@two_cores
def test_every_tunings_best_is_run_at_every_share(tunings: dict[str, Path]) -> None:
    one, two = tunings
    truth = {one: made_up_latency_s, two: other_latency_s}
    asked: list[tuple[str, int]] = []

    def measure(device: str, jobs: Sequence[BuildJob]) -> Mapping[str, float]:
        asked.append((device, len(jobs)))
        slower = 1 + (len(asked) - 1) // 2  # a repetition after the other
        return {job.program.hash: slower * truth[device](job.program.hash) for job in jobs}

    table = share_table(list(tunings.values()), ["this-cpu@1", "this-cpu@2"], repeats=3, measure=measure)
    assert (table.tuned_at, table.run_at, table.tasks) == ((one, two), (one, two), 2)
    assert [device for device, _ in asked] == [one, two] * 3, "in turn"
    for tuned, folder in tunings.items():
        best = best_programs(folder)
        assert set(best) == set(WEIGHTS)
        for run in tunings:
            sums = sum(WEIGHTS[task] * truth[run](job.program.hash) for task, job in best.items())
            cell = table.cell(tuned, run)
            assert cell.latency_s == pytest.approx(2 * sums), "the median of once, twice and thrice"
            assert cell.ratio == pytest.approx(cell.latency_s / table.cell(run, run).latency_s)  # type: ignore[operator]
    assert table.cell(one, one).ratio == 1.0
    assert table.cell(one, two).spread == pytest.approx(2.0)
    json.dumps(table.to_json(), allow_nan=False)


@two_cores
def test_what_does_not_run_has_no_latency(tunings: dict[str, Path]) -> None:
    one, two = tunings
    table = share_table(
        list(tunings.values()),
        ["this-cpu@2"],
        repeats=1,
        measure=lambda device, jobs: {job.program.hash: 1e-6 for job in jobs[:-1]},
    )
    cells = [table.cell(tuned, two) for tuned in tunings]
    assert any(cell.latency_s is None and cell.ratio is None and cell.spread is None for cell in cells)
    assert table.run_at == (two,) and one in table.tuned_at


@two_cores
def test_tunings_that_do_not_belong_together(tunings: dict[str, Path], tmp_path: Path) -> None:
    first, second = tunings.values()
    with pytest.raises(TunerError, match="different shares"):
        share_table([first, first], ["this-cpu@1"])
    with pytest.raises(TunerError, match="different shares, got none"):
        share_table([], ["this-cpu@1"])
    with pytest.raises(TunerError, match="one repetition at least"):
        share_table([first, second], ["this-cpu@1"], repeats=0)
    with pytest.raises(TunerError, match="is a gpu"):
        share_table([first, second], ["h200"])
    with pytest.raises(TunerError, match="damaged"):
        share_table([tmp_path], ["this-cpu@1"])
    report = first / "report.json"
    text = report.read_text()
    try:
        report.unlink()
        with pytest.raises(TunerError, match="has this tuning been finished"):
            share_table([first, second], ["this-cpu@1"], measure=lambda device, jobs: {})
    finally:
        report.write_text(text)
    settings = second / "tuning.json"
    text = settings.read_text()
    try:
        settings.write_text(text.replace('"toy"', '"other"'))
        with pytest.raises(TunerError, match="different networks: toy, other"):
            share_table([first, second], ["this-cpu@1"])
    finally:
        settings.write_text(text)


def frame_of(rows: Sequence[tuple[str, str, str, float | None]]) -> pd.DataFrame:
    """Records of (device, task, program, seconds)."""
    frame = pd.DataFrame(rows, columns=["device", "task", "program", "latency_s"])
    status = ["ok" if latency_s is not None else "run_error" for latency_s in frame["latency_s"].tolist()]
    return frame.assign(status=status, origin="sampled")


def test_what_records_say_of_shares() -> None:
    """Known answer: in one task the fastest of each share is 1.5 and 2 times as slow at the other, in one it is the same."""
    rows: list[tuple[str, str, str, float | None]] = [
        *(("gpu", "t", f"p{i}", s) for i, s in enumerate((1.0, 2.0, 3.0))),
        *(("gpu@0.5", "t", f"p{i}", s) for i, s in enumerate((6.0, 4.0, 9.0))),
        *(("gpu", "u", f"q{i}", s) for i, s in enumerate((1.0, 2.0, 3.0))),
        *(("gpu@0.5", "u", f"q{i}", s) for i, s in enumerate((2.0, 4.0, 6.0))),
        ("gpu", "t", "only here", 0.1),
        ("gpu@0.5", "u", "q9", 0.1),
        ("gpu", "u", "q9", None),
        *((device, "few", "r", 1.0) for device in ("gpu", "gpu@0.5")),
    ]
    cells = {(c.best_at, c.run_at): c for c in best_elsewhere(frame_of(rows), least=3)}
    assert all(cell.tasks == 2 for cell in cells.values())
    assert cells["gpu", "gpu"].ratio == cells["gpu@0.5", "gpu@0.5"].ratio == 1.0
    assert cells["gpu", "gpu@0.5"].ratio == pytest.approx(1.5**0.5)
    assert cells["gpu", "gpu@0.5"].worst == pytest.approx(1.5)
    assert cells["gpu@0.5", "gpu"].ratio == pytest.approx(2.0**0.5)
    with pytest.raises(TunerError, match="no task has 4 programs"):
        best_elsewhere(frame_of(rows))
    with pytest.raises(TunerError, match="ran on two devices; there are gpu"):
        best_elsewhere(frame_of([row for row in rows if row[0] == "gpu"]), least=3)


def test_shares_on_the_command_line() -> None:
    assert devices_with_shares("this-cpu@1", None) == ["this-cpu@1"]
    assert devices_with_shares("this-cpu@1", "1") == ["this-cpu@1"]
    assert devices_with_shares("this-cpu", "2") == ["this-cpu@2"]
    assert devices_with_shares("this-cpu", "1, 2") == ["this-cpu@1", "this-cpu@2"]
    with pytest.raises(TunerError, match="give the share once"):
        devices_with_shares("this-cpu@1", "2")


def test_several_shares_are_tuned_and_compared_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = device_of_this_machine("this-cpu@1")

    def device_of(device: str, *_: object) -> Device:
        share = device.partition("@")[2]
        return replace(here, name=f"{here.base}@{share}", share=float(share))

    def tune_toy(network: str, *, device: str, out: Path, config: TuneConfig, **_: object) -> TuneReport:
        tasks = [(matmul_task(32), 1.0)]
        with Measurer(FakeEngine()) as measurer:
            report = tune_tasks(network, tasks, device=device, out=out, config=config, measurer=measurer)
        write_report(report, out)
        return report

    for module in ("prepare", "tuning"):
        monkeypatch.setattr(f"cdmpp.tuner.{module}.device_of_this_machine", device_of)
    monkeypatch.setattr("cdmpp.tuner.tuning.tune", tune_toy)
    monkeypatch.setattr(
        "cdmpp.tuner.share_table.measure_alone",
        lambda device, jobs: {job.program.hash: made_up_latency_s(job.program.hash) for job in jobs},
    )
    out, file = tmp_path / "t", tmp_path / "out.json"
    small = ("--batch", "6", "--population", "24", "--generations", "1", "--cost-model", "random")
    args = [
        "tune",
        "toy",
        "--device",
        "this-cpu",
        "--share",
        "1,2",
        "--trials",
        "6",
        "--out",
        str(out),
        *small,
    ]
    assert main([*args, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "tuned at" in shown and "run at" in shown
    found = json.loads(file.read_text())
    assert set(found) == {"tunings", "shares"} and set(found["tunings"]) == {"this-cpu@1", "this-cpu@2"}
    assert len(found["shares"]["cells"]) == 4
    assert sorted(folder.name for folder in out.iterdir()) == ["share-1", "share-2"]
    (out / "share-1").rename(tmp_path / "elsewhere")
    assert main(args) == 2
    assert "share-2 holds a tuning already" in capsys.readouterr().err
    assert not (out / "share-1").exists(), "said before the first is tuned"
