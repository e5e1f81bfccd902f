"""What the documentation shows is true: Python examples run, and commands are taken."""

from __future__ import annotations

import argparse
import doctest
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest

from cdmpp.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMANDS = sorted(
    {
        (page.name, " ".join(shlex.split(line.partition("   ")[0], comments=True)))
        for page in (*PAGES, ROOT / "README.md")
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if line.startswith("cdmpp ") and not line.startswith(("cdmpp as it ships", "cdmpp after learning"))
    }
)


@pytest.mark.parametrize("page", [p for p in PAGES if "```pycon" in p.read_text()], ids=lambda p: p.stem)
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```pycon\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page.stem, str(page), 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[command for _, command in COMMANDS])
def test_commands_are_taken(page: str, command: str) -> None:
    """Their options exist and have the right types; nothing is run."""
    parsed: list[argparse.Namespace] = []
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, args: object = None, namespace: object = None) -> None:
        parsed.append(parse(self, args, namespace))  # type: ignore[call-overload]
        raise SystemExit(0)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop), pytest.raises(SystemExit) as end:
        main(shlex.split(command)[1:])
    assert end.value.code == 0 and parsed
