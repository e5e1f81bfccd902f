"""A disk of its own, where one can be mounted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A disk that is mounted anew at each call, with these options."""
    folder = tmp_path / "medium"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("cannot mount here")
        return folder

    yield mount
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
