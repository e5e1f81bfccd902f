"""Loops of x86-64 instructions, assembled in memory. Each takes the number of iterations, a buffer and one more argument."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

from iced_x86 import BlockEncoder, Code, Instruction, MemoryOperand, Register

_BODY, _AGAIN = 1, 2  # labels of jump targets
_COUNT, _BUFFER, _ARGUMENT = Register.R15, Register.R14, Register.RBX
_SAVED = (Register.RBX, Register.R14, Register.R15)
_FIRST: dict[int, Any] = {128: Register.XMM0, 256: Register.YMM0, 512: Register.ZMM0}
_CODES = {
    ("fma", 128): Code.VEX_VFMADD231PS_XMM_XMM_XMMM128, ("fma", 256): Code.VEX_VFMADD231PS_YMM_YMM_YMMM256,
    ("fma", 512): Code.EVEX_VFMADD231PS_ZMM_K1Z_ZMM_ZMMM512B32_ER, ("divide", 128): Code.VEX_VDIVPS_XMM_XMM_XMMM128,
    ("divide", 256): Code.VEX_VDIVPS_YMM_YMM_YMMM256, ("divide", 512): Code.EVEX_VDIVPS_ZMM_K1Z_ZMM_ZMMM512B32_ER,
    ("shuffle", 128): Code.VEX_VUNPCKLPS_XMM_XMM_XMMM128, ("shuffle", 256): Code.VEX_VUNPCKLPS_YMM_YMM_YMMM256,
    ("shuffle", 512): Code.EVEX_VUNPCKLPS_ZMM_K1Z_ZMM_ZMMM512B32, ("load", 128): Code.VEX_VMOVUPS_XMM_XMMM128,
    ("load", 256): Code.VEX_VMOVUPS_YMM_YMMM256, ("load", 512): Code.EVEX_VMOVUPS_ZMM_K1Z_ZMMM512,
    ("store", 128): Code.VEX_VMOVUPS_XMMM128_XMM, ("store", 256): Code.VEX_VMOVUPS_YMMM256_YMM,
    ("store", 512): Code.EVEX_VMOVUPS_ZMMM512_K1Z_ZMM,
}  # fmt: skip

Body = list[Instruction]


def _of_buffer(offset: int = 0) -> MemoryOperand:
    return MemoryOperand(_BUFFER, displ=offset, displ_size=8)


def chain(length: int) -> Body:
    """Additions of which each waits for the one before it."""
    return [Instruction.create_reg_i32(Code.ADD_RM64_IMM8, Register.RAX, 1) for _ in range(length)]


def alike(name: str, bits: int, number: int) -> Body:
    """Instructions of one kind: multiply-adds (``fma``), divisions, shuffles, loads from the buffer, or stores to it."""
    code, first = _CODES[name, bits], _FIRST[bits]
    if name == "load":
        return [Instruction.create_reg_mem(code, first + i, _of_buffer(64 * i)) for i in range(number)]
    if name == "store":
        return [Instruction.create_mem_reg(code, _of_buffer(64 * i), first + i) for i in range(number)]
    return [Instruction.create_reg_reg_reg(code, first + i, first + 13, first + 14) for i in range(number)]


def gather(bits: int, number: int) -> Body:
    """Gathers of elements at most a cache line apart; a gather clears its mask, so the mask is set again before each."""
    found: Body = []
    for i in range(number):
        memory = MemoryOperand(_BUFFER, _FIRST[bits] + 15, 4)
        if bits == 512:
            ones = Instruction.create_reg_reg_reg(Code.VEX_KXNORW_KR_KR_KR, Register.K1, Register.K0, Register.K0)
            gather = Instruction.create_reg_mem(Code.EVEX_VGATHERDPS_ZMM_K1_VM32Z, _FIRST[bits] + i, memory)
            gather.op_mask = Register.K1
        else:
            mask = _FIRST[bits] + 14
            ones = Instruction.create_reg_reg_reg(Code.VEX_VPCMPEQD_YMM_YMM_YMMM256, mask, mask, mask)
            gather = Instruction.create_reg_mem_reg(Code.VEX_VGATHERDPS_YMM_VM32Y_YMM, _FIRST[bits] + i, memory, mask)
        found += [ones, gather]
    return found


def call(number: int) -> Body:
    """Calls of the function that the loop's argument points to, on the buffer's first element."""
    load = Instruction.create_reg_mem(Code.VEX_VMOVSS_XMM_M32, Register.XMM0, _of_buffer())
    return [load, Instruction.create_reg(Code.CALL_RM64, _ARGUMENT)] * number


def chase(number: int) -> Body:
    """Loads, each of which gives the offset of the next one."""
    memory = MemoryOperand(_BUFFER, Register.RAX)
    return [Instruction.create_reg_mem(Code.MOV_R64_RM64, Register.RAX, memory)] * number


def stream(bits: int, lines: int) -> Callable[[int, int, int], None]:
    """A loop whose every iteration reads the buffer from its beginning: `lines` cache lines, times the loop's argument."""
    memory = [MemoryOperand(Register.RAX, displ=at, displ_size=8) for at in range(0, 64 * lines, bits // 8)]
    code, first = _CODES["load", bits], _FIRST[bits]
    inner = [Instruction.create_reg_mem(code, first + i % 12, place) for i, place in enumerate(memory)]
    inner[0].ip = _AGAIN
    return loop([
        Instruction.create_reg_reg(Code.MOV_R64_RM64, Register.RAX, _BUFFER),
        Instruction.create_reg_reg(Code.MOV_R64_RM64, Register.RCX, _ARGUMENT),
        *inner,
        Instruction.create_reg_i32(Code.ADD_RM64_IMM32, Register.RAX, 64 * lines),
        Instruction.create_reg_i32(Code.SUB_RM64_IMM8, Register.RCX, 1),
        Instruction.create_branch(Code.JNE_REL32_64, _AGAIN),
    ])  # fmt: skip


def loop(body: Sequence[Instruction]) -> Callable[[int, int, int], None]:
    """A function that runs `body` as often as its first argument says."""
    begin = [Instruction.create_reg(Code.PUSH_R64, register) for register in _SAVED]
    begin += [
        Instruction.create_reg_reg(Code.MOV_R64_RM64, register, given)
        for register, given in ((_COUNT, Register.RDI), (_BUFFER, Register.RSI), (_ARGUMENT, Register.RDX))
    ]
    for register in (Register.YMM13, Register.YMM14, Register.YMM15):  # zeros, for indices too
        begin.append(Instruction.create_reg_reg_reg(Code.VEX_VXORPS_YMM_YMM_YMMM256, register, register, register))
    begin.append(Instruction.create_reg_reg(Code.XOR_R32_RM32, Register.EAX, Register.EAX))
    begin.append(Instruction.create(Code.NOPD))
    begin[-1].ip = _BODY
    end = [
        Instruction.create_reg_i32(Code.SUB_RM64_IMM8, _COUNT, 1),
        Instruction.create_branch(Code.JNE_REL32_64, _BODY),
        Instruction.create(Code.VEX_VZEROUPPER),
        *(Instruction.create_reg(Code.POP_R64, register) for register in reversed(_SAVED)),
        Instruction.create(Code.RETNQ),
    ]
    encoder = BlockEncoder(64)
    encoder.add_many([*begin, *body, *end])
    code = encoder.encode(0)
    memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    function = ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)(address)
    function.code = memory  # type: ignore[attr-defined]  # it has to live as long as the function
    return function
