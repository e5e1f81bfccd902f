"""Which CUDA programs can run: labels by resource limits and compile results, without a GPU.

Programs are drawn from MetaSchedule's ``cuda`` design spaces with the postprocessor that rejects invalid ones
switched off, lowered to CUDA C++ and judged:

1. TVM does not lower it: invalid on all architectures (``lowering``).
2. By rules: threads, block, grid or declared shared memory exceed what every architecture allows (``threads``, ``block``,
   ``grid``, ``shared``); asynchronous copies need sm_80 (``async``). A part of these is compiled all the same.
3. A part of those that no rule excludes is compiled to a cubin for one architecture drawn at random, a part of that for
   all. The compiler refuses (``compile``, or ``shared``: alignment counts), takes too long (``timeout``), or the registers of
   a block exceed the limit (``registers``). Of long sources, which take most of the compiler's time, only a small part is
   compiled; whatever alignment may take over the limit always is.
4. What no rule excludes and was not compiled is taken to be valid (TVM states the block's size, so ptxas keeps the
   registers within the limit, by spilling). How often the compiler contradicts the rules is in the summary.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import DatasetError, ProgramError

if TYPE_CHECKING:
    import pandas as pd

    from cdmpp.profiler.engine import BuildJob
    from cdmpp.profiler.gpu.bundle import CudaProgram
    from cdmpp.profiler.gpu.compile import CudaCompiler, KernelResources
    from cdmpp.profiler.gpu.lowering import CudaLowering

#: Architectures of the shipped data: Volta, Turing, Ampere (server, desktop), Hopper.
ARCHS: tuple[str, ...] = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90")

#: Bytes of shared memory that the alignment of a kernel's arrays may add to their sum.
_ALIGNMENT_SLACK = 1024


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
    part
        Part of the programs that no rule excludes that is compiled.
    audit
        Part of the programs that a rule excludes that is compiled all the same.
    long_source_bytes, long_part
        Of those with longer source only this part is compiled.
    timeout_s
        CPU seconds of one program's compilation; more is ``timeout``.
    per_round
        Programs of a task that are drawn at a time.
    """

    archs: tuple[str, ...] = ARCHS
    programs: int = 10_000
    part: float = 0.35
    everywhere: float = 0.05
    audit: float = 0.03
    long_source_bytes: int = 16_000
    long_part: float = 0.02
    timeout_s: float = 20.0
    per_round: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Verdict:
    """One program on one architecture.

    Attributes
    ----------
    valid
        Whether it compiles and a block of it can be launched.
    kind, error
        Why not: ``lowering``, ``threads``, ``block``, ``grid``, ``shared``, ``async``, ``registers``, ``compile``,
        ``timeout``; and in words.
    rule
        The kind by the rules alone; "" if none excludes it.
    compiled
        Whether the compiler was asked (the resources below are then known, unless it refused).
    threads, blocks, shared_declared_bytes
        Largest of the program's kernels, before compiling.
    registers, spill_store_bytes, spill_load_bytes, shared_bytes, stack_bytes
        Largest of its kernels, as ptxas reports them; -1 where unknown.
    source_bytes
        Of what was compiled or would have been; -1 where nobody asked.
    fits_opt_in
        Whether the declared shared memory would fit if it were dynamic and the kernel opted in to all there is.
    """

    program: str
    arch: str
    valid: bool
    kind: str = ""
    error: str = ""
    rule: str = ""
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


def draw_archs(program: str, config: ValidityConfig) -> tuple[str, ...]:
    """The architectures a program is compiled for: one by its hash, or all of them."""
    rng = random.Random(f"{config.seed}:{program}")
    one = rng.choice(config.archs)
    return config.archs if rng.random() < config.everywhere else (one,)


