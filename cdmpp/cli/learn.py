"""The verbs around a predictor's training: ``train``, ``finetune``, ``evaluate``, ``report``, ``search``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cdmpp.cli.options import Bar, Namespace, Parser, Verbs, add, number, percent, refuse, say, show_table, warn
from cdmpp.errors import CdmppError, raised_as

if TYPE_CHECKING:
    from cdmpp.predictor import Config

#: Columns of a metrics table: key -> heading, formatter.
_METRICS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "mape": ("MAPE", percent),
    "median_ape": ("median", percent),
    "within_10pct": ("to 10 %", percent),
    "within_20pct": ("to 20 %", percent),
    "pairwise_accuracy": ("pairwise", percent),
    "spearman": ("Spearman", lambda value: number(value, ".3f")),
    "top1_regret": ("top-1 regret", percent),
    "top5_regret": ("top-5 regret", percent),
    "n": ("n", number),
}
#: What is left out where names are long or the terminal is narrow, in this order.
_LEFT_OUT = ("within_10pct", "top5_regret", "spearman", "within_20pct", "top1_regret")
#: Characters of a split that a title shows.
_SPLIT = 60
#: Trials in the table of a search; all of them are in ``summary.json``.
_TRIALS = 10
#: What a finetuning learned, and what predictions are made by, in words.
_LEARNED = {"nothing": "nothing that helps", "correction": "a correction of predictions"}
_KINDS = {"ast": "AST", "compiled": "compiled code"}
_STATES = ("complete", "pruned", "failed", "interrupted")


def show_scores(console: Console, title: str, first: str, rows: Mapping[str, Mapping[str, Any]], brief: bool = False) -> None:
    """Name -> metrics: those that fit, or the most telling ones alone."""
    columns = {"": [f"<{first}", *rows]}
    for key, (heading, form) in _METRICS.items():
        columns[key] = [heading, *(form(metrics.get(key)) for metrics in rows.values())]
    for key in _LEFT_OUT:
        if brief or sum(max(map(len, cells)) + 3 for cells in columns.values()) >= console.width:
            del columns[key]
    headings, *cells = zip(*columns.values(), strict=True)
    show_table(console, title, headings, cells)


def show_noise(console: Console, metrics: Mapping[str, Any]) -> None:
    """What errors are to be compared with, where it is known."""
    if (floor := metrics.get("noise_floor_mape")) is not None:
        noise = f"A perfect predictor would score a MAPE of {percent(floor)}: the noise of the labels themselves."
        console.print(noise)


def _show_overall(console: Console, where: str, split: str, metrics: Mapping[str, Any]) -> None:
    """Of cdmpp, with the noise floor and the intervals below."""
    split = split if len(split) <= _SPLIT else f"{split[:_SPLIT]}..."  # it may name a hundred tasks
    show_scores(console, where + split, "model", {"cdmpp": metrics})
    show_noise(console, metrics)
    if interval := metrics.get("interval"):
        console.print(
            f"cdmpp: intervals of {100 * interval['coverage']:g} % hold {percent(interval['covered'])} of the "
            f"records; their upper end is {interval['width']:.3g} times the lower in the median."
        )


def _add_train(sub: Parser) -> None:
    add(sub, "config", help="configs/*.yaml (default: the values of configs/cpu.yaml)")
    add(sub, "data", help="dataset folders (default: those of the configuration)")
    add(sub, "out", required=True, help="run folder")
    add(sub, "split", help="in place of the configuration's, such as by_network")
    add(sub, "resume")


def _config(args: Namespace) -> Config:
    """The configuration with the split that was named."""
    from cdmpp.predictor import config_from_dict, load_config

    config = load_config(args.config) if args.config else config_from_dict({})
    if args.split:
        config = config.model_copy(update={"split": config.split.model_copy(update={"spec": args.split})})
    return config


def _train(args: Namespace, console: Console, errors: Console) -> Any:
    """Train a predictor on datasets.

    cdmpp train --data data runs/mine --out runs/predictor
    cdmpp train --data runs/llm --out runs/operators          of operators that libraries ran
    """
    from cdmpp.dataset.operators import operator_folders
    from cdmpp.predictor import evaluate, train

    if args.data and operator_folders(args.data):
        return _train_operators(args, console, errors)
    config = _config(args)
    if args.data:  # so that the run's config.yaml says what it was trained on
        config = config.model_copy(update={"data": config.data.model_copy(update={"paths": tuple(args.data)})})
    with Bar(errors, "epochs") as bar:
        result = train(config, args.data, args.out, progress=bar.epoch, resume=args.resume)
    with errors.status("predicting the held-out part"):
        scores = evaluate(result.predictor, result.data, result.split)
    _show_overall(console, f"{args.out}: held-out part of ", scores["split"], scores["overall"])
    return scores


def _train_operators(args: Namespace, console: Console, errors: Console) -> Any:
    """The model of library operators, and its errors on devices that were left out."""
    from cdmpp.dataset.operators import load_operators
    from cdmpp.predictor.operators import left_out_errors, train, training_table, with_what_was_measured

    refuse(args, _add_train, "data out", "is of programs: for operators each device is left out in turn")
    with errors.status("reading operators"):
        table = load_operators(args.data)
        learned = training_table(table)
    with Bar(errors, "trainings") as bar:
        model, left = train(learned, progress=bar.update)
    with_what_was_measured(model, table, learned).save(args.out)
    rows = left_out_errors(left)
    _show_operators(console, f"{args.out}: the fastest kernels of each device, which was left out", rows)
    return {"predictor": str(args.out), "devices": model.devices, "left_out": rows}


def _show_operators(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Errors by kind of operator, data type and device, or of all; and where it is said, whether training had the device."""
    seen, by = {True: "yes", False: "no", None: "-"}, {"kind": "all", "dtype": "", "device": ""}
    cells = [
        (*(row.get(name, every) for name, every in by.items()), seen[row.get("seen_in_training")],
         percent(row["median_ape"]), percent(row["mape"]), number(row["n"]))
        for row in rows
    ]  # fmt: skip
    show_table(console, title, ("<operator", "<dtype", "<device", "?<in training", "median", "MAPE", "n"), cells)


