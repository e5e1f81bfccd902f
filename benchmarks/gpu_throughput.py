"""Labels per second on a GPU: the parallel engine against the same worker one program at a time.

The same programs of a bundle are measured from source (compile, load, measure)

* alone: degree 1, no stage overlaps another, twice (their difference is the re-measurement noise);
* together: compiling on all cores, loading ahead, side by side as far as the calibration allows.

Prints a table and writes JSON with the ratio, the differences of the labels, and what the goals of the project say
about them. Runs of it are resumable: a part that is in ``--out`` already is not measured again.

    python benchmarks/gpu_throughput.py h200.bundle --programs 240 --out throughput --json throughput.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.dataset import Dataset
from cdmpp.errors import CdmppError
from cdmpp.profiler.calibration import spearman
from cdmpp.profiler.gpu.bundle import Bundle, read_bundle
from cdmpp.profiler.gpu.measure import MeasureConfig, measure

#: The goals: ratio of labels/s, median difference of labels, rank correlation, re-measurement noise.
GOALS = {"speedup": 4.0, "median_difference": 0.02, "spearman": 0.99, "noise": 0.01}
PARTS = ("alone", "alone_again", "together")


def take(bundle: Bundle, part: str, out: Path, config: MeasureConfig) -> dict[str, Any]:
    """Measure one part, unless it was measured before; its rate and labels."""
    folder, note = out / part, out / f"{part}.json"
    if not note.exists():
        if part != "together":
            config = replace(config, degree=1, overlap=False)
        report = measure(
            bundle, out=folder, config=config, notify=lambda line: print(line, file=sys.stderr), resume=True
        )
        value = {
            "labels_per_s": report.labels_per_s,
            "elapsed_s": report.elapsed_s,
            "new": report.new,
            "failures": report.failures,
            "degrees": {str(group): degree for group, degree in report.degrees.items()},
            "calibration": report.calibration,
            "gpu": asdict(report.facts),
        }
        note.write_text(json.dumps(value, indent=1))
    result: dict[str, Any] = json.loads(note.read_text())
    frame = Dataset.open(folder).records
    frame = frame[frame["status"] == "ok"].drop_duplicates("program")
    result["labels"] = dict(zip(frame["program"], frame["latency_s"], strict=True))
    return result


def compare(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    """How labels differ: median and 90th percentile of |b / a - 1|, its median sign, rank correlation."""
    common = sorted(set(a) & set(b))
    ratio = np.array([b[h] / a[h] for h in common]) - 1
    return {
        "n": len(common),
        "median_difference": float(np.median(np.abs(ratio))),
        "p90_difference": float(np.quantile(np.abs(ratio), 0.9)),
        "bias": float(np.median(ratio)),
        "spearman": spearman([a[h] for h in common], [b[h] for h in common]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--programs", type=int, default=240, help="evenly over the tasks")
    parser.add_argument("--part", choices=PARTS, help="measure this part only, to stay within a time limit")
    parser.add_argument("--compilers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = MeasureConfig(
        from_source=True,
        limit=args.programs,
        builders=args.compilers,
        best_per_task=0,
        check_per_task=0,
        seed=args.seed,
    )
    try:
        bundle = read_bundle(args.bundle)
        wanted = (args.part,) if args.part else PARTS
        parts = {part: take(bundle, part, args.out, config) for part in wanted}
    except CdmppError as err:
        print(f"gpu_throughput: {err}", file=sys.stderr)
        return 2
    for part, value in parts.items():
        print(f"{part:12s} {len(value['labels']):5d} labels  {value['labels_per_s']:8.2f} labels/s")
    if args.part:
        return 0
    alone, again, together = (parts[part] for part in PARTS)
    # The better of two runs alone is what to compare with.
    truth = {h: min(v, again["labels"].get(h, v)) for h, v in alone["labels"].items()}
    noise = compare(alone["labels"], again["labels"])
    against = compare(truth, together["labels"])
    serial = max(alone["labels_per_s"], again["labels_per_s"])
    result = {
        "speedup": together["labels_per_s"] / serial,
        "labels_per_s": {part: parts[part]["labels_per_s"] for part in PARTS},
        "together_against_alone": against,
        "alone_against_alone": noise,
        "degrees": together["degrees"],
        "calibration": together["calibration"],
        "gpu": together["gpu"],
        "goals": GOALS,
    }
    print(f"speed-up {result['speedup']:.2f} (goal {GOALS['speedup']:g})")
    for name, value in (("together against alone", against), ("alone against alone", noise)):
        print(
            f"{name}: {100 * value['median_difference']:.2f} % in the median, "
            f"{100 * value['p90_difference']:.2f} % in the worst tenth, Spearman {value['spearman']:.4f}"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
