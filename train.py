"""Train a predictor from a configuration: ``python train.py --config configs/cpu.yaml --out runs/p1``.

The same as ``cdmpp train``; both call :func:`cdmpp.predictor.train`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cdmpp.errors import CdmppError
from cdmpp.predictor import load_config, train


def main(argv: list[str] | None = None) -> int:
    """Parse arguments, train, show each epoch on stderr; 2 on bad input."""
    parser = argparse.ArgumentParser(description="Train a latency predictor.")
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("--data", nargs="+", help="dataset folders (default: data.paths of the configuration)")
    parser.add_argument("--out", required=True, help="run folder")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    args = parser.parse_args(argv)
    try:
        train(load_config(args.config), args.data, args.out, progress=_show, resume=args.resume)
    except CdmppError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


def _show(line: dict[str, Any]) -> None:
    print(
        f"epoch {line['epoch']}/{line['epochs']}  loss {line['train_loss']:.4f}  "
        f"valid MAPE {line['valid_mape']:.2%}  best {line['best_mape']:.2%} (epoch {line['best_epoch']})",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
