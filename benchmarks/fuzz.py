"""Damaged and hostile files: every reader says what is wrong in one line, and never runs code from the file.

``python benchmarks/fuzz.py --inputs 10000 --json benchmarks/results/fuzz.json`` (some minutes a kind on one core).

An input is a file written by cdmpp with a few changes: bytes flipped, cut, repeated or inserted (pickles, YAML tags and deep
nesting among them), or changed values inside of JSON, parquet, SQLite, safetensors and zip, so that checksums stay right. It
is accepted, or refused with an error of :mod:`cdmpp.errors`. Anything else is a finding: another error, more than ``--limit``
seconds or 3 GiB, a dead process, or the file that inserted code would create. Each kind is read in a process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from common import DEFAULT_WEIGHTS, arguments, figure, provenance, report, start

from cdmpp import Predictor, compact_ast
from cdmpp.dataset import Dataset, Record
from cdmpp.dataset.operators import load_operators
from cdmpp.device import get_device
from cdmpp.device.table import read_device_file
from cdmpp.errors import CdmppError
from cdmpp.predictor.config import Config, dump_config, load_config
from cdmpp.predictor.predictor import load_program
from cdmpp.profiler.gpu.bundle import Bundle, BundledProgram, CudaProgram, Launch, read_bundle, write_bundle
from cdmpp.profiler.session import read_task_file
from cdmpp.program import import_tvm
from cdmpp.program.graph import FORMAT, load_graph
from cdmpp.program.llm import load_decoder
from cdmpp.program.operators import read_operators
from cdmpp.program.types import Program, Space, Task

#: Bytes that a process may allocate, and seconds in which a new process must start and read its first input.
_MEMORY, _START_S = 3 << 30, 120.0
#: Placeholder in inserted bytes for the path of the canary: the file that exists only if inserted code was run.
_CANARY = b"CANARY"
_TOKENS = [
    b"cos\nsystem\n(S'touch CANARY'\ntR.", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch CANARY\x85R.",
    b'!!python/object/apply:os.system ["touch CANARY"]', b"*a", b"&a [*a]", b"[" * 5000, b'{"a":' * 3000, b"\0" * 64,
    b"\xff\xfe", b"NaN", b"-1e999", b"1" * 400, b"null", b"\xed\xa0\x80", b"9223372036854775808", b'"', b"}", b"\n", b",",
]  # fmt: skip
_VALUES: list[Any] = [
    None, True, -1, 0, 2**63, 10**40, 1e308, float("nan"), "", "x" * 70_000, "\0", "os.system('touch CANARY')", [], {}, [[]],
    {"": None}, "../../../etc/passwd", "1" * 5000,
]  # fmt: skip


# -- samples: files as cdmpp writes them ---------------------------------------------------------------------------


def _dataset(folder: Path, finish: bool) -> Path:
    task = Task("t", "double", "{}", {"net": 1.0}, 1e3, 1e3)
    space = Space("s", "t", "llvm", 0, 0, "[]")
    dataset = Dataset.open_or_create(folder / "dataset")
    dataset.set_device(get_device("xeon-cascadelake-2.5ghz@1"))
    dataset.add_task(task)
    dataset.add_space(space)
    for i in range(8):
        dataset.add_program(Program(f"p{i}", "t", "s", json.dumps([i])))
        found: Any = ("ok", 1e-4 * (i + 1), (1e-4, 1.1e-4), 0.01) if i < 6 else ("run_error", None, (), None)
        took = {"build_s": 0.5, "run_s": 0.1}
        dataset.add_record(Record(f"p{i}", "xeon-cascadelake-2.5ghz@1", *found, measured_at=1.0, meta=took))
    if finish:
        dataset.finalize()
    dataset.close()
    return folder / "dataset"


def _bundle(folder: Path) -> Path:
    task, spec = Task("t", "double", "{}", {"net": 1.0}, 1e3, 1e3), ((512,), "float32")
    launch = Launch((8, 1, 1), (64, 1, 1), kernel="main_kernel", buffers=(0, 1))
    cuda = CudaProgram('extern "C" __global__ void main_kernel() {}', (spec, spec), (1,), (), (launch,))
    kernels = [BundledProgram("p0", cuda, b"cubin", {"main_kernel": {"registers": 10}}), BundledProgram("p1", None)]
    programs = {f"p{i}": Program(f"p{i}", "t", "s", f"[{i}]") for i in range(2)}
    note = {"device": "h200", "arch": "sm_90", "devices": {"h200": get_device("h200").to_json()}}
    spaces = {"s": Space("s", "t", "cuda", 0, 0, "[]")}
    write_bundle(folder / "a.bundle", Bundle(note, {"t": task}, spaces, programs, kernels, {}))
    return folder / "a.bundle"


def _text(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text, encoding="utf-8")
        return folder / name

    return write


def _parquet(folder: Path, rows: int = 1) -> Path:
    sizes = {"m": 8.0, "n": 64.0, "k": 64.0}
    row = {"op": "gemm", **sizes, "dtype": "float16", "device": "h200", "seconds": 1e-5, "count": 1}
    path = folder / "operators/operators.parquet"
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist([row] * rows), path)
    return path


def _tir(folder: Path) -> Path:
    tvm = import_tvm()
    from tvm import te

    a = te.placeholder((64, 64), name="A")
    func = te.create_prim_func([a, te.compute((64, 64), lambda i, j: a[i, j] * 2.0, name="B")])
    return _text("program.json", tvm.ir.save_json(func))(folder)


def _read_dataset(path: Path) -> None:
    dataset = Dataset.open(path)
    try:
        _ = dataset.tasks, dataset.spaces, dataset.programs, dataset.records, dataset.devices, dataset.corrupt_lines
    finally:
        dataset.close()


_GRAPH = {"format": FORMAT, "version": 1, "name": "n", "nodes": [{"name": "a", "tasks": ["t"], "inputs": []}]}
_CSV = "op,count,m,n,k,heads,kv_heads,head_dim,q_lengths,kv_lengths\ngemm,2,8,64,64,,,,,\nattention,1,,,,8,8,64,1 1,9 9\n"
_LLM = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
        "intermediate_size": 128}  # fmt: skip
_DEVICE = "- {name: mine, kind: gpu, vendor: nvidia, arch: sm_90, cores: 132, clock_mhz: 1980, bandwidth_gb_s: 4000}\n"

#: Kind of file -> function that writes a sample to a folder, and function that reads it.
KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "dataset folder": (lambda folder: _dataset(folder, True), _read_dataset),
    "dataset rows (SQLite)": (lambda folder: _dataset(folder, False), _read_dataset),
    "predictor": (lambda folder: Path(shutil.copytree(DEFAULT_WEIGHTS, folder / "predictor")), Predictor.load),
    "bundle": (_bundle, read_bundle),
    "operator list (CSV)": (_text("operators.csv", _CSV), lambda path: read_operators(path, "float16")),
    "operator list (parquet)": (_parquet, lambda path: read_operators(path, "float16")),
    "measured operators": (lambda folder: _parquet(folder, 3).parent, load_operators),
    "device YAML": (_text("devices.yaml", _DEVICE), read_device_file),
    "TIR JSON": (_tir, lambda path: compact_ast(load_program(path))),
    "configuration YAML": (_text("config.yaml", dump_config(Config())), load_config),
    "network graph": (_text("graph.json", json.dumps(_GRAPH)), load_graph),
    "config.json of a model": (_text("config.json", json.dumps(_LLM)), load_decoder),
    "task file": (_text("tasks.json", json.dumps({"tasks": ["a", "b"]})), read_task_file),
}


# -- changes -------------------------------------------------------------------------------------------------------


def _changed_bytes(data: bytes, rng: random.Random, canary: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 4, 64, 1000))
        kind = rng.randrange(5)
        if kind == 0:
            data = data[:at] + bytes(b ^ (1 << rng.randrange(8)) for b in data[at : at + length]) + data[at + length :]
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data = data[:at] + data[at + length :]
        elif kind == 3:
            data = data[:at] + data[at : at + length] * rng.choice((2, 50)) + data[at + length :]
        else:
            data = data[:at] + rng.choice(_TOKENS).replace(_CANARY, canary) + data[at + rng.choice((0, length)) :]
    return data


def _changed_json(value: Any, rng: random.Random) -> Any:
    """The value with one part of it changed."""
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, copy = rng.choice(keys), value.copy()
        if rng.random() < 0.15:
            del copy[key]
        else:
            copy[key] = _changed_json(copy[key], rng)
        return copy
    return rng.choice(_VALUES)


def _changed_text(text: Any, rng: random.Random) -> Any:
    """A changed cell: JSON with one part changed, or another value if the cell is not JSON."""
    try:
        return json.dumps(_changed_json(json.loads(text), rng))
    except (TypeError, ValueError):
        return rng.choice(_VALUES)


def _change_inside(path: Path, rng: random.Random) -> None:
    """Change a value and keep checksums and lengths right. Raises ValueError or similar if the format cannot hold the value."""
    data = path.read_bytes()
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        rows, name = table.to_pylist(), rng.choice(table.schema.names)
        row = rng.choice(rows)
        row[name] = _changed_text(row[name], rng) if rng.random() < 0.8 else rng.choice(_VALUES)
        schema = table.schema if rng.random() < 0.8 else None  # None: the column's type may change
        pq.write_table(pa.Table.from_pylist(rows, schema).replace_schema_metadata(table.schema.metadata), path)
    elif path.suffix == ".db":
        with sqlite3.connect(path) as db:
            number, text = rng.choice(db.execute("SELECT number, value FROM rows").fetchall())
            db.execute("UPDATE rows SET value = ? WHERE number = ?", (_changed_text(text, rng), number))
    elif path.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        head = json.dumps(_changed_json(json.loads(data[8 : 8 + length]), rng)).encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])
    elif path.suffix == ".bundle":
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        name = rng.choice(list(parts))
        part = path.with_name("part" + Path(name).suffix)
        part.write_bytes(parts[name])
        _change_inside(part, rng)
        parts[name] = part.read_bytes()
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in parts.items():
                archive.writestr(name, content)
    else:
        path.write_text(json.dumps(_changed_json(json.loads(data), rng)), encoding="utf-8")


def make_input(sample: Path, folder: Path, rng: random.Random, canary: Path) -> Path:
    """Copy a sample to a folder and change it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / sample.name
    if sample.is_file():
        shutil.copyfile(sample, path)
        files = [path]
    else:
        shutil.copytree(sample, path, copy_function=os.link if sample.name == "predictor" else shutil.copy)
        files = sorted(file for file in path.rglob("*") if file.is_file())
    file = rng.choice(files)
    content = file.read_bytes()
    file.unlink()  # it may be a hard link to the sample
    if rng.random() > 0.02:
        file.write_bytes(content)
        try:
            if rng.random() < 0.5:
                _change_inside(file, rng)
                return path
        except (ValueError, TypeError, OverflowError, IndexError, RecursionError, sqlite3.Error, pa.ArrowException):
            pass
        file.write_bytes(_changed_bytes(content, rng, str(canary).encode()))
    return path


