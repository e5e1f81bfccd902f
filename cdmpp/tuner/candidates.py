"""Candidates of one task: a search proposes them, and earlier programs are replayed.

A tuning starts from the untuned program of a task, and falls back to it. On a CPU that is the unscheduled task, whose loops
LLVM compiles. A GPU cannot run an unscheduled task: there it is the schedule that TVM Relax applies by default
(``tvm.s_tir.dlight``, by the rules of ``relax.backend.cuda``), a trace without sampling decisions, with an origin of its own.

The cost of a search is replaying traces: TVM takes 3 to 12 ms of CPU time for each program whose AST is to be predicted, and
holds Python's lock meanwhile; its evolutionary search replays a thousand programs for sixteen that are measured. Here most
children are never replayed. Small trees over the decisions are fitted to the predictions (and rejections) of the programs
replayed so far. They select the few likely fast ones of some thousand mutants and crossovers; the predictor ranks these by AST.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import random
import signal
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cdmpp.device import Device
from cdmpp.errors import ProgramError
from cdmpp.profiler.engine import BuildJob
from cdmpp.program import import_tvm, quiet, structural_hash
from cdmpp.program import space as design
from cdmpp.program.ast import CompactAST, compact_asts
from cdmpp.program.types import Program, Space, Task

T = TypeVar("T")

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]

#: ``Program.origin`` of default schedules.
DEFAULT = "default"
#: Trial limit given to MetaSchedule's search: so high that it never applies.
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Candidate:
    """A proposed program, as MetaSchedule's MeasureCandidate and as a build job for the profiler."""

    measure: Any
    job: BuildJob

    @property
    def hash(self) -> str:
        """Structural hash of the program."""
        return self.job.program.hash

    @property
    def task(self) -> str:
        """The task's hash."""
        return self.job.task.hash


