"""Task, Space and Program: what is measured and predicted, as plain data; only :meth:`Task.prim_func` imports TVM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """One fused sub-graph of a network as an unscheduled TIR PrimFunc (TVM's *workload*)."""

    #: 16 hexadecimal digits of the structural hash of the normalised PrimFunc, the same for equal tasks of several networks.
    hash: str
    #: The name Relax gave the fused function, for people.
    name: str
    #: The PrimFunc as TVM's JSON, or the generator that makes it (:mod:`cdmpp.program.generators`).
    tir_json: str = field(repr=False)
    #: Network name -> weight, the number of times the task occurs in it.
    networks: Mapping[str, float]
    #: Floating-point operations of one run, as TVM estimates them.
    flops: float
    #: Bytes of all parameters, inputs and outputs, each counted once.
    bytes: float
    #: Data type of the output.
    dtype: str = "float32"

    def prim_func(self) -> Any:
        """The unscheduled PrimFunc (ProgramError: it is stored as a generator that this version does not have)."""
        from cdmpp.program import import_tvm

        if self.tir_json.startswith('{"cdmpp_generator":'):
            from cdmpp.program.generators import build_description

            return build_description(self.tir_json)
        tvm = import_tvm()
        if f'"tvm_version":"{tvm.__version__}"' in self.tir_json:  # nothing to convert, which takes longer than reading
            from tvm_ffi.serialization import from_json_graph_str

            return from_json_graph_str(self.tir_json)
        return tvm.ir.load_json(self.tir_json)


@dataclass(frozen=True)
class Space:
    """One design space of a task: the instructions of a MetaSchedule trace, without decisions."""

    #: Hash of task, rule set, cores and instructions.
    hash: str
    task_hash: str
    #: MetaSchedule's rule set: ``"llvm"`` or ``"cuda"``; or ``"generator"`` for the configurations of a parametrised
    #: kernel (:mod:`cdmpp.program.generators`).
    rule: str
    #: Cores that MetaSchedule's parallel rule was given (CPU); 0 for a GPU.
    num_cores: int
    #: The number of the space among those of the task.
    index: int
    #: The instructions as JSON (first half of ``Trace.as_json()``); for a generator its name, the names of its parameters, and
    #: the arguments that its programs share.
    insts_json: str = field(repr=False)


@dataclass(frozen=True)
class Program:
    """One point of a design space, or the unscheduled task if a vendor library runs it."""

    #: 16 hexadecimal digits of the structural hash of the scheduled PrimFunc.
    hash: str
    task_hash: str
    space_hash: str | None
    #: The decisions of the trace as compact JSON (second half of ``Trace.as_json()``); with the space they rebuild the program
    #: exactly. For a generator the values of its parameters. Empty if ``space_hash`` is None.
    decisions: str = field(repr=False)
    #: How it was found: ``random`` (uniform over the space), ``search`` (evolutionary search, the fast region a tuner visits),
    #: ``generator`` (a configuration of a parametrised kernel), ``unscheduled`` (the task as it is), ``default`` (TVM's
    #: schedule for a GPU if nothing was tuned).
    origin: str = "random"
    #: ``scheduled`` (this TIR is what runs) or ``library`` (a vendor library runs the task).
    implementation: str = "scheduled"
