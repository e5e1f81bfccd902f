"""Which CUDA programs can run: labels by resource limits and compile results, without a GPU.

Programs are drawn from MetaSchedule's ``cuda`` design spaces with the postprocessor that rejects invalid ones
switched off, lowered to CUDA C++ and judged:

1. TVM does not lower it: invalid on all architectures (``lowering``).
2. Threads, block, grid or declared shared memory exceed what every architecture allows: invalid on all
   (``threads``, ``block``, ``grid``, ``shared``), without compiling. A part is compiled all the same, to check the rule.
3. Everything else is compiled to a cubin for one architecture drawn at random, a part for all of them. The compiler
   refuses (``compile``, or ``shared``: alignment counts), takes too long (``timeout``), the registers of a block exceed the
   limit (``registers``), or the program is valid.

Programs of very long source take most of the compiler's time; of those that no rule decides only a part is kept, and
their rows weigh accordingly more (``weight``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import DatasetError, ProgramError

if TYPE_CHECKING:
    import pandas as pd

    from cdmpp.profiler.build import BuildJob
    from cdmpp.profiler.cuda_compile import CudaCompiler, KernelResources
    from cdmpp.profiler.cuda_limits import KernelShape
    from cdmpp.profiler.cuda_lowering import CudaLowering
    from cdmpp.profiler.cuda_program import CudaProgram

#: Architectures of the shipped data: Volta, Turing, Ampere (server, desktop), Hopper.
ARCHS: tuple[str, ...] = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


@dataclass(frozen=True)
class ValidityConfig:
    """What is collected.

    Attributes
    ----------
    archs
        Architectures.
    programs
        In all, evenly over the tasks.
    everywhere
        Part of the programs that is compiled for all architectures.
    audit
        Part of the programs decided by a rule that is compiled all the same.
    long_source_bytes, long_part
        Of undecided programs with longer source only this part is kept.
    timeout_s
        CPU seconds of one program's compilation; more is ``timeout``.
    per_round
        Programs of a task that are drawn at a time.
    """

    archs: tuple[str, ...] = ARCHS
    programs: int = 10_000
    everywhere: float = 0.05
    audit: float = 0.03
    long_source_bytes: int = 60_000
    long_part: float = 0.1
    timeout_s: float = 30.0
    per_round: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Verdict:
    """One program on one architecture.

    Attributes
    ----------
    valid
        Whether it compiles and a block of it can be launched.
    kind, error
        Why not: ``lowering``, ``threads``, ``block``, ``grid``, ``shared``, ``registers``, ``compile``, ``timeout``;
        and in words.
    compiled
        Whether the compiler was asked (the resources below are then known, unless it refused).
    threads, blocks, shared_declared_bytes
        Largest of the program's kernels, before compiling.
    registers, spill_store_bytes, spill_load_bytes, shared_bytes, stack_bytes
        Largest of its kernels, as ptxas reports them; -1 where unknown.
    fits_opt_in
        Whether the declared shared memory would fit if it were dynamic and the kernel opted in to all there is.
    weight
        Programs like it that it stands for.
    """

    program: str
    arch: str
    valid: bool
    kind: str = ""
    error: str = ""
    compiled: bool = False
    threads: int = -1
    blocks: int = -1
    kernels: int = -1
    shared_declared_bytes: int = -1
    registers: int = -1
    spill_store_bytes: int = -1
    spill_load_bytes: int = -1
    shared_bytes: int = -1
    stack_bytes: int = -1
    fits_opt_in: bool = False
    source_bytes: int = -1
    weight: float = 1.0


def draw_archs(program: str, config: ValidityConfig) -> tuple[str, ...]:
    """The architectures a program is compiled for: one by its hash, or all of them."""
    rng = random.Random(f"{config.seed}:{program}")
    one = rng.choice(config.archs)
    return config.archs if rng.random() < config.everywhere else (one,)


def judge(
    program: str,
    cuda: CudaProgram,
    config: ValidityConfig,
    compilers: Callable[[str], CudaCompiler],
    starting: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Verdicts of a lowered program; none if it is not kept (a long source that was not drawn).

    `starting` is called before each compilation with the verdict that holds if it never ends.
    """
    from cdmpp.profiler.cuda_limits import shape_fault

    archs = draw_archs(program, config)
    rng = random.Random(f"{config.seed}:{program}:audit")
    fault = shape_fault(cuda.shapes, config.archs[0])
    known = _shape_columns(cuda)
    rows: dict[str, Verdict] = {}
    weight = 1.0
    if fault is not None:
        for arch in config.archs:
            fits = _fits_opt_in(cuda.shapes, arch)
            rows[arch] = Verdict(program, arch, False, *fault, **known, fits_opt_in=fits)
        if rng.random() >= config.audit:
            return list(rows.values())
    elif len(cuda.source) > config.long_source_bytes:
        if rng.random() >= config.long_part:
            return []
        weight = 1 / config.long_part
    for arch in archs:
        if starting is not None:
            late = f"compiling took over {config.timeout_s:g} s"
            fits = _fits_opt_in(cuda.shapes, arch)
            starting(
                Verdict(program, arch, False, "timeout", late, True, **known, fits_opt_in=fits, weight=weight)
            )
        verdict = _compile(program, cuda, arch, known, weight, compilers(arch))
        if fault is not None and not verdict.valid:
            # The rule's kind stays: a compiler has its own words for it.
            verdict = Verdict(**{**asdict(verdict), "kind": fault[0]})
        rows[arch] = verdict
    return list(rows.values())


