"""The HTML report: self-contained, escaped, with the numbers that evaluate gives, and one clear error for bad input."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cdmpp.errors import CdmppError, PredictorError
from cdmpp.files import seconds_text
from cdmpp.predictor import Predictor, evaluate, train
from cdmpp.predictor.data import subset
from cdmpp.program.types import Task
from cdmpp.report.content import RunReport, collect_report, latency_decade
from cdmpp.report.html import report_html, write_report
from tests.samples.training import make_data, small_config

HOSTILE = "<script>alert('net')</script> & co"


@pytest.fixture(scope="module")
def data():
    made = make_data(n_tasks=40, per_task=4)
    # net1 in as many sizes as it has tasks
    networks = {t: (HOSTILE if n == "net0" else n + f"@s{t}" * (n == "net1"),) for t, (n,) in made.networks.items()}
    families = {networks[t][0]: f"<{made.families[n]}>" for t, (n,) in made.networks.items()}
    tasks = {t: Task(t, f"<b>conv</b>&{t}", "", {}, 1.0, 1.0, "float32") for t in networks}
    return replace(made, networks=networks, families=families, view=SimpleNamespace(tasks=tasks, parts=()))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run <1>"
    train(small_config("by_task:test=0.4;valid=0.3;seed=0", epochs=2), data, folder)
    return folder


@pytest.fixture(scope="module")
def written(run, data, tmp_path_factory) -> tuple[RunReport, str]:
    """The numbers, and the file that they are in."""
    path = tmp_path_factory.mktemp("written") / "new" / "report.html"
    return write_report(run, path, data), path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def report(written) -> RunReport:
    return written[0]


@pytest.fixture(scope="module")
def page(written) -> str:
    return written[1]


@pytest.fixture
def page_of(report, monkeypatch) -> Callable[..., str]:
    """The page of a report that differs in this, without pictures."""
    monkeypatch.setattr("cdmpp.report.html.scatter_figures", lambda *_: {})
    return lambda **changes: report_html(replace(report, ranking=[], coverage=[], history=[], **changes))


def test_the_page_loads_nothing(page):
    without_images = re.sub(r'src="data:image/png;base64,[A-Za-z0-9+/=]+"', "", page)
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<img") == 8 and "src=" not in without_images
    assert not re.search(r"https?:|<script|<link|<iframe|@import|url\(", without_images)


def test_numbers_are_those_of_evaluate(report, page, run, data):
    scores = evaluate(Predictor.load(run), data, by=("device", "network", "family", "task"))
    assert report.scores == scores
    overall = scores["overall"]
    for key in ("mape", "noise_floor_mape", "median_ape", "within_20pct", "pairwise_accuracy", "top1_regret"):
        assert f">{100 * overall[key]:.1f} %<" in page
    assert f"{100 * overall['interval']['covered']:.1f} %" in page
    slow = scores["groups"]["device"]["slow"]
    assert re.search(rf">slow</td><td>{100 * slow['mape']:.1f} %</td>", page)
    worst = max(scores["groups"]["task"].items(), key=lambda item: item[1]["mape"])
    assert report.groups["task"][0]["name"] == worst[0]
    assert sum(row["n"] for row in report.groups["latency"]) == overall["n"]


def test_the_worst_come_first_with_their_bias(report):
    for grouping in ("device", "network", "family", "task"):
        mapes = [row["mape"] for row in report.groups[grouping]]
        assert mapes == sorted(mapes, reverse=True) and len(mapes) > 1
    fast = report.records[report.records["device"] == "fast"]
    median = (fast["predicted_s"] / fast["latency_s"]).median()
    assert {row["name"]: row["bias"] for row in report.groups["device"]}["fast"] == pytest.approx(median - 1)


def test_sizes_of_a_network_are_one_row_with_the_sizes_below_it(report, page):
    rows = {row["name"]: row for row in report.groups["network"]}
    assert set(rows) == {HOSTILE, "net1", "net2", "net3"}
    sizes = rows["net1"]["sizes"]
    assert {row["name"] for row in sizes} == {name for name in report.scores["groups"]["network"] if name.startswith("net1@")}
    assert [row["mape"] for row in sizes] == sorted((row["mape"] for row in sizes), reverse=True)
    assert rows["net1"]["n"] == sum(row["n"] for row in sizes)
    assert "sizes" not in rows["net2"]
    (body,) = re.findall(rf"<tbody><tr><td[^>]*><details><summary>net1 \({len(sizes)} sizes\).*?</tbody>", page)
    assert body.count('<tr class="size">') == len(sizes) == page.count('<tr class="size">')


@pytest.mark.parametrize(("n", "shown", "folded"), [(15, 15, 0), (16, 15, 1), (40, 15, 25)])
def test_fifteen_rows_are_shown_and_the_rest_is_folded(report, page_of, n, shown, folded):
    names = [f"d{i:02d}" for i in range(n)]
    rows = [{**report.groups["device"][0], "name": name} for name in names]
    text = page_of(groups={**report.groups, "device": rows})
    table = text[text.index("By device") : text.index("By network")]
    assert re.findall(r'<tbody><tr><td class="text">(d\d\d)<', table) == names[:shown]
    assert re.findall(r'<tbody class="rest"><tr><td class="text">(d\d\d)<', table) == names[shown:]
    assert (f"<summary>{folded} more</summary>" in table) == bool(folded)
    assert "table:not(:has(.more[open])) .rest { display: none; }" in text


def test_hundreds_of_names_are_no_wall(report, page_of):
    networks = [f"net{i}@s{size}" for i in range(30) for size in range(13)]
    devices = {f"gpu{i}": 7 for i in range(16)}
    text = page_of(training={**report.training, "networks": networks, "records_by_device": devices})
    assert "<details><summary>30 networks</summary>net0 (13 sizes), net1 (13 sizes)," in text
    assert "<details><summary>16 devices</summary>gpu0: 7," in text
    assert "net0@s0" not in text


def test_nothing_is_wider_than_the_page(page):
    """What can be wide scrolls by itself or wraps, and no element asks for a width."""
    style = page[page.index("<style>") : page.index("</style>")]
    assert page.count("<table>") == page.count('<div class="scroll"><table>') > 5
    assert "pre, .scroll { overflow-x: auto; }" in style and "img { max-width: 100%;" in style
    assert "h1, p, pre, .text { overflow-wrap: anywhere; }" in style
    assert not re.search(r"<[a-z]+ [^>]*\b(width|style)=[^>]*>", page[page.index("<body>") :])
    # on a phone a table keeps its name and three columns
    assert re.search(r"@media screen and \(max-width: \d+rem\) \{ \.wide \{ display: none; \}", style)
    header = page[page.index("<thead>") : page.index("</thead>")]
    assert re.findall(r'<th(?: class="text")?>([^<]*)<', header) == ["device", "MAPE", "bias", "n"]


def test_columns_that_no_row_knows_are_left_out(report, page_of):
    rows = [{**row, "spearman": None} for row in report.groups["device"]]
    assert "Spearman" in page_of()
    assert "Spearman" not in page_of(groups=dict.fromkeys(report.groups, rows))


def test_names_are_escaped(page, run):
    assert "&lt;script&gt;alert(&#39;net&#39;)&lt;/script&gt; &amp; co" in page
    assert "&lt;b&gt;conv&lt;/b&gt;&amp;t" in page and "&lt;cnn&gt;" in page
    assert "run &lt;1&gt;" in page
    for raw in ("<script", "<b>conv", "<cnn>", "run <1>"):
        assert raw not in page


def test_training_and_interval_figures_need_their_data(report):
    text = report_html(replace(report, history=[], coverage=[], ranking=[]))
    assert text.count("<img") == 2
    assert "has no history" in text and "There are none" in text and "two scored programs" in text


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


def test_bad_input_is_one_clear_error(run, data, tmp_path, command):
    for folder, of, message in (
        (tmp_path / "none", data, "no such run folder"),
        (tmp_path, data, r"config\.yaml"),
        (run, None, "names no datasets"),
    ):
        with pytest.raises(CdmppError, match=message):
            collect_report(folder, of)
    assert "no such run folder" in command.error("report", tmp_path / "none", "--out", tmp_path / "r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(PredictorError, match="cannot write"):
        write_report(run, tmp_path / "file" / "report.html", data)


def test_matplotlib_missing_is_said(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PredictorError, match=r"cdmpp\[report\]"):
        report_html(report)
