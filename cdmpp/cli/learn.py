"""The verbs around a predictor's training: ``train``, ``finetune``, ``evaluate``, ``report``, ``search``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.cli.options import Namespace, Parser, Verbs, add

if TYPE_CHECKING:
    from rich.console import Console

    from cdmpp.predictor import Config


def _add_train(sub: Parser) -> None:
    add(sub, "config", help="configs/*.yaml (default: the values of configs/cpu.yaml)")
    add(sub, "data", help="dataset folders (default: those of the configuration)")
    add(sub, "out", required=True, help="run folder")
    add(sub, "split", help="in place of the configuration's, such as by_network")
    add(sub, "resume", action="store_true")


def _config(args: Namespace) -> Config:
    """The configuration with the split that was named."""
    from cdmpp.predictor import config_from_dict, load_config

    config = load_config(args.config) if args.config else config_from_dict({})
    if args.split:
        config = config.model_copy(update={"split": config.split.model_copy(update={"spec": args.split})})
    return config


def _train(args: Namespace, console: Console, errors: Console) -> Any:
    """Make a predictor from datasets.

    cdmpp train --data data runs/mine --out runs/predictor
    cdmpp train --config configs/smoke.yaml --data runs/mine --split by_network --out runs/small
    """
    from cdmpp.cli.render import Bar, show_metrics
    from cdmpp.predictor import evaluate, train

    config = _config(args)
    if args.data:  # so that the run's config.yaml says what it was trained on
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"paths": tuple(args.data)})}
        )
    with Bar(errors, "epochs") as bar:
        result = train(config, args.data, args.out, progress=bar.epoch, resume=args.resume)
    scores = evaluate(result.predictor, result.data, result.split)
    show_metrics(console, f"{args.out}: held-out part of {scores['split']}", {"cdmpp": scores["overall"]})
    return scores


def _add_finetune(sub: Parser) -> None:
    add(sub, "predictor", default="default", help="where to start (default: the one that ships)")
    add(sub, "data", required=True, help="records of D, and of other devices")
    add(sub, "device", required=True)
    sub.add_argument(
        "--tasks", metavar="K|FILE", help="how many tasks to choose, or which (default: all of D's)"
    )
    sub.add_argument(
        "--select",
        choices=("kmeans", "random"),
        default="kmeans",
        help="how K tasks are chosen (default: kmeans)",
    )
    add(sub, "seed", type=int, default=0, help="of the choice, and of training without --config")
    sub.add_argument(
        "--adapt", type=float, default=0.0, metavar="F", help="part of D's other programs seen without labels"
    )
    add(sub, "config", help="its loss, train and data sections are used")
    add(sub, "out", required=True, help="run folder")


def _finetune(args: Namespace, console: Console, errors: Console) -> Any:
    """Teach a predictor a new device by records of a few tasks; it chooses which.

    cdmpp finetune --data data --device t4 --tasks 20 --out runs/t4         what to profile
    cdmpp finetune --data data runs/t4-records --device t4 --out runs/t4    learn from it
    """
    from cdmpp.cli.render import Bar, say, show_metrics
    from cdmpp.predictor import Predictor, evaluate, finetune, load_config
    from cdmpp.profiler.profile import read_task_file

    tasks = args.tasks
    if tasks is not None:
        tasks = int(tasks) if tasks.isdigit() else read_task_file(tasks)
    with Bar(errors, "epochs") as bar:
        result = finetune(
            Predictor.default() if args.predictor == "default" else args.predictor,
            args.data,
            args.device,
            args.out,
            tasks=tasks,
            select=args.select,
            seed=args.seed,
            adapt=args.adapt,
            config=load_config(args.config) if args.config else None,
            progress=bar.epoch,
        )
    summary = {
        "task_file": str(result.task_file),
        "selection": result.selection.to_json(),
        "next_command": result.next_command,
    }
    if result.predictor is None:
        say(
            console,
            f"There are no records of {args.device} yet. Measure the {len(result.selection.wanted)} tasks\n"
            f"chosen, which {result.task_file} names, and finetune again with DIR beside --data:\n"
            f"{result.next_command}",
        )
        return summary
    chosen = f"{len(result.selection.tasks)} tasks of {args.device}"
    valid = result.predictor.training["valid_mape"]
    say(console, f"{args.out}: finetuned on {chosen}; MAPE {100 * valid:.1f} % on programs of them held out")
    if result.split is None:
        return {**summary, "valid_mape": valid}
    scores = evaluate(result.predictor, result.data, result.split)
    show_metrics(console, f"the other tasks on {args.device}", {"cdmpp": scores["overall"]})
    return {**summary, "valid_mape": valid, **scores}


def _add_evaluate(sub: Parser) -> None:
    add(sub, "predictor", default="default")
    add(sub, "data", required=True)
    add(sub, "split", help="by_network, by_task:seed=1, ..., or all (default: that of training)")
    sub.add_argument(
        "--part", choices=("train", "valid", "test"), default="test", help="of the split (default: test)"
    )
    sub.add_argument(
        "--compiled",
        action="store_true",
        help="give it the counted instructions of the programs (cdmpp codegen)",
    )
    sub.add_argument(
        "--measured",
        action="store_true",
        help="give it what the same programs took on the other devices of the data",
    )
    sub.add_argument(
        "--by",
        default="device,network",
        metavar="G,G",
        help="of device, network, task, family, origin (default: %(default)s)",
    )


def _evaluate(args: Namespace, console: Console, errors: Console) -> Any:
    """How far a predictor is from what was measured.

    cdmpp evaluate --data data/epyc-zen4-1core --by network
    cdmpp evaluate --predictor runs/predictor --data runs/mine --split all --compiled
    """
    from cdmpp.cli.render import Bar, show_groups, show_metrics
    from cdmpp.predictor import Predictor, evaluate, gather

    predictor = Predictor.default() if args.predictor == "default" else Predictor.load(args.predictor)
    by = [g for g in args.by.split(",") if g]
    with Bar(errors, "reading ASTs") as bar:
        data = gather(args.data, progress=bar.update)
    with errors.status("predicting"):
        result = evaluate(predictor, data, args.split, by, args.part, args.compiled, args.measured)
    given = f", {result['n_compiled']} with their instructions" if args.compiled else ""
    given += f", {result['n_measured']} with what they took elsewhere" if args.measured else ""
    show_metrics(console, f"{args.part} part of {result['split']}{given}", {"cdmpp": result["overall"]})
    show_groups(console, result["groups"])
    return result


def _add_report(sub: Parser) -> None:
    sub.add_argument("run_dir", metavar="RUN_DIR", help="what cdmpp train or finetune wrote")
    add(sub, "data", help="dataset folders (default: those of the run's configuration)")
    add(sub, "split", help="as of cdmpp evaluate (default: the run's own)")
    add(sub, "out", required=True, metavar="FILE", help="the HTML file")


def _report(args: Namespace, console: Console, errors: Console) -> Any:
    """Where a trained predictor errs, as one HTML page.

    cdmpp report runs/predictor --out report.html
    cdmpp report runs/t4 --data runs/t4-records --split all --out t4.html
    """
    from cdmpp.cli.render import say, show_metrics
    from cdmpp.report.html import write_report

    with errors.status("reading the data, predicting, drawing"):
        report = write_report(args.run_dir, args.out, args.data, args.split)
    show_metrics(console, f"test part of {report.scores['split']}", {"cdmpp": report.scores["overall"]})
    say(console, f"Written to {args.out}.")
    return {**report.scores, "path": str(args.out)}


def _add_search(sub: Parser) -> None:
    add(sub, "config", help="what is not searched (default: as of cdmpp train)")
    add(sub, "data", help="dataset folders (default: those of the configuration)")
    add(sub, "trials", type=int, required=True)
    add(sub, "out", required=True, help="search folder")
    add(sub, "split", help="in place of the configuration's, such as by_network")
    add(sub, "resume", action="store_true")
    sub.add_argument(
        "--model",
        default="ours",
        choices=("ours", "xgboost-perstore", "xgboost-ast", "xgboost-ast-codegen", "lstm", "released"),
        help="whose hyper-parameters (default: ours)",
    )


def _search(args: Namespace, console: Console, errors: Console) -> Any:
    """Find better hyper-parameters before a long training.

    cdmpp search --data data --trials 50 --out runs/search
    cdmpp search --data data --trials 50 --model xgboost-ast --out runs/trees --resume
    """
    from cdmpp.cli.render import Bar, say, show_search, trial_text
    from cdmpp.predictor.search import BEST_FILE, search

    with Bar(errors, "trials") as bar:

        def progress(line: dict[str, Any]) -> None:
            bar.say(trial_text(line))
            bar.update(line["trial"] + 1, args.trials)

        result = search(
            _config(args), args.data, args.out, args.trials, args.model, args.resume, progress=progress
        )
    show_search(console, result.summary)
    say(console, f"The best values are in {args.out}/{BEST_FILE}.")
    return result.summary


VERBS: Verbs = {
    "train": (_add_train, _train),
    "finetune": (_add_finetune, _finetune),
    "evaluate": (_add_evaluate, _evaluate),
    "report": (_add_report, _report),
    "search": (_add_search, _search),
}
