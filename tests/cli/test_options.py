"""Options and help: examples that parse, lines that fit, settings that are the fields' own."""

from __future__ import annotations

import io
import shlex

import pytest
from rich.console import Console

from cdmpp.cli import _parser, learn, main, options, verb_groups
from cdmpp.cli.options import settings
from cdmpp.errors import CdmppError
from cdmpp.profiler.session import ProfileConfig
from cdmpp.tuner import Objective, TuneConfig
from tests.samples.command import Command

VERBS = {name: run for group in verb_groups().values() for name, (_, run) in group.items()}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_the_help_says_when_to_use_each_verb() -> None:
    text = _parser("").format_help()
    for name, run in VERBS.items():
        when = (run.__doc__ or "").partition("\n")[0].rstrip(".")
        assert f"  {name} " in text and f"  {when}\n" in text
        assert 10 < len(when) <= 88, "with the name, 100 columns"


@pytest.mark.parametrize("name", VERBS)
def test_a_verbs_help_fits_and_ends_in_two_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and max(map(len, lines)) <= 100
    assert lines[-3] == "examples:"
    for example in lines[-2:]:
        words = shlex.split(example.strip().split("   ")[0])
        assert words[:2] == ["cdmpp", name]
        assert _parser(name).parse_args(words[1:]).run is VERBS[name]


def test_settings_are_the_fields_own_defaults_unless_said() -> None:
    parse = _parser().parse_args
    profile = "profile mlp --out x"
    assert settings(parse(profile.split()), ProfileConfig) == ProfileConfig()
    given = settings(parse(f"{profile} --workers 3 --max-seconds 90 --unscheduled".split()), ProfileConfig)
    assert (given.workers, given.max_seconds, given.unscheduled) == (3, 90.0, True)
    tune = "tune mlp --device this-cpu@1 --out x --trials 8 --budget 1h30m --stop-when-gain-per-minute-below 0.5%"
    args = parse(tune.split())
    objective = settings(args, Objective)
    assert objective == Objective(8, budget_s=5400.0, least_gain_per_minute=0.005)
    assert settings(args, TuneConfig, objective=objective) == TuneConfig(objective)


def test_an_option_has_one_name_and_its_former_ones() -> None:
    parse = _parser("measure").parse_args
    now = parse(shlex.split("measure x.bundle --out x --workers 2 --check-per-task 1 --budget 10m"))
    before = parse(shlex.split("measure x.bundle --out x --degree 2 --check 1 --max-seconds 600"))
    assert now == before and now.degree == 2
    assert "--degree" not in _parser("measure").format_help()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no-such-verb"], "invalid choice"),
        (["tune", "mlp"], "required: --device"),
        (["tune", "mlp", "--trials", "many"], "--trials"),
        (["profile", "mlp", "--out", "x", "--workers", "two"], "auto or a whole number"),
        (["profile", "mlp", "--out", "x", "--budget", "soon"], "no duration"),
        (["latency", "mlp", "--device", "t4", "--html", "x"], "--html is of language models and lists of operators"),
        (["latency", "qwen3-8b", "--device", "t4", "--streams", "2"], "--streams is of networks, and qwen3-8b is"),
        (["latency", "x.csv", "--device", "t4", "--tp", "2"], "--tp is of language models, and x.csv is taken for one"),
        (["latency", "mlp", "--device", "t4", "--compile", "2"], "--compile is of networks with --runtime tvm, and mlp is"),
        (["profile", "mlp", "--out", "x", "--library", "--seed", "1"], "--seed is of programs"),
        (["profile", "mlp", "--out", "x", "--remeasure"], "--remeasure needs --programs-of"),
        (["measure", "x.csv", "--out", "x", "--check", "1"], "--check-per-task is of bundles"),
        (["devices", "--ray", "local"], "give both"),
        (["networks", "--json", "no/such/folder/x.json"], "cannot write"),
    ],
)
def test_bad_options_are_one_line(args: list[str], said: str, command: Command) -> None:
    assert said in command.error(*args)


def test_progress_is_a_line_now_and_then_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, lines in ((1e9, 0), (0.0, 2)):
        monkeypatch.setattr(options, "_EVERY_S", seconds)
        text = io.StringIO()
        with options.Bar(Console(file=text, width=100), "measuring") as bar:
            bar.update(1, 9)
            bar.update(2, 9, "1 failed")
        shown = text.getvalue().splitlines()
        assert len(shown) == lines
    assert shown[1].startswith("measuring: 2 of 9, ") and shown[1].endswith("/s, 1 failed")


@pytest.mark.parametrize("name", ["cdmpp", "xeon-cascadelake-2.5ghz.x86-64-v2@1"])
@pytest.mark.parametrize("width", [80, 100])
def test_tables_of_metrics_fit(name: str, width: int) -> None:
    values = dict.fromkeys(learn._METRICS, 0.4321) | {"n": 12345}
    text = io.StringIO()
    learn.show_scores(Console(file=text, width=width), "scores", "device", {name: values})
    heading, row = (line for line in text.getvalue().splitlines() if line[0] in "┃│")
    assert name in row and "43.2 %" in row and "12345" in row
    assert all(word in heading for word in ("MAPE", "median", "pairwise"))


def test_durations_and_fractions() -> None:
    found = [options.duration(t) for t in ("90", "90s", "10m", "1h30m", "1.5h", "2min")]
    assert found == [90, 90, 600, 5400, 5400, 120]
    assert options.fraction("1%") == pytest.approx(0.01) and options.fraction("0.02") == 0.02
    for bad in ("", "ten", "10x", "m", "1..2m"):
        with pytest.raises(CdmppError, match="no duration"):
            options.duration(bad)
    with pytest.raises(CdmppError, match="no fraction"):
        options.fraction("much")