class TaskTuner:
    """Search for programs of one task. The design spaces depend on the device's kind, TVM target and number of cores. Raises
    ProgramError if TVM finds no space."""

    def __init__(self, task: Task, device: Device, seed: int, population: int = 256, generations: int = 3) -> None:
        tvm = import_tvm()
        from tvm.s_tir import meta_schedule as ms

        self.task, self._on_cpu = task, device.kind == "cpu"
        # GPU programs are sampled within the same limits with which cdmpp.program.space.Rebuilder replays them.
        limits = {} if self._on_cpu else {**design.CUDA_SPACE_TARGET, "arch": str(device.target["arch"])}
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=population, genetic_num_iters=generations, init_min_unmeasured=1
        )
        self._spaces = design.TaskSpaces(
            task,
            "llvm" if self._on_cpu else "cuda",
            int(device.share),
            target=tvm.target.Target(limits or dict(device.target)),
            search_strategy=strategy,
            task_name=task.name,
            rand_state=seed,
            logger=logging.getLogger(f"{__name__}.metaschedule"),
        )
        self.context = self._spaces.context
        self.mod = self.context.mod
        self._postprocs = list(self.context.space_generator.postprocs)

    def sample(self, n: int, seed: int) -> list[Candidate]:
        """At most `n` distinct random programs, drawn from all spaces in turn; fewer if the spaces have no more."""
        programs = [replace(program, origin="search") for program in self._spaces.sample(n, seed)]
        return [self.replay(program, self._spaces.space_of(program)) for program in programs]

    def untuned(self) -> BuildJob | None:
        """The program that runs when nothing was tuned (see the module docstring); None if there is none."""
        if self._on_cpu:
            return BuildJob(design.unscheduled(self.task), self.task, None)
        return candidate.job if (candidate := self.untuned_candidate()) else None

    def untuned_candidate(self) -> Candidate | None:
        """The untuned program with a trace, for MetaSchedule's database."""
        from tvm.s_tir.schedule import Schedule

        if self._on_cpu:
            schedule = Schedule(self.mod)
            # MetaSchedule ignores a record whose trace has no instruction.
            schedule.get_sblock("root", func_name="main")
            return self.candidate(schedule, "unscheduled")
        schedule = default_schedule(self.mod["main"], self.context.target)
        return None if schedule is None else self.candidate(schedule, DEFAULT)

    def start(self, database: Any, cost_model: Any, batch: int) -> None:
        """Begin the search, with the best programs of a MetaSchedule database as parents."""
        self.context.pre_tuning(_NO_LIMIT, batch, self._spaces.schedules, database, cost_model)

    def propose(self) -> list[Candidate]:
        """The next candidates, none of them proposed before; empty if the space has no more."""
        with signals_held_back():
            found = list(self.context.generate_measure_candidates() or ())
        if found:
            # MetaSchedule's search counts the results that it gets, but does not read them.
            self.context.notify_runner_results(found, runner_results([None] * len(found)))
        return [self.candidate(measure.sch) for measure in found]

    def replay(self, program: Program, space: Space) -> Candidate:
        """An earlier program as a candidate. Raises ProgramError if its replay differs from it: another TVM made it."""
        try:
            schedule = self._replayed(json.loads(space.insts_json), json.loads(program.decisions))
        except Exception as err:  # TVM raises its own error types
            raise ProgramError(f"program {program.hash} does not replay: {err}") from err
        digest = None if schedule is None else structural_hash(schedule.mod["main"])
        if schedule is None or digest != program.hash:
            raise ProgramError(f"program {program.hash} replays as {digest}: made by another TVM?")
        return self.candidate(schedule, program.origin)

    def drawn(self, n: int, rng: random.Random) -> Iterator[tuple[str, str]]:
        """Instructions and decisions, as JSON, of `n` programs that TVM samples from each space; fewer if sampling fails."""
        for space in [space for space in self._spaces.spaces for _ in range(n)]:
            try:
                schedule = self._spaces.draw(space, rng)
            except Exception as err:  # a decision that a primitive refuses
                logger.debug("task %s: a sampled trace does not apply: %s", self.task.hash, err)
                continue
            yield space.insts_json, design.instructions_and_decisions(schedule)[1]

    def measure_of(self, insts: Any, decisions: Any) -> Any | None:
        """MetaSchedule's candidate for a space's instructions and decisions (JSON values); None if TVM rejects them."""
        from tvm.s_tir import meta_schedule as ms

        try:
            schedule = self._replayed(insts, decisions)
        except Exception as err:  # as in drawn()
            logger.debug("task %s: decisions do not apply: %s", self.task.hash, err)
            return None
        return None if schedule is None else ms.MeasureCandidate(schedule, self._arguments)

    def _replayed(self, insts: Any, decisions: Any) -> Any | None:
        """A postprocessed schedule; None if a postprocessor rejects it. Raises TVM's own errors if it does not replay."""
        schedule = design.schedule_of(self.mod, insts, decisions)
        schedule.enter_postproc()
        return schedule if all(postproc.apply(schedule) for postproc in self._postprocs) else None

    @functools.cached_property
    def _arguments(self) -> Any:
        """Shapes and dtypes of the arguments, in MetaSchedule's form."""
        from tvm.s_tir import meta_schedule as ms

        return ms.arg_info.ArgInfo.from_entry_func(self.mod, remove_preproc=True)

    def candidate(self, schedule: Any, origin: str = "search") -> Candidate:
        """A postprocessed schedule of the task as a candidate."""
        from tvm.s_tir import meta_schedule as ms

        rule, cores = self._spaces.rule, self._spaces.num_cores
        program, space = design.program_of_schedule(schedule, self.task, rule, cores, origin)
        return Candidate(ms.MeasureCandidate(schedule, self._arguments), BuildJob(program, self.task, space))


