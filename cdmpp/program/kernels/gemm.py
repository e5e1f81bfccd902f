"""CLBlast's GEMM (Nugteren, IWOCL'18, kernel 0 of ``xgemm``) in all its configurations."""

from __future__ import annotations

from typing import Any

from cdmpp.errors import ProgramError
from cdmpp.program.kernels.builder import block, function, loops, script

#: Parameters of a configuration, as CLBlast calls them: MWG x NWG is the tile of a block and KWG its depth, MDIMC x NDIMC
#: its threads; MDIMA and NDIMB the shape in which they fetch A and B; KWI the unrolling of the depth; VWM and VWN vector
#: widths; STRM and STRN strided access of a thread; SA and SB shared memory for A and B.
PARAMETERS: tuple[str, ...] = (
    "MWG", "NWG", "KWG", "MDIMC", "NDIMC", "MDIMA", "NDIMB", "KWI", "VWM", "VWN", "STRM", "STRN", "SA", "SB",
)  # fmt: skip


def gemm(m: int, n: int, k: int) -> Any:
    """The task: ``out[n, m] = sum_k a[k, m] b[k, n] + c[n, m]`` (CLBlast's layout; alpha and beta are 1)."""
    from cdmpp.program.library_ops import prim_func, te

    builder = te()
    a = builder.placeholder((k, m), name="a")
    b = builder.placeholder((k, n), name="b")
    c = builder.placeholder((n, m), name="c")
    r = builder.reduce_axis((0, k), name="r")
    product = builder.compute((n, m), lambda j, i: builder.sum(a[r, i] * b[r, j], axis=r), name="matmul")
    return prim_func([a, b, c], builder.compute((n, m), lambda j, i: product[j, i] + c[j, i], name="out"))


def clblast_gemm(
    m: int, n: int, k: int, *,
    MWG: int, NWG: int, KWG: int, MDIMC: int, NDIMC: int, MDIMA: int, NDIMB: int, KWI: int, VWM: int, VWN: int,
    STRM: int, STRN: int, SA: int, SB: int,
) -> Any:  # fmt: skip
    """The kernel of a configuration (:data:`PARAMETERS`) for a problem size.

    Raises
    ------
    ProgramError
        The parameters do not divide each other as CLBlast requires.
    """
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

    def unrolled(*extents: int) -> list[Any]:
        return [T.unroll(extent) for extent in extents]

    with function({"a": ((k, m), "float32"), "b": ((k, n), "float32"), "c": ((n, m), "float32"),
                   "out": ((n, m), "float32")}) as (buffers, made):  # fmt: skip
        a, b, c, out = buffers
        # Registers have an axis for each loop that tells elements of a thread apart, so that they shrink to what it holds.
        c_local = T.sblock_alloc_buffer((n // VWN, VWN, m // VWM, VWM), scope="local")
        a_local = T.sblock_alloc_buffer((k, m // VWM, VWM), scope="local")
        b_local = T.sblock_alloc_buffer((k, n // VWN, VWN), scope="local")
        a_shared = T.sblock_alloc_buffer((k, m), scope="shared") if SA else None
        b_shared = T.sblock_alloc_buffer((k, n), scope="shared") if SB else None
        grid = loops(
            T.thread_binding(m // MWG, thread="blockIdx.x"), T.thread_binding(n // NWG, thread="blockIdx.y"),
            T.thread_binding(NDIMC, thread="threadIdx.y"), T.thread_binding(MDIMC, thread="threadIdx.x"),
        )  # fmt: skip
        with grid as (bm, bn, ty, tx):

            def m_vector(i: Any) -> Any:
                """Which vector of M a thread's `i`-th is."""
                inside = i * MDIMC + tx if STRM else tx * m_vectors + i
                return bm * (MWG // VWM) + inside

            def n_vector(i: Any) -> Any:
                inside = i * NDIMC + ty if STRN else ty * n_vectors + i
                return bn * (NWG // VWN) + inside

            def result(ni: Any, vn: Any, mi: Any, vm: Any) -> list[tuple[int, Any]]:
                return [(n // VWN, n_vector(ni)), (VWN, vn), (m // VWM, m_vector(mi)), (VWM, vm)]

            def fetch(name: str, source: Any, target: Any, size: int, tile: int, start: Any, across: int,
                      width: int, strided: int, k0: Any) -> None:  # fmt: skip
                """All threads together: a tile of the depth KWG from global to shared memory."""
                tid = ty * MDIMC + tx
                vectors, depth = tile // across // width, KWG * across // threads
                with loops(*unrolled(vectors, depth), T.vectorized(width)) as (vi, ki, v):
                    lane = T.floormod(tid, across)
                    position = vi * across + lane if strided else lane * vectors + vi
                    row = k0 * KWG + T.floordiv(tid, across) * depth + ki
                    with block(name, [(k, row), (size, start * tile + position * width + v)]) as (kk, x):
                        T.buffer_store(target, source[kk, x], [kk, x])

            every = (n_vectors, VWN, m_vectors)
            with (
                loops(*unrolled(*every), T.vectorized(VWM)) as (ni, vn, mi, vm),
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
                    with loops(*unrolled(m_vectors), T.vectorized(VWM)) as (mi, vm):
                        axes = [(k, depth), (m // VWM, m_vector(mi)), (VWM, vm)]
                        with block("a_local", axes) as (kk, x, v):
                            T.buffer_store(
                                a_local, (a if a_shared is None else a_shared)[kk, x * VWM + v], [kk, x, v]
                            )
                    with loops(*unrolled(n_vectors), T.vectorized(VWN)) as (ni, vn):
                        axes = [(k, depth), (n // VWN, n_vector(ni)), (VWN, vn)]
                        with block("b_local", axes) as (kk, y, v):
                            T.buffer_store(
                                b_local, (b if b_shared is None else b_shared)[kk, y * VWN + v], [kk, y, v]
                            )
                    with (
                        loops(*unrolled(n_vectors, m_vectors, VWN), T.vectorized(VWM)) as (ni, mi, vn, vm),
                        block("update", result(ni, vn, mi, vm), [(k, depth)]) as (y, w, x, v, kk),
                    ):
                        product = a_local[kk, x, v] * b_local[kk, y, w]
                        T.buffer_store(c_local, c_local[y, w, x, v] + product, [y, w, x, v])
            with (
                loops(*unrolled(*every), T.vectorized(VWM)) as (ni, vn, mi, vm),
                block("out", result(ni, vn, mi, vm)) as (y, w, x, v),
            ):
                row, column = y * VWN + w, x * VWM + v
                T.buffer_store(out, c_local[y, w, x, v] + c[row, column], [row, column])
    return made()
