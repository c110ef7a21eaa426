"""Signals as requests to the training loop."""

import os
import signal
import threading

import pytest

from partita.train.interrupt import Interruption, StopRequest


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def test_the_first_press_is_a_wish_and_the_second_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert interruption.request is StopRequest.NOTHING
        press()
        assert interruption.request is StopRequest.STOP
        with pytest.raises(KeyboardInterrupt):
            press()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_warning_asks_for_a_checkpoint_and_a_termination_to_stop() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with Interruption(saves=True) as interruption:
        press(signal.SIGUSR1)
        assert interruption.request is StopRequest.SAVE
        interruption.saved()
        assert interruption.request is StopRequest.NOTHING
        press(signal.SIGTERM)
        press(signal.SIGUSR1)
        interruption.saved()
        assert interruption.request is StopRequest.STOP
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_the_handler_is_put_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="inside"), Interruption():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_python_does_not_know_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR1 else signal.SIG_DFL)
        interruption = Interruption(saves=True)
    own = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with interruption:
            press(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        for number, handler in {**own, signal.SIGUSR1: before}.items():
            signal.signal(number, handler)


def test_another_thread_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with Interruption():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
