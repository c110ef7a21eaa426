"""Signal handling: the step in progress is finished first, and all ranks react after the same step."""

import signal
import threading
from collections.abc import Sequence
from enum import IntEnum
from types import FrameType
from typing import Self


class StopRequest(IntEnum):
    """A request to the training loop. The greater one has priority."""

    NOTHING = 0
    SAVE = 1
    STOP = 2


class Interruption:
    """A context in which a first SIGINT only sets ``request`` to STOP; a second one raises Python's KeyboardInterrupt.

    With checkpoints (``saves``), SIGTERM also stops, and SIGUSR1, which job schedulers send before a preemption, asks
    for a checkpoint. The loop sets ``agreed``: the greatest request of any rank.

    Outside the main thread, signals cannot be handled, and nothing is changed.
    """

    def __init__(self, *, saves: bool = False) -> None:
        self.request = self.agreed = StopRequest.NOTHING
        self._signals: Sequence[int] = (signal.SIGINT, *((signal.SIGTERM, signal.SIGUSR1) if saves else ()))
        self._before = {number: signal.getsignal(number) for number in self._signals}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                # Python cannot restore a handler that was not set from Python (None).
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request = max(self.request, StopRequest.SAVE if number == signal.SIGUSR1 else StopRequest.STOP)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def saved(self) -> None:
        """Clear a request for a checkpoint, because it was saved."""
        if self.request is StopRequest.SAVE:
            self.request = StopRequest.NOTHING
