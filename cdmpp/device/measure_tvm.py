"""Two kernels that only compiled code can be: a chase of pointers, and a call that does nothing."""

from __future__ import annotations

from typing import Any

#: Dependent loads of one run: long against the call, short for a person.
_LOADS = 1 << 15
_RUNS = 2
_LINE_BYTES = 64


class CpuKernels:
    """The kernels, compiled by TVM for this CPU.

    Parameters
    ----------
    cores
        Cores that a parallel call starts.
    max_kb
        Largest working set.

    Raises
    ------
    CdmppError
        TVM is not installed.
    """

    def __init__(self, cores: int, max_kb: int) -> None:
        import numpy as np

        from cdmpp.program.tvm_env import import_tvm

        self._tvm = import_tvm()
        self._cores = cores
        self._next = np.zeros(max_kb * 1024 // 4, dtype=np.int32)
        self._rng = np.random.default_rng(0)
        self._run_chase = self._compile(self._chase())
        self._run_nothing = self._compile(self._nothing())

    def load_s(self, kb: int) -> float:
        """Seconds of a load that waits for the one before, in a working set of so many KB, in random order."""
        import time

        import numpy as np

        step = _LINE_BYTES // 4
        lines = kb * 1024 // _LINE_BYTES
        order = self._rng.permutation(lines).astype(np.int32) * step
        self._next[order] = np.roll(order, -1)
        table, out = self._tensor(self._next), self._tensor(np.zeros(1, dtype=np.int32))
        best = float("inf")
        for _ in range(1 + _RUNS):
            start = time.thread_time()  # so that time given to others does not count
            self._run_chase(table, out)
            best = min(best, time.thread_time() - start)
        return best / _LOADS

    def launch_s(self) -> float:
        """Seconds of a call of a kernel that stores one number on every core."""
        import numpy as np

        out = self._tensor(np.zeros(self._cores, dtype=np.float32))
        timer = self._run_nothing.mod.time_evaluator("main", self._tvm.cpu(), number=200, repeat=_RUNS)
        return float(min(timer(out).results))

    def _tensor(self, array: Any) -> Any:
        return self._tvm.runtime.tensor(array, device=self._tvm.cpu())

    def _compile(self, func: Any) -> Any:
        target = self._tvm.target.Target({"kind": "llvm", "num-cores": self._cores})
        return self._tvm.compile(self._tvm.IRModule({"main": func}), target)

    def _chase(self) -> Any:
        from cdmpp.program.kernels.builder import block, function, loops, script

        T = script()
        with function({"next": (self._next.shape, "int32"), "out": ((1,), "int32")}) as ((table, out), made):
            place = T.sblock_alloc_buffer((1,), "int32", scope="local")
            with block("start"):
                T.buffer_store(place, T.int32(0), [0])
            with loops(T.serial(_LOADS)), block("step"):
                T.buffer_store(place, table[place[0]], [0])
            with block("end"):
                T.buffer_store(out, place[0], [0])
        return made()

    def _nothing(self) -> Any:
        from cdmpp.program.kernels.builder import block, function, loops, script

        T = script()
        with (
            function({"out": ((self._cores,), "float32")}) as ((out,), made),
            loops(T.parallel(self._cores)) as (i,),
            block("store", [(self._cores, i)]) as (k,),
        ):
            T.buffer_store(out, T.float32(0.0), [k])
        return made()
