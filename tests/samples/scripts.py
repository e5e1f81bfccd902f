"""Hand-written programs of the AST tests, as TVMScript text so that names can be replaced."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cdmpp.program.tvm_env import import_tvm

#: C[64, 64] += A[64, 32] * B[32, 64], tiled: 8 parallel rows of tiles, 4 columns, 8 steps of reduction.
MATMUL = """
@T.prim_func(s_tir=True)
def main(A: T.Buffer((64, 32), "float32"), B: T.Buffer((32, 64), "float32"), C: T.Buffer((64, 64), "float32")):
    with T.sblock("root"):
        for i0 in T.parallel(8, annotations={"pragma_auto_unroll_max_step": 64, "pragma_unroll_explicit": 1}):
            for j0 in range(4):
                for i1 in range(8):
                    for j1 in T.vectorized(16):
                        with T.sblock("init"):
                            vi = T.axis.spatial(64, i0 * 8 + i1)
                            vj = T.axis.spatial(64, j0 * 16 + j1)
                            T.reads()
                            T.writes(C[vi, vj])
                            C[vi, vj] = T.float32(0)
                for k0 in range(8):
                    for i2 in range(8):
                        for k1 in range(4):
                            for j2 in T.vectorized(16):
                                with T.sblock("update"):
                                    vi = T.axis.spatial(64, i0 * 8 + i2)
                                    vj = T.axis.spatial(64, j0 * 16 + j2)
                                    vk = T.axis.reduce(32, k0 * 4 + k1)
                                    T.reads(C[vi, vj], A[vi, vk], B[vk, vj])
                                    T.writes(C[vi, vj])
                                    C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
"""

#: 3x3 convolution of a padded image, nothing scheduled, initialisation in the block.
CONV = """
@T.prim_func(s_tir=True)
def main(X: T.Buffer((8, 8, 8), "float32"), W: T.Buffer((4, 8, 3, 3), "float32"), Y: T.Buffer((4, 8, 8), "float32")):
    with T.sblock("root"):
        P = T.sblock_alloc_buffer((8, 10, 10))
        for c, y, x in T.grid(8, 10, 10):
            with T.sblock("pad"):
                vc, vy, vx = T.axis.remap("SSS", [c, y, x])
                T.reads(X[vc, vy - 1, vx - 1])
                T.writes(P[vc, vy, vx])
                P[vc, vy, vx] = T.if_then_else(1 <= vy and vy < 9 and 1 <= vx and vx < 9, X[vc, vy - 1, vx - 1], T.float32(0))
        for n, f, y, x, c, ry, rx in T.grid(1, 4, 8, 8, 8, 3, 3):
            with T.sblock("conv"):
                vn, vf, vy, vx, vc, vry, vrx = T.axis.remap("SSSSRRR", [n, f, y, x, c, ry, rx])
                T.reads(P[vc, vy + vry, vx + vrx], W[vf, vc, vry, vrx])
                T.writes(Y[vf, vy, vx])
                with T.init():
                    Y[vf, vy, vx] = T.float32(0)
                Y[vf, vy, vx] = Y[vf, vy, vx] + P[vc, vy + vry, vx + vrx] * W[vf, vc, vry, vrx]
