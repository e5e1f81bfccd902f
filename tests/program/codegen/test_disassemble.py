"""Object files are decoded, or refused in one line."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from cdmpp.errors import ProgramError
from cdmpp.program.codegen.blocks import Address, Register
from cdmpp.program.codegen.disassemble import read_functions
from tests.program.codegen.assembly import code

OBJECTS = Path(__file__).parents[2] / "golden" / "objects.zip"


@pytest.fixture(scope="module")
def shared_object() -> bytes:
    with zipfile.ZipFile(OBJECTS) as objects:
        return objects.read(min(objects.infolist(), key=lambda info: info.file_size))


def test_only_the_program_is_read(shared_object: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.so"
    path.write_bytes(shared_object)
    (main,) = read_functions(path)  # not the wrapper that checks arguments
    assert main[-1].name in ("ret", "nop") and any(i.name == "ret" for i in main)
    assert [i.address for i in main] == sorted(i.address for i in main)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b"\x7fELF", b"\x7fELK", "not an object file"),
        (b"\x03\x00\x3e\x00", b"\x03\x00\xb7\x00", "AArch64; only x86-64"),
        (b".symtab", b".nosyms", "no symbols.*stripped"),
        (b"main_compute_", b"compiler_init", "no function of a program"),
    ],
)
def test_other_files_are_refused(shared_object: bytes, tmp_path, before: bytes, after: bytes, message: str) -> None:
    path = tmp_path / "p.so"
    path.write_bytes(shared_object.replace(before, after))
    assert path.read_bytes() != shared_object
    with pytest.raises(ProgramError, match=rf"p\.so.*{message}"):
        read_functions(path)


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.5, 0.99])
def test_an_object_that_was_cut_off_is_refused(shared_object: bytes, tmp_path: Path, share: float) -> None:
    path = tmp_path / "p.so"
    path.write_bytes(shared_object[: int(share * len(shared_object))])
    with pytest.raises(ProgramError, match=r"p\.so"):
        read_functions(path)


def test_what_instructions_read_write_and_change() -> None:
    add, store, divide, call, move = code(
        "add 0x8(%rsp),%eax\nvmovups %zmm0,-0x4(%rdi,%rcx,4){%k1}\nidivl (%rdi)\ncall f\ncmovl %rcx,%rdx"
    )
    assert add.operands == (Register("rax", 32), Address("rsp", displacement=8)) and add.memory_bits == 32
    assert add.loads and not add.stores and {"rax", "rsp"} == set(add.reads) and add.writes == ("rax",)
    assert add.changes == ("rax",) and add.sets_flags
    assert store.operands == (Address("rdi", "rcx", 4, -4, 64), Register("zmm0", 512))
    assert store.stores and not store.loads and not store.changes and not store.sets_flags
    assert set(store.reads) == {"rdi", "rcx", "zmm0", "k1"} and not store.writes
    assert set(divide.changes) == {"rax", "rdx"} and divide.loads and not divide.stores
    assert "rcx" in call.changes and "rbx" not in call.changes and call.flow == "call"
    assert move.condition == "l" and not move.sets_flags and "rdx" in move.reads