def judge(
    program: str,
    plain: CudaProgram,
    full: Callable[[], CudaProgram],
    config: ValidityConfig,
    compilers: Callable[[str], CudaCompiler],
    starting: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Verdicts of a lowered program, one an architecture.

    Parameters
    ----------
    plain
        Lowered without unrolling, which is all that the rules need.
    full
        Gives it as it is compiled.
    starting
        Called before each compilation with the verdict that holds if it never ends.
    """
    from cdmpp.profiler.gpu.limits import arch_limits

    known = _shape_columns(plain)
    verdicts: dict[str, Verdict] = {}
    for arch in config.archs:
        fault = rule_fault(plain, arch)
        verdicts[arch] = Verdict(
            program,
            arch,
            fault is None,
            *(fault or ("", "")),
            rule=fault[0] if fault else "",
            fits_opt_in=known["shared_declared_bytes"] <= arch_limits(arch).shared_optin_bytes,
            **known,
        )
    rng = random.Random(f"{config.seed}:{program}:compile")
    audited, wanted, long_wanted = (rng.random() < p for p in (config.audit, config.part, config.long_part))
    near = known["shared_declared_bytes"] > (
        arch_limits(config.archs[0]).shared_static_bytes - _ALIGNMENT_SLACK
    )
    asked = [a for a in draw_archs(program, config) if (audited if verdicts[a].rule else wanted or near)]
    if not asked:
        return list(verdicts.values())
    try:
        cuda = full()
    except ProgramError as err:
        return _not_lowered(program, config, err)
    for arch, verdict in verdicts.items():
        verdicts[arch] = replace(verdict, source_bytes=len(cuda.source))
    excluded = any(verdicts[a].rule for a in asked)
    if len(cuda.source) > config.long_source_bytes and not long_wanted and (excluded or not near):
        return list(verdicts.values())
    for arch in asked:
        if starting is not None:
            kind, late = verdicts[arch].rule or "timeout", f"compiling took over {config.timeout_s:g} s"
            starting(replace(verdicts[arch], valid=False, kind=kind, error=late, compiled=True))
        verdicts[arch] = _compile(cuda, verdicts[arch], compilers(arch))
    return list(verdicts.values())


def _not_lowered(program: str, config: ValidityConfig, err: ProgramError) -> list[Verdict]:
    return [Verdict(program, arch, False, "lowering", str(err), "lowering") for arch in config.archs]


def rule_fault(cuda: CudaProgram, arch: str) -> tuple[str, str] | None:
    """Why a lowered program cannot run on an architecture, as far as that shows before it is compiled.

    Returns
    -------
    Kind (``threads``, ``block``, ``grid``, ``shared``, ``async``) and a sentence; None if no rule excludes it.
    """
    from cdmpp.profiler.gpu.limits import arch_limits, shape_fault

    fault = shape_fault(cuda.launches, arch)
    if fault is None and cuda.async_copies and not arch_limits(arch).async_copies:
        return "async", f"it copies asynchronously, which {arch} cannot"
    return fault


def _compile(cuda: CudaProgram, verdict: Verdict, compiler: CudaCompiler) -> Verdict:
    """The verdict of the rules as the compiler sees it; a rule's kind stays where both refuse."""
    from cdmpp.profiler.gpu.compile import CompileError
    from cdmpp.profiler.gpu.limits import resource_fault

    def refused(kind: str, err: Exception) -> Verdict:
        return replace(verdict, valid=False, kind=verdict.rule or kind, error=str(err), compiled=True)

    try:
        compiled = compiler.compile(cuda.source, verdict.arch)
    except CompileError as err:
        return refused("shared" if "too much shared" in str(err) else "compile", err)
    except TimeoutError as err:
        return refused("timeout", err)
    taken = [compiled.resources[launch.kernel] for launch in cuda.launches]
    kind, error = resource_fault(cuda.launches, taken, verdict.arch) or ("", "")
    return replace(verdict, valid=not kind, kind=kind, error=error, compiled=True, **_resource_columns(taken))


def _shape_columns(cuda: CudaProgram) -> dict[str, Any]:
    return {
        "threads": max(s.threads for s in cuda.launches),
        "blocks": max(s.blocks for s in cuda.launches),
        "kernels": len(cuda.launches),
        "shared_declared_bytes": max(s.shared_bytes for s in cuda.launches),
    }


def _resource_columns(taken: Sequence[KernelResources]) -> dict[str, Any]:
    return {name: max(getattr(t, name) for t in taken) for name in asdict(taken[0])}


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
        plain = lowering(func, unroll=False)
    except ProgramError as err:
        return _not_lowered(job.program.hash, config, err)
    return judge(job.program.hash, plain, lambda: lowering(func), config, compilers, starting)


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
    """Counts: programs by kind (on the last architecture asked about), verdicts by architecture, and how often the
    compiler contradicted a rule."""
    compiled = frame[frame["compiled"]]
    excluded = compiled["rule"] != ""
    by_arch = {
        str(arch): {
            "valid": int(part["valid"].sum()),
            "invalid": int((~part["valid"]).sum()),
            "compiled": int(part["compiled"].sum()),
        }
        for arch, part in frame.groupby("arch", observed=True)
    }
    newest = frame.drop_duplicates("program", keep="last")
    kinds = Counter("valid" if v else str(k) for v, k in zip(newest["valid"], newest["kind"], strict=True))
    per_program = compiled.groupby("program")["valid"].agg(["min", "max", "size"])
    several = per_program[per_program["size"] > 1]
    return {
        "programs": int(frame["program"].nunique()),
        "tasks": int(frame["task"].nunique()),
        "verdicts": len(frame),
        "programs_by_kind": dict(kinds),
        "verdicts_by_arch": by_arch,
        "compiled": len(compiled),
        "rules": {
            "excluded_and_compiled": int(excluded.sum()),
            "of_them_valid": int(compiled.loc[excluded, "valid"].sum()),
            "not_excluded_and_compiled": int((~excluded).sum()),
            "of_them_invalid": int((~compiled.loc[~excluded, "valid"]).sum()),
        },
        "programs_compiled_everywhere": len(several),
        "of_them_not_equal_everywhere": int((several["min"] != several["max"]).sum()),
    }
