"""What tuning costs with and without trimming, at equal final latency.

    python benchmarks/trimmer.py --data data --out runs/bench-trimmer --json trimmer.json
    python benchmarks/trimmer.py --quick --out /tmp/bench-trimmer        # does it run? figures mean nothing

Tasks of networks that the predictor never saw are tuned as in ``benchmarks/tuning.py`` (which see: predictor, tasks, final
measurements, resuming), with cdmpp's cost model, the same trials and seeds, once measuring every candidate and once
dropping those whose predicted interval lies above the best so far. In the folder of that benchmark its own runs of the cost
model are the ones that measure everything: they are not made twice.

``cost_ratio`` is the cost with trimming over that without, the geometric mean over tasks and seeds; the cost is CPU
seconds of search, building and measuring together. It counts only where the final latency is not worse by more than 2 %:
``final_latency_ratio`` says, and ``equal`` is the fraction of the runs for which that holds.

``stopped`` is what both would be had the trimmed runs been told ``--stop-when-gain-per-minute-below`` besides: their curves
are cut where that rule stops them, the cost with them in proportion to the wall time, and the latencies are those that
the runs themselves measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from kept_rows import KeptRows
from tuning import (
    add_arguments,
    described,
    held_out_predictor,
    held_out_tasks,
    measure_again,
    shrink,
    tune_alone,
)

#: Final latencies that differ by less are equal.
EQUAL = 0.02


def stopped(pairs: list[tuple[dict[str, Any], dict[str, Any]]], least_gain: float) -> dict[str, float]:
    """The ratios had each trimmed run ended where another minute is expected to bring less."""
    from cdmpp.tuner.objective import Curve, Point, geometric_mean

    costs, latencies = [], []
    for plain, trimmed in pairs:
        points = [Point(**point) for point in trimmed["curve"]]
        gains = [Curve(points[: n + 1]).gain() for n in range(len(points))]
        end = next((n for n, gain in enumerate(gains) if gain is not None and gain < least_gain), -1)
        done = points[end].wall_s / trimmed["costs"]["wall_s"]
        costs.append(done * trimmed["costs"]["cpu_s"] / plain["costs"]["cpu_s"])
        latencies.append(points[end].latency_s / plain["curve"][-1]["latency_s"])
    return {
        "least_gain_per_minute": least_gain,
        "cost_ratio": geometric_mean(costs),
        "latency_ratio": geometric_mean(latencies),
        "equal": sum(ratio <= 1 + EQUAL for ratio in latencies) / len(latencies),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    parser.add_argument("--coverage", type=float, default=0.9, help="of the trimmer's intervals")
    parser.add_argument("--least-gain", type=float, default=0.01, help="per minute, of the runs cut short")
    args = parser.parse_args()
    if args.quick:
        shrink(args)
    from cdmpp.tuner.objective import geometric_mean

    args.out.mkdir(parents=True, exist_ok=True)
    results = KeptRows(args.out / "results.json")
    predictor = held_out_predictor(args)
    tasks = held_out_tasks(args, predictor)
    runs = {"cdmpp": None, f"trimmed-{args.coverage:g}": args.coverage}
    pairs: list[list[dict[str, Any]]] = []
    for seed in args.seeds:
        for task in tasks:
            options = {"cost_model": "cdmpp", "predictor": predictor, "seed": seed}
            pairs.append(
                [tune_alone(args, task, name, results, trim=trim, **options) for name, trim in runs.items()]
            )
    measure_again(args, [row for pair in pairs for row in pair], results)
    usable = [(a, b) for a, b in pairs if a.get("final_s") and b.get("final_s")]
    if not usable:
        sys.exit("no task has a program that works")
    costs = [b["costs"]["cpu_s"] / a["costs"]["cpu_s"] for a, b in usable]
    latencies = [b["final_s"] / a["final_s"] for a, b in usable]
    by_seed = [
        geometric_mean([c for c, (a, _) in zip(costs, usable, strict=True) if a["seed"] == seed])
        for seed in sorted({a["seed"] for a, _ in usable})
    ]
    content = {
        "cost_ratio": geometric_mean(costs),
        "cost_ratio_by_seed": by_seed,
        "cost_ratio_spread": [min(by_seed), max(by_seed)],
        "final_latency_ratio": geometric_mean(latencies),
        "equal": sum(ratio <= 1 + EQUAL for ratio in latencies) / len(latencies),
        "dropped": sum(b["costs"]["dropped"] for _, b in usable)
        / sum(b["costs"]["trials"] for _, b in usable),
        "stopped": stopped(usable, args.least_gain),
        "pairs": len(usable),
        "rows": [row for pair in pairs for row in pair],
        **described(args, tasks),
    }
    print(f"{'cost':>10}{'latency':>10}{'equal':>10}{'dropped':>10}{'pairs':>8}")
    names = ("cost_ratio", "final_latency_ratio", "equal", "dropped")
    print("".join(f"{content[name]:10.3f}" for name in names) + f"{content['pairs']:8d}")
    print(f"    cost: seeds from {min(by_seed):.3f} to {max(by_seed):.3f}")
    short = content["stopped"]
    print(
        f"    stopped below {100 * short['least_gain_per_minute']:g} % a minute: cost {short['cost_ratio']:.3f}, "
        f"latency {short['latency_ratio']:.3f}, equal {short['equal']:.3f}"
    )
    if args.json:
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
