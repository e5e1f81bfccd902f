"""Real programs to CUDA C++ and launches, what ptxas says of them, limits, and bundles; cubins where there is nvcc."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdmpp.dataset import Dataset
from cdmpp.device import get_device
from cdmpp.errors import BundleError, NetworkError, ProfilerError, ProgramError
from cdmpp.profiler.gpu.build import CudaLowering
from cdmpp.profiler.gpu.bundle import CudaProgram, Launch, read_bundle
from cdmpp.profiler.gpu.compile import CudaCompiler, NvccCompiler, find_compiler, find_nvcc, parse_ptxas
from cdmpp.profiler.gpu.limits import arch_limits, block_registers, resource_fault, rule_fault
from cdmpp.profiler.gpu.make import BundleConfig, make_bundle
from cdmpp.program.space import Rebuilder, TaskSpaces
from tests.samples.gpu import toy_program
from tests.samples.programs import matmul_task, te_task

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")


@pytest.fixture(scope="session")
def compiler() -> CudaCompiler:
    try:
        return find_compiler("sm_90")
    except ProfilerError as err:
        pytest.skip(str(err))


@pytest.fixture(scope="module")
def lowering() -> CudaLowering:
    return CudaLowering(dict(get_device("h200").target))


def lowered(lowering: CudaLowering, task: Any, n: int, **options: bool) -> list[CudaProgram]:
    spaces = TaskSpaces(task, "cuda", verify=False)
    found = []
    for program in spaces.sample(n, seed=1):
        try:
            found.append(lowering(spaces.rebuild(program, spaces.space_of(program)), **options))
        except ProgramError:
            continue
    return found


def test_a_matrix_product_is_one_launch_of_its_parameters(lowering: CudaLowering) -> None:
    programs = lowered(lowering, matmul_task(64), 4)
    assert programs
    for program in programs:
        assert program.params == (((64, 64), "float32"),) * 3
        assert program.outputs == (2,)
        assert program.workspaces == ()
        (launch,) = program.launches
        assert sorted(launch.buffers) == [0, 1, 2]
        # One thread needs no bounds.
        threads = launch.threads
        assert threads == 1 or f"__launch_bounds__({threads})" in program.source
        assert launch.kernel in program.source
    assert any(p.launches[0].shared_bytes > 0 for p in programs)


def test_the_arguments_of_a_launch_are_in_the_kernels_order(lowering: CudaLowering) -> None:
    program = lowered(lowering, matmul_task(64), 1)[0]
    head = program.source[program.source.index("main_kernel(") :]
    names = [part.split("__restrict__")[1].strip() for part in head[: head.index(")")].split(",")]
    order = {"A_ptr": 0, "B_ptr": 1, "C_ptr": 2}
    assert [order[name] for name in names] == list(program.launches[0].buffers)


def test_without_unrolling_the_launches_are_the_same(lowering: CudaLowering) -> None:
    wholes, plains = (lowered(lowering, matmul_task(64), 4), lowered(lowering, matmul_task(64), 4, unroll=False))
    assert wholes
    for whole, plain in zip(wholes, plains, strict=True):
        assert plain.launches == whole.launches and plain.workspaces == whole.workspaces
        assert plain.async_copies == whole.async_copies == ("cp.async" in whole.source)
        assert plain.source == ""


def two_steps() -> Any:
    """A row's maximum, taken off the row: two kernels unless they are fused."""

    def make(te: Any) -> list[Any]:
        a = te.placeholder((32, 64), name="A")
        k = te.reduce_axis((0, 64), name="k")
        top = te.compute((32,), lambda i: te.max(a[i, k], axis=k), name="top")
        return [a, te.compute((32, 64), lambda i, j: a[i, j] - top[i], name="B")]

    return te_task("off_the_top", make)


def test_what_goes_from_kernel_to_kernel_is_a_workspace(lowering: CudaLowering) -> None:
    programs = lowered(lowering, two_steps(), 12)
    several = [p for p in programs if len(p.launches) == 2]
    assert several
    for program in several:
        assert program.workspaces == (((32,), "float32"),)
        first, second = program.launches
        assert 2 in first.buffers and 2 in second.buffers
        assert program.outputs == (1,)


