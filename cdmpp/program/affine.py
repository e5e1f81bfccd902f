"""Index expressions as linear forms of the loops around them.

A :data:`Form` is either an ``int`` (a constant) or a mapping ``loop or atom -> coefficient``; the constant of a
form that is not constant is dropped, since footprints and strides do not depend on it. Loops are numbered from
the outermost (0, 1, ...) of the leaf's own chain. What is not affine, ``floordiv`` and ``floormod`` of fused
loops above all, becomes an *atom*, numbered -1, -2, ..., after every simplification that is exact: the splits
that MetaSchedule makes of fused loops mostly cancel. Nothing here imports TVM.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

#: A constant, or loop (>= 0) / atom (< 0) -> coefficient. Never mutated once made.
Form = int | dict[int, int]

DIV, MOD, OPAQUE = 0, 1, 2


class Atom(NamedTuple):
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

    __slots__ = ("_known", "_splits", "atom_loops", "atoms", "extents")

    def __init__(self, extents: list[int]) -> None:
        self.extents = extents
        self.atoms: list[Atom] = []
        #: Loops that each atom depends on.
        self.atom_loops: list[frozenset[int]] = []
        self._known: dict[tuple[object, ...], int] = {}
        self._splits: dict[tuple[object, ...], tuple[Form, Form]] = {}

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
        loops = set(form)
        if self.atoms:
            for key in form:
                if key < 0:
                    loops.discard(key)
                    loops |= self.atom_loops[-1 - key]
        return loops

    def sum(self, a: Form, b: Form) -> Form:
        """``a + b``, in which ``k * (s // k) + s % k`` becomes ``s``."""
        out = add(a, b)
        return self.joined(out) if len(self.atoms) > 1 and not isinstance(out, int) else out

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
        return a // b if isinstance(a, int) else self.split(a, b)[0]

    def floormod(self, a: Form, b: Form) -> Form:
        """``a - floor(a / b) * b``."""
        if not isinstance(b, int) or b <= 0:
            return self.opaque([a, b])
        return a % b if isinstance(a, int) else self.split(a, b)[1]

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

    def split(self, form: dict[int, int], factor: int) -> tuple[Form, Form]:
        """Quotient and remainder of a form by a positive constant."""
        key = (factor, *form.items())
        known = self._splits.get(key)
        if known is None:
            known = self._splits[key] = self._split(form, factor)
        return known

    def _split(self, form: dict[int, int], factor: int) -> tuple[Form, Form]:
        """What :meth:`split` returns.

        The terms are parted into a high and a low part such that the low part stays below a common divisor
        ``g`` of the factor and the high part: then ``form // factor = (high / g) // (factor / g)`` and
        ``form % factor = g * ((high / g) % (factor / g)) + low``. A term with a negative coefficient is never
        low. Terms that the factor divides go to the quotient beforehand.
        """
        if factor == 1:
            return form, 0
        extents, atoms = self.extents, self.atoms
        whole: dict[int, int] = {}
        terms: list[
            tuple[int, int, int, int]
        ] = []  # size and sign for sorting, loop or atom, coefficient, span
        rest_span = 0
        for key, coef in form.items():
            if coef % factor == 0:
                whole[key] = coef // factor
                continue
            if coef > 0:
                span = coef * (extents[key] - 1 if key >= 0 else atoms[-1 - key].span)
                terms.append((coef, key, coef, span))
            else:
                span = factor
                terms.append((-coef, key, coef, span))
            rest_span += span
        if not terms:
            return whole, 0
        # The fewer terms are in the high part, the larger the common divisor: take the first cut that works.
        if rest_span < factor:
            return whole or 0, {key: coef for _, key, coef, _ in terms}
        terms.sort(reverse=True)
        g, cut = factor, 0
        while rest_span >= g and cut < len(terms):
            term = terms[cut]
            g = gcd(g, term[2])
            rest_span -= term[3]
            cut += 1
        low = {key: coef for _, key, coef, _ in terms[cut:]}
        high = {key: coef // g for _, key, coef, _ in terms[:cut]}
        quotient, remainder = self._split_high(high, factor // g)
        if g > 1:
            remainder = scale(remainder, g)
        return (
            self.sum(whole, quotient) if whole else quotient,
            self.sum(remainder, low) if low else remainder,
        )

    def _split_high(self, high: dict[int, int], factor: int) -> tuple[Form, Form]:
        """Quotient and remainder of a form that has no low part and no common divisor with the factor."""
        if factor == 1:
            return high, 0
        span = 0
        positive = True
        for key, coef in high.items():
            positive &= coef > 0
            span += abs(coef) * (self.extents[key] - 1 if key >= 0 else self.atoms[-1 - key].span)
        if positive and span < factor:
            return 0, high
        if len(high) == 1:
            ((key, coef),) = high.items()
            if key < 0 and coef == 1:
                atom = self.atoms[-1 - key]
                if atom.op == DIV:
                    quotient = self.floordiv(atom.source, atom.factor * factor)
                    return quotient, {self._atom(MOD, high, factor, min(span, factor - 1)): 1}
                if atom.op == MOD and atom.factor % factor == 0:
                    remainder = self.floormod(atom.source, factor)
                    return {self._atom(DIV, high, factor, span // factor): 1}, remainder
        return (
            {self._atom(DIV, high, factor, span // factor): 1},
            {self._atom(MOD, high, factor, min(span, factor - 1)): 1},
        )

    def _atom(self, op: int, source: dict[int, int], factor: int, span: int) -> int:
        key = (op, factor, frozenset(source.items()))
        number = self._known.get(key)
        if number is None:
            self.atoms.append(Atom(op, source, factor, span))
            self.atom_loops.append(frozenset(self.loops_of(source)))
            number = self._known[key] = -len(self.atoms)
        return number

    def joined(self, form: dict[int, int]) -> Form:
        """The form with quotients and remainders put together again.

        ``k * (s // k) + s % k`` is ``s``, and ``k * ((s % n) // k) + s % k`` is ``s % n`` where ``k`` divides ``n``.
        """
        while True:
            found = [(key, self.atoms[-1 - key]) for key in form if key < 0]
            if len(found) < 2:
                return form
            pair = self._pair(form, found)
            if pair is None:
                return form
            remainder, quotient = pair
            out = {key: coef for key, coef in form.items() if key not in pair}
            merged = add(out, scale(self.atoms[-1 - quotient].source, form[remainder]))
            if isinstance(merged, int):
                return merged
            form = merged

    def _pair(self, form: dict[int, int], found: list[tuple[int, Atom]]) -> tuple[int, int] | None:
        """A remainder and a quotient among the atoms of a form that :meth:`joined` can put together."""
        for remainder, mod in found:
            if mod.op != MOD:
                continue
            coef = form[remainder] * mod.factor
            for quotient, div in found:
                if div.op != DIV or div.factor != mod.factor or form[quotient] != coef:
                    continue
                if div.source == mod.source:
                    return remainder, quotient
                if len(div.source) == 1:
                    ((key, one),) = div.source.items()
                    inner = self.atoms[-1 - key] if key < 0 and one == 1 else None
                    if (
                        inner
                        and inner.op == MOD
                        and inner.source == mod.source
                        and inner.factor % mod.factor == 0
                    ):
                        return remainder, quotient
        return None


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
