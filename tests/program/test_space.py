"""Design spaces: unique programs that rebuild exactly, for CPUs and GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cdmpp.errors import ProgramError
from cdmpp.program import import_tvm, structural_hash
from cdmpp.program.space import Rebuilder, TaskSpaces, sample_programs, unscheduled
from cdmpp.program.types import Program, Space, Task
from tests.samples.programs import matmul_task, te_task


@pytest.fixture(scope="module")
def spaces() -> TaskSpaces:
    return TaskSpaces(matmul_task(64))


def parts(program: Program, spaces: TaskSpaces) -> tuple[Program, Task, Space]:
    """What rebuilds a program."""
    return program, spaces.task, next(s for s in spaces.spaces if s.hash == program.space_hash)


def test_programs_are_unique_and_rebuild_exactly(spaces: TaskSpaces) -> None:
    programs = spaces.sample(24, seed=0)
    assert len({p.hash for p in programs}) == len(programs) == 24
    again = Rebuilder()
    for program in programs:
        assert structural_hash(again(*parts(program, spaces))) == program.hash
        assert program.origin == "random"
        assert len(program.decisions) < 400, "a program is stored in some hundred bytes"


def test_the_seed_decides_and_exclusion_works(spaces: TaskSpaces) -> None:
    first = spaces.sample(8, seed=1)
    # the same in every process: records of several runs and machines belong together
    assert [p.hash for p in first[:3]] == ["72b320d9f7da2f41", "2b8652b32fbce7e2", "7fe60691f22569f0"]
    others = spaces.sample(8, seed=1, exclude={p.hash for p in first})
    assert {p.hash for p in others}.isdisjoint(p.hash for p in first)


def test_mutants_are_new_programs_of_the_same_spaces(spaces: TaskSpaces) -> None:
    parents = spaces.sample(6, seed=2)
    mutants = spaces.mutate(parents, 12, seed=0)
    assert len(mutants) >= 8
    assert {m.hash for m in mutants}.isdisjoint(p.hash for p in parents)
    for mutant in mutants:
        assert mutant.origin == "search"
        Rebuilder()(*parts(mutant, spaces))  # raises if it gives another hash


def test_a_task_without_choices_gives_what_it_has() -> None:
    def exponentials(te: Any) -> list[Any]:
        a = te.placeholder((64,), name="A")
        return [a, te.compute((64,), lambda i: import_tvm().tirx.exp(a[i]), name="B")]

    assert 1 <= len(sample_programs(te_task("exp", exponentials), 50)) < 10


def test_cuda_programs_bind_threads() -> None:
    spaces = TaskSpaces(matmul_task(128), "cuda")
    programs = spaces.sample(4, seed=0)
    assert len(programs) == 4
    for program in programs:
        text = Rebuilder()(*parts(program, spaces)).script()
        assert "threadIdx.x" in text and "blockIdx.x" in text


def test_an_unscheduled_program_is_the_task_itself() -> None:
    task = matmul_task(16)
    assert unscheduled(task).implementation == "library"
    assert structural_hash(Rebuilder()(unscheduled(task), task, None)) == task.hash
    with pytest.raises(ProgramError, match="expected 'llvm' or 'cuda'"):
        TaskSpaces(task, "hexagon")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash": "f" * 16}, "replays as"),
        ({"decisions": '[[4,[1,"x"]]]'}, "does not replay"),
        ({"space_hash": "0" * 16}, "needs its design space"),
    ],
)
def test_wrong_decisions_are_refused(spaces: TaskSpaces, change: dict[str, str], message: str) -> None:
    program, *rest = parts(*spaces.sample(1, seed=0), spaces)
    with pytest.raises(ProgramError, match=message):
        Rebuilder()(replace(program, **change), *rest)


def test_tasks_of_one_hash_with_blocks_of_other_names_rebuild_side_by_side() -> None:
    def doubled(name: str, te: Any) -> list[Any]:
        a = te.placeholder((64, 64), name="a")
        return [a, te.compute((64, 64), lambda i, j: a[i, j] * 2.0, name=name)]

    tasks = [te_task("doubled", partial(doubled, name)) for name in ("first", "second")]
    assert tasks[0].hash == tasks[1].hash
    again = Rebuilder()
    for task in tasks:
        spaces = TaskSpaces(task)
        (program,) = spaces.sample(1, seed=0)
        assert structural_hash(again(*parts(program, spaces))) == program.hash
