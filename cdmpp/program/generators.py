"""Programs and tasks made by a function: stored as its name and arguments, some 100 bytes, and built again when needed.

A generator is a pure function from plain arguments to a PrimFunc. Two kinds are stored:

* a **task** of a library operator (:mod:`cdmpp.program.library_ops`): ``Task.tir_json`` holds :func:`describe`'s JSON in
  place of TVM's (13 kB for a linear layer);
* a **program** of a hand-written, parametrised kernel (:mod:`cdmpp.program.kernels`): its space has the rule
  :data:`RULE` and says which generator and which parameters, its decisions are their values.

The structural hash of what is built tells whether a generator changed: programs and tasks refuse to be another one than
they were stored as.

Importing this module does not import TVM; building does.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program.types import Program, Space

#: ``Space.rule`` of programs made by a generator.
RULE = "generator"

#: Key of the JSON that stands for a task.
_KEY = "cdmpp_generator"

#: Generator -> the module that has its function, of the same name.
_MODULES: dict[str, str] = {
    **dict.fromkeys(
        ("linear", "bmm", "conv2d", "elementwise", "softmax", "layer_norm", "memory"),
        "cdmpp.program.library_ops",
    ),
    **dict.fromkeys(("gemm", "clblast_gemm"), "cdmpp.program.kernels.gemm"),
    **dict.fromkeys(("image_convolution", "kernel_tuner_convolution"), "cdmpp.program.kernels.convolution"),
    **dict.fromkeys(("dedispersion", "kernel_tuner_dedispersion"), "cdmpp.program.kernels.dedispersion"),
}


def build(name: str, arguments: Mapping[str, Any]) -> Any:
    """The PrimFunc of a generator and its arguments (imports TVM).

    Raises
    ------
    ProgramError
        There is no such generator, or it does not take these arguments.
    """
    module = _MODULES.get(name)
    if module is None:
        raise ProgramError(f"no generator {name!r}; this version has {', '.join(sorted(_MODULES))}")
    function = getattr(importlib.import_module(module), name)
    try:
        return function(**arguments)
    except TypeError as err:
        raise ProgramError(f"generator {name} does not take {dict(arguments)}: {err}") from err


def describe(name: str, arguments: Mapping[str, Any]) -> str:
    """JSON that stands for a generated PrimFunc where TVM's JSON may stand."""
    return json.dumps({_KEY: name, **arguments}, separators=(",", ":"))


def is_description(text: str) -> bool:
    """Whether :func:`describe` made it (else it is TVM's JSON)."""
    return text.startswith(f'{{"{_KEY}":')


def build_description(text: str) -> Any:
    """The PrimFunc that a description stands for (ProgramError as :func:`build`)."""
    arguments = json.loads(text)
    return build(arguments.pop(_KEY), arguments)


def generator_space(task_hash: str, name: str, parameters: Sequence[str], fixed: Mapping[str, Any]) -> Space:
    """The space of a generator's programs of a task.

    Parameters
    ----------
    parameters
        Names of the arguments that differ from program to program, in the order of their values in the decisions.
    fixed
        Arguments that all programs share, such as the problem's size.
    """
    content = json.dumps(
        {"generator": name, "parameters": list(parameters), "fixed": dict(fixed)}, separators=(",", ":")
    )
    digest = hashlib.blake2b(f"{task_hash}|{RULE}|{content}".encode(), digest_size=8).hexdigest()
    return Space(digest, task_hash, RULE, 0, 0, content)


def generator_program(space: Space, program_hash: str, values: Sequence[int]) -> Program:
    """A program of a generator space, by the values of its parameters."""
    decisions = json.dumps(list(values), separators=(",", ":"))
    return Program(program_hash, space.task_hash, space.hash, decisions, "generator")


def program_arguments(space: Space, decisions: str) -> tuple[str, dict[str, Any]]:
    """Generator and arguments of a program.

    Raises
    ------
    ProgramError
        The space is not a generator's, or the decisions are not values of its parameters.
    """
    try:
        content = json.loads(space.insts_json)
        values = json.loads(decisions)
        arguments = dict(zip(content["parameters"], values, strict=True))
        return str(content["generator"]), {**content["fixed"], **arguments}
    except (TypeError, KeyError, ValueError) as err:
        raise ProgramError(
            f"space {space.hash} and decisions {decisions!r} name no generator: {err}"
        ) from err


def build_program(space: Space, decisions: str) -> Any:
    """The PrimFunc of a program of a generator space (ProgramError as :func:`build`)."""
    return build(*program_arguments(space, decisions))
