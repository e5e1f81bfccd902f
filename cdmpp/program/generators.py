"""Programs and tasks made by a function: stored as its name and arguments, some 100 bytes, and built again when needed.

A generator is a pure function from plain arguments to a PrimFunc. Two kinds are stored:

* a **task** of a library operator (:mod:`cdmpp.program.library_ops`): ``Task.tir_json`` holds :func:`describe`'s JSON in
  place of TVM's (13 kB for a linear layer);
* a **program** of a hand-written, parametrised kernel (:mod:`cdmpp.program.kernels`): its space says which generator and
  which parameters, its decisions are their values (:func:`cdmpp.program.space.generator_space`).

The structural hash of what is built tells whether a generator changed: programs and tasks refuse to be another one than they
were stored as. Importing this module does not import TVM; building does.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program import kernels, library_ops

#: Key of the JSON that stands for a task.
_KEY = "cdmpp_generator"  # `Task.prim_func` looks for it

_GENERATORS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        library_ops.linear, library_ops.bmm, library_ops.conv2d, library_ops.elementwise, library_ops.softmax,
        library_ops.layer_norm, library_ops.memory, kernels.gemm, kernels.clblast_gemm, kernels.image_convolution,
        kernels.kernel_tuner_convolution, kernels.dedispersion, kernels.kernel_tuner_dedispersion,
    )
}  # fmt: skip


def build(name: str, arguments: Mapping[str, Any]) -> Any:
    """The PrimFunc of a generator and its arguments (ProgramError: there is no such one, or it does not take these)."""
    function = _GENERATORS.get(name)
    if function is None:
        raise ProgramError(f"no generator {name!r}; this version has {', '.join(sorted(_GENERATORS))}")
    try:
        return function(**arguments)
    except TypeError as err:
        raise ProgramError(f"generator {name} does not take {dict(arguments)}: {err}") from err


def kernel_parameters(name: str) -> tuple[str, ...]:
    """Names of what the configurations of a kernel choose, in the order of its arguments."""
    arguments = inspect.signature(_GENERATORS[name]).parameters.values()
    return tuple(argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY)


def describe(name: str, arguments: Mapping[str, Any]) -> str:
    """JSON that stands for a generated PrimFunc where TVM's JSON may stand."""
    return json.dumps({_KEY: name, **arguments}, separators=(",", ":"))


def build_description(text: str) -> Any:
    """The PrimFunc that a description stands for (ProgramError as :func:`build`)."""
    arguments = json.loads(text)
    return build(arguments.pop(_KEY), arguments)
