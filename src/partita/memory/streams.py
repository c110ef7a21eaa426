"""Asynchronous work: in order on a :class:`Stream`, in parallel by :class:`Workers`.

Callers submit work and get an :class:`Event`; code that needs the result waits for it. So no caller depends on the
device type. Threads are useful on the CPU, too: gloo's send writes to the socket on the calling thread.
"""

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue

import torch

from partita.errors import PartitaError
from partita.memory import accelerator

Piece = Callable[[], object]
# At exit, the process abandons its work if no piece completes within this time.
STUCK_S = 2.0


class Event:
    """A point in asynchronous work.

    :meth:`wait` makes the accelerator's current stream, or on the host the caller, wait for it.

    Raises:
        Exception: the work's error, at every wait.
    """

    def __init__(
        self,
        wait: Callable[[], object] | None = None,
        *,
        wait_for: Callable[[float], bool] | None = None,
        query: Callable[[], bool] | None = None,
        keeps: object = None,
    ) -> None:
        self._wait = wait
        self._wait_for = wait_for
        self._query = query
        self._keeps = keeps

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()

    def wait_for(self, seconds: float) -> bool:
        """Wait, but block the caller for at most ``seconds``; return whether the point was reached."""
        if self._wait_for is not None and not self._wait_for(seconds):
            return False
        self.wait()
        return True

    def is_behind(self) -> bool:
        """Return True if the work is known not to have reached the point yet. Called from any thread."""
        return self._query is not None and not self._query()


def record(device: torch.device, *, keeps: object = None) -> Event:
    """Return an event at this point of the current stream. ``keeps``: an object that lives as long as the event."""
    if not accelerator.has_streams(device):
        return Event()
    event = accelerator.new_event(device)
    accelerator.record_event(event, device)
    return Event(partial(accelerator.wait_for_event, event, device), query=event.query, keeps=keeps)


def record_for_host(device: torch.device) -> Event:
    """Return an event at this point of the current stream. Its ``wait`` blocks the caller: afterwards the host may use
    memory that earlier work on the stream reads or writes.
    """
    if not accelerator.has_streams(device):
        return Event()
    event = accelerator.new_event(device)
    accelerator.record_event(event, device)
    return Event(event.synchronize)


def finish(device: torch.device) -> None:
    """Block the caller until all work queued on the current stream is done, so that the host may use its memory."""
    accelerator.wait_for_stream(device)


class Stream:
    """A queue of work that overlaps with the current stream: on a stream of the accelerator, or on a thread. On a
    simulated device, work runs immediately.

    After an item fails, no later item runs; their events raise the same error.

    Args:
        waits: True if the work waits for the host (the disk, computation on the CPU). It then runs on a thread also
            with an accelerator.
    """

    def __init__(self, device: torch.device, name: str, *, waits: bool = False) -> None:
        self._device = device
        self._stream = accelerator.new_stream(device)
        self._thread = Workers(name, 1)
        self._waits = waits

    def wait_in_thread(self) -> None:
        """Run the work in a thread from now on, because it waits for the host."""
        self._waits = True

    def run(self, work: Callable[[], object]) -> Event:
        """Queue ``work``. Operations that it launches on an accelerator are queued on the stream.

        Without ``waits`` it is called at once on an accelerator.
        """
        if accelerator.is_simulated(self._device):
            work()
            return Event()
        if self._stream is None:
            return self._thread.run(None, [work])
        if self._waits:
            return self._run_in_thread(work, self._stream)
        with self._stream:
            work()
            # The launched kernels may still read tensors that only ``work`` references.
            return record(self._device, keeps=work)

    def _run_in_thread(self, work: Callable[[], object], stream: AbstractContextManager[object]) -> Event:
        done = accelerator.new_event(self._device)

        def launch() -> None:
            with stream:
                work()
                accelerator.record_event(done, self._device)

        task = self._thread.run(None, [launch])

        def wait() -> None:
            task.wait()
            accelerator.wait_for_event(done, self._device)

        def has_passed() -> bool:
            return not task.is_behind() and done.query()

        return Event(wait, wait_for=task.wait_for, query=has_passed, keeps=work)

    def finish(self) -> None:
        """Block the caller until the thread has finished all work, ignoring errors."""
        self._thread.forget(None)

    def close(self) -> None:
        """Release the thread, which ends after the queued work. New work starts another thread."""
        self._thread.release_threads()


