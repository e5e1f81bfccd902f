"""Features of a program and a device together, computed without learning from the AST and the device's specification.

A lower bound and an analytical estimate of the latency are baselines. Labels can be relative to the estimate: then the network
predicts how far a program stays behind (CDMPP predicts the time itself). Features for the network say how the program fills the
device; for compiled programs also how long loops take on the core (:mod:`cdmpp.program.codegen.loops`). A network that must
carry over to new devices should not have to learn from a handful of them how a product of matrices is cut into tiles for their
cores (NeuSight, Lee et al., ASPLOS'25, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdmpp.device import Device
from cdmpp.program.ast import CAPACITIES, LEAF_FEATURES, N_LOOPS, N_SLOTS, SIMD_BYTES, SPECIAL, CompactAST, size_name
from cdmpp.program.codegen import CACHE_KB, CODEGEN_FEATURES, CYCLE_FEATURES, KINDS, LOOP_FEATURES, LOOPS

FloatArray = NDArray[np.float64]

#: No program takes less than this, whatever the bound says: the resolution of a kernel launch or function call.
_MIN_S = 1e-8
#: Cycles that a dependent floating-point operation waits for the one before. Additions wait as long as multiply-adds, so
#: a chain of sums takes the same time without fused multiply-adds (Fog, instruction tables: 4 for both on Skylake).
_LATENCY_CYCLES = 4.0
#: Operations of a GPU lane that one exponential, square root or the like takes.
_SPECIAL_CYCLES = 12.0
#: Cycles of such a function on a CPU: a call of the C library for each element. Fitted: 3 to 12 rank programs alike.
_CALL_CYCLES = 6.0
#: Cycles of a square root on a CPU, which is one instruction for each element (Fog: 3 to 5).
_ROOT_CYCLES = 3.0
#: Loads and stores a core starts per cycle.
_MEMORY_PORTS = 2.0
#: Instructions that can wait in a core for their operands: dependent chains no longer than this overlap.
_WINDOW = 200.0
#: Instructions a core starts per cycle.
_ISSUE = 4.0
#: Microarchitectures whose gathers microcode slows down against Gather Data Sampling (Intel, INTEL-SA-00828).
SLOW_GATHER = frozenset({"skylake", "skylake-avx512", "coffeelake", "cometlake", "cascadelake", "icelake-server"})
#: Cycles per element that a gather adds on these. One gather takes 25, whatever its width (measured on a Cascade Lake at
#: 2.5 GHz: 10 to 11 ns for 4, 8 and 16 elements). LLVM prefers gathers of 8 elements, and emits gathers in half of the programs
#: where :func:`_gathered` finds any (47 % of 24,001).
_GATHER_CYCLES = 25 / 8 / 2
#: Lanes of the narrowest gather of float32.
_GATHER_LANES = 4.0
#: LLVM unrolls loops up to this extent before it vectorises, then vectorises the loop around. Fitted: 4 to 100 are as good.
_UNROLLED_EXTENT = 16.0
#: Bytes per cycle and core from the second and the third cache level.
_L2_BYTES, _L3_BYTES = 32.0, 8.0
#: Cycles, to scale only, for a line that a cache lost to set conflicts, and for a page that the TLB lacks.
_CROWDED_CYCLES, _PAGE_CYCLES = 5.0, 10.0
#: Sets and ways of the first cache level of current CPUs. On AMD's cores, misses of one set are ``_SET_CYCLES`` apart (such as
#: in a column of a matrix whose rows are 4 KB apart), which only matters where strides use few sets, ``_FEW_SETS`` at most.
_SETS, _WAYS, _SET_CYCLES, _FEW_SETS = 64, 8, 11.0, 4
#: Cycles to hand a parallel loop nest to the threads of several cores and to wait for them, and by what factor each core is
#: slower while others work: on two cores of a Zen 5, a Zen 4 and a Cascade Lake 2,500, 2,650 and 2,300 cycles, and 4 %.
_REGION_CYCLES, _TOGETHER = 2450.0, 1.04
#: Used where a specification does not give the value.
_DEFAULT_CLOCK_MHZ, _DEFAULT_BANDWIDTH_GB_S, _DEFAULT_PEAK_GFLOPS = 2000.0, 20.0, 50.0
#: Microseconds of a GPU launch where the specification does not give it.
_GPU_LAUNCH_US = 4.0
#: Watts per GFLOP/s and per nanometre of the process that sustain the float32 peak: those of a Tesla V100 for PCIe (250 W,
#: 14,000 GFLOP/s, 12 nm), whose products of matrices run at its peak clock (Jia et al. 2018, Dissecting the NVIDIA Volta GPU
#: architecture via microbenchmarking); a Tesla K40 (235 W, 5,040 GFLOP/s, 28 nm) would give 12 % more.
_SUSTAINED_W = 250 / 14000 / 12
#: Edge of a square output tile -> part of a core's peak that a product of matrices cut into such tiles reaches.
_TILE_EFFICIENCY = {32: 0.4, 64: 0.7, 128: 0.9, 256: 0.95}

_COLUMN = {name: i for i, name in enumerate(LEAF_FEATURES)}
_EXTENT = [_COLUMN[f"loop{i}_extent"] for i in range(1, N_LOOPS + 1)]
_REDUCTION = [_COLUMN[f"loop{i}_reduction"] for i in range(1, N_LOOPS + 1)]
#: Above the number of top-level loop nests of any program.
_NESTS = 1 << 20
_FP_OPS = ("fadd", "fmul", "fma", "fdiv", "fminmax")


def _cores(device: Device) -> float:
    return max(1.0, device.cores_used or 1.0)


def _column(leaves: NDArray[Any], name: str) -> FloatArray:
    return np.asarray(leaves[:, _COLUMN[name]], dtype=np.float64)


@dataclass(frozen=True)
class ProgramView:
    """Sizes and properties of n programs, each float64 or bool (n,). The *main leaf* is the one with the most operations.

    ``io_bytes`` are of inputs and outputs; buffers that a program allocates in between may stay in a cache. Of the main leaf,
    ``columns``, ``rows`` and ``batch`` are extents of output loops (the innermost, the one around it, the product of the
    others; 1 where there is none), ``depth`` is the product of its reduction loops, ``parallel`` its parallel iterations.
    ``regions`` is the number of top-level loop nests that run in parallel. ``blocks``, ``threads`` and ``shared_bytes`` are of
    the largest GPU launch (1, 1 and 0 without). A program on a GPU that is not ``scheduled_for_gpu`` is run by a library. A
    ``contraction`` is a sum of products, which matrix units compute. A ``windowed`` program reduces over several loops, as a
    convolution does: libraries run it as one product of matrices over all output points."""

    flops: FloatArray
    io_bytes: FloatArray
    columns: FloatArray
    rows: FloatArray
    batch: FloatArray
    depth: FloatArray
    parallel: FloatArray
    regions: FloatArray
    blocks: FloatArray
    threads: FloatArray
    shared_bytes: FloatArray
    scheduled_for_gpu: NDArray[np.bool_]
    contraction: NDArray[np.bool_]
    windowed: NDArray[np.bool_]

    @property
    def outputs(self) -> FloatArray:
        """Number of outputs of the main leaf."""
        return self.columns * self.rows * self.batch

    def tiles(self, edge: int) -> FloatArray:
        """Number of square tiles with an edge of this many points that cover the outputs."""
        by_loops = np.ceil(self.columns / edge) * np.ceil(self.rows / edge) * self.batch
        return np.where(self.windowed, np.ceil(self.outputs / edge**2), by_loops)

    @classmethod
    def of(cls, asts: Sequence[CompactAST]) -> ProgramView:
        """The view of programs, each of which has at least one leaf."""
        lengths = np.asarray([ast.n_leaves for ast in asts])
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        leaves = np.concatenate([ast.leaves for ast in asts]) if len(asts) else np.zeros((0, len(LEAF_FEATURES)))

        column = partial(_column, leaves)

        def largest(name: str) -> FloatArray:
            return np.maximum.reduceat(column(name), starts) if len(asts) else np.zeros(0)

        owner = np.repeat(np.arange(len(asts)), lengths)

        started = np.unique((owner * _NESTS + column("nest_index").astype(np.int64))[column("parallel") > 1])
        order = np.lexsort((column("iterations"), column("flops"), owner))
        main = leaves[order[starts + lengths - 1]].astype(np.float64)
        first = leaves[starts].astype(np.float64)
        extent = np.maximum(main[:, _EXTENT], 1.0)
        output = (main[:, _REDUCTION] == 0) & (extent > 1)
        rank = np.cumsum(output, axis=1)
        products = main[:, _COLUMN["op_fma"]] + main[:, _COLUMN["op_fmul"]]
        depth = np.maximum(main[:, _COLUMN["reduction"]], 1.0)
        blocks, threads = largest("block_idx"), largest("thread_idx")
        bytes_ = first[:, _COLUMN["program_bytes"]] - first[:, _COLUMN["program_allocated"]]
        return cls(
            flops=first[:, _COLUMN["program_flops"]],
            io_bytes=np.maximum(bytes_, main[:, _COLUMN["itemsize"]]),
            columns=np.where(output & (rank == 1), extent, 1.0).prod(1),
            rows=np.where(output & (rank == 2), extent, 1.0).prod(1),
            batch=np.where(output & (rank > 2), extent, 1.0).prod(1),
            depth=depth,
            parallel=np.maximum(main[:, _COLUMN["parallel"]], 1.0),
            regions=np.bincount(started // _NESTS, minlength=len(asts)).astype(np.float64),
            blocks=np.maximum(blocks, 1.0),
            threads=np.maximum(threads, 1.0),
            shared_bytes=first[:, _COLUMN["program_shared"]],
            scheduled_for_gpu=(blocks > 1) | (threads > 1),
            contraction=(products > 0) & (depth > 1),
            windowed=((main[:, _REDUCTION] > 0) & (extent > 1)).sum(1) > 1,
        )

    def take(self, numbers: NDArray[np.int64]) -> ProgramView:
        """The programs with these indices."""
        return ProgramView(**{field.name: getattr(self, field.name)[numbers] for field in fields(self)})


def roofline_s(asts: Sequence[CompactAST], device: Device, view: ProgramView | None = None) -> FloatArray:
    """Lower bound of each program's latency on a device, float64 seconds (n,), by Williams et al. (CACM 2009): floating-point
    operations over peak, or bytes of inputs and outputs over memory bandwidth, whichever is longer; plus the launch overhead,
    where known. Only bytes beyond the size of the last-level cache count, as those that fit may come from there. ``view`` is
    :meth:`ProgramView.of` these programs, if the caller has it."""
    view = ProgramView.of(asts) if view is None else view
    bandwidth = 1e9 * (device.bandwidth_gb_s or _DEFAULT_BANDWIDTH_GB_S)
    cache = 1024.0 * max(device.l3_kb or 0.0, device.l2_kb or 0.0)
    beyond = np.maximum(0.0, view.io_bytes - cache)
    launch = 1e-6 * (device.launch_overhead_us or 0.0)
    compute = view.flops / peak_flops(view, device)
    return np.maximum(np.maximum(compute, beyond / bandwidth) + launch, _MIN_S)


def peak_flops(view: ProgramView, device: Device) -> FloatArray:
    """Peak of the device for each program in float32 operations per second, (n,): that of its matrix units where a GPU has
    them for float32 and a library runs a sum of products."""
    peak = 1e9 * (device.peak_gflops.get("float32") or _DEFAULT_PEAK_GFLOPS)
    matrix = 1e9 * device.peak_gflops.get("float32_matrix", 0.0)
    by_library = (device.kind == "gpu") & ~view.scheduled_for_gpu & view.contraction
    return np.where(by_library, max(peak, matrix), peak)


def power_headroom(device: Device) -> float | None:
    """Power limit over the power that all lanes need at their peak clock, None where unknown; below 1 the clock falls under
    load. The energy of an operation is assumed to be proportional to the feature size of the process, with the ratio of a
    device that sustains its peak."""
    power = device.power_for(device.peak_gflops.get("float32"))
    return None if power is None else power / _SUSTAINED_W


def estimate_s(asts: Sequence[CompactAST], device: Device, view: ProgramView | None = None) -> FloatArray:
    """Analytical estimate of each program's latency on a device, float64 seconds (n,).

    On a CPU, and for a program that was scheduled for a GPU, it is the sum over the leaves. A leaf takes as long as its slowest
    resource in the core (arithmetic, loads and stores, the chain of dependent updates) plus the lines that each cache level
    moves for it, divided by the cores that its parallel loops keep busy; on a GPU the same with lanes in place of SIMD
    registers. A program that a library runs on a GPU takes as long as its arithmetic in whole waves of tiles or as its inputs
    and outputs in memory, whichever is longer. The constants are typical of current hardware: the estimate is meant to rank
    programs and to give their scale, not to be exact. ``view`` is as in :func:`roofline_s`."""
    view = ProgramView.of(asts) if view is None else view
    leaves, owner = _leaves_of(asts)
    seconds = _cpu_leaf_s(leaves, device) if device.kind == "cpu" else _gpu_leaf_s(leaves, device)
    total = np.bincount(owner, seconds, len(asts)).astype(np.float64)
    launch_us = device.launch_overhead_us or 0.0
    if device.kind == "cpu":
        total = total + regions_s(view, device)
    else:
        special = np.bincount(owner, leaves[:, _COLUMN["special"]], len(asts)).astype(np.float64)
        total = np.where(view.scheduled_for_gpu, total, _library_s(view, special, device))
        launch_us = device.launch_overhead_us or _GPU_LAUNCH_US
    return np.maximum(total + 1e-6 * launch_us, roofline_s(asts, device, view))


def _leaves_of(asts: Sequence[CompactAST]) -> tuple[FloatArray, NDArray[np.int64]]:
    """Leaves of all programs, and the index of the program that each belongs to."""
    leaves = np.concatenate([ast.leaves for ast in asts]).astype(np.float64)
    return leaves, np.repeat(np.arange(len(asts)), [ast.n_leaves for ast in asts])


def regions_s(view: ProgramView, device: Device) -> FloatArray:
    """Seconds that a CPU takes to start and end the parallel loop nests of each program, (n,): 0 on one core."""
    return view.regions * (_cores(device) > 1) * _REGION_CYCLES / (1e6 * (device.working_mhz or _DEFAULT_CLOCK_MHZ))


def are_shares(one: Device, other: Device) -> bool:
    """Whether two devices are the same CPU, each with some number of its cores, and run the same code."""
    return one.kind == "cpu" and bool(one.base) and (one.base, one.isa) == (other.base, other.isa)


def share_ratio(asts: Sequence[CompactAST], measured_s: FloatArray, source: Device, target: Device) -> FloatArray:
    """Latency on ``target`` over ``measured_s`` on ``source``, (n,), where both are numbers of cores of one CPU. Parallel
    loops are dealt out to the cores in rounds and have to be started; other loops take the same time on both. NaN where
    starting the parallel loops was more than a quarter of the measured latency."""
    view = ProgramView.of(asts)
    busy = []
    for device in (source, target):
        cores = _cores(device)
        busy.append(np.ceil(view.parallel / cores) * np.where((cores > 1) & (view.regions > 0), _TOGETHER, 1.0))
    starting_s = regions_s(view, source)
    within = np.where(starting_s > measured_s / 4, np.nan, measured_s - starting_s)
    ratio: FloatArray = (within * busy[1] / busy[0] + regions_s(view, target)) / measured_s
    return ratio


def _library_s(view: ProgramView, special: FloatArray, device: Device) -> FloatArray:
    bandwidth = 1e9 * (device.bandwidth_gb_s or _DEFAULT_BANDWIDTH_GB_S)
    cores = _cores(device)
    headroom = power_headroom(device)
    peak = peak_flops(view, device) * min(1.0, 1.0 if headroom is None else headroom)
    tiled = np.full(len(view.flops), np.inf)
    for tile, efficiency in _TILE_EFFICIENCY.items():
        work = np.ceil(view.tiles(tile) / cores) * cores * tile**2 * 2 * view.depth
        tiled = np.minimum(tiled, work / efficiency)
    plain = view.flops + _SPECIAL_CYCLES * special
    return np.maximum(np.where(view.contraction, tiled, plain) / peak, view.io_bytes / bandwidth)


def _cpu_leaf_s(leaves: FloatArray, device: Device) -> FloatArray:
    column = partial(_column, leaves)
    clock = 1e6 * (device.working_mhz or _DEFAULT_CLOCK_MHZ)
    width = max(w for w in SIMD_BYTES if w <= max((device.simd_bits or 128) / 8, SIMD_BYTES[0]))
    pipes = max(1.0, (device.lanes_per_core or width / 2) / (width / 4))
    fp = np.stack([column(f"op_{name}") for name in _FP_OPS]).sum(0)
    # Side-by-side statements are counted for registers of 32 bytes; narrower ones hold fewer.
    packed = np.maximum(column("fp_instructions_packed"), fp * column("iterations") * column("itemsize") / width)
    arithmetic = np.minimum(column(f"fp_instructions_{width}b"), packed)
    memory, index = column(f"mem_instructions_{width}b"), column("index_ops")
    # Without fused multiply-adds each is two instructions, and the two-operand code of SSE also copies a register.
    split = np.zeros(len(leaves)) if device.fma else arithmetic * column("op_fma") / np.maximum(fp, 1e-9)
    copies = split if width == SIMD_BYTES[0] else 0.0
    arithmetic = arithmetic + split
    instructions = arithmetic + copies + memory + index
    # Updates of one accumulator wait for each other; a core overlaps those of as many accumulators as it holds
    # in flight, and several runs over the reduction if they are short.
    per_tile = instructions / np.maximum(column("iterations"), 1.0) * column("tile_points")
    overlapped = np.maximum(1.0, _WINDOW / np.maximum(column("hold") * per_tile, 1.0))
    chain = _LATENCY_CYCLES * column("chain") / overlapped
    loads_stores = memory / _MEMORY_PORTS
    if device.arch in SLOW_GATHER and width > SIMD_BYTES[0]:
        loads_stores = loads_stores + _GATHER_CYCLES * _gathered(leaves)
    slowest = np.maximum.reduce([arithmetic / pipes, loads_stores, chain, index / _ISSUE, instructions / _ISSUE])
    special = np.stack([column(f"op_{name}") for name in SPECIAL]).sum(0)
    roots = column("op_sqrt") / np.maximum(special, 1e-9)
    core = slowest + (_CALL_CYCLES * (1 - roots) + _ROOT_CYCLES * roots) * column("special")
    l1, l2 = _fetched(leaves, device)
    l3 = _moved(leaves, device.l3_kb or 8192)
    cores = _cores(device)
    parallel = np.maximum(column("parallel"), 1.0)
    busy = np.maximum(parallel / np.ceil(parallel / cores), 1.0)
    # the default bandwidth is that of one core: two get twice as much
    per_cycle = 1e9 * (device.bandwidth_gb_s or _DEFAULT_BANDWIDTH_GB_S * busy) / clock
    cycles = core + l1 / _L2_BYTES + l2 / _L3_BYTES
    return (cycles / busy + l3 / per_cycle) / clock


def _fetched(leaves: FloatArray, device: Device) -> tuple[FloatArray, FloatArray]:
    """Bytes moved into the first and the second cache level of a CPU, (leaves,) each; strides may use their sets unevenly."""
    l1 = np.maximum(_moved(leaves, device.l1_kb or 32), _column(leaves, "conflict_32kb"))
    return l1, np.maximum(_moved(leaves, device.l2_kb or 512), _column(leaves, "conflict_1mb"))


def _set_cycles(leaves: FloatArray) -> FloatArray:
    """Cycles to fetch the lines that strides crowd into few sets of the first cache level, (leaves,)."""
    column, total = partial(_column, leaves), np.zeros(len(leaves))
    missed = np.maximum(column("conflict_32kb"), column("moved_32kb")) / _LINE
    for slot in (f"slot{i}_" for i in range(1, N_SLOTS + 1)):
        sets, lines, elements = np.ones((3, len(leaves)))
        few, fetched = np.full(len(leaves), np.inf), np.zeros(len(leaves))
        for loop in (1, 2, 3):  # outwards, to the loop whose lines exceed the ways of their sets
            extent = column(f"loop{loop}_extent")
            step = np.abs(column(f"{slot}stride_{loop}")) * column(slot + "itemsize")
            moves, far = (step > 0) & (extent > 1), step >= _LINE
            of_loop = np.where(far, extent, np.ceil(extent * step / _LINE))
            period = _SETS * _LINE / np.gcd(step.astype(np.int64), int(_SETS * _LINE))
            sets = np.where(moves, np.minimum(_SETS, sets * np.where(far, np.minimum(of_loop, period), of_loop)), sets)
            lines, elements = np.where(moves, lines * of_loop, lines), np.where(moves, elements * extent, elements)
            exceeds = np.isinf(few) & (lines > _WAYS * sets)
            few = np.where(exceeds, sets, few)
            fetched = np.where(exceeds, column(slot + "register_elements") * lines / elements, fetched)
        total += np.where(few <= _FEW_SETS, _SET_CYCLES * np.minimum(fetched, missed) / few, 0.0)
    return total


def _memory_cycles(asts: Sequence[CompactAST], device: Device) -> FloatArray:
    """Parts ``l1_misses`` to ``few_sets`` of :data:`TIME_PARTS`, (n, 5), from loops and strides, whatever the code."""
    leaves, owner = _leaves_of(asts)
    l1, l2 = _fetched(leaves, device)
    crowded = np.maximum(_column(leaves, "conflict_1mb") - _column(leaves, "moved_512kb"), 0.0)
    pages = _PAGE_CYCLES * _column(leaves, "pages_1536")
    each = (l1 / _LINE, l2 / _LINE, _CROWDED_CYCLES * crowded / _LINE, pages, _set_cycles(leaves))
    return np.stack([np.bincount(owner, cycles, len(asts)) for cycles in each], axis=1)


def _gathered(leaves: FloatArray) -> FloatArray:
    """Elements that a compiler may load with gathers, (leaves,).

    LLVM vectorises an innermost loop that is no reduction even if accesses stride along it, where the CPU has gathers."""

    column = partial(_column, leaves)
    second = (column("loop1_extent") <= _UNROLLED_EXTENT) & (column("loop1_extent") > 0)

    def along(name: str) -> FloatArray:
        return np.where(second, column(name.format(2)), column(name.format(1)))

    free = (along("loop{}_extent") >= _GATHER_LANES) & (along("loop{}_reduction") == 0)
    free &= column("vectorized") <= 1
    total = np.zeros(len(leaves))
    for slot in (f"slot{i}_" for i in range(1, N_SLOTS + 1)):
        loaded = (column(slot + "loads") > 0) & (column(slot + "stores") == 0)
        strided = np.abs(along(slot + "stride_{}")) > 1
        total += np.where(free & loaded & strided, column(slot + "register_elements"), 0.0)
    return total


def _gpu_leaf_s(leaves: FloatArray, device: Device) -> FloatArray:
    column = partial(_column, leaves)
    peak = 1e9 * (device.peak_gflops.get("float32") or _DEFAULT_PEAK_GFLOPS)
    bandwidth = 1e9 * (device.bandwidth_gb_s or _DEFAULT_BANDWIDTH_GB_S)
    cores = _cores(device)
    blocks, threads = np.maximum(column("block_idx"), 1.0), np.maximum(column("thread_idx"), 1.0)
    lanes = device.lanes_per_core or 128.0
    # How full the waves of blocks over the cores are, and the lanes: blocks that are too small leave some idle.
    waves = blocks / (np.ceil(blocks / cores) * cores)
    filled = np.minimum(1.0, threads * np.maximum(1.0, blocks / cores) / lanes)
    flops = column("flops") + _SPECIAL_CYCLES * column("special")
    arithmetic = flops / (peak * waves * filled)
    return np.maximum(arithmetic, _moved(leaves, device.l2_kb or 4096) / bandwidth)


def _moved(leaves: FloatArray, kb: float) -> FloatArray:
    """Bytes moved into a memory of ``kb`` KB: those of the largest capacity among the features that is not larger."""
    size = max(c for c in CAPACITIES if c <= max(kb * 1024, CAPACITIES[0]))
    return leaves[:, _COLUMN[f"moved_{size_name(size)}"]]


def references_s(
    reference: Callable[[Sequence[CompactAST], Device], FloatArray],
    asts: Sequence[CompactAST],
    devices: Sequence[Device],
    device_index: NDArray[np.int64],
) -> FloatArray:
    """:func:`estimate_s` or :func:`roofline_s` of ``asts[i]`` on ``devices[device_index[i]]``, float64 seconds (n,)."""
    out = np.empty(len(asts))
    for number in np.unique(device_index):
        here = np.flatnonzero(device_index == number)
        out[here] = reference([asts[i] for i in here.tolist()], devices[number])
    return out


#: Edges of the square tiles into which libraries cut products of matrices.
TILES = (32, 64, 128, 256)

#: Ratios are given in thousandths, times in nanoseconds: the encoder takes logarithms of 1 + x.
_PER_MILLE = 1e3
_NS = 1e9
#: Bytes of a cache line.
_LINE = 64.0
#: Bytes per nanosecond from memory to a CPU core, where the bandwidth is not known.
_BANDWIDTH = 10.0
#: Alignment to powers of two above this one makes no difference.
_MOST_ALIGNED = 256

#: Columns of :func:`pair_rows`; :func:`_pairs_of` shows how each is computed.
PAIR_FEATURES: tuple[str, ...] = (
    "on_gpu", "by_library", "estimate_ns", "roofline_ns", "compute_ns", "power_ns", "memory_ns", "launch_ns", "intensity",
    "last_cache", "near_cache", "filled_lanes", "rows_per_core",
    *(f"{name}_{edge}" for name in ("waves", "idle", "padding") for edge in TILES),
    "blocks_per_core", "resident_blocks", "block_waves", "block_idle", "balance", "headroom",
    "columns_aligned", "rows_aligned", "depth_aligned", "columns", "rows", "batch", "depth",
)  # fmt: skip

#: Pair features that a network is given for a program on a GPU that it was never trained on: the program's shape, how it fills
#: the GPU, and the analytical times; none that tells GPUs apart by itself (see :data:`cdmpp.device.GENERAL_DEVICE_FEATURES`).
GENERAL_PAIR_FEATURES = frozenset(PAIR_FEATURES) - {
    "compute_ns", "power_ns", "memory_ns", "launch_ns", "headroom", "last_cache", "near_cache",
}  # fmt: skip
#: Mask over :data:`PAIR_FEATURES`: 1 for :data:`GENERAL_PAIR_FEATURES`, 0 for others.
GENERAL_PAIRS = np.array([name in GENERAL_PAIR_FEATURES for name in PAIR_FEATURES], dtype=np.float32)


def _pairs_of(view: ProgramView, asts: Sequence[CompactAST], device: Device) -> FloatArray:
    n = len(asts)
    nan = np.full(n, np.nan)
    cores = _cores(device)
    bandwidth = device.bandwidth_gb_s
    compute = _NS * view.flops / peak_flops(view, device)
    headroom = power_headroom(device)
    memory = view.io_bytes / bandwidth if bandwidth else nan  # GB/s is bytes a nanosecond
    last = 1024 * max(device.l3_kb or 0.0, device.l2_kb or 0.0)
    near = 1024 * (device.l2_kb or 0.0) * (cores if device.kind == "cpu" else 1.0)
    gpu = np.full(n, float(device.kind == "gpu"))
    rounds = np.ceil(view.parallel / cores)
    resident = np.full(n, 32.0)  # GPU blocks on a core at the same time
    if device.max_threads_per_core:
        resident = np.minimum(resident, device.max_threads_per_core // np.maximum(view.threads, 1.0))
    if device.shared_kb:
        resident = np.minimum(resident, 1024 * device.shared_kb // np.maximum(view.shared_bytes, 1.0))
    resident = np.maximum(resident, 1.0)
    waves = view.blocks / (cores * resident)
    blocks = {
        "blocks_per_core": _PER_MILLE * view.blocks / cores,
        "resident_blocks": resident,
        "block_waves": _PER_MILLE * waves,
        "block_idle": _PER_MILLE * np.ceil(waves) / waves,
    }
    columns: dict[str, FloatArray] = {
        "on_gpu": gpu,
        "by_library": gpu * ~view.scheduled_for_gpu,
        "estimate_ns": _NS * estimate_s(asts, device, view),
        "roofline_ns": _NS * roofline_s(asts, device, view),
        "compute_ns": compute,
        # floating-point operations over the part of the peak that the power limit sustains
        "power_ns": compute / min(1.0, headroom) if headroom is not None else compute,
        "memory_ns": memory,
        "launch_ns": np.full(n, 1e3 * device.launch_overhead_us) if device.launch_overhead_us else nan,
        "intensity": _PER_MILLE * compute / np.maximum(memory, 1e-3),
        "last_cache": _PER_MILLE * view.io_bytes / last if last else nan,
        "near_cache": _PER_MILLE * view.io_bytes / near if near else nan,
        "filled_lanes": _PER_MILLE * view.outputs / (cores * (device.lanes_per_core or 1.0)),
        "rows_per_core": _PER_MILLE * view.outputs / view.columns / cores,
        # 0 where nothing is bound to blocks or threads
        **{name: np.where(view.scheduled_for_gpu, values, 0.0) for name, values in blocks.items()},
        # parallel iterations over those that the cores could run in as many rounds
        "balance": _PER_MILLE * view.parallel / (rounds * cores),
        "headroom": nan if headroom is None else np.full(n, _PER_MILLE * headroom),
        "columns_aligned": _power_of_two(view.columns),
        "rows_aligned": _power_of_two(view.rows),
        "depth_aligned": _power_of_two(view.depth),
        "columns": view.columns,
        "rows": view.rows,
        "batch": view.batch,
        "depth": view.depth,
    }
    for edge in TILES:
        tiles = view.tiles(edge)
        columns[f"waves_{edge}"] = _PER_MILLE * tiles / cores
        # whole waves over waves: cores idle in the last one
        columns[f"idle_{edge}"] = _PER_MILLE * np.ceil(tiles / cores) / (tiles / cores)
        columns[f"padding_{edge}"] = _PER_MILLE * tiles * edge**2 / view.outputs
    return np.stack([columns[name] for name in PAIR_FEATURES], axis=1)


def _power_of_two(extent: FloatArray) -> FloatArray:
    """Largest power of two that divides each extent, at most :data:`_MOST_ALIGNED`."""
    whole = np.maximum(extent, 1).astype(np.int64)
    return np.minimum(whole & -whole, _MOST_ALIGNED).astype(np.float64)


def pair_rows(
    asts: Sequence[CompactAST], devices: Sequence[Device], program: NDArray[np.int64], device: NDArray[np.int64]
) -> FloatArray:
    """Raw features of pairs, float64 (n, len(PAIR_FEATURES)), >= 0, NaN where a device's specification lacks a value.
    ``program`` and ``device``, int (n,), give each pair's index in ``asts`` and in ``devices``."""
    out = np.empty((len(program), len(PAIR_FEATURES)))
    if not len(program):
        return out
    view = ProgramView.of(asts)
    for number in np.unique(device):
        here = np.flatnonzero(device == number)
        used, back = np.unique(program[here], return_inverse=True)
        out[here] = _pairs_of(view.take(used), [asts[i] for i in used], devices[number])[back]
    return out