def read(kind: str, path: Path, canary: Path) -> str:
    """Read an input: ``accepted``, ``refused``, or the text of a finding."""
    try:
        KINDS[kind][1](path)
        found = "accepted"
    except CdmppError as err:
        found = "refused" if str(err).strip() else "an error without text"
        if "\n" in str(err).strip():
            found = f"more than one line: {str(err)[:200]!r}"
    except BaseException as err:
        where = traceback.extract_tb(err.__traceback__)
        own = [f for f in where if "cdmpp" in f.filename] or where
        found = f"{type(err).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}: {str(err)[:120]}"
    if canary.exists():
        canary.unlink()
        found = "code was run"
    return found


# -- processes -----------------------------------------------------------------------------------------------------


def _serve(connection: Any, kind: str, sample: Path, folder: Path, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    canary = folder.with_name("canary")
    for number in iter(connection.recv, None):
        rng = random.Random(f"{seed} {kind} {number}")
        connection.send(read(kind, make_input(sample, folder, rng, canary), canary))


def fuzz(kind: str, inputs: int, seed: int, limit_s: float) -> dict[str, Any]:
    """Read a number of inputs of a kind; returns a row of the table."""
    context = multiprocessing.get_context("spawn")
    outcomes: Counter[str] = Counter()
    findings: dict[str, dict[str, Any]] = {}
    started, worker, pipe = time.perf_counter(), None, None
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        sample = KINDS[kind][0](Path(name))
        for number in range(inputs):
            if worker is None:
                warm = False
                pipe, theirs = context.Pipe()
                worker = context.Process(target=_serve, args=(theirs, kind, sample, Path(name) / "input", seed), daemon=True)
                worker.start()
                theirs.close()
            pipe.send(number)
            try:
                found = pipe.recv() if pipe.poll(limit_s if warm else _START_S) else f"over {limit_s:g} s"
            except (EOFError, ConnectionResetError):
                worker.join(5)
                found = f"the process died with exit code {worker.exitcode}"
            warm = True
            if found.startswith("over ") or "died" in found:
                worker.kill()
                worker = None
            good = found in ("accepted", "refused")
            outcomes[found if good else "findings"] += 1
            if not good:
                key = found.split(": ")[0]
                findings.setdefault(key, {"what": found, "input": number, "times": 0})["times"] += 1
        if worker is not None:
            pipe.send(None)
            worker.join(5)
    row = {"kind": kind, "inputs": inputs, **{name: outcomes[name] for name in ("accepted", "refused", "findings")}}
    return {**row, "seconds": round(time.perf_counter() - started, 1), "found": list(findings.values())}


def main() -> None:
    args = arguments(__doc__, __file__, kinds={"choices": list(KINDS), "default": list(KINDS)}).parse_args()
    made, rows = provenance(__file__, seeds=[args.seed]), []
    with ThreadPool(len(os.sched_getaffinity(0))) as pool:
        for row in pool.imap(lambda kind: fuzz(kind, args.inputs, args.seed, args.limit), args.kinds):
            rows.append(row)
            print(f"{row['kind']}: {row['findings']} findings in {row['seconds']:.0f} s", file=sys.stderr, flush=True)
            for found in row["found"]:
                print(f"  {found['times']} times, first {found['input']}: {found['what']}", file=sys.stderr)
    names = ("accepted", "refused", "findings")
    figures = [figure(row["kind"], {name: row[name] for name in names}, row["inputs"], [args.seed]) for row in rows]
    report(args.json, made, figures, rows=rows)
    if any(row["findings"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    start(main)
