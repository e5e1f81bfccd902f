"""What the golden files freeze, computed by the library at hand: ``make.py`` stores it, the tests compare with it.

``dataset`` holds 186 measured programs of the data that ships, even over operators (each word in the names of tasks:
four scheduled, one unscheduled) and devices, failures among them; 63 CUDA programs of ``data/validity-cuda``; and what
``cdmpp import`` makes of ``neusight.parquet`` and ``hub.parquet``, whose latencies mean nothing. It, ``journals`` and
``predictor`` were written by version 0.1.0 and have to open as they are.

Everything from inside the library is imported here, so that moving it changes one line.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp import CompactAST, Dataset, Predictor, Split, load_datasets, train
from cdmpp.dataset.codegen import CODEGEN_FILE, load_codegen, save_codegen
from cdmpp.dataset.importers import import_benchmark_hub, import_neusight
from cdmpp.dataset.split import PARTS
from cdmpp.predictor import load_config
from cdmpp.predictor.data import AST_FILE
from cdmpp.predictor.evidence import Evidence
from cdmpp.predictor.predictor import Pairs
from cdmpp.program.ast import LEAF_FEATURES, compact_asts
from cdmpp.program.ast.store import load_asts, save_asts
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.compile import compile_to_shared_object
from cdmpp.program.codegen.core import core_of, counts_key
from cdmpp.program.codegen.counts import codegen_features
from cdmpp.program.space import Rebuilder

HERE = Path(__file__).parent
DATA = HERE.parents[1] / "data"
#: Datasets in the form of today: finished, and with journals of a writer that was killed.
FOLDER, JOURNALS = HERE / "dataset", HERE / "journals"
#: Rows as in the public tables that ``cdmpp import`` reads.
NEUSIGHT, HUB = HERE / "neusight.parquet", HERE / "hub.parquet"

#: A small predictor, as :meth:`Predictor.save` of today writes it, and what its training was configured with.
PREDICTOR, SMALL = HERE / "predictor", HERE / "small.yaml"
#: Some of the compiled programs, ``PROGRAM-TARGET.so``.
OBJECTS = HERE / "objects.zip"

#: The CPUs of the data that ship; GPUs, half of them known from training; a CPU that is not.
CPUS = (
    "epyc-zen4-2.6ghz@1", "xeon-cascadelake-2.5ghz.x86-64-v2@1", "xeon-cascadelake-2.5ghz@1", "xeon-cascadelake-2.5ghz@2",
)  # fmt: skip
GPUS = (
    "a100-pcie-40gb", "a100-sxm4-80gb@0.5", "h100-sxm", "h200", "mi210", "mi300x", "rtx-4090", "t4",
)  # fmt: skip
UNSEEN_CPU = "epyc-7763@1"

#: What programs are compiled for (AVX2, AVX-512 by two makers, 128 bits without fused multiply-add), and what runs them.
TARGETS = {
    "znver3": "znver3", "znver4": "znver4", "cascadelake": "skylake-avx512", "x86-64-v2": "skylake-avx512",
}  # fmt: skip

#: Specifications of splits, made of the golden dataset; the last is that of the weights that ship.
SPLITS = (
    "by_network", "by_network:heldout=3;seed=1",
    "by_network:heldout=swin_tiny+gpt2;valid=googlenet+vgg16;seed=2", "by_task",
    "by_task:test=0.3;valid=0.2;seed=3", "within_task", "within_task:test=0.5;seed=4", f"by_device:heldout={CPUS[0]}",
    f"by_device:heldout={CPUS[3]}+{CPUS[2]};seed=5",
    "by_network:heldout=densenet121+gcn+inception_v3+vgg16;valid=efficientnet_b0+gpt2+mlp_mixer+unet;others=0.1;seed=0",
)  # fmt: skip

Arrays = dict[str, NDArray[Any]]


@lru_cache(maxsize=1)
def dataset() -> Dataset:
    """The golden programs."""
    return Dataset.open(FOLDER)


@lru_cache(maxsize=1)
def predictor() -> Predictor:
    """The weights that ship."""
    return Predictor.default()


def programs(kind: str) -> list[str]:
    """Hashes of the golden programs for a ``cpu`` (they have records), ``cuda`` or ``library`` (library operators and
    kernels of others), sorted."""
    measured = set(dataset().records["program"])

    def kind_of(program: Any) -> str:
        rule = dataset().spaces[program.space_hash].rule if program.space_hash else ""
        if rule == "llvm" or (not rule and program.hash in measured):
            return "cpu"
        return "cuda" if rule == "cuda" else "library"

    return sorted(program.hash for program in dataset().programs.values() if kind_of(program) == kind)


def on_gpus() -> list[str]:
    """Hashes of the programs of which predictions for GPUs are frozen."""
    return [*programs("cuda"), *programs("library")]


def prim_funcs(hashes: list[str], data: Any = None) -> list[Any]:
    """The TIR of programs of a dataset, the golden one by default."""
    data, rebuild = data or dataset(), Rebuilder(verify=False)
    stored = [data.programs[program] for program in hashes]
    return [rebuild(p, data.task_of(p), data.spaces[p.space_hash] if p.space_hash else None) for p in stored]


def fresh_asts(hashes: list[str], data: Any = None) -> dict[str, CompactAST]:
    """ASTs made by this version."""
    return dict(zip(hashes, compact_asts(prim_funcs(hashes, data)), strict=True))


def stored_asts() -> dict[str, CompactAST]:
    """ASTs that the golden dataset keeps."""
    return load_asts(FOLDER / AST_FILE)


def store_asts() -> None:
    """Write the ASTs of all golden programs into their dataset."""
    save_asts(FOLDER / AST_FILE, fresh_asts(sorted(dataset().programs)))


def counts_on(device: str, hashes: list[str]) -> NDArray[np.float32]:
    """Stored counts of programs on a CPU, rows of NaN where there are none."""
    stored, key = load_codegen(FOLDER / CODEGEN_FILE), counts_key(predictor().specs[device])
    unknown = np.full(len(CODEGEN_FEATURES), np.nan, np.float32)
    return np.stack([stored.get((program, key), unknown) for program in hashes])


def latencies_on(device: str, hashes: list[str]) -> NDArray[np.float64]:
    """Mean measured seconds of programs on a device, NaN where there are none."""
    records = dataset().records
    means = records[records["device"] == device].groupby("program")["latency_s"].mean()
    return means.reindex(hashes).to_numpy(dtype=np.float64)


def predictions() -> Arrays:
    """Seconds and 90 % intervals, (n, 3) each: what is predicted, low, high."""
    found: Arrays = {}
    asts = stored_asts()
    cpu, gpu = ([asts[program] for program in hashes] for hashes in (programs("cpu"), on_gpus()))
    for kind, of_kind, devices in (("cpu", cpu, (*CPUS, UNSEEN_CPU)), ("gpu", gpu, GPUS)):
        for device in devices:
            found[f"{kind} {device}"] = _with_interval(of_kind, device)
            found[f"unfamiliar {device}"] = predictor().unfamiliar(of_kind, device)
    small = Predictor.load(PREDICTOR)
    found["small"] = np.stack([small.predict(cpu, device) for device in CPUS])
    for device, other in zip(CPUS, (*CPUS[1:], CPUS[0]), strict=True):
        found[f"compiled {device}"] = _compiled(cpu, device)
        measured = {other: latencies_on(other, programs("cpu"))}
        found[f"{device} measured on {other}"] = _with_interval(cpu, device, measured=measured)
    return found


def _with_interval(asts: list[CompactAST], device: str, **evidence: Any) -> NDArray[np.float64]:
    low, high = predictor().predict_interval(asts, device, 0.9, **evidence)
    return np.stack([predictor().predict(asts, device, **evidence), low, high], axis=1)


def _compiled(asts: list[CompactAST], device: str) -> NDArray[np.float64]:
    """With the stored counts of those CPU programs that have some, rows of NaN for the others."""
    evidence = Evidence(code=counts_on(device, programs("cpu")))
    seconds = predictor().predict_asts(asts, device, evidence)
    difficulty = predictor().difficulty(Pairs.of(asts, device, evidence))
    ends = np.exp(predictor().calibration_of(evidence).ends(device, 0.9)[:, None] * difficulty)
    rows = np.stack([seconds, *(seconds * ends)], axis=1)
    rows[np.isnan(evidence.code[:, 0])] = np.nan
    return rows


def encodings() -> Arrays:
    """What the network of the weights that ship takes of every tenth program and of the devices."""
    asts = stored_asts()
    cpu, gpu = programs("cpu")[::10], on_gpus()[::10]
    leaves = np.concatenate([asts[program].leaves for program in (*cpu, *gpu)])
    pairs = {device: _pairs(cpu, asts, device, counts_on(device, cpu)) for device in CPUS}
    pairs |= {device: _pairs(gpu, asts, device, None) for device in GPUS}
    return {
        "leaves": predictor().encoder.encode_leaves(leaves),
        "devices": predictor().encode_devices([*CPUS, UNSEEN_CPU, *GPUS]),
        **{f"pairs {device}": values for device, values in pairs.items()},
    }


def _pairs(hashes: list[str], asts: Mapping[str, CompactAST], device: str, code: Any) -> NDArray[np.float32]:
    """Pair, compiled code, and whether that is known, side by side."""
    index = np.zeros(len(hashes), np.int64)
    arrays = predictor().encode([asts[program] for program in hashes], [device], index, code)
    parts = (arrays.pair, arrays.code, arrays.has_code[:, None])
    return np.concatenate([part.numpy() for part in parts], axis=1).astype(np.float32)


def compile_and_count(hashes: list[str], mcpu: str, keep: Callable[[str, Path], None] | None = None) -> NDArray[np.float32]:
    """Counts of programs compiled for a CPU, (n, len(CODEGEN_FEATURES)); ``keep`` is given each object."""
    target = {"kind": "llvm", "num-cores": 1, "mcpu": mcpu}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.so"
        for program, func in zip(hashes, prim_funcs(hashes), strict=True):
            compile_to_shared_object(func, target, path)
            if keep is not None:
                keep(program, path)
            found.append(codegen_features(path, core_of(TARGETS[mcpu])))
    return np.stack(found)


def count_objects() -> dict[str, NDArray[np.float32]]:
    """Instructions of the objects that are kept, by name."""
    with zipfile.ZipFile(OBJECTS) as objects, tempfile.TemporaryDirectory() as folder:
        cores = {name: TARGETS[name.removesuffix(".so").split("-", 1)[1]] for name in objects.namelist()}
        return {n: codegen_features(objects.extract(n, folder), core_of(core)) for n, core in cores.items()}


def splits(view: Any, specs: Sequence[str] = SPLITS) -> dict[str, dict[str, list[Any]]]:
    """Specification -> part -> [labels in it, digest of their programs and devices]."""
    labels = view.labels(None)
    found: dict[str, dict[str, list[Any]]] = {}
    for spec in specs:
        split = Split.parse(spec, labels, view.tasks, view.network_families)
        found[spec] = {}
        for part in PARTS:
            rows = labels.iloc[getattr(split, part)]
            lines = sorted(rows["program"].astype(str) + " " + rows["device"].astype(str))
            found[spec][part] = [len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]]
    return found
