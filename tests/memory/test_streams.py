"""Streams and events are nothing on the CPU: work runs where it is called, in order."""

import torch

from partita.memory.streams import Event, Stream, record

CPU = torch.device("cpu")


def test_a_stream_runs_at_once() -> None:
    stream, done = Stream(CPU), []
    with stream.use():
        done.append("inside")
    with stream.use(), stream.use():
        done.append("twice inside")
    assert done == ["inside", "twice inside"]


def test_an_event_needs_no_waiting() -> None:
    for event in (Event(), record(CPU)):
        event.wait()
        event.wait()


def test_an_exception_leaves_the_stream() -> None:
    stream = Stream(CPU)
    try:
        with stream.use():
            raise KeyError
    except KeyError:
        pass
    with stream.use():
        pass
