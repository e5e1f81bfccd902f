"""The ``cdmpp`` command: parse, call one public function, render. Everything it does can be done from Python."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cdmpp.cli.options import Parser, Verbs, console
from cdmpp.errors import CdmppError, raised_as

#: What a group of verbs is for -> its verbs. A group's first word is its module.
GROUPS = {
    "use: predict without measuring": ("demo", "predict", "latency"),
    "tune: make networks faster": ("tune",),
    "measure: make data": ("profile", "bundle", "measure"),
    "learn: make predictors of data": ("train", "finetune", "evaluate", "report", "search"),
    "data: see what there is": ("devices", "networks", "dataset", "import", "codegen"),
}

_START = """new here?  cdmpp demo                                measures, predicts and compares, in minutes
           cdmpp latency resnet18 --device h200,t4   predicts for devices that are not here
           cdmpp COMMAND --help                      the options of a command, and examples"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (2 for bad input, 130 after Ctrl-C)."""
    argv = sys.argv[1:] if argv is None else argv
    # A long run that is told to end (by kill, or by a scheduler) ends as after Ctrl-C, also where a shell started it
    # in the background and so made it deaf to Ctrl-C.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)
    try:
        args = _parser(argv[0] if argv else None).parse_args(argv)
        level = logging.DEBUG if args.verbose else logging.WARNING
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
        helper = _helper_of_torchrun(argv)
        result = args.run(args, console(quiet=helper), console(err=True, quiet=helper))
        if args.json is not None and not helper:
            _write_json(args.json, result)
    except CdmppError as err:
        print(f"cdmpp: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cdmpp: interrupted; what was measured or trained so far is kept (--resume)", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe went away, as `head` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
        return 0
    return 0


def _helper_of_torchrun(argv: Sequence[str]) -> bool:
    """Whether another of torchrun's processes shows and writes the result; CdmppError where torchrun is of no use."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    if argv[0] != "train":
        raise CdmppError(f"torchrun is for cdmpp train: several processes would do the same {argv[0]}")
    return os.environ["RANK"] != "0"


def _write_json(path: str, result: Any) -> None:
    text = json.dumps(result, indent=1, allow_nan=False, default=_jsonable) + "\n"
    with raised_as(CdmppError, f"cannot write {path}"):
        Path(path).write_text(text, encoding="utf-8")


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def verb_groups(verb: str | None = None) -> dict[str, Verbs]:
    """What a group of verbs is for -> its verbs: of all, or of the group of one, so that the others are not imported."""
    groups = {title: names for title, names in GROUPS.items() if verb in names} or GROUPS
    found: dict[str, Verbs] = {}
    for title, names in groups.items():
        verbs = _module_verbs(title.partition(":")[0])
        found[title] = {name: verbs[name] for name in names}
    return found


def _module_verbs(group: str) -> Verbs:
    if group == "use":
        from cdmpp.cli.use import VERBS
    elif group == "tune":
        from cdmpp.cli.tune import VERBS
    elif group == "measure":
        from cdmpp.cli.measure import VERBS
    elif group == "learn":
        from cdmpp.cli.learn import VERBS
    else:
        from cdmpp.cli.data import VERBS
    return VERBS


def _parser(verb: str | None = None) -> Parser:
    """The parser, with the options of all verbs; or of one, so that what the others need is not imported."""
    from cdmpp import __version__

    groups = verb_groups(verb)
    wide = max(len(name) for group in groups.values() for name in group)
    lines = [_START]
    for title, group in groups.items():
        whens = {name: _doc(run).partition("\n")[0] for name, (_, run) in group.items()}
        lines += ["", title, *(f"  {name:{wide}}  {when.rstrip('.')}" for name, when in whens.items())]
    parser = Parser(
        prog="cdmpp",
        usage="cdmpp [-h] [--version] COMMAND ...",
        description="Predicts how long a tensor program takes on a device.",
        epilog="\n".join(lines),
        formatter_class=_format,
    )
    parser.add_argument("--version", action="version", version=f"cdmpp {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="cdmpp")
    for name, (add, run) in ((name, verb) for group in groups.values() for name, verb in group.items()):
        when, *examples = _doc(run).split("\n")
        epilog = "\n  ".join(["examples:", *filter(None, examples)])
        sub = commands.add_parser(name, description=when, epilog=epilog, formatter_class=_format)
        general = sub.add_argument_group("options of every command")
        general.add_argument("--json", metavar="FILE", help="write the same numbers as JSON")
        general.add_argument("--verbose", action="store_true", help="log what happens inside")
        sub.set_defaults(run=run)
        if verb in (None, name):
            add(sub)
        sub.usage = _usage(sub)
    return parser


def _doc(run: Callable[..., Any]) -> str:
    return inspect.cleandoc(run.__doc__ or "")


def _format(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32)


def _usage(parser: Parser) -> str:
    """What must be given, and that there are options."""
    parts = [parser.prog]
    for action in parser._actions:
        name, many = str(action.metavar or action.dest), " ..." if action.nargs in ("+", "*") else ""
        if not action.option_strings:
            parts.append(f"[{name} ...]" if action.nargs == "*" else name + many)
        elif action.required:
            parts.append(f"{action.option_strings[0]} {name}{many}")
    return " ".join([*parts, "[options]"])
