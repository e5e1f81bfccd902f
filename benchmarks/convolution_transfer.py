"""How well a measured time transfers: the fastest solver's time for a convolution on an AMD GPU, predicted from another GPU's.

    python benchmarks/convolution_transfer.py --data runs/miopen --json convolution_transfer.json

The dataset is what ``cdmpp import miopen`` makes. The other GPU's times are multiplied by the constant that is best over all
convolutions. Shown are the best GPU of another family, and of the same one: its errors come from solvers, versions and clocks.
"""

from __future__ import annotations

import itertools

import numpy as np
from common import arguments, bootstrap, figure, provenance, report, start

from cdmpp.dataset.operators import load_operators
from cdmpp.device import get_device
from cdmpp.predictor.operators import families
from cdmpp.program.operators import SIZES


def main() -> None:
    args = arguments(__doc__, __file__).parse_args()
    table = load_operators(args.data).fillna(dict.fromkeys(SIZES, -1))
    family = families([get_device(name) for name in sorted(set(table["device"]))])
    best: dict[str, np.ndarray] = {}
    for dtype, part in table.groupby("dtype", observed=True):
        logs = np.log(part.pivot_table("seconds", list(SIZES), "device", "min", observed=True))
        for device, other in itertools.permutations(logs, 2):
            known = (logs[device] - logs[other]).dropna()
            error = np.abs(np.expm1(known.median() - known)).to_numpy()
            name = f"{dtype}, {device} from {'its' if family[device] == family[other] else 'another'} family"
            if len(error) >= 100 and np.median(error) < np.median(best.get(name, np.inf)):
                best[name] = error
    found = [
        figure(name, {"median_ape": float(np.median(error))}, len(error), interval={
            "median_ape": bootstrap(error, np.arange(len(error)), median=True, resamples=200)
        })
        for name, error in best.items()
    ]  # fmt: skip
    report(args.json, provenance(__file__, args.data), found)


if __name__ == "__main__":
    start(main)
