"""Decodes the functions of an object file (ELF, x86-64) with pyelftools and iced-x86."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import iced_x86
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from iced_x86 import ConditionCode, FlowControl, MemorySizeExt, OpAccess, OpKind, RegisterExt

from cdmpp.errors import ProgramError, raised_as
from cdmpp.program.codegen.blocks import INTEGER_REGISTERS, Address, Instruction, Location, Operand, Register, signed

#: Symbols of wrappers, error paths and helpers, which are the same in all objects.
_NOT_THE_PROGRAM = re.compile(r"__tvm_ffi_main|__tvm_set_raised|truncsf|extendhf|_init|_fini")
#: Integer registers that a call may change (System V ABI).
_CALLER_SAVED = ("rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11")


def _names(enumeration: object) -> dict[Any, str]:
    return {value: name.lower() for name, value in vars(enumeration).items() if isinstance(value, int)}


_MNEMONICS, _REGISTER_NAMES = _names(iced_x86.Mnemonic), _names(iced_x86.Register)
#: ah to dh are bits 8 to 15 of registers. They keep their own names, so they are not locations.
_REGISTERS = {
    value: Register(
        name if name in ("ah", "bh", "ch", "dh") else _REGISTER_NAMES[RegisterExt.full_register(value)],
        8 * RegisterExt.size(value),
    )
    for value, name in _REGISTER_NAMES.items()
}
_WITHOUT_CONDITION = ("none", "o", "no", "p", "np")
_CONDITIONS = {value: name for value, name in _names(ConditionCode).items() if name not in _WITHOUT_CONDITION}
_FLOWS = {
    FlowControl.CONDITIONAL_BRANCH: "branch",
    FlowControl.UNCONDITIONAL_BRANCH: "jump",
    FlowControl.INDIRECT_BRANCH: "jump",
    FlowControl.CALL: "call",
    FlowControl.INDIRECT_CALL: "call",
    FlowControl.RETURN: "end",
    FlowControl.EXCEPTION: "end",
}
_READS = (OpAccess.READ, OpAccess.COND_READ, OpAccess.READ_WRITE, OpAccess.READ_COND_WRITE)
_WRITES = (OpAccess.WRITE, OpAccess.COND_WRITE, OpAccess.READ_WRITE, OpAccess.READ_COND_WRITE)


def read_functions(path: str | Path) -> list[list[Instruction]]:
    """Functions of the program in an object file or shared object, without those that TVM adds to every object.

    The code from one symbol to the next is one function, so a function without a symbol belongs to the one before it.

    Raises ProgramError if the file is not ELF, has code of another instruction set, no symbols or no function of a program."""
    with raised_as(ProgramError, f"{path} is not an object file (ELF)", ELFError), Path(path).open("rb") as file:
        elf = ELFFile(file)
        if elf.get_machine_arch() != "x64":
            raise ProgramError(f"{path} has code for {elf.get_machine_arch()}; only x86-64 is decoded")
        text, symbols = elf.get_section_by_name(".text"), elf.get_section_by_name(".symtab")
        if text is None or not isinstance(symbols, SymbolTableSection):
            raise ProgramError(f"{path} has no symbols, so its functions are not known (stripped?)")
        number, start, code = elf.get_section_index(".text"), text["sh_addr"], text.data()
        names = {s["st_value"]: s.name for s in symbols.iter_symbols() if s.name and s["st_shndx"] == number}
    begins = sorted(names)
    functions = [
        decode(code[begin - start : end - start], begin)
        for begin, end in zip(begins, [*begins[1:], start + len(code)], strict=True)
        if not _NOT_THE_PROGRAM.search(names[begin]) and begin < end
    ]
    if not functions:
        raise ProgramError(f"{path} has no function of a program")
    return functions


def decode(code: bytes, address: int = 0) -> list[Instruction]:
    """Decoded instructions of machine code that begins at the given address."""
    facts = iced_x86.InstructionInfoFactory()
    return [_instruction(raw, facts.info(raw)) for raw in iced_x86.Decoder(64, code, ip=address)]


def _instruction(raw: iced_x86.Instruction, facts: iced_x86.InstructionInfo) -> Instruction:
    operands = tuple([_operand(raw, number) for number in range(raw.op_count)])
    memory, access = None, OpAccess.NONE
    for number, operand in enumerate(operands):
        if isinstance(operand, Address):
            memory, access = operand, facts.op_access(number)
    used = [(_REGISTERS[register.register].name, register.access) for register in facts.used_registers()]
    flow = _FLOWS.get(raw.flow_control, "next")
    writes = _CALLER_SAVED if flow == "call" else tuple([name for name, how in used if how in _WRITES])
    changes: tuple[Location, ...] = tuple([name for name in writes if name in INTEGER_REGISTERS])
    stores = access in _WRITES
    if stores and memory is not None and memory.is_slot:
        changes = (*changes, memory)
    return Instruction(
        raw.ip,
        _MNEMONICS[raw.mnemonic],
        operands,
        memory,
        8 * MemorySizeExt.size(raw.memory_size),
        access in _READS,
        stores,
        tuple([name for name, how in used if how in _READS or how == OpAccess.COND_WRITE]),
        writes,
        changes,
        flow,
        _CONDITIONS.get(raw.condition_code),
        flow == "call" or raw.rflags_modified != 0,
    )


def _operand(raw: iced_x86.Instruction, number: int) -> Operand:
    kind = raw.op_kind(number)
    if kind == OpKind.REGISTER:
        return _REGISTERS[raw.op_register(number)]
    if kind == OpKind.NEAR_BRANCH64:
        return int(raw.near_branch_target)
    if OpKind.IMMEDIATE8 <= kind <= OpKind.IMMEDIATE32TO64:
        return int(raw.immediate(number))
    base, index = _REGISTERS[raw.memory_base], _REGISTERS[raw.memory_index]
    return Address(
        base.name if base.bits else None,
        index.name if index.bits else None,
        raw.memory_index_scale,
        signed(raw.memory_displacement, 64),
        index.bits,
    )
