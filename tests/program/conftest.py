"""Compact ASTs by both ways: the Python walk and the C++ reader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdmpp.program.native import Library, NativeError, compile_library, library_path


@pytest.fixture(scope="session")
def native_library() -> Library:
    """The C++ reader, compiled if it has not been (some ten seconds, once)."""
    try:
        compile_library(library_path())
        return Library(library_path())
    except NativeError as err:
        pytest.skip(f"no C++ reader: {err}")


@pytest.fixture(scope="module", params=["python", "native"])
def reading(request: pytest.FixtureRequest) -> Iterator[str]:
    """All tests of a module that uses it run by both ways."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "native":
            request.getfixturevalue("native_library")
        patch.setenv("CDMPP_NATIVE", "1" if request.param == "native" else "0")
        yield request.param
