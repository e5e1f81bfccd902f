"""Profiling goes on through what goes wrong: a short form of the soak."""

from __future__ import annotations

from benchmarks.soak import FATES, fate, programs_of, soak


def test_every_program_is_labelled_or_fails_once(tmp_path) -> None:
    count = 60
    assert {fate(program.hash) for program in programs_of(count, 0.035, 1)} == set(FATES), "all that can go wrong does"
    found = soak(count, 0.035, 1, tmp_path, full_s=0.1)
    assert found["once"] == sum(found["statuses"].values()) == count
    assert not found["other status than expected"] and not found["damaged rows"]
    assert len(found["interruptions"]) == 2 and all("full" in text for text in found["interruptions"])
    assert found["memory grew by MB"] < 64
