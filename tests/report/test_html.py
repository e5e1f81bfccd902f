"""The HTML report: self-contained, escaped, with the numbers that evaluate gives, and one clear error for bad input."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cdmpp.cli import main
from cdmpp.errors import CdmppError, PredictorError
from cdmpp.predictor import config_from_dict, evaluate, train
from cdmpp.predictor.data import subset
from cdmpp.program.types import Task
from cdmpp.report.content import RunReport, collect_report, latency_decade, seconds_text
from cdmpp.report.html import report_html, write_report
from tests.samples.training import make_data

HOSTILE = "<script>alert('net')</script> & co"


@pytest.fixture(scope="module")
def data():
    made = make_data(n_tasks=40, per_task=4)
    names = {"net0": HOSTILE}
    networks = {t: tuple(names.get(n, n) for n in members) for t, members in made.networks.items()}
    families = {names.get(n, n): f"<{family}>" for n, family in made.families.items()}
    tasks = {t: Task(t, f"<b>conv</b>&{t}", "", {}, 1.0, 1.0, "float32") for t in networks}
    return replace(made, networks=networks, families=families, view=SimpleNamespace(tasks=tasks, parts=()))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    size = {"dim": 8, "layers": 1, "heads": 2, "ffn_dim": 8, "embedding_dim": 8, "decoder_dim": 8}
    config = config_from_dict(
        {
            "model": size,
            "train": {"epochs": 2, "patience": 2, "threads": 1},
            "split": {"spec": "by_task:test=0.4;valid=0.3;seed=0"},
        }
    )
    folder = tmp_path_factory.mktemp("runs") / "run <1>"
    train(config, data, folder)
    return folder


@pytest.fixture(scope="module")
def report(run, data) -> RunReport:
    return collect_report(run, data)


@pytest.fixture(scope="module")
def page(report) -> str:
    return report_html(report)


def test_the_file_is_written(run, data, tmp_path):
    written = write_report(run, tmp_path / "new" / "report.html", data)
    text = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and text == report_html(written)


def test_the_page_loads_nothing(page):
    without_images = re.sub(r'src="data:image/png;base64,[A-Za-z0-9+/=]+"', "", page)
    assert page.count("<img") == 4 and "src=" not in without_images
    assert not re.search(r"https?:|<script|<link|<iframe|@import|url\(", without_images)


def test_numbers_are_those_of_evaluate(report, page, run, data):
    from cdmpp.predictor import Predictor

    scores = evaluate(Predictor.load(run), data, by=("device", "network", "family", "task"))
    assert report.scores == scores
    overall = scores["overall"]
    for key in ("mape", "noise_floor_mape", "median_ape", "within_20pct", "pairwise_accuracy", "top1_regret"):
        assert f">{100 * overall[key]:.1f} %<" in page
    assert f"{100 * overall['interval']['covered']:.1f} %" in page
    slow = scores["groups"]["device"]["slow"]
    assert re.search(rf">slow</td><td>{100 * slow['mape']:.1f} %</td>", page)
    worst = max(scores["groups"]["task"].items(), key=lambda item: item[1]["mape"])
    assert report.worst_tasks[0]["name"] == worst[0] and len(report.worst_tasks) == 20
    assert [row["mape"] for row in report.groups["network"]] == sorted(
        (m["mape"] for m in scores["groups"]["network"].values()), reverse=True
    )
    assert sum(row["n"] for row in report.groups["latency"]) == overall["n"]


def test_bias_is_the_median_ratio(report):
    fast = report.records[report.records["device"] == "fast"]
    expected = (fast["predicted_s"] / fast["latency_s"]).median() - 1
    assert {row["name"]: row["bias"] for row in report.groups["device"]}["fast"] == pytest.approx(expected)


def test_names_are_escaped(page, run):
    assert "&lt;script&gt;alert(&#x27;net&#x27;)&lt;/script&gt; &amp; co" in page
    assert "&lt;b&gt;conv&lt;/b&gt;&amp;t" in page and "&lt;cnn&gt;" in page
    assert "run &lt;1&gt;" in page
    for raw in ("<script", "<b>conv", "<cnn>", "run <1>"):
        assert raw not in page


def test_training_and_interval_figures_need_their_data(report):
    bare = replace(report, history=[], coverage=[], ranking=[])
    text = report_html(bare)
    assert text.count("<img") == 1
    assert "holds no history" in text and "There are none" in text and "two scored programs" in text


def test_other_models_are_shown_where_there_is_a_comparison(run, data, report, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    other = {**report.scores["overall"], "mape": 0.4321}
    (copy / "comparison.json").write_text(json.dumps({"xgb <3>": {"overall": other, "groups": {}}}))
    text = report_html(collect_report(copy, data))
    assert "xgb &lt;3&gt;</td><td>43.2 %" in text
    (copy / "comparison.json").write_text('{"xgb": 1}')
    with pytest.raises(PredictorError, match=r"comparison\.json"):
        collect_report(copy, data)


def test_what_to_know_is_at_the_top(run, data):
    other = subset(data, np.arange(len(data) - 8))
    assert any("not those of the run" in note for note in collect_report(run, other).notes)
    everything = collect_report(run, data, "all")
    assert any("that the predictor was trained on" in note for note in everything.notes)
    assert everything.scores["split"] == "all" and everything.scores["overall"]["n"] == len(data)


@pytest.mark.parametrize(
    ("latency_s", "decade"),
    [(1e-6, "1 us to 10 us"), (9.99e-6, "1 us to 10 us"), (0.5, "100 ms to 1 s"), (3e-9, "1 ns to 10 ns")],
)
def test_decades(latency_s, decade):
    assert latency_decade(latency_s) == decade
    assert seconds_text(1.25e-3) == "1.25 ms"


def test_bad_input_is_one_clear_error(run, data, tmp_path, capsys):
    with pytest.raises(CdmppError, match="no such run folder"):
        collect_report(tmp_path / "none", data)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CdmppError, match=r"config\.yaml"):
        collect_report(tmp_path / "empty", data)
    with pytest.raises(PredictorError, match="names no datasets"):
        collect_report(run)
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path / "r.html")]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("cdmpp: ") and "\n" not in err
    (tmp_path / "file").write_text("")
    with pytest.raises(PredictorError, match="cannot write"):
        write_report(run, tmp_path / "file" / "report.html", data)


def test_matplotlib_missing_is_said(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PredictorError, match=r"cdmpp\[report\]"):
        report_html(report)
