"""Programs and tasks made by a function: stored as its name and arguments, some 100 bytes, and rebuilt when needed.

A generator is a pure function from plain arguments to a PrimFunc. Two kinds are stored:

* a **task** of a library operator (:mod:`cdmpp.program.library_ops`): ``Task.tir_json`` holds :func:`describe`'s JSON in
  place of TVM's (13 kB for a linear layer);
* a **program** of a hand-written, parametrised kernel (:mod:`cdmpp.program.kernels`): its space names the generator and
  the parameters, its decisions are the values of these parameters (:func:`cdmpp.program.space.generator_space`).

The structural hash of what is built shows whether a generator changed: a program that differs from the stored one is refused.
Importing this module does not import TVM; building does.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program import kernels, library_ops

#: Key of the JSON that replaces a task's TIR.
_KEY = "cdmpp_generator"  # `Task.prim_func` looks for it
#: TVM keeps the tag of the operator that is being built in one place for all threads.
_BUILDING = threading.Lock()

_GENERATORS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        library_ops.linear, library_ops.bmm, library_ops.conv2d, library_ops.elementwise, library_ops.softmax,
        library_ops.layer_norm, library_ops.memory, kernels.gemm, kernels.clblast_gemm, kernels.image_convolution,
        kernels.kernel_tuner_convolution, kernels.dedispersion, kernels.kernel_tuner_dedispersion,
    )
}  # fmt: skip


def build(name: str, arguments: Mapping[str, Any]) -> Any:
    """The PrimFunc of a generator and its arguments (ProgramError: no such generator, or it does not take these arguments)."""
    function = _GENERATORS.get(name)
    if function is None:
        raise ProgramError(f"no generator {name!r}; this version has {', '.join(sorted(_GENERATORS))}")
    try:
        with _BUILDING:
            return function(**arguments)
    except TypeError as err:
        raise ProgramError(f"generator {name} does not take {dict(arguments)}: {err}") from err


def kernel_parameters(name: str) -> tuple[str, ...]:
    """Names of the parameters that the configurations of a kernel set, in the order of its arguments."""
    arguments = inspect.signature(_GENERATORS[name]).parameters.values()
    return tuple(argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY)


def describe(name: str, arguments: Mapping[str, Any]) -> str:
    """JSON that describes a generated PrimFunc, to be stored in place of TVM's JSON."""
    return json.dumps({_KEY: name, **arguments}, separators=(",", ":"))


def build_description(text: str) -> Any:
    """The PrimFunc of a description (ProgramError as in :func:`build`)."""
    arguments = json.loads(text)
    return build(arguments.pop(_KEY), arguments)
