"""Streams on the CPU: a thread runs work in order, and its errors are raised in every wait."""

import threading
import weakref

import pytest
import torch

from partita.memory.streams import Event, Stream, record

CPU = torch.device("cpu")


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