#: Nanoseconds of a compiled program on the device's core (:mod:`cdmpp.program.codegen.loops`): in all, by what bounds a loop;
#: of units, front end, dependent instructions, lines from the second cache level, calls and code between loops, each by itself;
#: and of lines from beyond the second and the last level, at the bandwidth of memory.
TIME_FEATURES: tuple[str, ...] = (
    "core_ns", "unit_ns", "front_ns", "chain_ns", "line_ns", "call_ns", "outside_ns", "beyond_l2_ns", "beyond_l3_ns",
)  # fmt: skip
#: Features of a loop besides those of :data:`LOOP_FEATURES`: its bounds and its work per cycle that it takes, its part of the
#: program's cycles, bytes that it touches per byte of fetched lines, and how often it is entered.
_LOOP_RATIOS = (
    "units", "front", "chain", "instructions", "loaded", "stored", "gathers", "arithmetic", "l1_lines", "lines_1024k",
)  # fmt: skip
LOOP_CODE_FEATURES: tuple[str, ...] = (
    *LOOP_FEATURES, *(f"{name}_per_cycle" for name in _LOOP_RATIOS), "part", "bytes_of_line", "entries",
)  # fmt: skip
_SHARES = tuple(kind for kind in KINDS if kind != "all")
#: Features of a whole compiled program: counts, its times on the device, each time as a part of ``core_ns``, and each
#: instruction kind as a part of the instructions that run.
CODE_FEATURES: tuple[str, ...] = (
    *CODEGEN_FEATURES[: -LOOPS * len(LOOP_FEATURES)],
    *TIME_FEATURES,
    *(f"{name}_part" for name in TIME_FEATURES[1:]),
    *(f"{kind}_part" for kind in _SHARES),
)
#: Parts whose sum is a program's time, each times a ratio that the network learns. From the compiled code: the longest loops,
#: the others, code between loops, lines from beyond each capacity (one cycle per line), loops entered, calls. From the AST:
#: lines that the first and the second cache level fetch, lines lost to set conflicts, pages that the TLB lacks, misses of few
#: sets, parallel loop nests.
TIME_PARTS: tuple[str, ...] = (
    *(f"loop{number}" for number in range(LOOPS)), "other_loops", "outside", *(f"lines_{kb}k" for kb in CACHE_KB),
    "loop_entries", "calls", "l1_misses", "l2_misses", "crowded_lines", "pages", "few_sets", "regions",
)  # fmt: skip
#: Logarithm of a part over the reference where a program has no such part.
ABSENT = -30.0