def runner_results(latency_s: Sequence[float | None]) -> list[Any]:
    """Labels in seconds as MetaSchedule's runner results; None is a failure."""
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    return [RunnerResult(None, "failed") if s is None else RunnerResult([s], None) for s in latency_s]


def task_hash(context: Any) -> str:
    """Structural hash of the task of a MetaSchedule context."""
    return structural_hash(context.mod["main"])


def funcs_of(measures: Sequence[Any]) -> list[Any]:
    """Scheduled PrimFuncs of MetaSchedule's candidates."""
    return [measure.sch.mod["main"] for measure in measures]


def hashes_of(measures: Sequence[Any]) -> list[str]:
    """Structural hashes of MetaSchedule's candidates."""
    return [structural_hash(func) for func in funcs_of(measures)]


class CandidateCache(Generic[T]):
    """Caches what a model computes for a program, because a search asks for some programs again and again. `compute` returns
    one value for each of n >= 1 ASTs. At most `most` programs are kept. ``computed`` counts programs."""

    def __init__(self, compute: Callable[[Sequence[CompactAST]], Sequence[T]], most: int) -> None:
        self._compute, self._most = compute, most
        self.computed = 0
        self._kept: OrderedDict[str, T | None] = OrderedDict()

    def get(self, hashes: Sequence[str], funcs: Sequence[Any]) -> dict[int, T]:
        """Values for scheduled PrimFuncs with these hashes, by index, without those whose AST cannot be read."""
        missing = {h: f for h, f in zip(hashes, funcs, strict=True) if h not in self._kept}
        self.computed += len(missing)
        if missing:
            self._kept.update(zip(missing, self._read(list(missing.values())), strict=True))
        found = {i: kept for i, digest in enumerate(hashes) if (kept := self._kept[digest]) is not None}
        for digest in hashes:
            self._kept.move_to_end(digest)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return found

    def _read(self, funcs: list[Any]) -> list[T | None]:
        try:
            return list(self._compute(compact_asts(funcs)))
        except ProgramError as err:
            if len(funcs) == 1:
                logger.debug("a candidate cannot be read: %s", err)
                return [None]
            # At least one cannot be read: find out which. This happens to few programs of few tasks.
            return [found for func in funcs for found in self._read([func])]


def is_untuned(program: Program) -> bool:
    """Whether a program is the untuned one. It is not a trial, nor a parent for the search, which cannot mutate it."""
    return program.space_hash is None or program.origin == DEFAULT


def default_schedule(func: Any, target: Any) -> Any | None:
    """The schedule that TVM Relax applies to a PrimFunc on a GPU by default; None if no rule applies."""
    from tvm.s_tir import dlight

    gpu = dlight.gpu
    for rule in (gpu.Matmul, gpu.GEMV, gpu.Reduction, gpu.GeneralReduction, gpu.Fallback):
        try:
            with quiet(), target:
                found = rule().apply(func, target, False)
        except Exception as err:  # a rule may fail on a PrimFunc that it accepts; TVM raises its own error types
            logger.debug("%s: %s", rule.__name__, err)
            continue
        if found is not None:
            return found[0] if isinstance(found, list) else found
    return None


# -- Ctrl-C --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Defer Ctrl-C while TVM's search runs: an exception in the search's threads would end the process (``std::terminate``),
    and one in a callback would become a TVM error. The first signal (Ctrl-C, or SIGTERM if it has a handler) is handled at the
    end, a second one at once. Outside the main thread this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Signals that are ignored, or that end the process, keep their behaviour.
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    received: list[signal.Signals] = []

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def receive(number: int, frame: Any) -> None:
        restore()
        received.append(signal.Signals(number))
        print("stopping after this step of the search; Ctrl-C again stops at once", file=sys.stderr)

    for number in handlers:
        signal.signal(number, receive)
    try:
        yield
    finally:
        restore()
    for number in received:
        handlers[number](number, None)


