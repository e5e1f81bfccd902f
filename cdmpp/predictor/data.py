"""Turns datasets into training data: the label table, the compact ASTs and the devices."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cdmpp.dataset import DatasetView, Split, load_datasets
from cdmpp.dataset.codegen import CODEGEN_FILE, load_codegen
from cdmpp.device import Device
from cdmpp.errors import DatasetError, FeatureMismatchError, PredictorError, ProgramError
from cdmpp.files import cache_file
from cdmpp.predictor.config import DataConfig
from cdmpp.predictor.pair_features import CodeRows, code_rows, estimate_s, pair_rows, references_s
from cdmpp.program.ast import CompactAST, compact_asts
from cdmpp.program.ast.store import load_asts, save_asts
from cdmpp.program.codegen import CODEGEN_FEATURES
from cdmpp.program.codegen.core import counts_key
from cdmpp.program.space import Rebuilder
from cdmpp.program.types import Program

logger = logging.getLogger(__name__)

#: File in a dataset folder that stores the compact ASTs of its programs.
AST_FILE = "asts.parquet"

#: Programs that are rebuilt and processed at once, and new programs after which results are written, which can take minutes.
_CHUNK, _WRITE_EVERY = 128, 2048

#: What records can be grouped by.
GROUPINGS = ("device", "task", "network", "family", "origin")

#: Progress callback, called with ``done, total`` while ASTs are computed.
CountCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class TrainingData:
    """Labelled (program, device) pairs with the descriptions of their programs and devices.

    ``labels`` has one row per pair, columns :data:`cdmpp.dataset.view.LABEL_COLUMNS`, index 0..n-1; ``asts`` (by hash) and
    ``devices`` (by name) cover all rows. ``networks`` maps a task (hash) to the networks it occurs in, ``families`` a network
    to its family, as far as known. ``view`` is the underlying dataset; None for data made otherwise. ``codegen`` holds the
    instruction counts of the programs that have some, as :func:`cdmpp.dataset.codegen.load_codegen` gives them. ``unlabelled``
    are the programs of ``data.adapt``."""

    labels: pd.DataFrame
    asts: Mapping[str, CompactAST]
    devices: Mapping[str, Device]
    networks: Mapping[str, tuple[str, ...]]
    families: Mapping[str, str]
    view: DatasetView | None = None
    codegen: Mapping[tuple[str, str], NDArray[np.float32]] = field(default_factory=dict)
    unlabelled: Mapping[str, CompactAST] = field(default_factory=dict)
    _code: dict[bool, CodeRows] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """The labels in seconds (n,)."""
        return self.labels["latency_s"].to_numpy(dtype=np.float64)

    def reference_s(self, rows: Any = slice(None), reference: Any = estimate_s) -> NDArray[np.float64]:
        """:func:`cdmpp.predictor.pair_features.references_s` of these rows of the label table, seconds (n,)."""
        asts, devices, program, device = self.numbered_pairs()
        return references_s(reference, [asts[i] for i in program[rows]], devices, device[rows])

    @cached_property
    def codegen_counts(self) -> NDArray[np.float32] | None:
        """Instruction counts of every pair, float32 (n, len(CODEGEN_FEATURES)), NaN where there are none, or None."""
        if not self.codegen:
            return None
        codes = {name: counts_key(device) for name, device in self.devices.items()}
        unknown = np.full(len(CODEGEN_FEATURES), np.nan, dtype=np.float32)
        pairs = zip(self.labels["program"], self.labels["device"], strict=True)
        counts = np.stack([self.codegen.get((program, codes[device]), unknown) for program, device in pairs])
        counts.flags.writeable = False
        return counts

    def numbered_pairs(self) -> tuple[list[CompactAST], list[Device], NDArray[np.int64], NDArray[np.int64]]:
        """ASTs of the distinct programs, the distinct devices, and each pair's index into both, int64 (n,) each."""
        programs, program = np.unique(self.labels["program"].to_numpy(dtype=str), return_inverse=True)
        names, device = np.unique(self.labels["device"].to_numpy(dtype=str), return_inverse=True)
        return [self.asts[p] for p in programs], [self.devices[n] for n in names], program, device

    @cached_property
    def pair_features(self) -> NDArray[np.float64]:
        """:func:`cdmpp.predictor.pair_features.pair_rows` of every pair."""
        return pair_rows(*self.numbered_pairs())

    def code_features(self, relative: bool) -> CodeRows:
        """:func:`cdmpp.predictor.pair_features.code_rows` of every pair, rows of NaN where there are no counts. Read-only."""
        if relative not in self._code:
            counts = self.codegen_counts
            if counts is None:
                counts = np.full((len(self), len(CODEGEN_FEATURES)), np.nan, np.float32)
            self._code[relative] = code_rows(counts, *self.numbered_pairs(), relative)
            for values in self._code[relative]:
                values.flags.writeable = False
        return self._code[relative]

    def counted(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these pairs (n,) have instruction counts, bool (n,)."""
        counts = self.codegen_counts
        return np.zeros(len(rows), bool) if counts is None else ~np.isnan(counts[rows, 0])

    def count_coverage(self, rows: NDArray[np.int64]) -> dict[str, tuple[int, int]]:
        """CPU -> number of its records among these pairs (n,) that have instruction counts, and number of all its records."""
        names = self.labels["device"].to_numpy(dtype=str)[rows]
        counted = self.counted(rows)
        return {
            name: (int(counted[names == name].sum()), int((names == name).sum()))
            for name, device in self.devices.items()
            if device.kind == "cpu" and (names == name).any()
        }

    def members(self, grouping: str, rows: NDArray[np.int64] | None = None) -> list[tuple[str, ...]]:
        """The groups that each pair belongs to, by ``device``, ``task``, ``network``, ``family`` or ``origin``
        (PredictorError for another grouping). A task of several networks belongs to all of them."""
        check_groupings([grouping])
        table = self.labels if rows is None else self.labels.iloc[rows]
        if grouping == "network":
            return [self.networks.get(task, ()) for task in table["task"]]
        if grouping == "family":
            return [
                tuple(sorted({self.families[n] for n in self.networks.get(task, ()) if n in self.families}))
                for task in table["task"]
            ]
        return [(str(name),) for name in table[grouping]]


def check_groupings(names: Iterable[str]) -> None:
    """PredictorError for a name that is not among :data:`GROUPINGS`."""
    if wrong := [name for name in names if name not in GROUPINGS]:
        raise PredictorError(f"cannot group by '{wrong[0]}' (known: {', '.join(GROUPINGS)})")


def warn_of_missing_counts(coverage: Mapping[str, tuple[int, int]]) -> None:
    """Warn of CPUs on which some records lack instruction counts; ``coverage`` is :meth:`TrainingData.count_coverage`."""
    lacking = [f"{counted} of {n} records of {name}" for name, (counted, n) in coverage.items() if counted < n]
    if lacking:
        logger.warning("instruction counts: %s; the others have only their AST", ", ".join(lacking))


def gather(
    datasets: DatasetView | str | Path | Sequence[str | Path],
    config: DataConfig | None = None,
    progress: CountCallback | None = None,
    disturbed: bool = False,
) -> TrainingData:
    """Collect labels, ASTs and devices of datasets; missing ASTs are computed, as in :func:`collect_derived`. Labels measured
    on a disturbed core are used neither to train nor to test: they are left out unless ``disturbed`` is set. DatasetError:
    there is no dataset, no label is left, or a device has no specification or two."""
    view = datasets if isinstance(datasets, DatasetView) else load_datasets(datasets)
    config = config or DataConfig()
    labels = view.labels(list(config.devices) if config.devices is not None else None)
    if labels.empty:
        raise DatasetError("no ok record is left after the choice of devices")
    if absent := set(config.devices or ()) - set(labels["device"]):
        logger.warning("no label is of device %s", ", ".join(sorted(absent)))
    if not disturbed and labels["disturbed"].any():
        logger.warning("%d labels left out: the core was disturbed", int(labels["disturbed"].sum()))
        labels = labels[~labels["disturbed"]].reset_index(drop=True)
        if labels.empty:
            raise DatasetError("all labels are of a disturbed core: measure again on a quiet machine (--remeasure)")
    counts = _collect_codegen(view)
    compiled = (program for program, _ in counts) if config.unmeasured else ()
    asts = collect_asts(view, [*labels["program"], *compiled], progress)
    missing = ~labels["program"].isin(list(asts))
    if missing.any():
        logger.warning("%d labels left out: their programs have no AST", int(missing.sum()))
        labels = labels[~missing].reset_index(drop=True)
    more = load_datasets(config.adapt) if config.adapt else None
    data = TrainingData(
        labels,
        asts,
        {name: view.devices[name] for name in sorted(labels["device"].unique())},
        {task.hash: tuple(sorted(task.networks)) for task in view.tasks.values()},
        dict(view.network_families),
        view,
        counts,
        collect_asts(more, more.programs, progress) if more else {},
    )
    if counts:
        warn_of_missing_counts(data.count_coverage(np.arange(len(data))))
    return data


def _collect_codegen(view: DatasetView) -> dict[tuple[str, str], NDArray[np.float32]]:
    """Instruction counts stored beside the datasets' records; unreadable files are skipped with a warning."""
    counts: dict[tuple[str, str], NDArray[np.float32]] = {}
    for part in view.parts:
        path = Path(part.path) / CODEGEN_FILE
        if path.exists():
            try:
                counts.update(load_codegen(path))
            except DatasetError as err:
                logger.warning("instruction counts are left out: %s", err)
    return counts


def collect_asts(view: DatasetView, programs: Iterable[str], progress: CountCallback | None = None) -> dict[str, CompactAST]:
    """ASTs of programs, from the datasets' ``asts.parquet`` or computed; programs that cannot be rebuilt are left out."""
    return collect_derived(view, programs, AST_FILE, compact_asts, load_asts, save_asts, progress)


def collect_derived(
    view: DatasetView,
    programs: Iterable[str],
    file: str,
    derive: Callable[[list[Any]], Iterable[Any]],
    load: Callable[[Path], Mapping[str, Any]],
    save: Callable[[Path, Mapping[str, Any]], None],
    progress: CountCallback | None = None,
) -> dict[str, Any]:
    """Data derived from programs: read from a file in the datasets' folders or the user's cache, else computed with TVM from
    their PrimFuncs and stored in the cache of the first folder that holds the program. Programs for which ``derive`` raises
    ProgramError, or that cannot be rebuilt, are left out."""
    wanted = list(dict.fromkeys(programs))
    known: dict[str, Any] = {}
    for folder in (Path(part.path) for part in view.parts):
        for path in (cache_file(folder, file), folder / file):
            if path.exists():
                try:
                    known.update(load(path))
                except (FeatureMismatchError, DatasetError) as err:
                    logger.warning("%s is computed again: %s", file, err)
    missing = [program for program in wanted if program not in known]
    resolve = program_resolver(view) if missing else None
    unsaved, lost = set[str](), dict[str, ProgramError]()
    for begin in range(0, len(missing), _CHUNK):
        fresh, refused = _derive_each(view, missing[begin : begin + _CHUNK], resolve, derive)
        known.update(fresh)
        lost |= refused
        unsaved |= fresh.keys()
        end = min(begin + _CHUNK, len(missing))
        if unsaved and (end == len(missing) or len(unsaved) >= _WRITE_EVERY):
            stored = set[str]()
            for part in view.parts:
                held = set(part.programs) - stored  # what an earlier folder holds, too, is stored with that
                stored |= held
                if unsaved & held:
                    path = cache_file(Path(part.path), file)
                    try:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        save(path, {program: v for program, v in known.items() if program in held})
                    except (OSError, DatasetError) as err:
                        logger.warning("%s is not written: %s", path, err)
            unsaved.clear()
        if progress is not None:
            progress(end, len(missing))
    if lost:
        logger.warning("programs left out: %d, such as %s: %s", len(lost), *next(iter(lost.items())))
    return {program: known[program] for program in wanted if program in known}


def _derive_each(
    view: DatasetView, programs: Sequence[str], resolve: Any, derive: Callable[[list[Any]], Iterable[Any]]
) -> tuple[dict[str, Any], dict[str, ProgramError]]:
    """Results of ``derive`` on the PrimFuncs of programs, in as few calls as its errors allow; and the errors."""

    def rebuilt(program: str) -> Any:
        try:
            return resolve(view.programs[program])
        except (KeyError, ProgramError) as err:
            logger.warning("program %s cannot be rebuilt: %s", program, err)

    def results(programs: list[str]) -> tuple[dict[str, Any], dict[str, ProgramError]]:
        try:
            return dict(zip(programs, derive([funcs[p] for p in programs]), strict=True)), {}
        except ProgramError as err:
            if len(programs) == 1:
                return {}, {programs[0]: err}
        middle = len(programs) // 2
        (found, refused), (more, others) = results(programs[:middle]), results(programs[middle:])
        return found | more, refused | others

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # TVM replays programs outside Python's lock
        funcs = {p: func for p, func in zip(programs, pool.map(rebuilt, programs), strict=True) if func is not None}
    return results(list(funcs))


def program_resolver(view: DatasetView) -> Callable[[Program], Any]:
    """A function from the programs of a dataset to their PrimFuncs (rebuilds them with TVM)."""
    # verify=False: programs that cannot run are rebuilt too, as failed programs are data as well
    rebuild = Rebuilder(verify=False)

    def resolve(program: Program) -> Any:
        space = view.spaces.get(program.space_hash) if program.space_hash else None
        return rebuild(program, view.task_of(program), space)

    return resolve


def subset(data: TrainingData, rows: NDArray[np.int64]) -> TrainingData:
    """Training data with only the pairs of these rows."""
    labels = data.labels.iloc[rows].reset_index(drop=True)
    asts = {program: data.asts[program] for program in labels["program"].unique()}
    devices = {name: data.devices[name] for name in sorted(labels["device"].unique())}
    return replace(data, labels=labels, asts=asts, devices=devices)


def split_data(spec: str, data: TrainingData) -> Split:
    """The split of the data's label table by a specification; errors are those of :meth:`cdmpp.dataset.Split.parse`."""
    return Split.parse(spec, data.labels, data.networks, data.families)
