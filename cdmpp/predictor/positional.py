"""Sinusoidal encoding of the positions of leaves in the pre-order of the AST (CDMPP, section 4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdmpp.errors import PredictorError

#: Encodings that :func:`positional_encoding` knows.
VARIANTS: tuple[str, ...] = ("standard", "paper")

_BASE = 10000.0


def positional_encoding(positions: ArrayLike, dim: int, variant: str = "standard") -> NDArray[np.float32]:
    """Encode pre-order positions.

    Column ``k`` is ``sin(pos * f_k)`` for even ``k`` and ``cos(pos * f_k)`` for odd ``k``, with the frequencies

    * ``standard``: ``f_k = 10000 ** (-2 * (k // 2) / dim)``. A sine and a cosine share a frequency, as in *Attention
      is all you need*: the encoding of ``pos + n`` is a rotation of that of ``pos``.
    * ``paper``: ``f_k = 10000 ** (-2 * k / dim)``, CDMPP's formula with ``k`` counting columns. Frequencies fall
      twice as fast, to 1e-8, and no two columns share one.

    Parameters
    ----------
    positions
        Non-negative integers of any shape.
    dim
        Columns; at least 1, may be odd.
    variant
        One of :data:`VARIANTS`.

    Returns
    -------
    encoding
        float32, ``positions.shape + (dim,)``, values in [-1, 1].

    Raises
    ------
    PredictorError
        Unknown variant, no columns or a negative position.
    """
    if variant not in VARIANTS:
        raise PredictorError(
            f"unknown positional encoding {variant!r}: expected one of {', '.join(VARIANTS)}"
        )
    if dim < 1:
        raise PredictorError(f"a positional encoding needs at least one column, got {dim}")
    pos = np.asarray(positions, dtype=np.float64)
    if pos.size and pos.min() < 0:
        raise PredictorError(f"positions must not be negative, got {pos.min():g}")
    column = np.arange(dim)
    exponent = 2.0 * (column // 2 if variant == "standard" else column) / dim
    angle = pos[..., None] * _BASE**-exponent
    return np.where(column % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)
