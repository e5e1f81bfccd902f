"""Search for fast programs of a task over the decisions of its design spaces.

Replaying a trace is what a search costs: TVM takes 3 to 12 ms of a CPU for each program whose AST is to be predicted, and holds
Python's lock meanwhile; its evolutionary search replays a thousand for sixteen that are measured. Here most children are never
replayed: small trees over the decisions, fitted to the predictions (and rejections) of what was replayed so far, say which of
some thousand mutants and crossings are likely to be fast, and the predictor ranks those few by their ASTs.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.program.tvm_env import structural_hash
from cdmpp.tuner.candidates import Candidate, TaskTuner

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]
#: What a sampling instruction decides: tiles of a loop, outermost first, or a number.
Decision = tuple[int, ...] | int
#: A program: number of its space, and (position of a sampling instruction, decision) of each.
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
#: Programs drawn blindly before the first children, and children replayed in a step, times the candidates of a round.
_FIRST, _FRESH, _REPLAYED = 6, 1, 2
#: Steps of a search's first round, and of the later ones, which begin with what is known.
_STEPS, _LATER = 4, 2
#: Generations that the trees alone judge between two steps, and children of each.
_GENERATIONS, _CHILDREN = 3, 256
_PARENTS = 64
#: Part of the children replayed that is chosen blindly, and of those made by crossing.
_BLIND, _CROSSED = 0.1, 0.3
#: Log seconds that what was rejected or failed counts as slower than the slowest.
_REJECTED = 0.7
#: Part of a round that is of the spaces that least was proposed of: where predictions of one are too low, all would be of it.
_ELSEWHERE = 0.125
#: Programs of each space that TVM draws itself: they show how far its loops reach.
_SHOWN = 4
#: Programs kept from round to round, the likeliest: 60 kB each.
_KEPT = 512


@dataclass
class SearchCounts:
    """Children that the trees judged; programs replayed, and of these rejected by TVM and equal to another; proposed."""

    judged: int = 0
    replayed: int = 0
    rejected: int = 0
    equal: int = 0
    proposed: int = 0


class _Space:
    """A design space by the JSON of its instructions: what they may decide, and decisions as numbers."""

    def __init__(self, insts_json: str) -> None:
        self.insts: list[Any] = json.loads(insts_json)
        #: Values of what decides no tiles; those of compute locations are what was seen, TVM takes the nearest that there is.
        self._values: dict[int, list[int]] = {
            at: list(range(len(inst[2][0]))) for at, inst in enumerate(self.insts) if inst[0] == "SampleCategorical"
        }
        self.locations = [at for at, inst in enumerate(self.insts) if inst[0] == "SampleComputeLocation"]
        self._values.update((at, [-2, -1]) for at in self.locations)

    def see(self, decisions: Sequence[tuple[int, Decision]]) -> None:
        """Take note of locations that there are, and of the next."""
        for at, value in decisions:
            if at in self.locations and isinstance(value, int) and value >= max(self._values[at]):
                self._values[at] = list(range(-2, value + 2))

    def is_open(self, at: int, decision: Decision) -> bool:
        """Whether it can be another one."""
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
        """A blind decision in place of one."""
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
        """Limit of the innermost tile."""
        return int(self.insts[at][2][1])

    @staticmethod
    def features(decisions: Sequence[tuple[int, Decision]]) -> list[float]:
        """Logarithms of tiles and of all tiles inside of each, those summed over the loops, other decisions as they are."""
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
    """The search for one task. `score` gives predicted log seconds, float64 (n,), of MetaSchedule's candidates, infinite for
    what failed; a round has `batch` candidates. `earlier` programs are parents from the start."""

    def __init__(
        self,
        tuner: TaskTuner,
        score: Callable[[Sequence[Any]], FloatArray],
        batch: int,
        seed: int,
        earlier: Sequence[Candidate] = (),
    ) -> None:
        self._tuner, self._score, self._batch = tuner, score, batch
        self._rng = random.Random(f"{tuner.task.hash}:{seed}")
        self.counts = SearchCounts()
        #: The design spaces, and the number of each by the JSON of its instructions.
        self._spaces: list[_Space] = []
        self._numbers: dict[str, int] = {}
        #: Hash of the program of all decisions that were replayed, None of what was rejected; features of the decisions.
        self._hashes: dict[Genes, str | None] = {}
        self._features: dict[Genes, list[float]] = {}
        #: Predicted log seconds of all programs; decisions and MetaSchedule's candidate of those kept.
        self._log_s: dict[str, float] = {}
        self._kept: dict[str, tuple[Genes, Any]] = {}
        self._proposed: set[str] = set()
        #: Programs proposed of each space.
        self._of_space: Counter[int] = Counter()
        self._templates: list[Genes] = []
        self._steps = _STEPS
        for candidate in earlier:
            assert candidate.job.space is not None
            number = self._number(candidate.job.space.insts_json)
            genes = number, _decisions(candidate.job.program.decisions)
            self._take(genes, candidate.hash, candidate.measure)
        self._show()
        self._predict(list(self._kept))

    def sample(self, n: int) -> list[float]:
        """Replay so many programs drawn blindly; predicted log seconds of all that are known."""
        if self._templates:
            self._replay([self._drawn() for _ in range(n)])
        return list(self._log_s.values())

    def propose(self, known: Collection[str]) -> list[Candidate]:
        """The next candidates, likeliest first, none of them known, or proposed before though it was dropped; fewer where the
        spaces give no more, at last none."""
        self._predict(list(self._kept))
        self.sample(max(_FRESH * self._batch, _FIRST * self._batch - len(self._hashes)))
        for _ in range(self._steps):
            self._replay(self._children(_REPLAYED * self._batch))
        self._steps = _LATER
        likeliest = sorted(self._kept, key=self._log_s.__getitem__)
        chosen = self._chosen([digest for digest in likeliest if digest not in known and digest not in self._proposed])
        self._proposed.update(chosen)
        self.counts.proposed += len(chosen)
        found = [self._tuner.candidate(self._kept[digest][1].sch) for digest in chosen]
        for digest in likeliest[_KEPT:]:
            del self._kept[digest]
        return found

    def _chosen(self, likeliest: Sequence[str]) -> list[str]:
        """A batch: the likeliest, and a few of the spaces that least was proposed of."""
        few = round(_ELSEWHERE * self._batch) if len(self._spaces) > 1 else 0
        space_of = {digest: self._kept[digest][0][0] for digest in likeliest}
        chosen, rest = list(likeliest[: self._batch - few]), list(likeliest[self._batch - few :])
        self._of_space.update(space_of[digest] for digest in chosen)
        while rest and len(chosen) < self._batch:
            digest = min(rest, key=lambda other: self._of_space[space_of[other]])
            rest.remove(digest)
            chosen.append(digest)
            self._of_space[space_of[digest]] += 1
        return sorted(chosen, key=self._log_s.__getitem__)

    def describe(self) -> dict[str, int]:
        """What it did, as JSON values; ``distinct`` are different programs, ``spaces`` those of what is kept."""
        spaces = {genes[0] for genes, _ in self._kept.values()}
        return {**asdict(self.counts), "distinct": len(self._log_s), "spaces": len(spaces)}

    def _number(self, insts_json: str) -> int:
        """Of a design space, which is read when it is met first."""
        if insts_json not in self._numbers:
            self._numbers[insts_json] = len(self._spaces)
            self._spaces.append(_Space(insts_json))
        return self._numbers[insts_json]

    def _show(self) -> None:
        """Have TVM draw a few programs of each space, from which all others are made."""
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
        """Replay what is new, and predict it."""
        before = set(self._log_s)
        for genes in wanted:
            if genes in self._hashes:
                continue
            space = self._spaces[genes[0]]
            self.counts.replayed += 1
            measure = self._tuner.measure_of(space.insts, [list(pair) for pair in genes[1]])
            if measure is None:
                self.counts.rejected += 1
                self._hashes[genes] = None
                continue
            digest = structural_hash(measure.sch.mod["main"])
            self.counts.equal += digest in self._log_s or digest in self._kept
            self._hashes[genes] = digest
            if space.locations:
                # where a location is not there TVM took the nearest
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
        """The likeliest children of the best, by trees, and a few others; none of them was replayed."""
        ranked = sorted((log_s, self._kept[d][0]) for d, log_s in self._log_s.items() if d in self._kept)[:_PARENTS]
        if not ranked:
            return [self._drawn() for _ in range(n)] if self._templates else []
        judge, judged, parents = self._fitted(), dict[Genes, float](), ranked
        for _ in range(_GENERATIONS):
            children = {self._child([genes for _, genes in parents]) for _ in range(_CHILDREN)}
            fresh = sorted(children - self._hashes.keys() - judged.keys())
            if not fresh:
                break
            self.counts.judged += len(fresh)
            judged.update(zip(fresh, judge(fresh).tolist(), strict=True))
            parents = sorted([*ranked, *((log_s, genes) for genes, log_s in judged.items())])[:_PARENTS]
        order = sorted(judged, key=judged.__getitem__)
        likeliest = n - round(_BLIND * n)
        rest = order[likeliest:]
        return order[:likeliest] + self._rng.sample(rest, min(n - likeliest, len(rest)))

    def _child(self, parents: Sequence[Genes]) -> Genes:
        """A mutant of one parent, or of what two of a space have."""
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
        """Trees fitted to all that was replayed, as log seconds of decisions; the faster a program, the more it counts."""
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
        """Features, (n, m): the space's number, and each space's in columns of its own, NaN in the others."""
        for genes in wanted:
            if genes not in self._features:
                self._features[genes] = _Space.features(genes[1])
        widths: dict[int, int] = dict.fromkeys(range(len(self._spaces)), 0)
        widths.update(
            (number, len(self._features[number, d])) for number, d in self._hashes if (number, d) in self._features
        )
        starts = np.cumsum([1, *widths.values()])
        rows = np.full((len(wanted), starts[-1]), np.nan)
        for row, genes in zip(rows, wanted, strict=True):
            values = self._features[genes]
            row[0] = genes[0]
            row[starts[genes[0]] : starts[genes[0]] + len(values)] = values
        return rows


def _place(n: int, rng: random.Random) -> int:
    """One of n places, the first ones more often: log-uniform."""
    return min(n - 1, int(math.exp(rng.random() * math.log(n + 1))) - 1)


def _decisions(decisions_json: str) -> tuple[tuple[int, Decision], ...]:
    return tuple(
        (int(at), tuple(map(int, d)) if isinstance(d, list) else int(d)) for at, d in json.loads(decisions_json)
    )


@functools.cache
def _divisors(n: int) -> list[int]:
    """Those above 1."""
    return [d for d in range(2, n + 1) if n % d == 0]
