"""A GPU for tunings: programs are unknown before they are found, so what they do is a function of their hashes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.profiler.fake_gpu import FakeGpu

#: To be named in a configuration.
PATH = "tests.tuner.tuning_gpu:TuningGpu"


def made_up_latency_s(digest: str) -> float:
    """Between 10 and 1000 us."""
    return 1e-5 * (1 + int(digest[:4], 16) % 100)


def fails(digest: str) -> bool:
    """Every other program cannot be loaded."""
    return int(digest[5], 16) % 2 == 0


class TuningGpu(FakeGpu):
    """Latency by hash; with ``failing`` every other program cannot be loaded, with ``breaks`` all break the context."""

    def __init__(self, failing: bool = False, breaks: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._failing, self._breaks = failing, breaks

    def _of(self, program: str) -> Mapping[str, Any]:
        return {
            "run_s": made_up_latency_s(program),
            "fault_load": self._failing and fails(program),
            "fault": "first" if self._breaks else "",
            **self.script.get(program, {}),
        }
