"""Compiles the C++ reader of programs, or says why programs will be read in Python."""

from __future__ import annotations

import sys

from cdmpp.program.native import Library, NativeError, compile_library, library_path


def main() -> int:
    try:
        path = library_path()
        compile_library(path)
        Library(path)
    except NativeError as err:
        print(f"programs will be read in Python, which is slower: {err}")
    else:
        print(f"programs will be read by {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