def _add_finetune(sub: Parser) -> None:
    add(sub, "predictor", default="default", help="predictor to start from (default: the one that ships)")
    records = "records of D and of other devices, or operators timed by cdmpp measure (none: list K operators to time)"
    add(sub, "data", help=records)
    add(sub, "device", required=True)
    add(sub, "tasks", metavar="K|FILE", help="number of tasks to choose, or a file of them (default: all of D's)")
    chosen = "how K tasks are chosen (default: kmeans; for operators variance, the most informative)"
    add(sub, "select", choices=("kmeans", "random", "variance"), help=chosen)
    add(sub, "seed", default=0, help="seed of the choice")
    add(sub, "out", required=True, help="run folder")


def _finetune(args: Namespace, console: Console, errors: Console) -> Any:
    """Adapt a predictor to a new device with records of a few tasks, which it chooses.

    cdmpp finetune --data data --device t4 --tasks 20 --out runs/t4    what to profile
    cdmpp finetune --device h200 --tasks 30 --out h200.csv             operators to measure
    """
    from cdmpp.dataset.operators import operator_folders
    from cdmpp.predictor import evaluate, finetune
    from cdmpp.profiler.session import read_task_file

    if not args.data:
        return _list_operators(args, console)
    if operator_folders(args.data):
        return _teach_operators(args, console)
    tasks = args.tasks
    if tasks is not None:
        tasks = int(tasks) if tasks.isdigit() else read_task_file(tasks)
    select = args.select or "kmeans"
    with errors.status("learning"):
        result = finetune(args.predictor, args.data, args.device, args.out, tasks=tasks, select=select, seed=args.seed)
    summary = {"task_file": str(result.task_file), "selection": result.selection.to_json(), "next_command": result.next_command}
    if result.predictor is None:
        say(console, f"There are no records of {args.device} yet. Measure the {len(result.selection.wanted)} tasks\n"
            f"chosen, which {result.task_file} names, and finetune again with DIR beside --data:\n"
            f"{result.next_command}")  # fmt: skip
        return summary
    chosen = f"{len(result.selection.tasks)} tasks of {args.device}"
    about = result.predictor.training["finetuned"]
    summary |= {name: about[name] for name in ("learned", "errors")}
    say(console, f"{args.out}: learned from {chosen}: {_LEARNED[about['learned']]}")
    for kind, error in about["errors"].items():
        after = f"{percent(error['before'])} before, {percent(error['corrected'])} corrected"
        say(console, f"MAPE on chosen tasks left out, by {_KINDS[kind]}: {after}")
    if result.split is None:
        return summary
    scores = evaluate(result.predictor, result.data, result.split)
    _show_overall(console, f"the other tasks on {args.device}", "", scores["overall"])
    return {**summary, **scores}


