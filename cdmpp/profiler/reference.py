"""The reference program: the same arithmetic on every machine, re-timed regularly to see the machine drift."""

from __future__ import annotations

from cdmpp.profiler.build import BuildJob
from cdmpp.program.tvm_env import import_tvm, structural_hash
from cdmpp.program.types import Program, Task


def reference_job() -> BuildJob:
    """A 96x96x96 float32 matrix product, unscheduled: some 100 us on one core, in the caches, no threads."""
    tvm = import_tvm()
    from tvm import te

    n = 96
    a = te.placeholder((n, n), name="A")
    b = te.placeholder((n, n), name="B")
    k = te.reduce_axis((0, n), name="k")
    c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    func = te.create_prim_func([a, b, c])
    digest = structural_hash(func)
    task = Task(digest, "reference_matmul", tvm.ir.save_json(func), {}, 2.0 * n**3, 3.0 * n * n * 4)
    return BuildJob(Program(digest, digest, None, "", "unscheduled"), task, None)
