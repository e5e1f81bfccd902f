"""CUDA programs as data, and bundles: files of programs compiled for another machine's GPU. Reading a bundle needs neither TVM
nor CUDA. A bundle is an uncompressed zip archive of compressed parquet files: tasks, spaces, programs as in a dataset,
``kernels.parquet`` (one row per program), ``references.parquet`` (reference outputs of some tasks). Its ``bundle.json`` holds
the device, the compiler and the settings."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cdmpp.dataset.record import from_arrow, to_arrow
from cdmpp.errors import BundleError, raised_as
from cdmpp.files import parse_json, replacing
from cdmpp.profiler.arguments import ArgSpec, Reference
from cdmpp.profiler.engine import Built
from cdmpp.profiler.gpu.compile import Resources
from cdmpp.program.types import Program, Space, Task

#: Version of the format described above. Bundles of other versions are refused.
BUNDLE_VERSION = 2
_NOTE = "bundle.json"
#: Kernels of neighbouring programs are similar, so one page holds many of them and compresses well.
_PAGE_BYTES = 1 << 24
_GROUP_ROWS = 512
#: Columns of the tables that only bundles have.
_KERNELS = pa.schema({
    "program": pa.string(), "status": pa.string(), "error": pa.string(), "source": pa.large_string(),
    "launches": pa.string(), "cubin": pa.large_binary(), "resources": pa.string(), "build_s": pa.float32(),
}.items())  # fmt: skip
_REFERENCES = pa.schema({
    "task": pa.string(), "seed": pa.int64(), "output": pa.int32(), "values": pa.list_(pa.float32()), "mean": pa.float64(),
}.items())  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One kernel launch: grid and block extents (x, y, z), and the shared bytes that the kernel declares."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    #: The entry function, and its pointer arguments as indices into parameters followed by workspaces.
    kernel: str = ""
    buffers: tuple[int, ...] = ()

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.grid)


@dataclass(frozen=True)
class CudaProgram:
    """CUDA C++ of a scheduled program and how to run it: all that a machine without TVM needs."""

    #: Self-contained: nvcc and NVRTC can compile it.
    source: str = field(repr=False)
    params: tuple[ArgSpec, ...]
    #: Indices of the parameters that it writes.
    outputs: tuple[int, ...]
    #: Further buffers in global memory, which pass data from kernel to kernel.
    workspaces: tuple[ArgSpec, ...]
    #: In order; one run of the program executes all of them.
    launches: tuple[Launch, ...]
    #: Whether a kernel copies to shared memory asynchronously (``cp.async``, since sm_80).
    async_copies: bool = False

    @property
    def buffers(self) -> tuple[ArgSpec, ...]:
        """Parameters and workspaces: what ``Launch.buffers`` indexes."""
        return (*self.params, *self.workspaces)

    def to_json(self) -> dict[str, Any]:
        """All fields but the source, as a bundle stores them."""
        return {name: value for name, value in asdict(self).items() if name != "source"}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], source: str) -> CudaProgram:
        """Inverse of :meth:`to_json`; `value` may have been through JSON, which turns tuples into lists."""
        fields = {name: _tuples(part) for name, part in value.items() if name != "launches"}
        launches = [{name: _tuples(part) for name, part in launch.items()} for launch in value["launches"]]
        return cls(source=source, launches=tuple(Launch(**launch) for launch in launches), **fields)


def _tuples(value: Any) -> Any:
    """The value with all lists, also nested ones, turned into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class BundledProgram(Built):
    """A program, given by its hash, with its code or the reason why there is none."""

    program: str
    #: Source and launches; None if the program could not be lowered.
    cuda: CudaProgram | None = None
    #: Machine code for the bundle's architecture; b"" if only the source is kept.
    cubin: bytes = field(default=b"", repr=False)
    resources: Resources = field(default_factory=dict)


@dataclass(frozen=True)
class Bundle:
    """The contents of a bundle: tasks, spaces and programs by their hash, references by the hash of their task."""

    #: ``device`` (name), ``arch``, ``compiler``, ``devices`` (name -> specification, for the shares of the device too),
    #: ``network_families``, ``versions``, ``config``.
    note: Mapping[str, Any]
    tasks: dict[str, Task]
    spaces: dict[str, Space]
    programs: dict[str, Program]
    #: Those of one task together; measuring takes one of each task in turn.
    kernels: list[BundledProgram]
    references: dict[str, Reference]

    @property
    def device(self) -> str:
        """Name of the device that the bundle was made for."""
        return str(self.note["device"])

    @property
    def arch(self) -> str:
        """Architecture of the cubins, such as ``sm_90``."""
        return str(self.note["arch"])


