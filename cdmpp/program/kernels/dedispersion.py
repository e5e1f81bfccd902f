"""Dedispersion of radio signals (Sclocco et al., Astronomy and Computing 2016) in all its configurations."""

from __future__ import annotations

from typing import Any

from cdmpp.program.kernels.builder import block, ceil_div, function, loops, script

#: Parameters of a configuration, as Kernel Tuner calls them: threads of a block, outputs of a thread, whether those lie a
#: block apart (1) or side by side (0), and by how much the loop over the channels is unrolled (0: as the compiler likes).
PARAMETERS: tuple[str, ...] = (
    "block_size_x", "block_size_y", "tile_size_x", "tile_size_y", "tile_stride_x", "tile_stride_y",
    "loop_unroll_factor_channel",
)  # fmt: skip

#: The survey of the benchmark: measures of dispersion from 0 in steps of 0.02.
_STEP = 0.02


def dedispersion(samples: int, measures: int, channels: int, max_shift: int) -> Any:
    """The task: ``out[dm, t] = sum_c signal[c, t + shift(dm, c)]``, the signal in bytes."""
    from tvm import tirx

    from cdmpp.program.library_ops import prim_func, te

    builder = te()
    signal = builder.placeholder((channels, samples + max_shift), dtype="uint8", name="signal")
    shifts = builder.placeholder((channels,), name="shifts")
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
    """The kernel of a configuration (:data:`PARAMETERS`) for a problem size."""
    T = script()
    span_x, span_y = block_size_x * tile_size_x, block_size_y * tile_size_y
    blocks_x, blocks_y = ceil_div(samples, span_x), ceil_div(measures, span_y)
    unroll = max(1, loop_unroll_factor_channel)
    sizes = {
        "signal": ((channels, samples + max_shift), "uint8"),
        "shifts": ((channels,), "float32"),
        "out": ((measures, samples), "float32"),
    }
    with function(sizes) as ((signal, shifts, out), made):
        inner = (tile_size_y, block_size_y) if tile_stride_y else (block_size_y, tile_size_y)
        outer = (tile_size_x, block_size_x) if tile_stride_x else (block_size_x, tile_size_x)
        split = (blocks_y, *inner, blocks_x, *outer)
        total = T.sblock_alloc_buffer(split, scope="local")
        grid = loops(
            T.thread_binding(blocks_y, thread="blockIdx.y"), T.thread_binding(blocks_x, thread="blockIdx.x"),
            T.thread_binding(block_size_y, thread="threadIdx.y"),
            T.thread_binding(block_size_x, thread="threadIdx.x"),
            T.serial(tile_size_x), T.serial(tile_size_y),
        )  # fmt: skip
        with grid as (by, bx, ty, tx, ti, tj):
            order_y = (tj, ty) if tile_stride_y else (ty, tj)
            order_x = (ti, tx) if tile_stride_x else (tx, ti)
            axes = list(zip(split, (by, *order_y, bx, *order_x), strict=True))

            def place(values: Any) -> tuple[Any, Any]:
                """Measure and sample of a block's axes."""
                b_y, y0, y1, b_x, x0, x1 = values
                return b_y * span_y + y0 * inner[1] + y1, b_x * span_x + x0 * outer[1] + x1

            row, column = place([value for _, value in axes])
            inside = [row < measures] if measures % span_y else []
            inside += [column < samples] if samples % span_x else []
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
