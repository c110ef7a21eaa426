"""Streams on the CPU: a thread runs work in order, and its errors are raised in every wait. Events of a device."""

import threading
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from partita.memory import accelerator
from partita.memory.streams import Event, Stream, record, record_for_host

CPU = torch.device("cpu")
OTHER = torch.device("xpu", 1)  # not the current device of the calling thread


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[mock.Mock]:
    """Replace the accelerator's events and streams; return the list of the events that are created."""
    created = list[mock.Mock]()

    def create(**options: object) -> mock.Mock:
        created.append(mock.Mock())
        return created[-1]

    monkeypatch.setattr(torch, "Event", create)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"the current stream of {device}")
    monkeypatch.setattr(accelerator, "new_stream", lambda device: nullcontext())
    return created


def test_work_runs_in_order_beside_the_caller() -> None:
    stream, done, may = Stream(CPU, "test"), list[str](), threading.Event()
    stream.run(may.wait)
    first = stream.run(lambda: done.append("first"))
    second = stream.run(lambda: done.append(threading.current_thread().name))
    assert done == []
    may.set()
    second.wait()
    first.wait()
    assert done == ["first", "partita test"]
    stream.close()


def test_waiting_can_end_before_the_work_does() -> None:
    stream, may = Stream(CPU, "test"), threading.Event()
    event = stream.run(may.wait)
    assert not event.wait_for(0.01)
    may.set()
    while not event.wait_for(1.0):
        pass
    assert event.wait_for(0.0)
    failed = stream.run(lambda: {}["nothing"])
    with pytest.raises(KeyError, match="nothing"):
        while not failed.wait_for(1.0):
            pass
    stream.close()


def test_an_event_of_the_caller_has_passed() -> None:
    for event in (Event(), record(CPU)):
        event.wait()
        event.wait()
        assert event.wait_for(0.0)


def test_an_error_reaches_all_who_wait_and_ends_the_stream() -> None:
    stream, done = Stream(CPU, "test"), list[str]()
    fine = stream.run(lambda: done.append("before"))
    failed = stream.run(lambda: {}["nothing"])
    later = stream.run(lambda: done.append("after"))
    fine.wait()
    for event in (failed, failed, later):
        with pytest.raises(KeyError, match="nothing"):
            event.wait()
    assert done == ["before"]
    stream.close()


def test_no_thread_without_work_and_none_after_close() -> None:
    before = threading.active_count()
    idle = Stream(CPU, "idle")
    assert threading.active_count() == before
    idle.close()
    for end in ("close", "drop"):
        stream = Stream(CPU, "test")
        stream.run(lambda: None).wait()
        (thread,) = (each for each in threading.enumerate() if each.name == "partita test")
        if end == "close":
            stream.close()
        del stream
        thread.join(10)
        assert not thread.is_alive()


def test_work_after_close_is_done() -> None:
    stream, done = Stream(CPU, "test"), list[int]()
    for number in range(2):
        stream.run(lambda number=number: done.append(number)).wait()
        stream.close()
    assert done == [0, 1]


def test_work_is_let_go_of_once_it_is_done() -> None:
    class Held:
        pass

    stream, held = Stream(CPU, "test"), Held()
    alive = weakref.ref(held)
    event = stream.run(lambda held=held: None)
    del held
    event.wait()
    stream.run(lambda: None).wait()
    assert alive() is None
    stream.close()


def test_events_are_of_the_current_stream_of_their_device(events: list[mock.Mock]) -> None:
    stream = Stream(OTHER, "test", waits=True)
    for event in (record(OTHER), Stream(OTHER, "test").run(lambda: None), stream.run(lambda: None)):
        event.wait()
    stream.close()
    record_for_host(OTHER)
    accelerator.timed_event(OTHER)
    assert len(events) == 5
    for number, event in enumerate(events):
        event.record.assert_called_once_with("the current stream of xpu:1")
        assert event.wait.mock_calls == ([mock.call("the current stream of xpu:1")] if number < 3 else [])


def test_work_in_a_thread_is_behind_until_the_device_has_done_it(events: list[mock.Mock]) -> None:
    stream, may = Stream(OTHER, "test", waits=True), threading.Event()
    event = stream.run(may.wait)
    events[0].query.return_value = True  # as of an event that is not recorded
    assert event.is_behind()
    may.set()
    event.wait()
    assert not event.is_behind()
    events[0].query.return_value = False
    assert event.is_behind(), "recorded, and the device has not reached it"
    stream.close()