#: Decision of a sampling instruction: the tile sizes of a loop, outermost first, or a number.
Decision = tuple[int, ...] | int
#: A program: the index of its space, and (position, decision) of each sampling instruction.
Genes = tuple[int, tuple[tuple[int, Decision], ...]]

_TREES: dict[str, Any] = {
    "max_depth": 5,
    "eta": 0.25,
    "subsample": 0.9,
    "colsample_bytree": 0.6,
    "tree_method": "hist",
    "nthread": 1,
    "verbosity": 0,
    "base_score": 0.0,
}
_NUMBER = 40
#: Random programs before the first children, new ones in a round, children replayed in a step; times a round's candidates.
_FIRST, _FRESH, _REPLAYED = 6, 1, 2
#: Steps of a search's first round, and of later rounds, which build on the earlier ones.
_STEPS, _LATER = 4, 2
#: Generations between two steps that only the trees score, and children of each.
_GENERATIONS, _CHILDREN = 3, 256
_PARENTS = 64
#: Fraction of the replayed children that is chosen at random, and fraction of children made by crossover.
_BLIND, _CROSSED = 0.1, 0.3
#: Rejected or failed programs count as slower than the slowest by so many log seconds.
_REJECTED = 0.7
#: Fraction of a round from the spaces with the fewest proposals: else one space with too low predictions would take it all.
_ELSEWHERE = 0.125
#: Programs of each space that TVM samples itself: they show the extents of its loops.
_SHOWN = 4
#: Programs kept from round to round, those predicted fastest: 60 kB each.
_KEPT = 512


class _Space:
    """A design space, from the JSON of its instructions: the possible decisions, and decisions as features."""

    def __init__(self, insts_json: str) -> None:
        self.insts: list[Any] = json.loads(insts_json)
        #: Values of decisions other than tiles; for compute locations those seen so far, as TVM takes the nearest valid one.
        self._values: dict[int, list[int]] = {
            at: list(range(len(inst[2][0]))) for at, inst in enumerate(self.insts) if inst[0] == "SampleCategorical"
        }
        self.locations = [at for at, inst in enumerate(self.insts) if inst[0] == "SampleComputeLocation"]
        self._values.update((at, [-2, -1]) for at in self.locations)

    def see(self, decisions: Sequence[tuple[int, Decision]]) -> None:
        """Record the compute locations that occur, and allow the next one."""
        for at, value in decisions:
            if at in self.locations and isinstance(value, int) and value >= max(self._values[at]):
                self._values[at] = list(range(-2, value + 2))

    def is_open(self, at: int, decision: Decision) -> bool:
        """Whether another decision is possible."""
        if isinstance(decision, int):
            return len(self._values[at]) > 1
        return len(decision) > 1 and math.prod(decision) > 1

    def mutated(self, at: int, decision: Decision, rng: random.Random) -> Decision:
        """Another value, or a factor moved from one tile to another as TVM does."""
        if isinstance(decision, int):
            return rng.choice([value for value in self._values[at] if value != decision])
        source = rng.choice([k for k, size in enumerate(decision) if size > 1])
        target = rng.choice([k for k in range(len(decision)) if k != source])
        tiles, factor = list(decision), rng.choice(_divisors(decision[source]))
        tiles[source] //= factor
        tiles[target] *= factor
        return decision if tiles[-1] > max(decision[-1], self._innermost(at)) else tuple(tiles)

    def drawn(self, at: int, decision: Decision, rng: random.Random) -> Decision:
        """A random decision in place of the given one."""
        if isinstance(decision, int):
            return rng.choice(self._values[at])
        tiles, left = [1] * len(decision), math.prod(decision)
        for k in rng.sample(range(1, len(tiles)), len(tiles) - 1):
            limit = self._innermost(at) if k == len(tiles) - 1 else left
            tiles[k] = rng.choice([1, *(d for d in _divisors(left) if d <= limit)])
            left //= tiles[k]
        tiles[0] = left
        return tuple(tiles)

    def _innermost(self, at: int) -> int:
        """Largest size of the innermost tile."""
        return int(self.insts[at][2][1])

    @staticmethod
    def features(decisions: Sequence[tuple[int, Decision]]) -> list[float]:
        """Log2 of each tile, and of it with all tiles inside it; sums of the latter over the loops; other decisions as is."""
        found: list[float] = []
        volume = [0.0] * 8
        for _, decision in decisions:
            if isinstance(decision, int):
                found.append(float(decision))
                continue
            inner = 0.0
            for level, size in enumerate(reversed(decision)):
                inner += math.log2(size)
                found += (math.log2(size), inner)
                volume[min(level, 3) + 4 * (len(decision) < 4)] += inner
        return found + volume


