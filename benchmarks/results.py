"""Writes ``benchmarks/RESULTS.md`` and the generated tables of the README and ``docs/`` from ``benchmarks/results/*.json``.

    python benchmarks/results.py

A result is stale if the code, data or weights that it depends on differ from those of this commit. Tables are written between
``<!-- table: NAME -->`` or ``<!-- result: FILE -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml
from common import REPOSITORY, cell, changed, load_result, markdown_table, tables

Content = Mapping[str, Any]

FOLDER = REPOSITORY / "benchmarks/results"
TABLES = REPOSITORY / "benchmarks/tables.yaml"
OUT = REPOSITORY / "benchmarks/RESULTS.md"
_BLOCK = re.compile(r"(<!-- (table|result): ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load_results(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """All result files, file name -> content; SystemExit for a file without provenance."""
    return {path.name: load_result(path) for path in sorted(folder.glob("*.json"))}


def readme_table(name: str, results: Mapping[str, Content]) -> str:
    """A table of ``tables.yaml`` as Markdown; SystemExit if no result has one of its figures."""
    table = yaml.safe_load(TABLES.read_text(encoding="utf-8"))[name]
    rows = [table["headings"]]
    for line in table["lines"]:
        files = line["file"].split()
        known = {shown["name"]: shown for file in files for shown in results.get(file, {"figures": ()})["figures"]}
        row = [line["title"]]
        for shown in line["figures"]:
            for metric in line.get("metrics", table["metrics"]):
                if metric and metric not in known.get(shown, {"values": ()})["values"]:
                    sys.exit(f"table {name}: {line['file']} has no {metric} of '{shown}'")
                row.append(cell(known[shown], metric) if metric else "")
        rows.append([*row, *["-"] * (len(rows[0]) - len(row))])
    return markdown_table(rows)


def made_by(file: str, content: Content) -> str:
    """File, commit and date in a few words."""
    made = content["provenance"]
    return f"`{file}`: {made['date'][:10]}, commit {(made['commit'] or 'not recorded')[:7]}"


def section(file: str, content: Content) -> str:
    """The section of a result: its command, note and tables."""
    made = content["provenance"]
    table = "\n\n".join(map(markdown_table, tables(content["figures"])))
    note = f"\n{content['note']}\n" if content.get("note") else ""
    return f"## {file}\n\n```\n{made['command']}\n```\n{note}\n{table}\n"


def overview(results: Mapping[str, Content], now: datetime) -> str:
    """A table with the commit, date, age, machine and staleness of every result."""
    lines = [["result", "date", "age in days", "commit", "machine", "stale: changed since"]]
    for file, content in results.items():
        made = content["provenance"]
        commit = (made["commit"] or "not recorded")[:7]
        commit += ", and changes not committed" if made["dirty"] else ""
        commit += " (reconstructed)" if made.get("reconstructed") else ""
        age = (now - datetime.fromisoformat(made["date"])).days
        machine = made["machine"]
        name = machine["name"] + (f", {machine['cores']} cores" if machine.get("cores") else "")
        lines.append([f"[{file}](#{file.replace('.', '')})", made["date"][:10], str(age), commit, name])
        lines[-1].append(", ".join(changed(made)) or "-")
    return markdown_table(lines)


_HEAD = """# Results

Written by `python benchmarks/results.py` from `benchmarks/results/*.json`; every benchmark writes such a file with `--json`.

A cell is a value with the sample standard deviation of repeated runs (±) or their range (in parentheses), and the 95 % interval
of a bootstrap over tasks [in brackets]; figures whose intervals overlap are not called different. Older results
have no intervals. A result is stale where the code (`cdmpp/` or the benchmark), the data or the weights it depends on
have changed since. *Reconstructed*: measured before provenance was recorded; commit, date and digests are those of the commit
that last changed the figures, the machine is what the files of that time say.
"""


def render(results: Mapping[str, Content], now: datetime) -> str:
    """The whole of ``RESULTS.md``."""
    sections = [section(file, content) for file, content in results.items()]
    return "\n".join([_HEAD, f"As of {now.date()}:\n", overview(results, now), "", *sections])


def fill(text: str, results: Mapping[str, Content]) -> str:
    """Fill the generated tables into a text."""

    def block(match: re.Match[str]) -> str:
        begin, kind, name, end = match.groups()
        if kind == "table":
            return f"{begin}{readme_table(name, results)}\n{end}"
        if name not in results:
            sys.exit(f"there is no benchmarks/results/{name}")
        found = "\n\n".join(map(markdown_table, tables(results[name]["figures"])))
        return f"{begin}{found}\n\n{made_by(name, results[name])}.\n{end}"

    return _BLOCK.sub(block, text)


def main() -> None:
    results = load_results()
    texts = {OUT: render(results, datetime.now(timezone.utc))}
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        texts[path] = fill(path.read_text(encoding="utf-8"), results)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
