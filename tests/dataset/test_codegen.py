"""Counted instructions kept beside a dataset's records."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from cdmpp.cli import main
from cdmpp.dataset.codegen import load_codegen, save_codegen
from cdmpp.dataset.record import Record, write_parquet
from cdmpp.dataset.store import load_datasets, write_dataset
from cdmpp.device import get_device
from cdmpp.errors import DatasetError
from cdmpp.profiler.compiled import collect_codegen
from cdmpp.profiler.session import ProfileConfig
from cdmpp.program.codegen import CODEGEN_FEATURES, COUNTING_VERSION, ObjectCache
from cdmpp.program.codegen.compile import compile_to_shared_object
from cdmpp.program.codegen.core import counts_key
from cdmpp.program.space import Rebuilder
from tests.samples.programs import matmul_task, sampled

CONFIG = ProfileConfig(builders=1)


def test_counts_round_trip_and_what_is_damaged_or_of_another_version_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    width = len(CODEGEN_FEATURES)
    counts = {(f"p{i}", "k"): rng.integers(0, 999, width).astype(np.float32) for i in range(7)}
    path = tmp_path / "codegen.parquet"
    save_codegen(path, counts)
    back = load_codegen(path)
    assert back.keys() == counts.keys()
    assert all(np.array_equal(back[key], counts[key]) for key in counts)
    table = pq.read_table(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DatasetError, match="damaged"):
        load_codegen(path)
    write_parquet(path, table.drop_columns(["run_all", "unknown_loops"]))
    with pytest.raises(DatasetError, match=r"lacks 2 columns.*run_all first.*cdmpp codegen"):
        load_codegen(path)
    write_parquet(path, table)  # the same columns, of which nobody says how they were counted
    with pytest.raises(DatasetError, match=rf"version 1, this cdmpp counts by {COUNTING_VERSION}; delete it"):
        load_codegen(path)


def test_what_was_compiled_before_is_counted_where_it_lies(tmp_path: Path) -> None:
    jobs = sampled(matmul_task(), 2)
    device, elsewhere = get_device("xeon-cascadelake-2.5ghz@1"), get_device("epyc-zen3-2.45ghz@1")
    records = [Record(job.program.hash, device.name, "ok", 1e-3) for job in jobs]
    spaces = [job.space for job in jobs if job.space is not None]
    for name in ("all", "kept"):
        write_dataset(tmp_path / name, [jobs[0].task], spaces, [job.program for job in jobs], records)
    with pytest.raises(DatasetError, match="h200: only programs compiled for x86 CPUs are counted"):
        collect_codegen(tmp_path / "all", CONFIG, cpus=[get_device("h200")])
    compiled = collect_codegen(tmp_path / "all", CONFIG, cpus=[elsewhere])
    both = {(job.program.hash, counts_key(cpu)) for job in jobs for cpu in (device, elsewhere)}
    assert compiled.keys() == both == load_codegen(tmp_path / "all" / "codegen.parquet").keys()
    first, second = ((job.program.hash, counts_key(device)) for job in jobs)
    assert compiled[first].tolist() != compiled[second].tolist(), "the two must differ"
    # the second one's object under the first one's name shows which is read; what is not kept is compiled
    cache = ObjectCache(tmp_path / "objects", device.target)
    compile_to_shared_object(Rebuilder()(jobs[1].program, jobs[1].task, jobs[1].space), dict(device.target), tmp_path / "p.so")
    cache.keep(first[0], tmp_path / "p.so")
    assert collect_codegen(tmp_path / "kept", replace(CONFIG, build_timeout_s=1e-3)) == {}, "given up"
    found = collect_codegen(tmp_path / "kept", replace(CONFIG, object_cache=str(tmp_path / "objects")))
    assert found[first].tolist() == found[second].tolist() == compiled[second].tolist()


def test_programs_are_compiled_for_a_cpu_elsewhere_and_not_measured(tmp_path: Path) -> None:
    command = "profile mlp --compile-only --device xeon-cascadelake-2.5ghz@1 --builders 1 --resume --programs-per-task"
    for count in ("1", "2"):  # and gone on with
        main([*command.split(), count, "--out", str(tmp_path / "a")])
    view, cpus = load_datasets(tmp_path / "a"), [get_device("xeon-cascadelake-2.5ghz@1"), get_device("epyc-7763@1")]
    assert view.records.empty and {*Counter(p.task_hash for p in view.programs.values()).values()} == {2}
    wanted = {(name, counts_key(cpu)) for name in view.programs for cpu in cpus}
    assert collect_codegen(tmp_path / "a", CONFIG, cpus=cpus[1:]).keys() == wanted
