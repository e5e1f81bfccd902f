"""What ptxas says, limits of architectures, and cubins that nvcc really builds."""

from __future__ import annotations

import pytest

from cdmpp.errors import ProfilerError
from cdmpp.profiler.cuda_compile import (
    CompileError,
    KernelResources,
    NvccCompiler,
    find_compiler,
    find_nvcc,
    parse_ptxas,
)
from cdmpp.profiler.cuda_limits import (
    KernelShape,
    arch_limits,
    block_registers,
    blocks_per_sm,
    resource_fault,
    shape_fault,
)
from tests.samples.gpu import toy_program

LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'main_kernel_1' for 'sm_90'
ptxas info    : Function properties for main_kernel_1
    432 bytes stack frame, 120 bytes spill stores, 124 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 432 bytes cumulative stack size, 37248 bytes smem
ptxas info    : Compiling entry function 'main_kernel' for 'sm_90'
ptxas info    : Function properties for main_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, 380 bytes cmem[0]
"""


def test_resources_of_each_kernel_are_read() -> None:
    assert parse_ptxas(LOG) == {
        "main_kernel_1": KernelResources(255, 120, 124, 37248, 432),
        "main_kernel": KernelResources(12),
    }


def shape(threads: int, shared: int = 0, blocks: int = 1) -> KernelShape:
    return KernelShape((blocks, 1, 1), (threads, 1, 1), shared)


def test_registers_are_handed_out_by_the_warp() -> None:
    # 33 registers x 32 threads = 1056, rounded up to 5 x 256; 65 threads are three warps.
    assert block_registers(33, 65) == 3 * 1280
    assert block_registers(32, 1024) == 32768


def test_occupancy_is_that_of_the_scarcest_resource() -> None:
    assert blocks_per_sm(shape(128), KernelResources(16), "sm_90") == 16  # 2048 threads
    assert blocks_per_sm(shape(128), KernelResources(255), "sm_90") == 2  # 65536 registers
    assert blocks_per_sm(shape(32, 48 * 1024), KernelResources(16), "sm_90") == 4  # 228 kB
    assert blocks_per_sm(shape(32), KernelResources(16), "sm_75") == 16  # blocks


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (shape(1025), "threads"),
        (KernelShape((1, 1, 1), (1, 1, 65)), "block"),
        (KernelShape((1, 65536, 1), (1, 1, 1)), "grid"),
        (shape(32, 49153), "shared"),
    ],
)
def test_what_exceeds_a_limit_is_named(kernel: KernelShape, kind: str) -> None:
    fault = shape_fault([shape(32), kernel], "sm_90")
    assert fault is not None and fault[0] == kind


def test_what_is_at_the_limit_is_valid() -> None:
    assert shape_fault([KernelShape((2**31 - 1, 65535, 65535), (16, 1, 64), 49152)], "sm_70") is None
    assert resource_fault([shape(1024)], [KernelResources(64, shared_bytes=49152)], "sm_90") is None
    fault = resource_fault([shape(1024)], [KernelResources(65)], "sm_90")
    assert fault is not None and fault[0] == "registers"


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ProfilerError, match="sm_90"):
        arch_limits("sm_1")
    with pytest.raises(ProfilerError, match="no CUDA compiler for sm_1"):
        find_compiler("sm_1")


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
class TestNvcc:
    def compiler(self) -> NvccCompiler:
        return NvccCompiler(str(find_nvcc()))

    def test_a_cubin_is_built_and_its_resources_are_known(self) -> None:
        compiled = self.compiler().compile(toy_program().source, "sm_90")
        assert compiled.cubin[:4] == b"\x7fELF"
        assert 0 < compiled.resources["main_kernel"].registers < 32

    def test_too_much_shared_memory_is_refused_by_name(self) -> None:
        source = toy_program().source.replace("{\n", "{\n  __shared__ float s[20000]; s[threadIdx.x] = a[0];\n"
                                              "  __syncthreads(); a[1] = s[threadIdx.x ^ 1];\n")  # fmt: skip
        with pytest.raises(CompileError, match="too much shared data"):
            self.compiler().compile(source, "sm_90")

    def test_the_first_error_is_the_message(self) -> None:
        with pytest.raises(CompileError, match="undefined_thing"):
            self.compiler().compile('extern "C" __global__ void f() { undefined_thing(); }', "sm_90")

    def test_a_slow_compilation_is_ended(self) -> None:
        with pytest.raises(TimeoutError):
            NvccCompiler(str(find_nvcc()), timeout_s=0.01).compile(toy_program().source, "sm_90")
