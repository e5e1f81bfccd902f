"""Kernel Tuner's 2-D convolution of an image (van Werkhoven et al., FGCS 2014) in all its configurations."""

from __future__ import annotations

from typing import Any

from cdmpp.program.kernels.builder import block, ceil_div, function, loops, script

#: Parameters of a configuration, as Kernel Tuner calls them: threads of a block, outputs of a thread, loads through the
#: read-only cache, rows of shared memory padded against bank conflicts, the input in shared memory at all, the filter in
#: constant memory.
PARAMETERS: tuple[str, ...] = (
    "block_size_x", "block_size_y", "tile_size_x", "tile_size_y", "read_only", "use_padding", "use_shmem", "use_cmem",
)  # fmt: skip

#: Banks of shared memory that the kernel pads for.
_BANKS = 32


def image_convolution(height: int, width: int, filter_height: int, filter_width: int) -> Any:
    """The task: one image of ``(height, width)`` with a filter, the input larger by the filter's border."""
    from cdmpp.program.library_ops import prim_func, te

    builder = te()
    image = builder.placeholder((height + filter_height - 1, width + filter_width - 1), name="image")
    weights = builder.placeholder((filter_height, filter_width), name="filter")
    i = builder.reduce_axis((0, filter_height), name="i")
    j = builder.reduce_axis((0, filter_width), name="j")
    result = builder.compute(
        (height, width),
        lambda y, x: builder.sum(image[y + i, x + j] * weights[i, j], axis=[i, j]),
        name="convolution",
    )
    return prim_func([image, weights], result)


def kernel_tuner_convolution(
    height: int, width: int, filter_height: int, filter_width: int, *,
    block_size_x: int, block_size_y: int, tile_size_x: int, tile_size_y: int, read_only: int, use_padding: int,
    use_shmem: int, use_cmem: int,
) -> Any:  # fmt: skip
    """The kernel of a configuration (:data:`PARAMETERS`) for a problem size.

    Outputs of a thread lie a block apart, so that neighbouring threads have neighbouring ones. Loops over the filter and
    over a thread's outputs are unrolled, as their pragmas ask.
    """
    T = script()
    span_y, span_x = block_size_y * tile_size_y, block_size_x * tile_size_x
    blocks_y, blocks_x = ceil_div(height, span_y), ceil_div(width, span_x)
    border_y, border_x = filter_height - 1, filter_width - 1
    rows, columns = span_y + border_y, span_x + border_x
    sizes = {
        "image": ((height + border_y, width + border_x), "float32"),
        "filter": ((filter_height, filter_width), "float32"),
        "out": ((height, width), "float32"),
    }
    cached = {"cdmpp.read_only": read_only} if read_only else {}
    constant = {"cdmpp.constant_memory": use_cmem} if use_cmem else {}
    with function(sizes) as ((image, weights, out), made):
        # An axis for each loop that tells outputs apart, so that a thread's registers shrink to what it holds.
        split = (blocks_y, tile_size_y, block_size_y, blocks_x, tile_size_x, block_size_x)
        sums = T.sblock_alloc_buffer(split, scope="local")
        reach = blocks_y * span_y + border_y, blocks_x * span_x + border_x
        shared = T.sblock_alloc_buffer(reach, scope="shared") if use_shmem else None
        grid = loops(
            T.thread_binding(blocks_y, thread="blockIdx.y"), T.thread_binding(blocks_x, thread="blockIdx.x"),
            T.thread_binding(block_size_y, thread="threadIdx.y"),
            T.thread_binding(block_size_x, thread="threadIdx.x"),
        )  # fmt: skip
        with grid as (by, bx, ty, tx):

            def result(yi: Any, xi: Any) -> list[tuple[int, Any]]:
                return list(zip(split, (by, yi, ty, bx, xi, tx), strict=True))

            def place(axes: Any) -> tuple[Any, Any]:
                """The output of a block's axes."""
                b_y, y, t_y, b_x, x, t_x = axes
                return b_y * span_y + y * block_size_y + t_y, b_x * span_x + x * block_size_x + t_x

            def inside(yi: Any, xi: Any) -> list[Any]:
                """Conditions that an output lies in the image, where blocks reach beyond it."""
                row, column = by * span_y + yi * block_size_y + ty, bx * span_x + xi * block_size_x + tx
                edges = [row < height] if height % span_y else []
                return [*edges, column < width] if width % span_x else edges

            if use_shmem:
                steps = T.unroll(ceil_div(rows, block_size_y)), T.unroll(ceil_div(columns, block_size_x))
                with loops(*steps) as (i, j):
                    row, column = i * block_size_y + ty, j * block_size_x + tx
                    needed = [row < rows] if rows % block_size_y else []
                    needed += [column < columns] if columns % block_size_x else []
                    if height % span_y or width % span_x:
                        needed += [
                            by * span_y + row < height + border_y,
                            bx * span_x + column < width + border_x,
                        ]
                    # Rows are padded to lie as many banks apart as the block is wide.
                    pad = use_padding and block_size_x % _BANKS and (columns - block_size_x) % _BANKS
                    aligned = {"buffer_dim_align": [[0, 0, _BANKS, block_size_x % _BANKS]]} if pad else {}
                    axes = [(reach[0], by * span_y + row), (reach[1], bx * span_x + column)]
                    with block("shared", axes, where=needed, annotations={**cached, **aligned}) as (y, x):
                        T.buffer_store(shared, image[y, x], [y, x])
            with (
                loops(T.unroll(tile_size_y), T.unroll(tile_size_x)) as (yi, xi),
                block("init", result(yi, xi)) as axes,
            ):
                T.buffer_store(sums, T.float32(0.0), axes)
            kernel = (
                T.unroll(filter_height),
                T.unroll(filter_width),
                T.unroll(tile_size_y),
                T.unroll(tile_size_x),
            )
            with loops(*kernel) as (i, j, yi, xi):
                reduce = [(filter_height, i), (filter_width, j)]
                # What lies beyond the image is computed from what lies beyond it in shared memory, and not stored.
                where = [] if use_shmem else inside(yi, xi)
                notes = constant if use_shmem else {**constant, **cached}
                with block("update", result(yi, xi), reduce, where, notes) as (*axes, fi, fj):
                    y, x = place(axes)
                    value = (image if shared is None else shared)[y + fi, x + fj] * weights[fi, fj]
                    T.buffer_store(sums, sums[tuple(axes)] + value, axes)
            with (
                loops(T.unroll(tile_size_y), T.unroll(tile_size_x)) as (yi, xi),
                block("out", result(yi, xi), where=inside(yi, xi)) as axes,
            ):
                T.buffer_store(out, sums[tuple(axes)], list(place(axes)))
    return made()
