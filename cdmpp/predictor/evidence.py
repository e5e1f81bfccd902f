"""What may be known of programs besides their ASTs: their compiled code, or their latencies on other devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import PredictorError
from cdmpp.predictor.elsewhere import rows_elsewhere

if TYPE_CHECKING:
    from cdmpp.device import Device
    from cdmpp.predictor.data import TrainingData


def check_one_kind(compiled: bool, measured: bool) -> None:
    """PredictorError for both."""
    if compiled and measured:
        raise PredictorError(
            "a prediction uses the compiled code (compiled) or latencies measured on other devices (measured), not both"
        )


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of n programs, of one kind at most; nothing by default.

    Attributes
    ----------
    code
        Instruction counts of the compiled programs, float32 (n, len(CODEGEN_FEATURES)), rows of NaN where unknown.
    elsewhere
        Other devices and the seconds measured there, float64 (n,) each, NaN where unknown.

    Raises
    ------
    PredictorError
        Both kinds.
    """

    code: NDArray[np.float32] | None = None
    elsewhere: Sequence[tuple[Device, NDArray[np.float64]]] | None = None

    def __post_init__(self) -> None:
        check_one_kind(self.code is not None, self.elsewhere is not None)

    @classmethod
    def of_rows(
        cls,
        data: TrainingData,
        rows: NDArray[np.int64],
        *,
        compiled: bool = False,
        measured: bool = False,
        hidden: NDArray[np.int64] | None = None,
    ) -> Evidence:
        """What data knows of the programs of these rows of its label table: the stored instruction counts
        (``compiled``), or the labels on all other devices of the same kind but for ``hidden`` rows (``measured``)."""
        check_one_kind(compiled, measured)
        if compiled:
            return cls(code=None if data.codegen_counts is None else data.codegen_counts[rows])
        if not measured:
            return cls()
        latency_s = data.labels["latency_s"].to_numpy(dtype=np.float64)
        found = rows_elsewhere(data, rows, hidden)
        return cls(
            elsewhere=[(device, np.where(there >= 0, latency_s[there], np.nan)) for device, there in found]
        )

    def known(self, n: int) -> NDArray[np.bool_]:
        """For which of the n programs there is any, bool (n,)."""
        if self.code is not None:
            return ~np.isnan(self.code[:, 0])
        known: NDArray[np.bool_] = np.zeros(n, dtype=bool)
        for _, seconds in self.elsewhere or ():
            known |= ~np.isnan(seconds)
        return known


#: Nothing but the AST.
NO_EVIDENCE = Evidence()
