"""Ctrl-C while foreign code runs: kept until it does no harm, never lost."""

from __future__ import annotations

import signal
import threading

import pytest

from cdmpp.tuner.candidates import answer_signals, signals_held_back


def test_the_first_ctrl_c_waits_for_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), signals_held_back():
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")
    assert reached == ["the end"] and "Ctrl-C again" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with signals_held_back():
        answer_signals()  # nothing is left of it


def test_a_second_one_stops_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), signals_held_back():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")
    assert not reached


def test_a_callback_may_answer_it_and_what_is_made_of_that_is_ctrl_c_again() -> None:
    def foreign() -> None:
        try:
            answer_signals()
        except KeyboardInterrupt as err:
            raise RuntimeError("InternalError: an exception in a callback") from err

    with pytest.raises(KeyboardInterrupt), signals_held_back():
        signal.raise_signal(signal.SIGINT)
        foreign()
    with pytest.raises(RuntimeError, match="without a signal"), signals_held_back():
        raise RuntimeError("without a signal")


def test_signals_without_a_handler_and_other_threads_stay_as_they_are() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    found = []

    def run() -> None:
        with signals_held_back():
            found.append(signal.getsignal(signal.SIGINT))

    try:
        with signals_held_back():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
