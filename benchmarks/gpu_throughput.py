"""Labels per second on a GPU: the parallel engine against the same worker one program at a time.

The same programs of a bundle are measured from source (compile, load, measure)

* alone: degree 1, no stage overlaps another, twice (their difference is the re-measurement noise);
* together: compiling on all cores, loading ahead, side by side as far as the calibration allows.

A part that is in ``--out`` already is not measured again.

    python benchmarks/gpu_throughput.py h200.bundle --programs 240 --out throughput --json throughput.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import Figure, arguments, figure, provenance, report, start

from cdmpp.dataset import Dataset
from cdmpp.profiler.calibration import spearman
from cdmpp.profiler.gpu.bundle import Bundle, read_bundle
from cdmpp.profiler.gpu.measure import MeasureConfig, measure

PARTS = ("alone", "alone_again", "together")


def take(bundle: Bundle, part: str, out: Path, config: MeasureConfig) -> dict[str, Any]:
    """Measure one part, unless it was measured before; its rate and labels."""
    folder, note = out / part, out / f"{part}.json"
    if not note.exists():
        if part != "together":
            config = replace(config, degree=1, overlap=False)
        done = measure(bundle, out=folder, config=config, notify=lambda line: print(line, file=sys.stderr), resume=True)
        degrees = {str(group): degree for group, degree in done.degrees.items()}
        value = {"labels_per_s": done.labels_per_s, "degrees": degrees, "calibration": done.calibration}
        note.write_text(json.dumps({**value, "gpu": asdict(done.facts)}))
    result: dict[str, Any] = json.loads(note.read_text())
    frame = Dataset.open(folder).records
    frame = frame[frame["status"] == "ok"].drop_duplicates("program")
    result["labels"] = dict(zip(frame["program"], frame["latency_s"], strict=True))
    return result


def difference(name: str, a: dict[str, float], b: dict[str, float]) -> Figure:
    """How labels differ: median and 90th percentile of |b / a - 1|, its median sign, rank correlation."""
    common = sorted(set(a) & set(b))
    ratio = np.array([b[h] / a[h] for h in common]) - 1
    values = {
        "median_ape": float(np.median(np.abs(ratio))),
        "worst tenth": float(np.quantile(np.abs(ratio), 0.9)),
        "bias": float(np.median(ratio)),
        "spearman": spearman([a[h] for h in common], [b[h] for h in common]),
    }
    return figure(f"labels, {name}", values, len(common))


def main() -> None:
    parser = arguments(__doc__, __file__, part={"choices": PARTS})
    parser.add_argument("bundle")
    parser.add_argument("--builders", "--compilers", type=int, metavar="N", help="compiling processes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = MeasureConfig(
        from_source=True, limit=args.programs, builders=args.builders, best_per_task=0, check_per_task=0, seed=args.seed
    )
    bundle = read_bundle(args.bundle)
    wanted = (args.part,) if args.part else PARTS
    parts = {part: take(bundle, part, args.out, config) for part in wanted}
    for part, value in parts.items():
        print(f"{part:12s} {len(value['labels']):5d} labels  {value['labels_per_s']:8.2f} labels/s")
    if args.part:
        return
    alone, again, together = (parts[part] for part in PARTS)
    # the better of two runs alone is what to compare with
    truth = {h: min(v, again["labels"].get(h, v)) for h, v in alone["labels"].items()}
    rates = {"ours": together["labels_per_s"], "theirs": max(alone["labels_per_s"], again["labels_per_s"])}
    rates["ratio"] = rates["ours"] / rates["theirs"]
    figures = [
        figure("labels a second, together against alone", rates, len(together["labels"])),
        difference("together against alone", truth, together["labels"]),
        difference("alone against alone", alone["labels"], again["labels"]),
    ]
    made = provenance(__file__, [args.bundle], seeds=[args.seed])
    report(args.json, made, figures, **{key: together[key] for key in ("degrees", "calibration", "gpu")})


if __name__ == "__main__":
    start(main)