def _compile(
    program: str,
    cuda: CudaProgram,
    arch: str,
    known: dict[str, int],
    weight: float,
    compiler: CudaCompiler,
) -> Verdict:
    from cdmpp.profiler.cuda_compile import CompileError
    from cdmpp.profiler.cuda_limits import resource_fault

    common: dict[str, Any] = {
        **known,
        "compiled": True,
        "weight": weight,
        "fits_opt_in": _fits_opt_in(cuda.shapes, arch),
    }
    try:
        compiled = compiler.compile(cuda.source, arch)
    except CompileError as err:
        kind = "shared" if "too much shared" in str(err) else "compile"
        return Verdict(program, arch, False, kind, str(err), **common)
    except TimeoutError as err:
        return Verdict(program, arch, False, "timeout", str(err), **common)
    taken = [compiled.resources[launch.kernel] for launch in cuda.launches]
    fault = resource_fault(cuda.shapes, taken, arch)
    return Verdict(program, arch, fault is None, *(fault or ("", "")), **common, **_resource_columns(taken))


def _shape_columns(cuda: CudaProgram) -> dict[str, int]:
    return {
        "threads": max(s.threads for s in cuda.shapes),
        "blocks": max(s.blocks for s in cuda.shapes),
        "kernels": len(cuda.shapes),
        "shared_declared_bytes": max(s.shared_bytes for s in cuda.shapes),
        "source_bytes": len(cuda.source),
    }


def _resource_columns(taken: Sequence[KernelResources]) -> dict[str, int]:
    return {name: max(getattr(t, name) for t in taken) for name in taken[0].to_json()}


def _fits_opt_in(shapes: Sequence[KernelShape], arch: str) -> bool:
    from cdmpp.profiler.cuda_limits import arch_limits

    return max(s.shared_bytes for s in shapes) <= arch_limits(arch).shared_optin_bytes


def judge_job(
    job: BuildJob,
    func: Any,
    lowering: CudaLowering,
    config: ValidityConfig,
    compilers: Callable[[str], CudaCompiler],
    starting: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Lower a rebuilt program and :func:`judge` it."""
    try:
        cuda = lowering(func)
    except ProgramError as err:
        digest = job.program.hash
        return [Verdict(digest, arch, False, "lowering", str(err)) for arch in config.archs]
    return judge(job.program.hash, cuda, config, compilers, starting)


# -- the table -------------------------------------------------------------------------------------------------


def load_verdicts(path: str | Path) -> pd.DataFrame:
    """The verdicts of a folder that ``cdmpp validity-data`` wrote: a row a program and architecture, with the
    fields of :class:`Verdict` as columns and ``task``.

    Raises
    ------
    DatasetError
        There is none, or it is damaged.
    """
    import pandas as pd
    import pyarrow as pa

    from cdmpp.profiler.validity_run import TABLE_FILE

    file = Path(path) / TABLE_FILE
    try:
        return pd.read_parquet(file)
    except (OSError, pa.ArrowException, ValueError) as err:
        raise DatasetError(f"{path} holds no validity data: {err}") from err


def summarise(frame: pd.DataFrame) -> dict[str, Any]:
    """Counts: programs, verdicts, valid and invalid by kind, by architecture, and how the rules fared."""
    checked = frame[frame["compiled"] & (frame["shared_declared_bytes"] > 49152)]
    by_arch = {
        str(arch): {"valid": int(part["valid"].sum()), "invalid": int((~part["valid"]).sum())}
        for arch, part in frame.groupby("arch")
    }
    first = frame.drop_duplicates("program")
    kinds = Counter("valid" if v else str(k) for v, k in zip(first["valid"], first["kind"], strict=True))
    per_program = frame[frame["compiled"]].groupby("program")["valid"].agg(["min", "max", "size"])
    several = per_program[per_program["size"] > 1]
    return {
        "programs": int(frame["program"].nunique()),
        "tasks": int(frame["task"].nunique()) if "task" in frame else 0,
        "verdicts": len(frame),
        "programs_by_kind": dict(kinds),
        "verdicts_by_arch": by_arch,
        "compiled": int(frame["compiled"].sum()),
        "rule_checked": len(checked),
        "rule_contradicted": int(checked["valid"].sum()),
        "programs_compiled_everywhere": len(several),
        "of_them_not_equal_everywhere": int((several["min"] != several["max"]).sum()),
    }
