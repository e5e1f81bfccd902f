"""Ctrl-C while TVM's search runs: it is kept until an exception does no harm.

TVM looks for signals while its threads search; an exception there ends the process (``std::terminate``), and one in a callback
becomes an error of TVM's own.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

#: Signals heard inside of :func:`held_back` and not yet answered.
_HEARD: list[int] = []


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Answer the first Ctrl-C (or SIGTERM, where it has a handler) at the next :func:`answer`, or at the end; a second one at
    once. In other threads than the main one nothing changes.

    Raises
    ------
    KeyboardInterrupt
        As the handlers of before do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Signals that are ignored or end the process go on doing so.
    handlers = {number: handler for number, handler in before.items() if callable(handler)}

    def hear(number: int, frame: Any) -> None:
        _HEARD.append(number)
        if len(_HEARD) > 1:
            handlers[signal.Signals(number)](number, frame)
        print("stopping after this step of the search; Ctrl-C again stops at once", file=sys.stderr)

    for number in handlers:
        signal.signal(number, hear)
    try:
        yield
    except Exception as err:  # TVM's own error types
        if _HEARD:
            raise KeyboardInterrupt from err
        raise
    finally:
        heard = list(_HEARD)
        _HEARD.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if heard:
        handlers[signal.Signals(heard[0])](heard[0], None)


def answer() -> None:
    """KeyboardInterrupt if a signal is held back; for callbacks, whose exceptions TVM hands on."""
    if _HEARD:
        raise KeyboardInterrupt
