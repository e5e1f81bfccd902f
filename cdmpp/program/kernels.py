"""Hand-written parametric GPU kernels as scheduled TIR: the programs behind the configurations of public auto-tuning data.

For each kernel, one function gives the unscheduled task, and another turns the parameters of a configuration (its keyword-only
arguments) into a scheduled PrimFunc. Buffers in shared memory and registers are indexed like the tensors they hold parts of, as
in MetaSchedule's programs; TVM shrinks them when it lowers. A choice that TIR cannot express (a read-only cache) becomes an
annotation of the block, so that two configurations never give the same program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program import import_tvm, normalise
from cdmpp.program.library_ops import placeholders, prim_func, te


def script() -> Any:
    """TVM's script builder for TIR (imports TVM)."""
    import_tvm()
    from tvm.tirx.script import builder

    return builder


@contextmanager
def function(**parameters: tuple[Sequence[int], str]) -> Iterator[tuple[list[Any], Callable[[], Any]]]:
    """Open a PrimFunc of buffers with shapes and types; yields these, and a function that returns it after the ``with``."""
    T = script()
    from tvm.script.ir_builder import IRBuilder

    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name("main")
        yield (
            [T.arg(name, T.buffer(shape, dtype)) for name, (shape, dtype) in parameters.items()],
            lambda: normalise(ir.get()),
        )


@contextmanager
def loops(*wanted: Any) -> Iterator[list[Any]]:
    """Open loops, outermost first (frames such as ``T.serial(4)``; a number is an unrolled loop), and yield their variables."""
    T = script()
    with ExitStack() as stack:
        frames = [T.unroll(frame) if isinstance(frame, int) else frame for frame in wanted]
        yield [stack.enter_context(frame) for frame in frames]


def bound(**extents: int) -> list[Any]:
    """Loops bound to blockIdx and threadIdx, with extents such as ``bx=4`` and ``ty=2``."""
    T = script()
    kinds = {"b": "blockIdx", "t": "threadIdx"}
    return [T.thread_binding(n, thread=f"{kinds[name[0]]}.{name[1]}") for name, n in extents.items()]


@contextmanager
def block(
    name: str, spatial: Sequence[tuple[int, Any]] = (), reduce: Sequence[tuple[int, Any]] = (),
    where: Sequence[Any] = (), annotations: Mapping[str, Any] | None = None,
) -> Iterator[list[Any]]:  # fmt: skip
    """Open a block with the extent and binding of each axis, which runs if all conditions ``where`` hold; yields its axes."""
    T = script()
    with T.sblock(name):
        axes = [T.axis.spatial(extent, value) for extent, value in spatial]
        axes += [T.axis.reduce(extent, value) for extent, value in reduce]
        if where:
            T.where(functools.reduce(T.And, where))
        if annotations:
            T.sblock_attr(dict(annotations))
        yield axes


def within(*edges: tuple[Any, int, int]) -> list[Any]:
    """Conditions for (position, extent, step) that the position is below the extent, if the step does not divide the extent."""
    return [position < extent for position, extent, step in edges if extent % step]


def gemm(m: int, n: int, k: int) -> Any:
    """The task: ``out[n, m] = sum_k a[k, m] b[k, n] + c[n, m]`` (CLBlast's layout; alpha and beta are 1)."""
    builder = te()
    a, b, c = placeholders(a=(k, m), b=(k, n), c=(n, m))
    r = builder.reduce_axis((0, k), name="r")
    product = builder.compute((n, m), lambda j, i: builder.sum(a[r, i] * b[r, j], axis=r), name="matmul")
    return prim_func([a, b, c], builder.compute((n, m), lambda j, i: product[j, i] + c[j, i], name="out"))


