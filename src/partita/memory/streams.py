"""Streams and events that are no-ops where the device has none, so that no caller branches on the device."""

from contextlib import AbstractContextManager, nullcontext

import torch


class Event:
    """A point in a stream's work; :meth:`wait` makes the current stream wait for it."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()


class Stream:
    """A side stream of a device. Entering :meth:`use` queues work on it instead of on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def use(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def record(device: torch.device) -> Event:
    """An event at this point of the current stream."""
    if device.type != "cuda":
        return Event()
    event = torch.cuda.Event()
    event.record()
    return Event(event)
