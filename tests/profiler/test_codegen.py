"""Counting the instructions of compiled programs."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from cdmpp.dataset.parquet import write_parquet
from cdmpp.dataset.record import Record
from cdmpp.dataset.store import write_dataset
from cdmpp.errors import DatasetError, ProfilerError
from cdmpp.profiler.build import ObjectCache, code_key, compile_to_shared_object
from cdmpp.profiler.codegen import (
    CODEGEN_FEATURES,
    COUNTING_VERSION,
    codegen_features,
    count,
    kinds_of,
    parse_disassembly,
)
from cdmpp.profiler.codegen_store import collect_codegen, load_codegen, save_codegen
from cdmpp.program.space import Rebuilder
from tests.samples.programs import matmul_task, sampled

LISTING = """
x.so:     file format elf64-x86-64

0000000000001000 <__tvm_ffi_main>:
    1000:\tpush   %rbp
    1001:\tret

0000000000001010 <main_compute_>:
    1010:\tvxorps %xmm0,%xmm0,%xmm0
    1014:\tvbroadcastss (%rdi),%zmm1
    101a:\tvfmadd231ps (%rsi),%zmm1,%zmm0
    1020:\tvmovups %zmm0,0x40(%rsp)
    1026:\tadd    $0x40,%rsi
    102a:\tjne    101a <main_compute_+0xa>
    102c:\tvaddss (%rdx),%xmm0,%xmm0
    1030:\tvmovss %xmm0,(%rdx)
    1034:\tjne    1014 <main_compute_+0x4>
    1036:\tvgatherdps (%rsi,%xmm1,4),%xmm2{%k1}
    103c:\tret