class DecisionSearch:
    """The search for one task. `score` returns predicted log seconds, float64 (n,), of MetaSchedule's candidates, infinite for
    failed ones. A round has `batch` candidates. `earlier` programs are parents from the start. Nothing is replayed when the
    monotonic clock has reached `until`."""

    def __init__(
        self,
        tuner: TaskTuner,
        score: Callable[[Sequence[Any]], FloatArray],
        batch: int,
        seed: int,
        earlier: Sequence[Candidate] = (),
        until: float = math.inf,
    ) -> None:
        self._tuner, self._score, self._batch, self._until = tuner, score, batch, until
        self._rng = random.Random(f"{tuner.task.hash}:{seed}")
        #: Children scored by the trees; programs replayed, and of these rejected by TVM, equal to another; proposed.
        self.counts = dict.fromkeys(("judged", "replayed", "rejected", "equal", "proposed"), 0)
        #: The design spaces, and the index of each by the JSON of its instructions.
        self._spaces: list[_Space] = []
        self._numbers: dict[str, int] = {}
        #: Program hash for all decisions that were replayed, None if rejected; and features of decisions.
        self._hashes: dict[Genes, str | None] = {}
        self._features: dict[Genes, list[float]] = {}
        #: Predicted log seconds of all programs; and decisions and MetaSchedule's candidate of the programs kept.
        self._log_s: dict[str, float] = {}
        self._kept: dict[str, tuple[Genes, Any]] = {}
        self._proposed: set[str] = set()
        #: Number of programs proposed from each space.
        self._of_space: Counter[int] = Counter()
        self._templates: list[Genes] = []
        for candidate in earlier:
            assert candidate.job.space is not None
            number = self._number(candidate.job.space.insts_json)
            genes = number, _decisions(candidate.job.program.decisions)
            self._take(genes, candidate.hash, candidate.measure)
        self._show()
        self._predict(list(self._kept))

    def sample(self, n: int) -> list[float]:
        """Replay `n` random programs, and return the predicted log seconds of all programs known."""
        if self._templates:
            self._replay([self._drawn() for _ in range(n)])
        return list(self._log_s.values())

    def propose(self, known: Collection[str]) -> list[Candidate]:
        """The next candidates, predicted fastest first. None is in `known` or was proposed before, even if it was dropped then.
        Fewer than a round, in the end none, if the spaces have no more."""
        # the first round is half of one: it waits for nothing, and all the others overlap
        batch, steps = (self._batch, _LATER) if self._proposed else (-(-self._batch // 2), _STEPS)
        self._predict(list(self._kept))
        self.sample(max(_FRESH * batch, _FIRST * batch - len(self._hashes)))
        for _ in range(steps):
            self._replay(self._children(_REPLAYED * batch))
        likeliest = sorted(self._kept, key=self._log_s.__getitem__)
        new = [digest for digest in likeliest if digest not in known and digest not in self._proposed]
        chosen = self._chosen(new, batch)
        self._proposed.update(chosen)
        self.counts["proposed"] += len(chosen)
        found = [self._tuner.candidate(self._kept[digest][1].sch) for digest in chosen]
        for digest in likeliest[_KEPT:]:
            del self._kept[digest]
        return found

    def _chosen(self, likeliest: Sequence[str], batch: int) -> list[str]:
        """A batch: the programs predicted fastest, and a few from the spaces with the fewest proposals."""
        few = round(_ELSEWHERE * batch) if len(self._spaces) > 1 else 0
        space_of = {digest: self._kept[digest][0][0] for digest in likeliest}
        chosen, rest = list(likeliest[: batch - few]), list(likeliest[batch - few :])
        self._of_space.update(space_of[digest] for digest in chosen)
        while rest and len(chosen) < batch:
            digest = min(rest, key=lambda other: self._of_space[space_of[other]])
            rest.remove(digest)
            chosen.append(digest)
            self._of_space[space_of[digest]] += 1
        return sorted(chosen, key=self._log_s.__getitem__)

    def describe(self) -> dict[str, int]:
        """Counts of the search, as JSON values; ``distinct`` is of programs, ``spaces`` of the spaces of programs kept."""
        spaces = {genes[0] for genes, _ in self._kept.values()}
        return {**self.counts, "distinct": len(self._log_s), "spaces": len(spaces)}

    def _number(self, insts_json: str) -> int:
        """Index of a design space, which is parsed when it first occurs."""
        if insts_json not in self._numbers:
            self._numbers[insts_json] = len(self._spaces)
            self._spaces.append(_Space(insts_json))
        return self._numbers[insts_json]

    def _show(self) -> None:
        """Have TVM sample a few programs of each space, from which all others are made."""
        for insts_json, sampled in self._tuner.drawn(_SHOWN, self._rng):
            genes = self._number(insts_json), _decisions(sampled)
            self._spaces[genes[0]].see(genes[1])
            self._templates.append(genes)
        self._replay(self._templates)

    def _drawn(self) -> Genes:
        number, decisions = self._rng.choice(self._templates)
        space = self._spaces[number]
        return number, tuple((at, space.drawn(at, decision, self._rng)) for at, decision in decisions)

    def _replay(self, wanted: Sequence[Genes]) -> None:
        """Replay the programs that are new, and predict them."""
        before = set(self._log_s)
        for genes in wanted:
            if genes in self._hashes or time.monotonic() >= self._until:
                continue
            space = self._spaces[genes[0]]
            self.counts["replayed"] += 1
            measure = self._tuner.measure_of(space.insts, [list(pair) for pair in genes[1]])
            if measure is None:
                self.counts["rejected"] += 1
                self._hashes[genes] = None
                continue
            digest = structural_hash(measure.sch.mod["main"])
            self.counts["equal"] += digest in self._log_s or digest in self._kept
            self._hashes[genes] = digest
            if space.locations:
                # if a location does not exist TVM took the nearest one
                insts, taken = measure.sch.trace.insts, measure.sch.trace.decisions
                located = {at: int(taken[insts[at]]) for at in space.locations}
                genes = genes[0], tuple((at, located.get(at, decision)) for at, decision in genes[1])
                space.see(genes[1])
            self._take(genes, digest, measure)
        self._predict([digest for digest in self._kept if digest not in before])

    def _take(self, genes: Genes, digest: str, measure: Any) -> None:
        self._hashes[genes] = digest
        if digest not in self._log_s:
            self._kept.setdefault(digest, (genes, measure))

    def _predict(self, digests: Sequence[str]) -> None:
        if digests:
            log_s = self._score([self._kept[digest][1] for digest in digests])
            self._log_s.update(zip(digests, log_s.tolist(), strict=True))

    def _children(self, n: int) -> list[Genes]:
        """Children of the best programs: those the trees rank fastest, and a few random others. None was replayed before."""
        ranked = sorted((log_s, self._kept[d][0]) for d, log_s in self._log_s.items() if d in self._kept)[:_PARENTS]
        if not ranked:
            return [self._drawn() for _ in range(n)] if self._templates else []
        judge, judged, parents = self._fitted(), dict[Genes, float](), ranked
        for _ in range(_GENERATIONS):
            children = {self._child([genes for _, genes in parents]) for _ in range(_CHILDREN)}
            fresh = sorted(children - self._hashes.keys() - judged.keys())
            if not fresh:
                break
            self.counts["judged"] += len(fresh)
            judged.update(zip(fresh, judge(fresh).tolist(), strict=True))
            parents = sorted([*ranked, *((log_s, genes) for genes, log_s in judged.items())])[:_PARENTS]
        order = sorted(judged, key=judged.__getitem__)
        likeliest = n - round(_BLIND * n)
        rest = order[likeliest:]
        return order[:likeliest] + self._rng.sample(rest, min(n - likeliest, len(rest)))

    def _child(self, parents: Sequence[Genes]) -> Genes:
        """A mutant of one parent, or of a crossover of two parents of one space."""
        rng = self._rng
        # the first ones more often: as often as 1 / (place + 2)
        number, first = parents[_place(len(parents), rng)]
        made, space = list(first), self._spaces[number]
        if rng.random() < _CROSSED:
            other_number, other = parents[_place(len(parents), rng)]
            if other_number == number:
                made = [rng.choice(pair) for pair in zip(first, other, strict=True)]
        places = [k for k, (at, decision) in enumerate(made) if space.is_open(at, decision)]
        for _ in range(rng.choice((1, 1, 2, 3)) if places else 0):
            k = rng.choice(places)
            at, decision = made[k]
            made[k] = at, space.mutated(at, decision, rng)
        return number, tuple(made)

    def _fitted(self) -> Callable[[Sequence[Genes]], FloatArray]:
        """Trees fitted to all replayed programs: decisions to log seconds. Faster programs have larger weights."""
        import xgboost

        finite = [log_s for log_s in self._log_s.values() if math.isfinite(log_s)]
        worst = max(finite, default=0.0) + _REJECTED
        values = [math.inf if digest is None else self._log_s[digest] for digest in self._hashes.values()]
        log_s = np.minimum(values, worst)
        mean = float(log_s.mean())
        data = xgboost.DMatrix(self._rows(list(self._hashes)), log_s - mean, weight=np.exp(log_s.min() - log_s))
        trees = xgboost.train(_TREES, data, _NUMBER)
        return lambda genes: np.asarray(trees.inplace_predict(self._rows(genes))) + mean

    def _rows(self, wanted: Sequence[Genes]) -> FloatArray:
        """Features, (n, m): the index of the space, and its features in columns of their own, NaN in those of other spaces."""
        for genes in wanted:
            if genes not in self._features:
                self._features[genes] = _Space.features(genes[1])
        widths: dict[int, int] = dict.fromkeys(range(len(self._spaces)), 0)
        widths.update((number, len(self._features[number, d])) for number, d in self._hashes if (number, d) in self._features)
        starts = np.cumsum([1, *widths.values()])
        rows = np.full((len(wanted), starts[-1]), np.nan)
        for row, genes in zip(rows, wanted, strict=True):
            values = self._features[genes]
            row[0] = genes[0]
            row[starts[genes[0]] : starts[genes[0]] + len(values)] = values
        return rows


def _place(n: int, rng: random.Random) -> int:
    """A random index below n, log-uniform: small ones are more frequent."""
    return min(n - 1, int(math.exp(rng.random() * math.log(n + 1))) - 1)


def _decisions(written: str) -> tuple[tuple[int, Decision], ...]:
    return tuple((int(at), tuple(map(int, d)) if isinstance(d, list) else int(d)) for at, d in json.loads(written))


@functools.cache
def _divisors(n: int) -> list[int]:
    """Divisors above 1."""
    return [d for d in range(2, n + 1) if n % d == 0]
