"""Builds the C++ extension that reads programs; all else is in pyproject.toml.

Where it cannot be built, for there is no compiler, cdmpp is installed without it.
"""

from pathlib import Path

from setuptools import Extension, setup
from tvm_ffi import libinfo

NATIVE = Path("cdmpp/program/ast/native")

setup(
    ext_modules=[
        Extension(
            "cdmpp.program.ast._reader",
            sources=[str(NATIVE / "reader.cc")],
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            include_dirs=libinfo.include_paths(),
            library_dirs=[str(Path(libinfo.find_libtvm_ffi()).parent)],
            libraries=["tvm_ffi"],
            extra_compile_args=["-std=c++17", "-O2", "-g0"],
            language="c++",
            optional=True,
        )
    ]
)