def write_bundle(path: str | Path, bundle: Bundle, *, level: int = 19) -> None:
    """Write a bundle, compressed by zstd at `level`. The file is written completely or not at all (then BundleError)."""
    path = Path(path)
    note = {**bundle.note, "bundle_version": BUNDLE_VERSION}
    kernels = [
        {
            **{name: getattr(k, name) for name in ("program", "status", "error", "cubin", "build_s")},
            "source": None if k.cuda is None else k.cuda.source,
            "launches": None if k.cuda is None else json.dumps(k.cuda.to_json()),
            "resources": json.dumps(k.resources),
        }
        for k in bundle.kernels
    ]
    references = [
        {"task": r.task, "seed": r.seed, "output": n, "values": r.outputs[n], "mean": r.means[n]}
        for r in bundle.references.values()
        for n in r.outputs
    ]
    tables = {
        "tasks": to_arrow("tasks", bundle.tasks.values()),
        "spaces": to_arrow("spaces", bundle.spaces.values()),
        "programs": to_arrow("programs", bundle.programs.values()),
        "kernels": pa.Table.from_pylist(kernels, _KERNELS),
        "references": pa.Table.from_pylist(references, _REFERENCES),
    }
    with raised_as(BundleError, f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(_NOTE, json.dumps(note, indent=1, sort_keys=True))
            for name, table in tables.items():
                archive.writestr(f"{name}.parquet", _parquet(table, level))


def _parquet(table: pa.Table, level: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level=level,
        use_dictionary=False,
        data_page_size=_PAGE_BYTES,
        row_group_size=_GROUP_ROWS,
        write_statistics=False,
    )
    return sink.getvalue()


def read_bundle(path: str | Path) -> Bundle:
    """Read a bundle (BundleError if the file is missing, damaged, no bundle or of another version)."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            if damaged is not None:
                raise BundleError(f"{path} is damaged: {damaged!r} does not match its checksum")
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise BundleError(f"{path} is no bundle: its parts are compressed")
            note = parse_json(archive.read(_NOTE))
            tables = {
                name: pq.read_table(io.BytesIO(archive.read(f"{name}.parquet")))
                for name in ("tasks", "spaces", "programs", "kernels", "references")
            }
    except FileNotFoundError as err:
        raise BundleError(f"{path} does not exist") from err
    except KeyError as err:
        raise BundleError(f"{path} is no bundle: {err.args[0]}") from err
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, pa.ArrowException) as err:
        raise BundleError(f"{path} is no bundle, or damaged: {' '.join(str(err).split())[:200]}") from err
    if not isinstance(note, dict) or note.get("bundle_version") != BUNDLE_VERSION:
        version = note.get("bundle_version") if isinstance(note, dict) else None
        raise BundleError(f"{path} has bundle version {version!r}; this cdmpp reads {BUNDLE_VERSION}")
    try:
        tasks, spaces, programs = (from_arrow(name, tables[name]) for name in ("tasks", "spaces", "programs"))
        kernels = [_kernel(row) for row in tables["kernels"].to_pylist()]
        return Bundle(note, tasks, spaces, programs, kernels, _references(tables["references"].to_pylist()))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as err:
        raise BundleError(f"{path} is damaged: {' '.join(str(err).split())[:200]}") from err


def _kernel(row: dict[str, Any]) -> BundledProgram:
    launches, source = row.pop("launches"), row.pop("source")
    row["resources"] = json.loads(row["resources"])
    cuda = None if launches is None else CudaProgram.from_json(json.loads(launches), source)
    return BundledProgram(cuda=cuda, **row)


def _references(rows: list[dict[str, Any]]) -> dict[str, Reference]:
    found: dict[str, Reference] = {}
    for row in rows:
        reference = found.setdefault(row["task"], Reference(row["task"], row["seed"], {}, {}))
        reference.outputs[row["output"]] = np.array(row["values"], np.float32)
        reference.means[row["output"]] = row["mean"]
    return found