def clblast_gemm(
    m: int, n: int, k: int, *,
    MWG: int, NWG: int, KWG: int, MDIMC: int, NDIMC: int, MDIMA: int, NDIMB: int, KWI: int, VWM: int, VWN: int,
    STRM: int, STRN: int, SA: int, SB: int,
) -> Any:  # fmt: skip
    """Kernel 0 of CLBlast's ``xgemm`` (Nugteren, IWOCL'18) in one configuration; parameters have CLBlast's names.

    MWG x NWG is the tile of a block and KWG its depth, MDIMC x NDIMC its threads; MDIMA and NDIMB the shape in which they fetch
    A and B; KWI the unrolling of the depth; VWM and VWN vector widths; STRM and STRN strided access of a thread; SA and SB
    shared memory for A and B. Raises ProgramError if the parameters do not divide each other as CLBlast requires."""
    threads = MDIMC * NDIMC
    rules = {
        "MWG % (MDIMC VWM)": MWG % (MDIMC * VWM), "NWG % (NDIMC VWN)": NWG % (NDIMC * VWN),
        "MWG % (MDIMA VWM)": MWG % (MDIMA * VWM), "NWG % (NDIMB VWN)": NWG % (NDIMB * VWN),
        "KWG % KWI": KWG % KWI, "KWG MDIMA % (MDIMC NDIMC)": KWG * MDIMA % threads,
        "KWG NDIMB % (MDIMC NDIMC)": KWG * NDIMB % threads, "m % MWG": m % MWG, "n % NWG": n % NWG, "k % KWG": k % KWG,
    }  # fmt: skip
    broken = [rule for rule, rest in rules.items() if rest]
    if broken:
        raise ProgramError(f"no CLBlast kernel has a rest of {', '.join(broken)}")
    m_vectors, n_vectors = MWG // MDIMC // VWM, NWG // NDIMC // VWN
    T = script()
    shapes = {"a": (k, m), "b": (k, n), "c": (n, m), "out": (n, m)}
    with function(**{name: (shape, "float32") for name, shape in shapes.items()}) as ((a, b, c, out), made):
        # Register buffers have an axis for each loop that separates a thread's elements, so TVM shrinks them to these alone.
        c_local = T.sblock_alloc_buffer((n // VWN, VWN, m // VWM, VWM), scope="local")
        a_local = T.sblock_alloc_buffer((k, m // VWM, VWM), scope="local")
        b_local = T.sblock_alloc_buffer((k, n // VWN, VWN), scope="local")
        a_shared: Any = T.sblock_alloc_buffer((k, m), scope="shared") if SA else None
        b_shared: Any = T.sblock_alloc_buffer((k, n), scope="shared") if SB else None
        with loops(*bound(bx=m // MWG, by=n // NWG, ty=NDIMC, tx=MDIMC)) as (bm, bn, ty, tx):

            def m_vector(i: Any) -> Any:
                """Number, along M, of a thread's `i`-th vector."""
                inside = i * MDIMC + tx if STRM else tx * m_vectors + i
                return bm * (MWG // VWM) + inside

            def n_vector(i: Any) -> Any:
                inside = i * NDIMC + ty if STRN else ty * n_vectors + i
                return bn * (NWG // VWN) + inside

            def result(ni: Any, vn: Any, mi: Any, vm: Any) -> list[tuple[int, Any]]:
                return [(n // VWN, n_vector(ni)), (VWN, vn), (m // VWM, m_vector(mi)), (VWM, vm)]

            def fetch(name: str, source: Any, target: Any, size: int, tile: int, start: Any, across: int,
                      width: int, strided: int, k0: Any) -> None:  # fmt: skip
                """Copy a tile of depth KWG from global to shared memory, by all threads together."""
                tid = ty * MDIMC + tx
                vectors, depth = tile // across // width, KWG * across // threads
                with loops(vectors, depth, T.vectorized(width)) as (vi, ki, v):
                    lane = T.floormod(tid, across)
                    position = vi * across + lane if strided else lane * vectors + vi
                    row = k0 * KWG + T.floordiv(tid, across) * depth + ki
                    with block(name, [(k, row), (size, start * tile + position * width + v)]) as (kk, x):
                        T.buffer_store(target, source[kk, x], [kk, x])

            with (
                loops(n_vectors, VWN, m_vectors, T.vectorized(VWM)) as (ni, vn, mi, vm),
                block("init", result(ni, vn, mi, vm)) as place,
            ):
                T.buffer_store(c_local, T.float32(0.0), place)
            with loops(T.serial(k // KWG)) as (k0,):
                if SA:
                    fetch("a_shared", a, a_shared, m, MWG, bm, MDIMA, VWM, STRM, k0)
                if SB:
                    fetch("b_shared", b, b_shared, n, NWG, bn, NDIMB, VWN, STRN, k0)
                with loops(T.serial(KWG // KWI), T.unroll(KWI)) as (k1, k2):
                    depth = k0 * KWG + k1 * KWI + k2
                    for name, source, target, vectors, size, width, vector in (
                        ("a_local", a_shared if SA else a, a_local, m_vectors, m, VWM, m_vector),
                        ("b_local", b_shared if SB else b, b_local, n_vectors, n, VWN, n_vector),
                    ):
                        with (
                            loops(vectors, T.vectorized(width)) as (i, vi),
                            block(name, [(k, depth), (size // width, vector(i)), (width, vi)]) as (kk, x, v),
                        ):
                            T.buffer_store(target, source[kk, x * width + v], [kk, x, v])
                    with (
                        loops(n_vectors, m_vectors, VWN, T.vectorized(VWM)) as (ni, mi, vn, vm),
                        block("update", result(ni, vn, mi, vm), [(k, depth)]) as (y, w, x, v, kk),
                    ):
                        product = a_local[kk, x, v] * b_local[kk, y, w]
                        T.buffer_store(c_local, c_local[y, w, x, v] + product, [y, w, x, v])
            with (
                loops(n_vectors, VWN, m_vectors, T.vectorized(VWM)) as (ni, vn, mi, vm),
                block("out", result(ni, vn, mi, vm)) as (y, w, x, v),
            ):
                row, column = y * VWN + w, x * VWM + v
                T.buffer_store(out, c_local[y, w, x, v] + c[row, column], [row, column])
    return made()


#: Banks of shared memory that the kernel pads for.
_BANKS = 32


def image_convolution(height: int, width: int, filter_height: int, filter_width: int) -> Any:
    """The task: one filter over an image, with an output of ``(height, width)`` and an input larger by the filter's border."""
    builder = te()
    reached = (height + filter_height - 1, width + filter_width - 1)
    image, weights = placeholders(image=reached, filter=(filter_height, filter_width))
    i = builder.reduce_axis((0, filter_height), name="i")
    j = builder.reduce_axis((0, filter_width), name="j")
    result = builder.compute(
        (height, width), lambda y, x: builder.sum(image[y + i, x + j] * weights[i, j], axis=[i, j]), name="convolution"
    )
    return prim_func([image, weights], result)


def kernel_tuner_convolution(
    height: int, width: int, filter_height: int, filter_width: int, *,
    block_size_x: int, block_size_y: int, tile_size_x: int, tile_size_y: int, read_only: int, use_padding: int,
    use_shmem: int, use_cmem: int,
) -> Any:  # fmt: skip
    """Kernel Tuner's convolution (van Werkhoven et al., FGCS 2014) in one configuration: threads of a block, outputs of a
    thread, whether loads use the read-only cache, whether rows of shared memory are padded against bank conflicts, whether the
    input is in shared memory at all, and whether the filter is in constant memory.

    Outputs of a thread are a block's width or height apart, so that neighbouring threads have neighbouring outputs. Loops over
    the filter and over a thread's outputs are unrolled, as the kernel's pragmas ask."""
    T = script()
    span_y, span_x = block_size_y * tile_size_y, block_size_x * tile_size_x
    blocks_y, blocks_x = -(-height // span_y), -(-width // span_x)
    border_y, border_x = filter_height - 1, filter_width - 1
    rows, columns = span_y + border_y, span_x + border_x
    reached_y, reached_x = height + border_y, width + border_x
    shapes = {"image": (reached_y, reached_x), "filter": (filter_height, filter_width), "out": (height, width)}
    cached = {"cdmpp.read_only": read_only} if read_only else {}
    constant = {"cdmpp.constant_memory": use_cmem} if use_cmem else {}
    with function(**{name: (shape, "float32") for name, shape in shapes.items()}) as ((image, weights, out), made):
        # An axis for each loop that separates outputs, so that TVM shrinks the registers to a thread's own outputs.
        split = (blocks_y, tile_size_y, block_size_y, blocks_x, tile_size_x, block_size_x)
        sums = T.sblock_alloc_buffer(split, scope="local")
        reach = blocks_y * span_y + border_y, blocks_x * span_x + border_x
        shared: Any = T.sblock_alloc_buffer(reach, scope="shared") if use_shmem else None
        grid = bound(by=blocks_y, bx=blocks_x, ty=block_size_y, tx=block_size_x)
        with loops(*grid) as (by, bx, ty, tx):

            def result(yi: Any, xi: Any) -> list[tuple[int, Any]]:
                return list(zip(split, (by, yi, ty, bx, xi, tx), strict=True))

            def place(axes: Any) -> tuple[Any, Any]:
                """Row and column of the output at a block's axes."""
                b_y, y, t_y, b_x, x, t_x = axes
                return b_y * span_y + y * block_size_y + t_y, b_x * span_x + x * block_size_x + t_x

            def inside(yi: Any, xi: Any) -> list[Any]:
                """Conditions that an output lies in the image, if blocks reach beyond it."""
                row, column = place((by, yi, ty, bx, xi, tx))
                return within((row, height, span_y), (column, width, span_x))

            if use_shmem:
                with loops(-(-rows // block_size_y), -(-columns // block_size_x)) as (i, j):
                    row, column = i * block_size_y + ty, j * block_size_x + tx
                    needed = within((row, rows, block_size_y), (column, columns, block_size_x))
                    if height % span_y or width % span_x:
                        needed += [by * span_y + row < reached_y, bx * span_x + column < reached_x]
                    # Rows are padded so that they start as many banks apart as the block is wide.
                    pad = use_padding and block_size_x % _BANKS and (columns - block_size_x) % _BANKS
                    aligned = {"buffer_dim_align": [[0, 0, _BANKS, block_size_x % _BANKS]]} if pad else {}
                    axes = [(reach[0], by * span_y + row), (reach[1], bx * span_x + column)]
                    with block("shared", axes, where=needed, annotations={**cached, **aligned}) as (y, x):
                        T.buffer_store(shared, image[y, x], [y, x])
            with loops(tile_size_y, tile_size_x) as (yi, xi), block("init", result(yi, xi)) as axes:
                T.buffer_store(sums, T.float32(0.0), axes)
            with loops(filter_height, filter_width, tile_size_y, tile_size_x) as (i, j, yi, xi):
                reduce = [(filter_height, i), (filter_width, j)]
                # Outputs beyond the image are computed from shared memory beyond it, and not stored.
                where = [] if use_shmem else inside(yi, xi)
                notes = constant if use_shmem else {**constant, **cached}
                with block("update", result(yi, xi), reduce, where, notes) as (*axes, fi, fj):
                    y, x = place(axes)
                    value = (shared if use_shmem else image)[y + fi, x + fj] * weights[fi, fj]
                    T.buffer_store(sums, sums[tuple(axes)] + value, axes)
            with loops(tile_size_y, tile_size_x) as (yi, xi), block("out", result(yi, xi), where=inside(yi, xi)) as axes:
                T.buffer_store(out, sums[tuple(axes)], list(place(axes)))
    return made()


#: The benchmark's survey has dispersion measures from 0 in steps of 0.02.
_STEP = 0.02


def dedispersion(samples: int, measures: int, channels: int, max_shift: int) -> Any:
    """The task: ``out[dm, t] = sum_c signal[c, t + shift(dm, c)]``, with a uint8 signal."""
    builder = te()
    from tvm import tirx

    signal = builder.placeholder((channels, samples + max_shift), dtype="uint8", name="signal")
    (shifts,) = placeholders(shifts=(channels,))
    c = builder.reduce_axis((0, channels), name="c")

    def value(dm: Any, t: Any) -> Any:
        shift = (dm.astype("float32") * tirx.const(_STEP, "float32") * shifts[c]).astype("int32")
        return builder.sum(signal[c, t + shift].astype("float32"), axis=c)

    return prim_func([signal, shifts], builder.compute((measures, samples), value, name="dedispersion"))


def kernel_tuner_dedispersion(
    samples: int, measures: int, channels: int, max_shift: int, *,
    block_size_x: int, block_size_y: int, tile_size_x: int, tile_size_y: int, tile_stride_x: int, tile_stride_y: int,
    loop_unroll_factor_channel: int,
) -> Any:  # fmt: skip
    """Dedispersion of radio signals (Sclocco et al., Astronomy and Computing 2016) in a configuration of Kernel Tuner: threads
    of a block, outputs of a thread, whether those are a block apart (1) or side by side (0), and the unroll factor of the loop
    over the channels (0: the compiler decides)."""
    T = script()
    span_x, span_y = block_size_x * tile_size_x, block_size_y * tile_size_y
    blocks_x, blocks_y = -(-samples // span_x), -(-measures // span_y)
    unroll = max(1, loop_unroll_factor_channel)
    opened = function(
        signal=((channels, samples + max_shift), "uint8"), shifts=((channels,), "float32"), out=((measures, samples), "float32")
    )
    with opened as ((signal, shifts, out), made):
        inner = (tile_size_y, block_size_y) if tile_stride_y else (block_size_y, tile_size_y)
        outer = (tile_size_x, block_size_x) if tile_stride_x else (block_size_x, tile_size_x)
        split = (blocks_y, *inner, blocks_x, *outer)
        total = T.sblock_alloc_buffer(split, scope="local")
        grid = bound(by=blocks_y, bx=blocks_x, ty=block_size_y, tx=block_size_x)
        with loops(*grid, T.serial(tile_size_x), T.serial(tile_size_y)) as (by, bx, ty, tx, ti, tj):
            order_y = (tj, ty) if tile_stride_y else (ty, tj)
            order_x = (ti, tx) if tile_stride_x else (tx, ti)
            axes = list(zip(split, (by, *order_y, bx, *order_x), strict=True))

            def place(values: Any) -> tuple[Any, Any]:
                """Dispersion measure and sample at a block's axes."""
                b_y, y0, y1, b_x, x0, x1 = values
                return b_y * span_y + y0 * inner[1] + y1, b_x * span_x + x0 * outer[1] + x1

            row, column = place([value for _, value in axes])
            inside = within((row, measures, span_y), (column, samples, span_x))
            with block("init", axes) as where:
                T.buffer_store(total, T.float32(0.0), where)
            with (
                loops(T.serial(channels // unroll), T.unroll(unroll)) as (c0, c1),
                block("update", axes, [(channels, c0 * unroll + c1)], inside) as (*where, c),
            ):
                dm, t = place(where)
                shift = T.Cast("int32", T.Cast("float32", dm) * T.float32(_STEP) * shifts[c])
                value = T.Cast("float32", signal[c, t + shift])
                T.buffer_store(total, total[tuple(where)] + value, where)
            with block("out", axes, where=inside) as where:
                T.buffer_store(out, total[tuple(where)], list(place(where)))
    return made()
