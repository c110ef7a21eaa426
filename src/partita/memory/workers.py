"""Workers: a few threads that share work which can be cut in pieces, such as the blocks of a file.

A job is a list of pieces for one key. Jobs with the same key are done one after the other, in the order in which they
were handed over; the pieces of a job, and jobs with different keys, are done by whichever thread is free. (On a
:class:`~partita.memory.streams.Stream`, by contrast, everything is in order.)
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from queue import SimpleQueue

from partita.memory.streams import Event

Piece = Callable[[], object]


class Workers:
    """After a job that failed, no other with its key is done until :meth:`forget`: their events raise the same error.

    The threads start with the first job. They are daemons: a request that the system never answers must not keep the
    process from ending.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name, self._num_threads = f"partita {name}", num_threads
        self.ready: SimpleQueue[_Job | None] = SimpleQueue()
        self._last: dict[Hashable, _Job] = {}
        self._lock = threading.Lock()
        self._end: weakref.finalize[..., Workers] | None = None

    def run(self, key: Hashable, pieces: Iterable[Piece]) -> Event:
        """Hand over a job, of at least one piece."""
        job = _Job(pieces, self)
        with self._lock:
            self._start_threads()
            before, self._last[key] = self._last.get(key), job
        if before is None:
            job.start(None)
        else:
            before.then(job)
        return Event(job.wait)

    def forget(self, key: Hashable) -> None:
        """Wait for the key's jobs, however they end; the next job with it has none before."""
        with self._lock:
            last = self._last.pop(key, None)
        if last is not None:
            with contextlib.suppress(Exception):  # it has been raised to those who waited for it
                last.wait()

    def close(self) -> None:
        """Wait for all jobs, however they end, and let go of the threads."""
        for key in list(self._last):
            self.forget(key)
        if self._end is not None:
            self._end()

    def _start_threads(self) -> None:
        if self._end is not None and self._end.alive:
            return
        for _ in range(self._num_threads):
            threading.Thread(target=_serve, args=(self.ready,), name=self._name, daemon=True).start()
        self._end = weakref.finalize(self, _end, self.ready, self._num_threads)
        self._end.atexit = False  # the process takes them along; jobs may go on until then


class _Job:
    def __init__(self, pieces: Iterable[Piece], workers: Workers) -> None:
        self._pieces = deque(pieces)
        self._num_left = len(self._pieces)
        assert self._num_left, "a job without pieces would never end"
        self._workers: Workers | None = workers  # whose threads stay until the job is done
        self._lock, self._done = threading.Lock(), threading.Event()
        self._next: _Job | None = None
        self._error: Exception | None = None

    def start(self, failed: Exception | None) -> None:
        """Queue the pieces, which are dropped undone where a job before has ``failed``."""
        assert self._workers is not None
        self._error = failed
        ready = self._workers.ready
        for _ in range(self._num_left):
            ready.put(self)

    def then(self, job: "_Job") -> None:
        """Start another job once this one is done."""
        with self._lock:
            if not self._done.is_set():
                self._next = job
                return
        job.start(self._error)

    def do_piece(self) -> None:
        piece = self._pieces.popleft()
        error = None
        try:
            if self._error is None:
                piece()
        except Exception as raised:
            error = raised
        del piece  # and with it the memory it works on, before anybody is told that the job is done
        with self._lock:
            self._error = self._error or error
            self._num_left -= 1
            if self._num_left:
                return
            self._done.set()
            following, self._next, self._workers = self._next, None, None
        if following is not None:
            following.start(self._error)

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


def _serve(ready: "SimpleQueue[_Job | None]") -> None:
    while (job := ready.get()) is not None:
        job.do_piece()


def _end(ready: "SimpleQueue[_Job | None]", num_threads: int) -> None:
    for _ in range(num_threads):
        ready.put(None)
