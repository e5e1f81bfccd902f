"""Counts the tasks of every network of the zoo: ``python -m cdmpp.program.zoo.count_tasks``.

The counts are shipped, because counting takes minutes and listing the zoo must not import TVM.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from cdmpp.program.zoo.registry import zoo_networks


def count_tasks(names: Iterable[str] | None = None) -> dict[str, int]:
    """Number of tasks of each network at batch 1 (all of the zoo if None), by extracting them."""
    from cdmpp.program.tasks import extract_tasks

    return {name: len(extract_tasks([name])) for name in (names if names is not None else zoo_networks())}


def main() -> None:
    """Rewrite the shipped counts."""
    path = Path(__file__).with_name("task_counts.json")
    path.write_text(json.dumps(count_tasks(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
