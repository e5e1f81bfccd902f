"""Design spaces: unique programs that rebuild exactly, for CPUs and GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cdmpp.errors import ProgramError
from cdmpp.program.space import Rebuilder, TaskSpaces, rebuild, sample_programs, unscheduled
from cdmpp.program.tvm_env import structural_hash
from cdmpp.program.types import Task
from tests.samples.programs import matmul_task, te_task


@pytest.fixture(scope="module")
def spaces() -> TaskSpaces:
    return TaskSpaces(matmul_task(64))


def test_programs_are_unique_and_rebuild_exactly(spaces: TaskSpaces) -> None:
    programs = spaces.sample(24, seed=0)
    by_hash = {s.hash: s for s in spaces.spaces}
    assert len({p.hash for p in programs}) == len(programs) == 24
    again = Rebuilder()
    for program in programs:
        func = again(program, spaces.task, by_hash[str(program.space_hash)])
        assert structural_hash(func) == program.hash
        assert program.origin == "random"
        assert len(program.decisions) < 400, "a program is stored in some hundred bytes"


def test_the_seed_decides_and_exclusion_works(spaces: TaskSpaces) -> None:
    first = spaces.sample(8, seed=1)
    assert [p.hash for p in spaces.sample(8, seed=1)] == [p.hash for p in first]
    others = spaces.sample(8, seed=1, exclude={p.hash for p in first})
    assert {p.hash for p in others}.isdisjoint(p.hash for p in first)


def test_mutants_are_new_programs_of_the_same_spaces(spaces: TaskSpaces) -> None:
    parents = spaces.sample(6, seed=2)
    mutants = spaces.mutate(parents, 12, seed=0)
    by_hash = {s.hash: s for s in spaces.spaces}
    assert len(mutants) >= 8
    assert {m.hash for m in mutants}.isdisjoint(p.hash for p in parents)
    for mutant in mutants:
        assert mutant.origin == "search"
        spaces.rebuild(mutant, by_hash[str(mutant.space_hash)])  # raises if it gives another hash


def test_a_task_without_choices_gives_what_it_has() -> None:
    task = te_task("exp", lambda te: _exp(te))
    programs = sample_programs(task, 50)
    assert 1 <= len(programs) < 10


def _exp(te: object) -> list[object]:
    import tvm

    a = te.placeholder((64,), name="A")  # type: ignore[attr-defined]
    return [a, te.compute((64,), lambda i: tvm.tirx.exp(a[i]), name="B")]  # type: ignore[attr-defined]


def test_cuda_programs_bind_threads() -> None:
    spaces = TaskSpaces(matmul_task(128), "cuda")
    programs = spaces.sample(4, seed=0)
    by_hash = {s.hash: s for s in spaces.spaces}
    assert len(programs) == 4
    for program in programs:
        text = rebuild(program, spaces.task, by_hash[str(program.space_hash)]).script()
        assert "threadIdx.x" in text and "blockIdx.x" in text


def test_an_unscheduled_program_is_the_task_itself() -> None:
    task = matmul_task(16)
    program = unscheduled(task)
    assert program.implementation == "library"
    assert structural_hash(rebuild(program, task, None)) == task.hash


def test_wrong_decisions_are_refused(spaces: TaskSpaces) -> None:
    program = spaces.sample(1, seed=0)[0]
    space = next(s for s in spaces.spaces if s.hash == program.space_hash)
    with pytest.raises(ProgramError, match="replays as"):
        rebuild(replace(program, hash="f" * 16), spaces.task, space)
    with pytest.raises(ProgramError, match="does not replay"):
        rebuild(replace(program, decisions='[[4,[1,"x"]]]'), spaces.task, space)
    with pytest.raises(ProgramError, match="needs its design space"):
        rebuild(program, spaces.task, None)


def test_unknown_rule_set() -> None:
    with pytest.raises(ProgramError, match="expected 'llvm' or 'cuda'"):
        TaskSpaces(matmul_task(16), "hexagon")


def test_tasks_of_one_hash_with_blocks_of_other_names_rebuild_side_by_side() -> None:
    def doubled(name: str) -> Task:
        def make(te: Any) -> list[Any]:
            a = te.placeholder((64, 64), name="a")
            return [a, te.compute((64, 64), lambda i, j: a[i, j] * 2.0, name=name)]

        return te_task("doubled", make)

    tasks = [doubled("first"), doubled("second")]
    assert tasks[0].hash == tasks[1].hash
    again = Rebuilder()
    for task in tasks:
        spaces = TaskSpaces(task)
        (program,) = spaces.sample(1, seed=0)
        (space,) = [s for s in spaces.spaces if s.hash == program.space_hash]
        assert structural_hash(again(program, task, space)) == program.hash
