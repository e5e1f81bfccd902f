"""The verbs that show or add to what is known: ``devices``, ``networks``, ``dataset``, ``import``, ``codegen``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cdmpp.cli import options as ui
from cdmpp.errors import CdmppError

if TYPE_CHECKING:
    from cdmpp.device import Device

#: What makers say of every CPU.
_NOISE = re.compile(r"\(R\)|\(TM\)| CPU\b| \d+-Core| Processor| @ .*")


def _add_devices(sub: ui.Parser) -> None:
    ui.add(sub, "device_files")
    ui.add(sub, "add", metavar="FILE", help="add the devices of a YAML file permanently")
    ui.add(sub, "measure", action="store_true", help="run micro-benchmarks of this machine (some seconds)")
    ui.add(sub, "out", metavar="FILE", help="with --measure: write the results as a device file")
    node = "print the command that starts a Ray node here, measuring on N cores"
    ui.add(sub, "measuring_cores", type=int, metavar="N", help=node)
    ui.add(sub, "ray", help="with --measuring-cores: the head to join (default: become one)")


def _devices(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """List the known devices, and the name of this machine.

    cdmpp devices
    cdmpp devices --measure --out mine.yaml     what this machine can do, as a device file
    """
    from cdmpp.device import add_device_file, known_devices, load_table
    from cdmpp.device.table import missing_fields, read_device_file, user_file

    if args.out and not args.measure:
        raise CdmppError("--out takes what --measure finds: give both")
    if args.ray and args.measuring_cores is None:
        raise CdmppError("--ray is the head that a node with --measuring-cores joins: give both")
    if args.measuring_cores is not None:
        from cdmpp.profiler.ray import node_command

        command = node_command(args.measuring_cores, args.ray)
        ui.say(console, command)
        return {"command": command}
    added = add_device_file(args.add) if args.add else []
    table = load_table(args.device_files)
    if args.measure:
        return _measure_rates(args.out, table, console, errors)

    def cells(of: Device) -> tuple[str, ...]:
        numbers = (of.cores, of.clock_mhz, of.mem_gb, of.bandwidth_gb_s, of.peak_gflops.get("float32"))
        return (of.name, _NOISE.sub("", of.model), *(ui.number(value, ".0f") for value in numbers))

    here, known = table.get("this-cpu"), known_devices(table)
    rows = [cells(here), *(cells(device) for device in known if device.name != here.name)]
    columns = ("<name", "<model", "cores", "MHz", "GB", "GB/s", "GFLOP/s")
    ui.show_table(console, "devices; the first is this machine", columns, rows)
    console.print(
        f"[bold]{here.base}@1[/] (or this-cpu@1) is one core of this machine; "
        f"append .x86-64-v2 to the base for 128-bit SIMD code; h200@0.5 is half the SMs of a GPU. "
        "Cores: SMs of a GPU; GFLOP/s: of float32."
    )
    of_files = {row.name: row for row in table.rows}
    own = [row.name for path in args.device_files for row in read_device_file(path)]
    missing = {name: list(missing_fields(of_files[name])) for name in dict.fromkeys([*added, *own])}
    for name, fields in missing.items():
        unknown = f"unknown: {', '.join(fields)}" if fields else "nothing that is used is unknown"
        ui.say(console, f"{name}: {unknown}")
    if added:
        ui.say(console, f"{', '.join(added)} added to {user_file()}")
    devices = [device.to_json() for device in known]
    return {"this_machine": here.to_json(), "devices": devices, "added": added, "missing": missing}


def _measure_rates(out: str | None, table: Any, console: Console, errors: Console) -> Any:
    from cdmpp.device.table import write_device_file
    from cdmpp.profiler.rates import measure_machine

    with errors.status("measuring bandwidth, arithmetic and launches"):
        found = measure_machine(table)
    results = []
    for device in found:
        row = {} if device.known is None else device.known.used().to_json()
        row |= {"copy_gb_s": row.get("bandwidth_gb_s"), "launch_us": row.get("launch_overhead_us")}
        row |= {f"{dtype}_gflops": value for dtype, value in row.get("peak_gflops", {}).items()}
        known = {quantity: row.get(quantity) for quantity in device.results}
        cells = [(key, ui.number(value, ".4g"), ui.number(known[key], ".4g")) for key, value in device.results.items()]
        ui.show_table(console, f"{device.row.name}, measured", ("<quantity", "measured", "table"), cells)
        for reason in device.skipped:
            ui.say(console, f"not measured: {reason}")
        result = {"name": device.row.name, "measured": device.results, "table": known}
        results.append({**result, "skipped": list(device.skipped), "row": device.row.to_json()})
    if out:
        write_device_file([device.row for device in found], out)
        ui.say(console, f"{out} is a device file: cdmpp devices --add {out}")
    return results


def _networks(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """List the networks that come with cdmpp.

    cdmpp networks
    cdmpp networks --json networks.json
    """
    from cdmpp.program.llm import MODELS
    from cdmpp.program.zoo import task_counts, zoo_entry, zoo_networks

    counts = task_counts()
    rows, cells = [], []
    for entry in map(zoo_entry, zoo_networks()):
        inputs, tasks = [str(i) for i in entry.inputs], counts.get(entry.name)
        row = {"name": entry.name, "family": entry.family, "inputs": inputs, "tasks": tasks}
        rows.append({**row, "description": entry.description})
        shapes = "\n".join(inputs).replace(", ", ",").replace("float32", "")
        cells.append((entry.name, entry.family, shapes, ui.number(tasks), entry.description))
    ui.show_table(console, "networks", ("<name", "<family", "<inputs", "tasks", "<description"), cells)
    console.print(
        "Append a batch size as in resnet18@b4, an image size or sequence length as in resnet18@s160, or both, "
        "or give an .onnx or .pt2 file in place of a name. operators@s1, operators@s2, ... are fifty random operators each. "
        f"Inputs are float32 where nothing else is said. For cdmpp latency also: a config.json, or {', '.join(MODELS)}."
    )
    return rows


def _add_dataset(sub: ui.Parser) -> None:
    sub.add_argument("paths", nargs="+", metavar="DIR", help="dataset folders, or folders of them")


def _dataset(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """Show what a dataset holds: records, failures, tasks, devices, noise; or operators.

    cdmpp dataset runs/mine
    cdmpp dataset data --json data.json     all that ship
    """
    from cdmpp.dataset import load_datasets
    from cdmpp.dataset.operators import operator_folders

    def cells(name: str, row: Mapping[str, Any]) -> list[str]:
        counts = [str(row[key]) for key in ("records", "ok", "tasks", "networks")]
        failures = "\n".join(f"{kind} {n}" for kind, n in row["failures"].items() if n) or "-"
        return [name, *counts, failures, ui.percent(row["noise_floor_mape"])]

    if operator_folders(args.paths):
        return _operators(args, console, errors)
    with errors.status("reading the records"):
        summary = load_datasets(args.paths).summary()
    datasets = summary["datasets"]
    rows = [cells(str(row["path"]), row) for row in datasets]
    rows += [cells("total", summary["total"])] if len(rows) > 1 else []
    columns = ("<dataset", "records", "ok", "tasks", "networks", "<failures", "noise")
    ui.show_table(console, "datasets", columns, rows, total=len(rows) > 1)
    of_devices = [
        (str(row["path"]), name, str(n["ok"]), ui.percent(n["split_half_median"]), ui.percent(n["split_half_mean"]))
        for row in datasets
        for name, n in row.get("by_device", {}).items()
    ]
    if of_devices:
        title = "by device; how far the labels of split halves differ"
        ui.show_table(console, title, ("<dataset", "<device", "ok", "median", "mean"), of_devices)
    for row in datasets:
        ui.say(console, f"{row['path']}: origins of programs: {ui.counts_text(row.get('origins', {}))}")
        if row.get("remeasured"):
            ui.say(console, f"{row['path']}: {row['remeasured']} programs were measured again, "
                f"their labels differ by {ui.percent(row['remeasured_difference'])} in the median, "
                f"{ui.percent(row['remeasured_mean'])} in the mean, {ui.percent(row['remeasured_p90'])} in the worst tenth, "
                f"and {ui.percent(row['remeasured_disturbed'])} in the mean where the core was disturbed")  # fmt: skip
        if row.get("disturbed"):
            ui.say(console, f"{row['path']}: {row['disturbed']} labels of a disturbed core neither train nor test")
        if row.get("corrupt_lines"):
            ui.warn(console, f"{row['path']}: {row['corrupt_lines']} damaged lines were skipped")
    return summary


def _operators(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """How many rows datasets of library operators hold, and of what."""
    import pandas as pd

    from cdmpp.dataset.operators import load_operators, operator_folders
    from cdmpp.predictor.operators import kinds

    def counts(table: Any) -> dict[str, Any]:
        table, names = table.assign(kind=kinds(table)), ("device", "kind", "dtype", "framework")
        return {"rows": len(table), **{f"{name}s": Counter(map(str, table[name])) for name in names}}

    with errors.status("reading operators"):
        tables = {str(folder): load_operators(folder) for folder in operator_folders(args.paths)}
        datasets, total = {path: counts(own) for path, own in tables.items()}, counts(pd.concat(tables.values()))
    shown = datasets if len(datasets) == 1 else {**datasets, "total": total}
    cells = [(path, *(str(n if name == "rows" else len(n)) for name, n in row.items())) for path, row in shown.items()]
    ui.show_table(console, "datasets of operators", ("<dataset", *total), cells, total=len(datasets) > 1)
    for name in list(total)[1:]:
        ui.say(console, f"{name}: {ui.counts_text(total[name])}")
    return {"datasets": [{"path": path, **row} for path, row in datasets.items()], "total": total}


def _add_import(sub: ui.Parser) -> None:
    sources = ("neusight", "benchmark-hub", "neusight-operators", "aiconfigurator", "pipeweave", "miopen")
    sub.add_argument("source", choices=sources, help="where the files come from")
    sub.add_argument("files", nargs="+", metavar="FILE", help="parquet or CSV files, recognised by their columns")
    ui.add(sub, "out", required=True, help="new dataset folder")
    ui.add(sub, "limit", type=int, help="at most N rows of each file, spread evenly")
    ui.add(sub, "device_files")


def _import(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """Turn public measurements into a dataset.

    cdmpp import neusight operators.csv --out runs/neusight
    cdmpp import aiconfigurator operators.parquet --out runs/llm
    """
    from cdmpp.dataset.importers import SOURCES, import_benchmark_hub, import_neusight, import_operators
    from cdmpp.device import load_table

    run = import_neusight if args.source == "neusight" else import_benchmark_hub
    if args.source in SOURCES:
        run = partial(import_operators, args.source)
    given: Any = {"table": load_table(args.device_files), "limit": args.limit}
    with ui.Bar(errors, "reading") as bar:
        report = run(args.files, args.out, progress=lambda what, done, total: bar.update(done, total, what), **given)
    failures = {status: n for status, n in report.records.items() if status != "ok"}
    labels = f"{report.records.get('ok', 0)} labels (failures: {ui.counts_text(failures)})"
    of = f"{report.programs} programs of {report.tasks} tasks" if report.programs else f"{report.tasks} operators"
    ui.say(console, f"{report.path}: {labels} of {of} on {', '.join(report.devices) or 'no device'}")
    if report.graphs:
        ui.say(console, f"{len(report.graphs)} networks as graphs of tasks: {', '.join(report.graphs)}")
    for name, count in report.unknown_operators.items():
        ui.say(console, f"left out: {count} rows, {name if name == 'suspect' else f'of the unknown operator {name}'}")
    for note in report.notes:
        ui.say(console, note)
    return report.to_json()


def _add_codegen(sub: ui.Parser) -> None:
    sub.add_argument("data", nargs="+", metavar="DIR", help="dataset folders with labels of x86 CPUs")
    ui.add(sub, "builders", default=1, help="building processes")
    ui.hide(sub, "--workers", dest="builders", type=int, default=1)
    ui.add(sub, "build_timeout_s", default=20.0)
    ui.add(sub, "object_cache", "ray")
    ui.add(sub, "device", default="", help="also compile for these unmeasured CPUs, to train with data.unmeasured")


def _codegen(args: ui.Namespace, console: Console, errors: Console) -> Any:
    """Count the instructions of a dataset's compiled programs, for better predictions.

    cdmpp codegen runs/mine
    cdmpp codegen runs/mine runs/untuned --builders 4 --device this-cpu@1,epyc-zen3-2.45ghz@1
    """
    from cdmpp.dataset.codegen import CODEGEN_FILE
    from cdmpp.device import get_device
    from cdmpp.profiler.compiled import collect_codegen
    from cdmpp.profiler.session import ProfileConfig

    summary: dict[str, int] = {}
    cpus = [get_device(name.strip()) for name in args.device.split(",") if name.strip()]
    # a cluster builds on all of its nodes
    config = ui.settings(args, ProfileConfig, builders=args.builders if args.ray is None else None)
    for folder in args.data:
        with ui.Bar(errors, f"programs of {folder} without counts") as bar:
            summary[folder] = len(collect_codegen(folder, config, bar.update, cpus))
        ui.say(console, f"{folder}/{CODEGEN_FILE}: {summary[folder]} programs")
    return summary


VERBS: ui.Verbs = {
    "devices": (_add_devices, _devices),
    "networks": (lambda sub: None, _networks),
    "dataset": (_add_dataset, _dataset),
    "import": (_add_import, _import),
    "codegen": (_add_codegen, _codegen),
}
