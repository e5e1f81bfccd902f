"""Validity labels: the rules, what is compiled, and a collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cdmpp.dataset import Dataset
from cdmpp.errors import DatasetError, ProfilerError, ProgramError
from cdmpp.profiler.gpu.bundle import CudaProgram
from cdmpp.profiler.gpu.compile import Compiled, CompileError, KernelResources, find_nvcc
from cdmpp.profiler.validity import (
    ARCHS,
    ValidityConfig,
    Verdict,
    draw_archs,
    judge,
    load_verdicts,
    rule_fault,
)
from cdmpp.profiler.validity_run import AST_FILE, PROGRAMS_FOLDER, collect_validity
from cdmpp.program.ast.store import load_asts
from cdmpp.program.space import Rebuilder
from tests.samples.gpu import toy_program
from tests.samples.programs import matmul_task

EVERYWHERE = ValidityConfig(part=1.0, everywhere=1.0, audit=0.0)


class FakeCompiler:
    """Compiles everything, or nothing."""

    name = "fake"

    def __init__(self, registers: int = 20, error: str = "") -> None:
        self.registers, self.error = registers, error
        self.asked: list[str] = []

    def supports(self, arch: str) -> bool:
        return True

    def compile(self, source: str, arch: str) -> Compiled:
        self.asked.append(arch)
        if self.error:
            raise CompileError(self.error)
        return Compiled(b"", {"main_kernel": KernelResources(self.registers, 8, 8, 64, 16)})


def program(threads: int = 64, shared: int = 0, source: str = "") -> CudaProgram:
    toy = toy_program()
    launch = replace(toy.launches[0], grid=(9, 1, 1), block=(threads, 1, 1), shared_bytes=shared)
    return replace(toy, launches=(launch,), source=source or toy.source)


def verdicts(
    cuda: CudaProgram, config: ValidityConfig = EVERYWHERE, compiler: FakeCompiler | None = None
) -> Mapping[str, Verdict]:
    compiler = compiler or FakeCompiler()
    return {v.arch: v for v in judge("p", cuda, lambda: cuda, config, lambda arch: compiler)}


def test_a_program_within_limits_is_valid_with_its_resources() -> None:
    found = verdicts(program(shared=128))
    assert set(found) == set(ARCHS)
    for verdict in found.values():
        assert verdict.valid and verdict.compiled and verdict.kind == ""
        assert (verdict.threads, verdict.blocks, verdict.shared_declared_bytes) == (64, 9, 128)
        assert (verdict.registers, verdict.spill_store_bytes, verdict.stack_bytes) == (20, 8, 16)


def test_rules_decide_without_the_compiler() -> None:
    compiler = FakeCompiler()
    for cuda, kind in ((program(threads=2048), "threads"), (program(shared=50_000), "shared")):
        found = verdicts(cuda, compiler=compiler)
        assert {v.kind for v in found.values()} == {kind}
        assert not any(v.valid or v.compiled for v in found.values())
    assert compiler.asked == []


def test_opting_in_to_more_shared_memory_is_told_by_architecture() -> None:
    found = verdicts(program(shared=100 * 1024))
    assert {arch for arch, v in found.items() if v.fits_opt_in} == {"sm_80", "sm_90"}
    assert not any(v.valid for v in found.values())


def test_asynchronous_copies_need_ampere() -> None:
    cuda = replace(program(), async_copies=True)
    assert rule_fault(cuda, "sm_75") == ("async", "it copies asynchronously, which sm_75 cannot")
    found = verdicts(cuda)
    assert {arch for arch, v in found.items() if v.valid} == {"sm_80", "sm_86", "sm_90"}


def test_what_the_compiler_says_is_the_label() -> None:
    found = verdicts(program(threads=1024), compiler=FakeCompiler(registers=65))
    assert {v.kind for v in found.values()} == {"registers"}
    found = verdicts(program(), compiler=FakeCompiler(error="uses too much shared data"))
    assert {v.kind for v in found.values()} == {"shared"}
    found = verdicts(program(), compiler=FakeCompiler(error="expected a ;"))
    assert {(v.kind, v.error) for v in found.values()} == {("compile", "expected a ;")}


def test_a_rule_can_be_contradicted_by_the_compiler() -> None:
    audited = replace(EVERYWHERE, audit=1.0)
    found = verdicts(program(shared=50_000), audited)
    assert all(v.valid and v.compiled and v.rule == "shared" for v in found.values())
    found = verdicts(program(shared=50_000), audited, FakeCompiler(error="whatever"))
    assert all(not v.valid and v.compiled and v.kind == "shared" for v in found.values())


def test_most_programs_are_compiled_for_one_architecture() -> None:
    config = ValidityConfig(everywhere=0.1)
    drawn = [draw_archs(f"p{i}", config) for i in range(400)]
    assert drawn == [draw_archs(f"p{i}", config) for i in range(400)]
    several = sum(len(archs) > 1 for archs in drawn)
    assert 20 <= several <= 65
    assert {archs[0] for archs in drawn if len(archs) == 1} == set(ARCHS)
    found = verdicts(program(), replace(EVERYWHERE, everywhere=0.0))
    assert [v.compiled for v in found.values()].count(True) == 1


def test_long_sources_are_judged_by_the_rules() -> None:
    config = replace(EVERYWHERE, long_source_bytes=10, long_part=0.0)
    compiler = FakeCompiler()
    found = verdicts(program(), config, compiler)
    assert all(v.valid and not v.compiled for v in found.values()) and not compiler.asked
    # Unless alignment may take them over the limit.
    verdicts(program(shared=49_000), config, compiler)
    assert compiler.asked


def test_what_does_not_end_is_known_before() -> None:
    said: list[Verdict] = []
    judge("p", program(), program, EVERYWHERE, lambda arch: FakeCompiler(), said.append)
    assert [v.arch for v in said] == list(ARCHS)
    assert {(v.valid, v.kind) for v in said} == {(False, "timeout")}


def test_what_no_rule_excludes_and_is_not_compiled_is_valid() -> None:
    compiler = FakeCompiler()
    found = verdicts(program(), replace(EVERYWHERE, part=0.0), compiler)
    assert all(v.valid and not v.compiled for v in found.values()) and not compiler.asked


def test_what_does_not_lower_is_invalid_everywhere() -> None:
    def full() -> CudaProgram:
        raise ProgramError("unrolled beyond measure")

    found = judge("p", program(), full, EVERYWHERE, lambda arch: FakeCompiler())
    assert {(v.arch, v.valid, v.kind) for v in found} == {(a, False, "lowering") for a in ARCHS}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that has a task of the network ``mlp``."""
    path = tmp_path_factory.mktemp("tasks") / "d"
    with Dataset.create(path) as dataset:
        dataset.add_task(replace(matmul_task(128), networks={"mlp": 1.0}))
    return path


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_a_collection_can_be_extended_and_rebuilt(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "v"
    config = ValidityConfig(
        archs=("sm_80", "sm_90"), programs=3, part=0.5, everywhere=0.0, long_source_bytes=4000
    )
    first = collect_validity(["mlp"], out, config, tasks_of=source)
    assert first["programs"] == 3
    before = load_verdicts(out)
    with pytest.raises(DatasetError, match="--resume"):
        collect_validity(["mlp"], out, config, tasks_of=source)
    second = collect_validity(["mlp"], out, replace(config, programs=5), tasks_of=source, resume=True)
    assert second["programs"] == 5
    frame = load_verdicts(out)
    assert set(before["program"]) < set(frame["program"])
    assert not frame.duplicated(["program", "arch"]).any()
    assert set(load_asts(out / AST_FILE)) == set(frame["program"])
    programs = Dataset.open(out / PROGRAMS_FOLDER)
    rebuild = Rebuilder(verify=False)
    for digest in set(frame["program"]):
        program = programs.programs[digest]
        rebuild(program, programs.tasks[program.task_hash], programs.spaces[str(program.space_hash)])
    assert {p.name for p in out.iterdir()} == {
        "programs",
        "validity.parquet",
        "asts.parquet",
        "validity.json",
    }


def test_bad_requests_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ProfilerError, match="no CUDA compiler for sm_1"):
        collect_validity(["mlp"], tmp_path / "v", ValidityConfig(archs=("sm_1",)), tasks_of=source)
    with pytest.raises(DatasetError, match="no validity data"):
        load_verdicts(tmp_path)