def _list_operators(args: Namespace, console: Console) -> Any:
    """Write which operators of libraries to measure on a GPU."""
    from cdmpp.device import get_device
    from cdmpp.files import write_text
    from cdmpp.predictor.measurements import candidates, choose
    from cdmpp.predictor.operators import kinds, load_operator_model

    if not (args.tasks or "").isdigit() or not args.out.lower().endswith(".csv"):
        raise CdmppError("without --data operators of libraries are listed: expected --tasks K and --out FILE.csv")
    model, device = load_operator_model(args.predictor), get_device(args.device)
    pool = candidates(model, device)
    rows = pool.iloc[choose(*model.traits(pool, device), int(args.tasks), args.select or "variance", args.seed)]
    with raised_as(CdmppError, f"cannot write {args.out}"):
        write_text(Path(args.out), rows.dropna(axis=1, how="all").to_csv(index=False))
    on, cpu = f" --device {device.name}", device.kind == "cpu"
    say(console, f"{args.out}: {len(rows)} of {len(pool)} operators; copy it to {device.name}, where PyTorch is, and\n"
        f"cdmpp measure {args.out}{on * cpu} --out DIR\ncdmpp finetune --data DIR{on} --out PREDICTOR")  # fmt: skip
    return {"path": args.out, "operators": len(rows), "kinds": dict(Counter(map(str, kinds(rows))))}


def _teach_operators(args: Namespace, console: Console) -> Any:
    """Learn from operators that were measured on one device."""
    from cdmpp.dataset.operators import load_operators
    from cdmpp.device import get_device
    from cdmpp.predictor.measurements import teach
    from cdmpp.predictor.operators import load_operator_model

    device, n = get_device(args.device), args.tasks
    if not (n or "1").isdigit() or (args.select and not n):
        raise CdmppError("with operators --select says how --tasks K chooses some of them: expected a number K")
    choice = {"n": int(n), "select": args.select or "variance", "seed": args.seed} if n else {}
    model, fit = teach(load_operator_model(args.predictor, device.kind), load_operators(args.data), device, **choice)
    model.save(args.out)
    found = {"predictor": args.out, "operators": len(fit.left), "before": fit.before, "corrected": fit.error}
    say(console, f"{args.out}: learned from {len(fit.left)} operators of {device.name}: MAPE of operators left out "
        f"{percent(fit.before)} before, {percent(fit.error)} after")  # fmt: skip
    return {**found, "learned": "nothing" if fit.correction is None else "correction"}


def _add_evaluate(sub: Parser) -> None:
    add(sub, "predictor", default="default")
    add(sub, "data", required=True)
    add(sub, "split", help="by_network, by_task:seed=1, ..., or all (default: that of training)")
    add(sub, "part", choices=("train", "valid", "test"), help="part of the split (default: test)")
    add(sub, "compiled", action="store_true", help="use the instruction counts of compiled programs (cdmpp codegen)")
    measured = "use the latencies of the same programs on the other devices of the data"
    add(sub, "measured", action="store_true", help=measured)
    groupings = "group errors by any of device, network, task, family, origin (default: device,network)"
    add(sub, "by", metavar="G,G", help=groupings)


def _evaluate(args: Namespace, console: Console, errors: Console) -> Any:
    """Compare a predictor with measured labels, of programs or of library operators.

    cdmpp evaluate --data data/epyc-zen4-1core --by network
    cdmpp evaluate --predictor runs/predictor --data runs/mine --split all --compiled
    """
    from cdmpp.dataset.operators import operator_folders
    from cdmpp.dataset.split import read_spec
    from cdmpp.predictor import evaluate, gather
    from cdmpp.predictor.data import check_groupings
    from cdmpp.predictor.predictor import load_predictor

    if operator_folders(args.data):
        return _evaluate_operators(args, console, errors)
    predictor, part = load_predictor(args.predictor), args.part or "test"
    by = [g for g in ("device,network" if args.by is None else args.by).split(",") if g]
    check_groupings(by)  # refused before gigabytes are read, as a malformed split
    if args.split not in (None, "all"):
        read_spec(args.split)
    with Bar(errors, "reading ASTs") as bar:
        data = gather(args.data, progress=bar.update)
    with errors.status("predicting"):
        result = evaluate(predictor, data, args.split, by, part, args.compiled, args.measured)
    _show_overall(console, f"{part} part of ", result["split"], result["overall"])
    if args.compiled:
        say(console, f"{result['n_compiled']} of them with their instructions")
    if args.measured:
        say(console, f"{result['n_measured']} of them with what they took elsewhere")
    for grouping, rows in result["groups"].items():
        show_scores(console, f"by {grouping}", grouping, rows)
    return result


def _evaluate_operators(args: Namespace, console: Console, errors: Console) -> Any:
    """Errors of the model of library operators, and whether they are of devices that it was trained on."""
    from cdmpp.dataset.operators import load_operators
    from cdmpp.predictor.operators import evaluate_operators

    of_programs = ("split", "part", "compiled", "measured", "by")
    if given := [f"--{name}" for name in of_programs if getattr(args, name)]:
        raise CdmppError(f"{', '.join(given)}: of programs alone; errors of operators are by device, kind and dtype")
    with errors.status("predicting operators"):
        result = evaluate_operators(load_operators(args.data), args.predictor)
    rows = [*result["groups"], *result["overall"]]
    _show_operators(console, "the fastest kernels (errors on devices in training are no test)", rows)
    why = "slower kernels, and times that are not of the fastest kernel alone"
    warn(console, f"{result['left_out']} of {result['rows']} rows are left out: {why}" if result["left_out"] else "")
    return result


