"""Index expressions as linear forms of the loops around them.

A :data:`Form` is either an ``int`` (a constant) or a mapping ``loop or atom -> coefficient``; the constant of a
form that is not constant is dropped, since footprints and strides do not depend on it. Loops are numbered from
the outermost (0, 1, ...) of the leaf's own chain. What is not affine, ``floordiv`` and ``floormod`` of fused
loops above all, becomes an *atom*, numbered -1, -2, ..., after every simplification that is exact: the splits
that MetaSchedule makes of fused loops mostly cancel. Nothing here imports TVM.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

#: A constant, or loop (>= 0) / atom (< 0) -> coefficient. Never mutated once made.
Form = int | dict[int, int]

DIV, MOD, OPAQUE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Atom:
    """A part of an index that is not affine in the loops.

    Attributes
    ----------
    op
        ``DIV``: ``floor(source / factor)``; ``MOD``: ``source mod factor``; ``OPAQUE``: some function of the
        loops in ``source`` (a value read from memory, a product of loops, ...).
    source
        Linear form it is taken of.
    factor
        Divisor or modulus; for ``OPAQUE`` the number of values it may take (0: unknown).
    span
        Largest minus smallest value over the whole loop nest.
    """

    op: int
    source: dict[int, int]
    factor: int
    span: int


def _by_size(term: tuple[int, int]) -> tuple[int, int]:
    return -abs(term[1]), term[0]


def add(a: Form, b: Form) -> Form:
    """The sum of two forms."""
    if isinstance(a, int):
        return a + b if isinstance(b, int) else b
    if isinstance(b, int):
        return a
    out = dict(a)
    for key, coef in b.items():
        total = out.get(key, 0) + coef
        if total:
            out[key] = total
        else:
            del out[key]
    return out or 0


def scale(a: Form, factor: int) -> Form:
    """A form times a constant."""
    if isinstance(a, int):
        return a * factor
    if factor == 1:
        return a
    return {key: coef * factor for key, coef in a.items()} if factor else 0


class IndexSpace:
    """The loops around one leaf, and the atoms of its indices.

    Parameters
    ----------
    extents
        Extents of the loops, outermost first.
    """

    __slots__ = ("_known", "atoms", "extents")

    def __init__(self, extents: list[int]) -> None:
        self.extents = extents
        self.atoms: list[Atom] = []
        self._known: dict[tuple[object, ...], int] = {}

    def span(self, form: Form) -> int:
        """Largest minus smallest value of a form over all loops (an upper bound if atoms are correlated)."""
        if isinstance(form, int):
            return 0
        extents, atoms = self.extents, self.atoms
        return sum(
            abs(coef) * (extents[key] - 1 if key >= 0 else atoms[-1 - key].span) for key, coef in form.items()
        )

    def loops_of(self, form: Form) -> set[int]:
        """The loops a form depends on, through atoms too."""
        if isinstance(form, int):
            return set()
        loops: set[int] = set()
        for key in form:
            if key >= 0:
                loops.add(key)
            else:
                loops |= self.loops_of(self.atoms[-1 - key].source)
        return loops

    def sum(self, a: Form, b: Form) -> Form:
        """``a + b``, in which ``k * (s // k) + s % k`` becomes ``s``."""
        out = add(a, b)
        if not self.atoms or isinstance(out, int):
            return out
        return self._join(out)

    def product(self, a: Form, b: Form) -> Form:
        """``a * b``; an opaque atom if neither is constant."""
        if isinstance(b, int):
            return scale(a, b)
        if isinstance(a, int):
            return scale(b, a)
        return self.opaque([a, b])

    def floordiv(self, a: Form, b: Form) -> Form:
        """``floor(a / b)``."""
        if not isinstance(b, int) or b <= 0:
            return self.opaque([a, b])
        return a // b if isinstance(a, int) else self._split(a, b)[0]

    def floormod(self, a: Form, b: Form) -> Form:
        """``a - floor(a / b) * b``."""
        if not isinstance(b, int) or b <= 0:
            return self.opaque([a, b])
        return a % b if isinstance(a, int) else self._split(a, b)[1]

    def opaque(self, parts: list[Form], values: int = 0) -> Form:
        """Some function of forms that takes at most ``values`` values (0: as many as its loops)."""
        source: dict[int, int] = {}
        for part in parts:
            for loop in self.loops_of(part):
                source[loop] = 1
        if not source:
            return 0
        points = 1
        for loop in source:
            points *= self.extents[loop]
        return {self._atom(OPAQUE, source, values, min(points, values or points) - 1): 1}

    def _split(self, form: dict[int, int], factor: int) -> tuple[Form, Form]:
        """Quotient and remainder by a positive constant.

        The terms are parted into a high and a low part such that the low part stays below a common divisor
        ``g`` of the factor and the high part: then ``form // factor = (high / g) // (factor / g)`` and
        ``form % factor = g * ((high / g) % (factor / g)) + low``. A term with a negative coefficient is never
        low. Terms that the factor divides go to the quotient beforehand.
        """
        if factor == 1:
            return form, 0
        whole = {k: c // factor for k, c in form.items() if c % factor == 0}
        if whole:
            rest_form = {k: c for k, c in form.items() if c % factor}
            if not rest_form:
                return whole, 0
            quotient, remainder = self._split(rest_form, factor)
            return self.sum(whole, quotient), remainder
        terms = sorted(form.items(), key=_by_size)
        extents, atoms = self.extents, self.atoms
        spans = [
            coef * (extents[key] - 1 if key >= 0 else atoms[-1 - key].span) if coef > 0 else factor
            for key, coef in terms
        ]
        # The fewer terms are in the high part, the larger the common divisor: take the first cut that works.
        g, cut, rest_span = factor, 0, sum(spans)
        while rest_span >= g:
            if cut == len(terms):
                break
            g = gcd(g, terms[cut][1])
            rest_span -= spans[cut]
            cut += 1
        high, low = dict(terms[:cut]), dict(terms[cut:])
        if not high:
            return 0, low or 0
        high = {k: c // g for k, c in high.items()}
        rest = factor // g
        if rest == 1:
            return high, low or 0
        if all(c > 0 for c in high.values()) and self.span(high) < rest:
            return 0, self.sum(scale(high, g), low or 0)
        if len(high) == 1:
            ((key, coef),) = high.items()
            if key < 0 and coef == 1:
                atom = self.atoms[-1 - key]
                if atom.op == DIV and not low:
                    quotient = self.floordiv(atom.source, atom.factor * rest)
                    return quotient, {self._atom(MOD, high, rest, min(atom.span, rest - 1)): g}
                if atom.op == MOD and atom.factor % rest == 0:
                    remainder = self.floormod(atom.source, rest)
                    quotient = {self._atom(DIV, high, rest, atom.span // rest): 1}
                    return quotient, self.sum(scale(remainder, g), low or 0)
        span = self.span(high)
        quotient = {self._atom(DIV, high, rest, span // rest): 1}
        remainder = {self._atom(MOD, high, rest, min(span, rest - 1)): g}
        return quotient, add(remainder, low or 0)

    def _atom(self, op: int, source: dict[int, int], factor: int, span: int) -> int:
        key = (op, factor, tuple(sorted(source.items())))
        number = self._known.get(key)
        if number is None:
            self.atoms.append(Atom(op, source, factor, span))
            number = self._known[key] = -len(self.atoms)
        return number

    def _join(self, form: dict[int, int]) -> Form:
        """Put quotient and remainder of the same source together again."""
        if sum(key < 0 for key in form) < 2:
            return form
        for key, coef in form.items():
            if key >= 0:
                continue
            atom = self.atoms[-1 - key]
            if atom.op != MOD:
                continue
            other = self._known.get((DIV, atom.factor, tuple(sorted(atom.source.items()))))
            if other is not None and form.get(other) == coef * atom.factor:
                rest = {k: c for k, c in form.items() if k not in (key, other)}
                return self.sum(rest or 0, scale(atom.source, coef))
        return form


def spans_by_depth(
    space: IndexSpace, number: int, order: list[int], cache: dict[int, list[int]]
) -> list[int]:
    """Span of an atom while only the first ``k`` loops of ``order`` vary, for k = 0 ... len(order).

    Parameters
    ----------
    number
        Negative number of the atom in ``space``.
    order
        Loops, innermost first; -1 stands for a loop that changes nothing.
    cache
        Results by atom for this order, filled here.
    """
    known = cache.get(number)
    if known is not None:
        return known
    atom = space.atoms[-1 - number]
    extents, source = space.extents, atom.source
    out = [0]
    if atom.op == OPAQUE:
        points = 1
        for loop in order:
            if loop in source:
                points *= extents[loop]
            out.append(min(points, atom.factor or points) - 1)
    else:
        inner = [
            (abs(coef), spans_by_depth(space, key, order, cache)) for key, coef in source.items() if key < 0
        ]
        total = 0
        for k, loop in enumerate(order, 1):
            coef = source.get(loop, 0) if loop >= 0 else 0
            if coef:
                total += abs(coef) * (extents[loop] - 1)
            span = total
            for weight, spans in inner:
                span += weight * spans[k]
            out.append(span // atom.factor if atom.op == DIV else min(span, atom.factor - 1))
    cache[number] = out
    return out


def step(space: IndexSpace, form: Form, loop: int) -> int:
    """Change of a form when one loop goes from 0 to 1 while all others stay at 0."""
    if isinstance(form, int):
        return 0
    total = 0
    for key, coef in form.items():
        if key >= 0:
            if key == loop:
                total += coef
            continue
        atom = space.atoms[-1 - key]
        inner = step(space, atom.source, loop)
        if not inner:
            continue
        if atom.op == DIV:
            total += coef * (inner // atom.factor)
        elif atom.op == MOD:
            total += coef * (inner % atom.factor)
        else:
            total += coef * inner
    return total