class CodeRows(NamedTuple):
    """Raw features of n compiled programs, float64, all NaN where unknown: of the whole program (n, len(CODE_FEATURES)), of its
    longest loops (n, LOOPS, len(LOOP_CODE_FEATURES)), and the logarithms of the parts of its time over the reference of labels,
    (n, len(TIME_PARTS)), :data:`ABSENT` for a part that it does not have."""

    program: FloatArray
    loops: FloatArray
    times: FloatArray


def code_rows(
    counts: NDArray[np.float32],
    asts: Sequence[CompactAST],
    devices: Sequence[Device],
    program: NDArray[np.int64],
    device: NDArray[np.int64],
    relative: bool,
) -> CodeRows:
    """Code features of pairs, given as in :func:`pair_rows`, from ``counts``, (n, len(CODEGEN_FEATURES)), NaN if unknown. Times
    are in seconds or, like labels, ``relative`` to the estimate."""
    shapes = ((len(CODE_FEATURES),), (LOOPS, len(LOOP_CODE_FEATURES)), (len(TIME_PARTS),))
    rows = CodeRows(*(np.full((len(program), *shape), np.nan) for shape in shapes))
    known = ~np.isnan(counts[:, 0])
    if not known.any():
        return rows
    from cdmpp.program.codegen.core import core_name, core_of, with_overlap

    for number in np.unique(device[known]):
        here = np.flatnonzero(known & (device == number))
        used, back = np.unique(program[here], return_inverse=True)
        chosen = [asts[i] for i in used]
        view = ProgramView.of(chosen)
        references = estimate_s(chosen, devices[number], view) if relative else np.ones(len(chosen))
        memory = _memory_cycles(chosen, devices[number])[back]
        counted = with_overlap(counts[here], core_of(core_name(devices[number])))
        known_rows = _code_of(counted, view.take(back), memory, references[back], devices[number])
        for all_rows, values in zip(rows, known_rows, strict=True):
            all_rows[here] = values
    return rows


