"""A decoded instruction of x86-64: what it is, what it works on, what it changes."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Register(NamedTuple):
    """A register by the name of the widest that it is part of (eax: rax, xmm0: zmm0), and how many bits of that."""

    name: str
    bits: int


class Address(NamedTuple):
    """An operand in memory, at base + scale * index + displacement; the index of a gather is a vector."""

    base: str | None
    index_register: str | None = None
    scale: int = 1
    displacement: int = 0
    index_bits: int = 0

    @property
    def is_slot(self) -> bool:
        """Whether it is a place of its own in the stack."""
        return self.base in ("rsp", "rbp") and self.index_register is None


Operand: TypeAlias = Register | Address | int
#: What holds an integer: a 64-bit register, or a slot of the stack.
Place: TypeAlias = str | Address

INTEGER_REGISTERS = frozenset(
    ("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", *(f"r{number}" for number in range(8, 16)))
)


class Instruction(NamedTuple):
    """A decoded instruction."""

    address: int
    #: As Intel writes it, in lower case.
    name: str
    #: In Intel's order: what is written comes first. Of branches the address that they go to.
    operands: tuple[Operand, ...]
    #: The operand in memory, and its width.
    memory: Address | None
    memory_bits: int
    #: Whether that is read and written; neither of ``lea``.
    loads: bool
    stores: bool
    #: Registers by their names, those of the address among them; what is written in part is read too.
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    #: Integer registers and slots of the stack among what is written.
    changes: tuple[Place, ...]
    #: What comes next: "next", "branch" (next, or a jump), "jump", "call" or "end".
    flow: str
    #: Of a jump, conditional move and the like, "ne"; None for those that ask for parity and overflow.
    condition: str | None
    #: Whether it changes what conditions ask for.
    sets_flags: bool

    @property
    def target(self) -> int | None:
        """Address that a jump goes to; None for other instructions and where a register or memory says so."""
        to = self.operands[0] if self.flow in ("branch", "jump") else None
        return to if isinstance(to, int) else None

    def width(self, operand: Operand) -> int:
        """Bits of an operand; of a constant those of the operand that is written."""
        if isinstance(operand, int):
            operand = self.operands[0]
        return operand.bits if isinstance(operand, Register) else self.memory_bits


def place_of(operand: Operand) -> Place | None:
    """The place that an operand is; None for constants, vectors and memory outside of the stack."""
    if isinstance(operand, Register):
        return operand.name if operand.name in INTEGER_REGISTERS else None
    return operand if isinstance(operand, Address) and operand.is_slot else None


def signed(number: int, bits: int) -> int:
    """The low bits of a number as one with a sign."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number
