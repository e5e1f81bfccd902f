"""``cdmpp devices``: options and rendering; the work is :mod:`cdmpp.device`'s."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cdmpp.profiler.rates import MeasuredDevice

#: Measured quantity -> what the table says about it: a field, or a key of ``peak_gflops``.
_BESIDE = {
    "copy_gb_s": "bandwidth_gb_s",
    "triad_gb_s": "bandwidth_gb_s",
    "float32_gflops": "peak_gflops.float32",
    "tfloat32_matrix_gflops": "peak_gflops.tfloat32_matrix",
    "float16_matrix_gflops": "peak_gflops.float16_matrix",
    "launch_us": "launch_overhead_us",
}


def add_devices_arguments(sub: argparse.ArgumentParser) -> None:
    """Define the options of the verb."""
    sub.add_argument("--devices", nargs="+", default=(), metavar="FILE", help="YAML files of further devices")
    sub.add_argument("--add", metavar="FILE", help="make the devices of a YAML file known for good")
    sub.add_argument("--measure", action="store_true", help="micro-benchmarks of this machine (some seconds)")
    sub.add_argument("--out", metavar="FILE", help="with --measure: write the results as a device file")


def run_devices(args: argparse.Namespace, console: Console) -> Any:
    """Show what is known, add to it, or measure this machine."""
    from cdmpp.cli_render import show_devices
    from cdmpp.device import add_device_file, known_devices, load_table
    from cdmpp.device.table import missing_fields, read_device_file, user_file
    from cdmpp.errors import CdmppError

    if args.out and not args.measure:
        raise CdmppError("--out takes what --measure finds: give both")
    added = add_device_file(args.add) if args.add else []
    table = load_table(args.devices)
    if args.measure:
        return _measure(args, console, table)
    here = table.get("this-cpu")
    known = known_devices(table)
    show_devices(console, here, known)
    rows = {row.name: row for row in table.rows}
    own = [row.name for path in args.devices for row in read_device_file(path)]
    missing = {name: missing_fields(rows[name]) for name in dict.fromkeys([*added, *own])}
    for name, fields in missing.items():
        console.print(
            f"{name}: " + (f"unknown: {', '.join(fields)}" if fields else "nothing that is used is unknown")
        )
    if added:
        console.print(f"{', '.join(added)} added to {user_file()}")
    return {
        "this_machine": here.to_json(),
        "devices": [device.to_json() for device in known],
        "added": added,
        "missing": {name: list(fields) for name, fields in missing.items()},
    }


def _measure(args: argparse.Namespace, console: Console, table: Any) -> Any:
    from cdmpp.device.table import write_device_file
    from cdmpp.profiler.rates import measure_machine

    found = measure_machine(table)
    for device in found:
        _show(console, device)
    if args.out:
        write_device_file([device.row for device in found], args.out)
        console.print(f"{args.out} is a device file: cdmpp devices --add {args.out}")
    return _report(found)


def _report(found: Sequence[MeasuredDevice]) -> Any:
    return [
        {
            "name": device.row.name,
            "measured": device.results,
            "table": {quantity: _known(device, quantity) for quantity in device.results},
            "skipped": list(device.skipped),
            "row": device.row.to_json(),
        }
        for device in found
    ]


def _known(device: MeasuredDevice, quantity: str) -> float | None:
    """What the table says about a measured quantity."""
    if device.known is None:
        return None
    field, _, key = _BESIDE.get(quantity, quantity).partition(".")
    if key:
        return device.known.used().peak_gflops.get(key)
    return getattr(device.known, field, None)


def _show(console: Console, device: MeasuredDevice) -> None:
    from rich.table import Table

    table = Table(title=f"{device.row.name}, measured")
    for name in ("quantity", "measured", "table"):
        table.add_column(name, justify="left" if name == "quantity" else "right")
    for quantity, value in device.results.items():
        known = _known(device, quantity)
        table.add_row(quantity, f"{value:.4g}", "-" if known is None else f"{known:.4g}")
    console.print(table)
    for reason in device.skipped:
        console.print(f"not measured: {reason}")