""".splitlines()


def _counts() -> dict[str, float]:
    found = count(parse_disassembly(LISTING))
    return dict(zip(CODEGEN_FEATURES, found.tolist(), strict=True))


def test_known_answer_of_a_whole_program() -> None:
    counts = _counts()
    assert counts["program_all"] == 11  # the wrapper is not counted
    assert counts["program_fma_z"] == 1 and counts["program_load_z"] == 1
    assert counts["program_fp_s"] == 1 and counts["program_store_s"] == 1
    assert counts["program_load_s"] == 2  # a broadcast loads one element
    assert counts["program_store_z"] == 1 and counts["program_stack_store"] == 1
    assert counts["program_broadcast"] == 1 and counts["program_gather"] == 1
    assert counts["program_branch"] == 2


def test_known_answer_of_the_hottest_loop() -> None:
    counts = _counts()
    assert counts["innermost_loops"] == 1
    assert counts["loop_depth"] == 1  # one loop around it
    assert counts["loop_all"] == 4
    assert counts["loop_fma_z"] == 1 and counts["loop_broadcast"] == 0 and counts["loop_branch"] == 1


@pytest.mark.parametrize(
    ("operation", "operands", "kind"),
    [
        ("vfmadd213ss", "%xmm1,%xmm2,%xmm3", "fma_s"),
        ("mulps", "%xmm1,%xmm2", "fp_x"),  # as CPUs without AVX have it
        ("addss", "(%rax),%xmm2", "fp_s"),
        ("divps", "%xmm1,%xmm2", "div"),
        ("shufps", "$0x0,%xmm1,%xmm2", "shuffle"),
        ("movups", "(%rax),%xmm0", "load_x"),
        ("movaps", "%xmm0,0x10(%rsp)", "stack_store"),
        ("cvtsi2ss", "%eax,%xmm0", "convert"),
        ("vmulps", "%ymm1,%ymm2,%ymm3", "fp_y"),
        ("vdivps", "%xmm1,%xmm2,%xmm3", "div"),
        ("vunpcklps", "%xmm1,%xmm2,%xmm3", "shuffle"),
        ("vmovups", "(%rax),%ymm0", "load_y"),
        ("vmovups", "%xmm0,(%rax)", "store_x"),
        ("mov", "0x8(%rsp),%rax", "stack_load"),
        ("kxnorw", "%k0,%k0,%k1", "mask"),
        ("idiv", "%ecx", "idiv"),
        ("call", "1030 <expf@plt>", "call"),
    ],
)
def test_kinds(operation: str, operands: str, kind: str) -> None:
    assert kind in kinds_of(operation, operands)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_a_compiled_program_is_counted(tmp_path: Path) -> None:
    from cdmpp.program.tvm_env import import_tvm

    tvm = import_tvm()
    from tvm import te

    a = te.placeholder((256,), name="a")
    func = te.create_prim_func([a, te.compute((256,), lambda i: a[i] * 2.0, name="b")])
    compile_to_shared_object(func, {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}, tmp_path / "p.so")
    counts = dict(zip(CODEGEN_FEATURES, codegen_features(tmp_path / "p.so"), strict=True))
    assert (
        counts["program_fp_y"] + counts["program_fma_y"] > 0
    )  # 256-bit registers, for the target has no wider
    assert counts["program_fp_z"] == counts["program_load_z"] == 0
    assert tvm is not None


def test_what_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.so"
    path.write_text("not an object")
    with pytest.raises(ProfilerError, match="objdump"):
        codegen_features(path)


def test_counts_round_trip_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    width = len(CODEGEN_FEATURES)
    counts = {(f"p{i}", "k"): rng.integers(0, 999, width).astype(np.float32) for i in range(7)}
    path = tmp_path / "codegen.parquet"
    save_codegen(path, counts)
    back = load_codegen(path)
    assert back.keys() == counts.keys()
    assert all(np.array_equal(back[key], counts[key]) for key in counts)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DatasetError, match="damaged"):
        load_codegen(path)


def test_counts_of_another_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "codegen.parquet"
    save_codegen(path, {("p", "k"): np.zeros(len(CODEGEN_FEATURES), dtype=np.float32)})
    table = pq.read_table(path)
    write_parquet(path, table.drop_columns(["run_all", "unknown_loops"]))
    with pytest.raises(DatasetError, match=r"lacks 2 columns.*run_all first.*cdmpp codegen"):
        load_codegen(path)
    write_parquet(path, table)  # the same columns, of which nobody says how they were counted
    with pytest.raises(DatasetError, match=rf"version 1, this cdmpp counts by {COUNTING_VERSION}; delete it"):
        load_codegen(path)


def test_the_number_of_cores_does_not_change_the_code() -> None:
    target = {"kind": "llvm", "mcpu": "cascadelake"}
    assert code_key({**target, "num-cores": 1}) == code_key({**target, "num-cores": 2})
    assert code_key({**target, "mcpu": "x86-64-v2"}) != code_key(target)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_what_was_compiled_before_is_counted_where_it_lies(tmp_path: Path) -> None:
    from cdmpp.device import get_device

    jobs = sampled(matmul_task(), 2)
    device = get_device("xeon-cascadelake-2.5ghz@1")
    for name in ("all", "kept"):
        records = [
            Record(job.program.hash, device.name, "ok", 1e-3, (1e-3,), measured_at=0.0) for job in jobs
        ]
        spaces = {job.space.hash: job.space for job in jobs if job.space is not None}
        programs = [job.program for job in jobs]
        write_dataset(tmp_path / name, [jobs[0].task], spaces.values(), programs, records)
    compiled = collect_codegen(tmp_path / "all")
    first, second = ((job.program.hash, code_key(device.target)) for job in jobs)
    assert compiled[first].tolist() != compiled[second].tolist(), "the first must be told from the second"
    # the second one's object under the first one's name shows which is read; what is not kept is compiled
    cache = ObjectCache(tmp_path / "objects", device.target)
    compile_to_shared_object(
        Rebuilder()(jobs[1].program, jobs[1].task, jobs[1].space), dict(device.target), tmp_path / "p.so"
    )
    cache.keep(first[0], tmp_path / "p.so")
    found = collect_codegen(tmp_path / "kept", object_cache=tmp_path / "objects")
    assert found[first].tolist() == found[second].tolist() == compiled[second].tolist()
