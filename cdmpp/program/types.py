"""Task, Space and Program: what is measured and predicted, as plain data.

Nothing here imports TVM; :meth:`Task.prim_func` does when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """One fused sub-graph of a network as an unscheduled TIR PrimFunc (TVM's *workload*).

    Attributes
    ----------
    hash
        16 hexadecimal digits of the structural hash of the normalised PrimFunc; equal tasks of several
        networks have the same hash.
    name
        The name Relax gave the fused function, for people.
    tir_json
        The PrimFunc as TVM's JSON, or the generator that makes it (:mod:`cdmpp.program.generators`).
    networks
        Network name -> weight, the number of times the task occurs in it.
    flops
        Floating-point operations of one run, as TVM estimates them.
    bytes
        Bytes of all parameters, inputs and outputs, each counted once.
    dtype
        Data type of the output.
    """

    hash: str
    name: str
    tir_json: str = field(repr=False)
    networks: Mapping[str, float]
    flops: float
    bytes: float
    dtype: str = "float32"

    def prim_func(self) -> Any:
        """The unscheduled PrimFunc (imports TVM).

        Raises
        ------
        ProgramError
            It is stored as a generator that this version has not.
        """
        from cdmpp.program.tvm_env import import_tvm

        if self.tir_json.startswith('{"cdmpp_generator":'):
            from cdmpp.program.generators import build_description

            return build_description(self.tir_json)
        return import_tvm().ir.load_json(self.tir_json)


@dataclass(frozen=True)
class Space:
    """One design space of a task: the instructions of a MetaSchedule trace, without decisions.

    Attributes
    ----------
    hash
        Of task, rule set, cores and instructions.
    rule
        MetaSchedule's rule set: ``"llvm"`` or ``"cuda"``; or ``"generator"`` for the configurations of a
        parametrised kernel (:mod:`cdmpp.program.generators`).
    num_cores
        Cores that the parallel rule was given (CPU); 0 for a GPU.
    index
        The space's number among those of the task.
    insts_json
        The instructions as JSON (first half of ``Trace.as_json()``); of a generator its name, the names of its
        parameters, and the arguments that its programs share.
    """

    hash: str
    task_hash: str
    rule: str
    num_cores: int
    index: int
    insts_json: str = field(repr=False)


@dataclass(frozen=True)
class Program:
    """One point of a design space, or the unscheduled task where a vendor library runs it.

    Attributes
    ----------
    hash
        16 hexadecimal digits of the structural hash of the scheduled PrimFunc.
    decisions
        The decisions of the trace as compact JSON (second half of ``Trace.as_json()``); with the space they
        rebuild the program exactly. Of a generator the values of its parameters. Empty where ``space_hash`` is None.
    origin
        How it was found: ``random`` (uniform over the space), ``search`` (evolutionary search, the fast region a
        tuner visits), ``generator`` (a configuration of a parametrised kernel), ``unscheduled`` (the task as it is),
        ``default`` (TVM's schedule for a GPU where nothing was tuned).
    implementation
        ``scheduled`` (this TIR is what runs) or ``library`` (the task is run by a vendor library).
    """

    hash: str
    task_hash: str
    space_hash: str | None
    decisions: str = field(repr=False)
    origin: str = "random"
    implementation: str = "scheduled"