class Workers:
    """A thread pool for jobs that consist of pieces, such as the blocks of a file.

    A job is a list of pieces for one key. Jobs with the same key run in order; the pieces of a job, and jobs with
    different keys, run in parallel. After a job fails, no later job with its key runs until :meth:`forget`: their
    events raise the same error.

    The threads start with the first job. They are daemons, so that a request that the system or a dead rank never
    answers does not prevent the process from exiting. At exit, the process finishes its jobs as long as they make
    progress: a thread that returns from torch's code to Python after interpreter shutdown would abort the process.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = f"partita {name}"
        self._num_threads = num_threads
        self.ready: SimpleQueue[_Job | None] = SimpleQueue()
        self._last: dict[Hashable, _Job] = {}
        self._lock = threading.Lock()
        self._end: weakref.finalize[..., Workers] | None = None
        self._process = 0  # the process that started the threads

    def run(self, key: Hashable, pieces: Iterable[Piece]) -> Event:
        """Submit a job of at least one piece.

        Raises:
            PartitaError: this process was forked from the one that started the threads.
        """
        if self._end is not None and os.getpid() != self._process:  # the job would never run
            raise PartitaError(
                "this process was forked from the one that created the engine, and does not have the engine's threads "
                "and connections: start processes that train before partita.initialize, or with multiprocessing's "
                "method spawn"
            )
        job = _Job(pieces, self)
        with self._lock:
            self._start_threads()
            before = self._last.get(key)
            self._last[key] = job
        if before is None:
            job.start(None)
        else:
            before.then(job.start)
        return Event(job.wait, wait_for=job.ends_within, query=partial(job.ends_within, 0.0))

    def forget(self, key: Hashable) -> None:
        """Wait for the jobs of ``key``, ignoring errors. Later jobs with the key do not depend on them."""
        with self._lock:
            last = self._last.pop(key, None)
        if last is not None:
            with contextlib.suppress(Exception):  # every wait for the event raises it
                last.wait()

    def close(self) -> None:
        """Wait for all jobs, ignoring errors, and release the threads."""
        for key in list(self._last):
            self.forget(key)
        self.release_threads()

    def finish_jobs(self) -> bool:
        """Wait for all jobs, ignoring errors; return False as soon as no piece has completed for ``STUCK_S``."""
        if self._process != os.getpid():
            return True
        for job in list(self._last.values()):
            before = -1
            while not job.ends_within(STUCK_S):
                if before == _Job.pieces_ended:
                    return False
                before = _Job.pieces_ended
        return True

    def release_threads(self) -> None:
        """Let the threads end after the submitted jobs. New jobs start other threads."""
        with self._lock:
            end, jobs = self._end, list(self._last.values())
            self._end = None
        if end is not None:
            _end_after(jobs, end)

    def _start_threads(self) -> None:
        if self._end is None:
            for _ in range(self._num_threads):
                threading.Thread(target=_serve, args=(self.ready,), name=self._name, daemon=True).start()
            self._process = os.getpid()
            self._end = weakref.finalize(self, _end, self.ready, self._num_threads)
            self._end.atexit = False
            _STARTED.add(self)


class _Job:
    pieces_ended = 0  # of all jobs of this process; shows progress

    def __init__(self, pieces: Iterable[Piece], workers: Workers) -> None:
        self._pieces = deque(pieces)
        self._num_pending = len(self._pieces)
        assert self._num_pending, "a job without pieces would never end"
        self._workers: Workers | None = workers  # keeps the threads alive until the job is done
        self._lock = threading.Lock()
        self._running = threading.Lock()
        self._running.acquire()  # held until the job is done; waiting threads acquire and release it
        self._following = list[Callable[[Exception | None], object]]()
        self._error: Exception | None = None

    def start(self, failed: Exception | None) -> None:
        """Queue the pieces; they are skipped if a predecessor has ``failed``."""
        assert self._workers is not None
        self._error = failed
        ready = self._workers.ready
        for _ in range(self._num_pending):
            ready.put(self)

    def then(self, call: Callable[[Exception | None], object]) -> None:
        """Call ``call`` once this job is done, with the first error so far (None if there is none)."""
        with self._lock:
            if self._num_pending:
                self._following.append(call)
                return
        call(self._error)

    def do_piece(self) -> None:
        piece = self._pieces.popleft()
        error = None
        try:
            if self._error is None:
                piece()
        except Exception as raised:
            error = raised
        del piece  # frees the memory it works on before waiting threads continue
        _Job.pieces_ended += 1
        with self._lock:
            self._error = self._error or error
            self._num_pending -= 1
            if self._num_pending:
                return
            self._running.release()
            following = self._following
            self._following = []
            self._workers = None
        for call in following:
            call(self._error)

    def ends_within(self, seconds: float) -> bool:
        if is_done := self._running.acquire(timeout=seconds):
            self._running.release()
        return is_done

    def wait(self) -> None:
        with self._running:
            pass
        if self._error is not None:
            raise self._error


def _serve(ready: "SimpleQueue[_Job | None]") -> None:
    """Run pieces of jobs. An idle thread must not reference a job: its error's traceback references the engine."""
    while (job := ready.get()) is not None:
        job.do_piece()
        del job


_STARTED = weakref.WeakSet[Workers]()


@atexit.register
def finish_all_jobs() -> bool:
    """Wait for the jobs of all pools of this process; return False as soon as they make no progress."""
    return all(workers.finish_jobs() for workers in list(_STARTED))


def _end_after(jobs: list[_Job], end: Callable[[], object]) -> None:
    if jobs:
        jobs[0].then(lambda _: _end_after(jobs[1:], end))
    else:
        end()


def _end(ready: "SimpleQueue[_Job | None]", num_threads: int) -> None:
    for _ in range(num_threads):
        ready.put(None)


def after(events: Iterable[Event], work: Callable[..., object], *args: object) -> None:
    """Wait for these events, then call ``work``."""
    for event in events:
        event.wait()
    work(*args)
