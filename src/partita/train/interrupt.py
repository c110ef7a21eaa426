"""Ctrl-C as a wish: the step in progress is finished first, and all ranks stop after the same step."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Interruption:
    """While the block runs, a first SIGINT only sets ``requested``; a second one is Python's own KeyboardInterrupt.

    ``requested_anywhere`` is for the loop: what the ranks have agreed on.

    Outside the main thread signals are not ours to handle, and nothing is changed.
    """

    def __init__(self) -> None:
        self.requested = False
        self.requested_anywhere = False
        self._before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