"""

#: Two element-wise stages over fused loops; the second reads what the first wrote 64 elements before.
CHAIN = """
@T.prim_func(s_tir=True)
def main(X: T.Buffer((8, 256), "float32"), S: T.Buffer((256,), "float32"), Y: T.Buffer((8, 256), "float32")):
    with T.sblock("root"):
        E = T.sblock_alloc_buffer((8, 256))
        for f in T.parallel(32):
            for v in T.vectorized(64):
                with T.sblock("exp"):
                    vi = T.axis.spatial(8, (f * 64 + v) // 256)
                    vj = T.axis.spatial(256, (f * 64 + v) % 256)
                    T.reads(X[vi, vj])
                    T.writes(E[vi, vj])
                    E[vi, vj] = T.exp(X[vi, vj])
            for v in range(64):
                with T.sblock("scale"):
                    vi = T.axis.spatial(8, (f * 64 + v) // 256)
                    vj = T.axis.spatial(256, (f * 64 + v) % 256)
                    T.reads(E[vi, vj], S[vj])
                    T.writes(Y[vi, vj])
                    Y[vi, vj] = E[vi, vj] / S[vj] + T.float32(1)
"""

#: A gate of each channel, which does not depend on the two inner loops; a root of each row, which does not on the innermost.
GATE = """
@T.prim_func(s_tir=True)
def main(
    X: T.Buffer((8, 16, 32), "float32"), G: T.Buffer((8,), "float32"), R: T.Buffer((16,), "float32"),
    Y: T.Buffer((8, 16, 32), "float32"),
):
    with T.sblock("root"):
        for c in T.parallel(8):
            for i in range(16):
                for j in T.vectorized(32):
                    with T.sblock("gate"):
                        vc, vi, vj = T.axis.remap("SSS", [c, i, j])
                        T.reads(X[vc, vi, vj], G[vc], R[vi])
                        T.writes(Y[vc, vi, vj])
                        Y[vc, vi, vj] = X[vc, vi, vj] * T.sigmoid(G[vc])
"""

#: Row sums over 100 columns in steps of 32, the last partial; vectorised padding, which TVM cannot keep.
PREDICATED = """
@T.prim_func(s_tir=True)
def main(X: T.Buffer((4, 100), "float32"), Y: T.Buffer((4,), "float32"), Z: T.Buffer((32,), "float32")):
    with T.sblock("root"):
        for i, ko, ki in T.grid(4, 4, 32):
            with T.sblock("sum"):
                vi = T.axis.spatial(4, i)
                vk = T.axis.reduce(100, ko * 32 + ki)
                T.where(ko * 32 + ki < 100)
                T.reads(X[vi, vk])
                T.writes(Y[vi])
                with T.init():
                    Y[vi] = T.float32(0)
                Y[vi] = Y[vi] + X[vi, vk]
        for i in T.vectorized(32):
            with T.sblock("pad"):
                v = T.axis.spatial(32, i)
                T.reads(X[0, v - 1])
                T.writes(Z[v])
                Z[v] = T.if_then_else(1 <= v, X[0, v - 1], T.float32(0))
"""

#: Matrix product of 128 x 128 tiles bound to a GPU: 16 blocks of 64 threads, 4 virtual, staged through shared memory.
CUDA = """
@T.prim_func(s_tir=True)
def main(A: T.Buffer((128, 128), "float32"), B: T.Buffer((128, 128), "float32"), C: T.Buffer((128, 128), "float32")):
    with T.sblock("root"):
        L = T.sblock_alloc_buffer((128, 128), scope="local")
        S = T.sblock_alloc_buffer((128, 128), scope="shared")
        for b in T.thread_binding(16, thread="blockIdx.x"):
            for w in T.thread_binding(4, thread="vthread.x"):
                for t in T.thread_binding(64, thread="threadIdx.x"):
                    for i in range(4):
                        with T.sblock("init"):
                            vi = T.axis.spatial(128, b * 8 + w * 2 + t // 32)
                            vj = T.axis.spatial(128, t % 32 * 4 + i)
                            T.reads()
                            T.writes(L[vi, vj])
                            L[vi, vj] = T.float32(0)
                    for k0 in range(16):
                        for z in range(2):
                            for t1 in T.thread_binding(64, thread="threadIdx.x"):
                                for v in T.vectorized(8):
                                    with T.sblock("stage"):
                                        vk = T.axis.spatial(128, k0 * 8 + (z * 512 + t1 * 8 + v) // 128)
                                        vj = T.axis.spatial(128, (z * 512 + t1 * 8 + v) % 128)
                                        T.reads(B[vk, vj])
                                        T.writes(S[vk, vj])
                                        S[vk, vj] = B[vk, vj]
                        for k1, i in T.grid(8, 4):
                            with T.sblock("update"):
                                vi = T.axis.spatial(128, b * 8 + w * 2 + t // 32)
                                vj = T.axis.spatial(128, t % 32 * 4 + i)
                                vk = T.axis.reduce(128, k0 * 8 + k1)
                                T.reads(L[vi, vj], A[vi, vk], S[vk, vj])
                                T.writes(L[vi, vj])
                                L[vi, vj] = L[vi, vj] + A[vi, vk] * S[vk, vj]
                    for i in range(4):
                        with T.sblock("write"):
                            vi = T.axis.spatial(128, b * 8 + w * 2 + t // 32)
                            vj = T.axis.spatial(128, t % 32 * 4 + i)
                            T.reads(L[vi, vj])
                            T.writes(C[vi, vj])
                            C[vi, vj] = L[vi, vj]
"""

#: Rows picked by an index tensor.
GATHER = """
@T.prim_func(s_tir=True)
def main(W: T.Buffer((1000, 64), "float32"), I: T.Buffer((16,), "int32"), Y: T.Buffer((16, 64), "float32")):
    with T.sblock("root"):
        for i, j in T.grid(16, 64):
            with T.sblock("take"):
                vi, vj = T.axis.remap("SS", [i, j])
                T.reads(W[I[vi], vj], I[vi])
                T.writes(Y[vi, vj])
                Y[vi, vj] = W[I[vi], vj]
"""


#: Sums of the columns of a matrix whose rows are 4 KB, column after column: every access in a new page and the same set.
COLUMNS = """
@T.prim_func(s_tir=True)
def main(X: T.Buffer((64, 1024), "float32"), S: T.Buffer((1024,), "float32")):
    with T.sblock("root"):
        for i in range(1024):
            for j in range(64):
                with T.sblock("add"):
                    vi = T.axis.spatial(1024, i)
                    vj = T.axis.reduce(64, j)
                    T.reads(S[vi], X[vj, vi])
                    T.writes(S[vi])
                    S[vi] = S[vi] + X[vj, vi]
"""


@lru_cache(maxsize=64)
def parse(text: str) -> Any:
    """A PrimFunc from TVMScript text."""
    import_tvm()
    import tvm
    from tvm.script import tirx

    return tvm.script.from_source(text.strip(), {"T": tirx})