def _add_report(sub: Parser) -> None:
    sub.add_argument("run_dir", metavar="RUN_DIR", help="folder that cdmpp train, finetune or tune wrote")
    add(sub, "data", help="dataset folders (default: those of the run's configuration)")
    add(sub, "split", help="as for cdmpp evaluate (default: the run's own)")
    add(sub, "out", required=True, metavar="FILE", help="the HTML file")


def _report(args: Namespace, console: Console, errors: Console) -> Any:
    """Write one HTML page: where a trained predictor errs, or what a tuning achieved.

    cdmpp report runs/predictor --out report.html
    cdmpp report runs/t4 --data runs/t4-records --split all --out t4.html
    """
    if (Path(args.run_dir) / "tuning.json").is_file():
        from cdmpp.tuner.results import write_page

        refuse(args, _add_report, "out", "is of predictors, and RUN_DIR holds a tuning")
        content = write_page(Path(args.run_dir), Path(args.out))
        say(console, f"Written to {args.out}.")
        return {**content, "path": str(args.out)}
    from cdmpp.report import write_report

    with Bar(errors, "reading ASTs") as bar:
        report = write_report(args.run_dir, args.out, args.data, args.split, bar.update)
    _show_overall(console, "test part of ", report.scores["split"], report.scores["overall"])
    say(console, f"Written to {args.out}.")
    return {**report.scores, "path": str(args.out)}


def _add_search(sub: Parser) -> None:
    add(sub, "config", help="values that are not searched (default: as for cdmpp train)")
    add(sub, "data", help="dataset folders (default: those of the configuration)")
    add(sub, "trials", type=int, required=True)
    add(sub, "out", required=True, help="search folder")
    add(sub, "split", help="in place of the configuration's, such as by_network")
    add(sub, "resume")
    models = ("ours", "xgboost-perstore", "xgboost-ast", "xgboost-ast-codegen", "lstm", "released")
    add(sub, "model", choices=models, default="ours", help="model whose hyper-parameters are searched")


def _search(args: Namespace, console: Console, errors: Console) -> Any:
    """Search for hyper-parameters before a long training.

    cdmpp search --data data --trials 50 --out runs/search
    cdmpp search --data data --trials 50 --model xgboost-ast --out runs/trees --resume
    """
    from cdmpp.predictor.search import BEST_FILE, search

    with Bar(errors, "trials") as bar:

        def progress(line: dict[str, Any]) -> None:
            result = line["error"] or f"validation MAPE {_trial_mape(line)}"
            bar.say(f"trial {line['trial']:3d}  {line['state']:8s}  {result}  {line['seconds'] or 0:.0f} s")
            bar.update(line["trial"] + 1, args.trials)

        result = search(_config(args), args.data, args.out, args.trials, args.model, args.resume, progress=progress)
    show_search(console, result.summary)
    say(console, f"The best values are in {args.out}/{BEST_FILE}.")
    return result.summary


def show_search(console: Console, summary: Mapping[str, Any]) -> None:
    """The best trials of a search and what became of the others."""

    def text(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = summary["trials"]
    complete = sorted((line for line in lines if line["state"] == "complete"), key=lambda line: line["value"])
    rows = [
        (str(line["trial"]), _trial_mape(line), f"{line['seconds']:.0f} s",
         "  ".join(f"{name}={text(value)}" for name, value in line["values"].items()))
        for line in complete[:_TRIALS]
    ]  # fmt: skip
    title = f"{summary['model']}, {summary['split']}: validation MAPE of the best trials"
    show_table(console, title, ("trial", "MAPE", "time", "<values"), rows)
    counts = Counter(line["state"] for line in lines)
    states = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])
    parts = f"{summary['n_train']} records trained, {summary['n_valid']} judged, the test part was not looked at."
    console.print(f"{len(lines)} trials in {summary['seconds']:.0f} s: {states}; {parts}")


def _trial_mape(line: Mapping[str, Any]) -> str:
    errors = [line[name] for name in ("valid_mape", "valid_mape_compiled") if line[name] is not None]
    return ", ".join(map(percent, errors)) or "-"


VERBS: Verbs = {
    "train": (_add_train, _train),
    "finetune": (_add_finetune, _finetune),
    "evaluate": (_add_evaluate, _evaluate),
    "report": (_add_report, _report),
    "search": (_add_search, _search),
}