def test_the_compiler_counts_the_shared_memory_lowering_does(lowering: CudaLowering, compiler: CudaCompiler) -> None:
    programs = lowered(lowering, matmul_task(64), 4)
    program = next(p for p in programs if p.launches[0].shared_bytes and rule_fault(p, "sm_90") is None)
    _, resources = compiler.compile(program.source, "sm_90")
    declared = program.launches[0].shared_bytes
    assert declared <= resources["main_kernel"]["shared_bytes"] < declared + 1024


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that has two tasks of the network ``mlp``."""
    path = tmp_path_factory.mktemp("tasks") / "d"
    with Dataset.create(path) as dataset:
        for task in (matmul_task(32), two_steps()):
            dataset.add_task(replace(task, networks={"mlp": 1.0}))
    return path


CONFIG = BundleConfig(programs_per_task=2, invalid_per_task=1, builders=1, task_seconds=3600.0)


@pytest.mark.usefixtures("compiler")
def test_a_bundle_is_made_read_and_rebuilt(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.bundle"
    report = make_bundle(["mlp"], device="h200", out=out, config=CONFIG, tasks_of=source)
    assert report.statuses["ok"] == 4 and report.tasks == 2 and report.references == 2
    assert [p.name for p in tmp_path.iterdir()] == ["x.bundle"]
    bundle = read_bundle(out)
    assert bundle.arch == "sm_90" and bundle.note["devices"]["h200@0.5"]["share"] == 0.5
    rebuild = Rebuilder(verify=False)
    for kernel in bundle.kernels:
        program = bundle.programs[kernel.program]
        task, space = bundle.tasks[program.task_hash], bundle.spaces[str(program.space_hash)]
        rebuild(program, task, space)
        if kernel.status == "ok":
            assert kernel.cuda is not None and kernel.cubin[:4] == b"\x7fELF"
            assert set(kernel.resources) == {launch.kernel for launch in kernel.cuda.launches}
            assert rule_fault(kernel.cuda, "sm_90") is None
    with pytest.raises(BundleError, match="exists"):
        make_bundle(["mlp"], device="h200", out=out, config=CONFIG, tasks_of=source)

    chosen = {"device": "h200", "config": CONFIG, "tasks_of": source, "out": tmp_path / "y.bundle"}
    assert make_bundle(["mlp"], tasks=[matmul_task(32).hash], **chosen).tasks == 1
    with pytest.raises(ProfilerError, match="1 wanted tasks are not of these networks"):
        make_bundle(["mlp"], tasks=["0123456789abcdef"], **{**chosen, "out": tmp_path / "z.bundle"})


@pytest.mark.usefixtures("compiler")
def test_a_half_made_bundle_goes_on_where_it_was(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.bundle"

    def stop(progress: Any) -> None:
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_bundle(["mlp"], device="h200", out=out, config=CONFIG, tasks_of=source, progress=stop)
    with pytest.raises(BundleError, match="--resume"):
        make_bundle(["mlp"], device="h200", out=out, config=CONFIG, tasks_of=source)
    with pytest.raises(BundleError, match="was begun for sm_90, not for sm_75"):
        make_bundle(["mlp"], device="t4", out=out, config=CONFIG, tasks_of=source, resume=True)
    built: list[int] = []
    options = {"resume": True, "progress": lambda p: built.append(p.done)}
    assert make_bundle(["mlp"], device="h200", out=out, config=CONFIG, tasks_of=source, **options).statuses["ok"] == 4
    assert built[0] >= 2, "nothing is built twice"


def test_bad_requests_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ProfilerError, match="no CUDA device: expected an NVIDIA GPU"):
        make_bundle(["mlp"], device="this-cpu@1", out=tmp_path / "x", tasks_of=source)
    with pytest.raises(ProfilerError, match="sources or cubins"):
        config = BundleConfig(cubins=False, sources=False)
        make_bundle(["mlp"], device="h200", out=tmp_path / "x", config=config, tasks_of=source)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("network", "error", "message"), [("nonesuch", NetworkError, "unknown network"), ("resnet18", ProfilerError, "no task")]
)
def test_networks_without_tasks_are_refused(source: Path, tmp_path: Path, network: str, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make_bundle([network], device="h200", out=tmp_path / "x", tasks_of=source)


# -- compilers and limits -----------------------------------------------------------------------------------------


def taken(registers: int, spills: tuple[int, int] = (0, 0), shared: int = 0, stack: int = 0) -> dict[str, int]:
    found = {"registers": registers, "spill_store_bytes": spills[0], "spill_load_bytes": spills[1]}
    return {**found, "shared_bytes": shared, "stack_bytes": stack}


def test_resources_of_each_kernel_are_read() -> None:
    assert parse_ptxas(Path(__file__).with_name("ptxas.txt").read_text()) == {
        "main_kernel_1": taken(registers=255, spills=(120, 124), shared=37248, stack=432),
        "main_kernel": taken(registers=12),
        "main_kernel_2": taken(registers=14, shared=256),  # by NVRTC 13
    }


def launched(*launches: Launch) -> CudaProgram:
    return replace(toy_program(), launches=launches)


def test_registers_are_handed_out_by_the_warp() -> None:
    # 33 registers x 32 threads = 1056, rounded up to 5 x 256; 65 threads are three warps.
    assert (block_registers(33, 65), block_registers(32, 1024)) == (3 * 1280, 32768)


@pytest.mark.parametrize(
    ("launch", "kind"),
    [
        (Launch((1, 1, 1), (1025, 1, 1)), "threads"),
        (Launch((1, 1, 1), (1, 1, 65)), "block"),
        (Launch((1, 65536, 1), (1, 1, 1)), "grid"),
        (Launch((1, 1, 1), (32, 1, 1), 49153), "shared"),
        (Launch((2**31 - 1, 65535, 65535), (16, 1, 64), 49152), None),
    ],
)
def test_what_exceeds_a_limit_is_named(launch: Launch, kind: str | None) -> None:
    fault = rule_fault(launched(Launch((1, 1, 1), (32, 1, 1)), launch), "sm_70")
    assert (fault and fault.partition(":")[0]) == kind


@pytest.mark.parametrize(("registers", "kind"), [(64, None), (65, "registers")])
def test_what_takes_too_much_when_compiled_is_named(registers: int, kind: str | None) -> None:
    resources = {"k": taken(registers, shared=49152)}
    fault = resource_fault(launched(Launch((1, 1, 1), (1024, 1, 1), kernel="k")), resources, "sm_90")
    assert (fault and fault.partition(":")[0]) == kind


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ProfilerError, match="sm_90"):
        arch_limits("sm_1")
    with pytest.raises(ProfilerError, match="no CUDA compiler for sm_1"):
        find_compiler("sm_1")


@needs_nvcc
def test_nvcc_builds_cubins_and_says_why_not() -> None:
    toy, nvcc = toy_program().source, NvccCompiler()
    cubin, resources = nvcc.compile(toy, "sm_90")
    assert cubin[:4] == b"\x7fELF"
    assert 0 < resources["main_kernel"]["registers"] < 32
    greedy = "{\n  __shared__ float s[20000]; s[threadIdx.x] = a[0]; __syncthreads(); a[1] = s[threadIdx.x ^ 1];\n"
    with pytest.raises(ProfilerError, match="too much shared data"):
        nvcc.compile(toy.replace("{\n", greedy), "sm_90")
    with pytest.raises(ProfilerError, match="undefined_thing"):
        nvcc.compile('extern "C" __global__ void f() { undefined_thing(); }', "sm_90")
    nvcc._timeout_s = 0.01
    with pytest.raises(TimeoutError):
        nvcc.compile(toy, "sm_90")


def test_asynchronous_copies_need_ampere() -> None:
    cuda = replace(toy_program(), async_copies=True)
    assert rule_fault(cuda, "sm_75") == "async: it copies asynchronously, which sm_75 cannot"
    assert rule_fault(cuda, "sm_80") is None