def _code_of(counts: FloatArray, view: ProgramView, memory: FloatArray, references_s: FloatArray, device: Device) -> CodeRows:
    program, loops = np.split(counts, [-LOOPS * len(LOOP_FEATURES)], axis=1)
    of = {key: counts[:, CODEGEN_FEATURES.index(key)] for key in (*CYCLE_FEATURES, *(f"run_{kind}" for kind in KINDS))}
    # counts are those of a single thread: several share the work in rounds
    share = np.ceil(view.parallel / _cores(device)) / view.parallel
    ns_per_cycle = share * 1e3 / (device.working_mhz or 2500.0)
    ns: dict[str, NDArray[np.floating]] = {
        name: of[name.replace("_ns", "_cycles")] * ns_per_cycle for name in TIME_FEATURES if not name.startswith("beyond")
    }
    for level, capacity in (("l2", device.l2_kb), ("l3", device.l3_kb)):
        kb = max((kb for kb in CACHE_KB if kb <= (capacity or 1024)), default=CACHE_KB[0])
        ns[f"beyond_{level}_ns"] = of[f"lines_{kb}k"] * _LINE / (device.bandwidth_gb_s or _BANDWIDTH)
    each = loops.reshape(len(counts), LOOPS, len(LOOP_FEATURES))
    loop = {name: each[:, :, number] for number, name in enumerate(LOOP_FEATURES)}
    cycles, longest = np.maximum(loop["cycles"], 1e-3), loop["runs"] * loop["cycles"]
    core = np.maximum(of["core_cycles"], 1e-3)[:, None]
    ratios = [loop[name] / cycles for name in _LOOP_RATIOS]
    touched = (loop["loaded"] + loop["stored"]) / np.maximum(_LINE * loop["l1_lines"], 0.01)
    ratios += [longest / core, np.where(loop["runs"] > 0, touched, 0), loop["runs"] / np.maximum(loop["trips"], 1.0)]
    every = np.concatenate([each, np.stack(ratios, axis=2)], axis=2)
    taken = np.stack([ns[name] for name in TIME_FEATURES], axis=1)
    of_core = _PER_MILLE * taken[:, 1:] / np.maximum(taken[:, :1], 1e-2)
    run = np.stack([of[f"run_{kind}"] for kind in _SHARES], axis=1) / np.maximum(of["run_all"], 1.0)[:, None]
    others = np.maximum(of["core_cycles"] - of["outside_cycles"] - longest.sum(axis=1), 0.0)
    # code that is vectorised along another loop than the strided one touches a line with fewer instructions
    accesses = sum(of[f"run_{kind}"] for kind in KINDS if kind.startswith(("load_", "store_")))
    rest = [
        others,
        of["outside_cycles"],
        *(of[f"lines_{kb}k"] for kb in CACHE_KB),
        of["loop_entries"],
        of["call_cycles"],
        *memory[:, :-1].T,
        np.minimum(memory[:, -1], _SET_CYCLES * accesses),
    ]
    parts = np.concatenate([longest, np.stack(rest, axis=1)], axis=1) * (ns_per_cycle / _NS)[:, None]
    parts = np.concatenate([parts, regions_s(view, device)[:, None]], axis=1) / references_s[:, None]
    numbers = np.concatenate([program, taken, of_core, run], axis=1)
    return CodeRows(numbers, every, np.log(np.maximum(parts, np.exp(ABSENT))))
