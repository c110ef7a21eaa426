"""Streams: work that goes on beside the caller's, in order. On CUDA a side stream, elsewhere a thread.

Callers hand work over and get an :class:`Event`; whoever needs the result waits for it. So nobody branches on the
device. A thread pays on the CPU, too: gloo's send writes into the socket on the thread that calls it.
"""

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

from partita.errors import PartitaError


class Event:
    """A point in the work of a stream; :meth:`wait` makes the current stream (without CUDA: the caller) wait for it.

    Raises:
        Exception: what the work raised, as often as it is waited for.
    """

    def __init__(
        self,
        wait: Callable[[], object] | None = None,
        *,
        wait_for: Callable[[float], bool] | None = None,
        keeps: object = None,
    ) -> None:
        self._wait, self._wait_for, self._keeps = wait, wait_for, keeps

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()

    def wait_for(self, seconds: float) -> bool:
        """Wait, where that blocks the caller at most so long; whether the point is passed."""
        if self._wait_for is not None and not self._wait_for(seconds):
            return False
        self.wait()
        return True


class Stream:
    """Work beside the current stream's, one piece after the other.

    After a piece that failed no other is run: their events raise the same error.

    Args:
        waits: whether the work waits for the host (for the disk, for arithmetic there): then it has a thread on CUDA,
            too.
    """

    def __init__(self, device: torch.device, name: str, *, waits: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = _Thread(f"partita {name}")
        self._waits = waits

    def wait_in_thread(self) -> None:
        """From now on the work waits for the host, too."""
        self._waits = True

    def run(self, work: Callable[[], object]) -> Event:
        """Queue ``work``. On CUDA what it launches is queued on the side stream; without ``waits`` it is called at
        once.
        """
        if self._stream is None:
            task = self._thread.run(work)
            return Event(task.wait, wait_for=task.wait_for)
        if self._waits:
            return self._run_in_thread(work, self._stream)
        with torch.cuda.stream(self._stream):
            work()
            # What was launched may still read what only ``work`` holds.
            return Event(record(self._device).wait, keeps=work)

    def _run_in_thread(self, work: Callable[[], object], stream: torch.cuda.Stream) -> Event:
        done = torch.cuda.Event()

        def launch() -> None:
            with torch.cuda.stream(stream):
                work()
                done.record()

        task = self._thread.run(launch)

        def wait() -> None:
            task.wait()
            done.wait()

        return Event(wait, wait_for=task.wait_for, keeps=work)

    def close(self) -> None:
        """Let go of the thread, which ends after what is queued; another is started if more work comes."""
        self._thread.close()


class _Task:
    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._error: Exception | None = None
        self._done = threading.Event()

    def run(self, failed: Exception | None) -> Exception | None:
        """Do the work, unless an earlier task ``failed``; returns what went wrong so far."""
        try:
            if failed is None and self._work is not None:
                self._work()
        except Exception as error:
            failed = error
        self._work, self._error = None, failed
        self._done.set()
        return failed

    def wait_for(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class _Thread:
    """Runs tasks in order. It starts with the first, and is a daemon: work that waits for a rank that is gone must not
    keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._end: weakref.finalize[..., _Thread] | None = None
        self._process = 0  # that has the thread
        self.failed: Exception | None = None

    def run(self, work: Callable[[], object]) -> _Task:
        if self._end is None or not self._end.alive:
            threading.Thread(target=_serve, args=(self._tasks, weakref.ref(self)), name=self._name, daemon=True).start()
            self._end, self._process = weakref.finalize(self, self._tasks.put, None), os.getpid()
        elif os.getpid() != self._process:  # nothing would ever be done
            raise PartitaError(
                "this process was forked from the one that made the engine, whose threads and connections it does not "
                "have: start processes that train before partita.initialize, or with multiprocessing's method spawn"
            )
        task = _Task(work)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        if self._end is not None:
            self._end()


def _serve(tasks: "SimpleQueue[_Task | None]", owner: "weakref.ref[_Thread]") -> None:
    """The thread keeps nothing while it waits: an error's traceback has the engine, and that has the thread."""
    while (task := tasks.get()) is not None:
        thread = owner()
        failed = task.run(thread.failed if thread is not None else None)
        if thread is not None:
            thread.failed = failed
        del task, thread, failed


def record(device: torch.device) -> Event:
    """An event at this point of the current stream."""
    if device.type != "cuda":
        return Event()
    event = torch.cuda.Event()
    event.record()
    return Event(event.wait)


def finish(device: torch.device) -> None:
    """Hold the caller until all is done that the current stream has been given, so that the host may touch it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
