"""Work beside the caller's: in one order on a :class:`Stream`, side by side by :class:`Workers`.

Callers hand work over and get an :class:`Event`; whoever needs the result waits for it. So nobody branches on the
device. Threads pay on the CPU, too: gloo's send writes into the socket on the thread that calls it.
"""

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from queue import SimpleQueue

import torch

from partita.errors import PartitaError
from partita.memory import accelerator

Piece = Callable[[], object]
# When the process ends, work is given up of which no piece ends for so long.
STUCK_S = 2.0


class Event:
    """A point in work beside the caller's; :meth:`wait` has the accelerator's current stream, or on the host the
    caller, wait for it.

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
        self._wait = wait
        self._wait_for = wait_for
        self._keeps = keeps

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()

    def wait_for(self, seconds: float) -> bool:
        """Wait, where that blocks the caller at most so long; whether the point is passed."""
        if self._wait_for is not None and not self._wait_for(seconds):
            return False
        self.wait()
        return True


def record(device: torch.device) -> Event:
    """An event at this point of the current stream."""
    if not accelerator.has_streams(device):
        return Event()
    event = accelerator.new_event(device)
    event.record()
    return Event(event.wait)


def finish(device: torch.device) -> None:
    """Hold the caller until all is done that the current stream has been given, so that the host may touch it."""
    accelerator.wait_for_stream(device)


class Stream:
    """Work beside the current stream's, one piece after the other: on an accelerator's stream, or on a thread. A
    simulated device's is done at once.

    After a piece that failed no other is run: their events raise the same error.

    Args:
        waits: whether the work waits for the host (for the disk, for arithmetic there): then it has a thread on an
            accelerator, too.
    """

    def __init__(self, device: torch.device, name: str, *, waits: bool = False) -> None:
        self._device = device
        self._stream = accelerator.new_stream(device)
        self._thread = Workers(name, 1)
        self._waits = waits

    def wait_in_thread(self) -> None:
        """From now on the work waits for the host, too."""
        self._waits = True

    def run(self, work: Callable[[], object]) -> Event:
        """Queue ``work``. What it launches on an accelerator is queued on the stream; without ``waits`` it is called at
        once.
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
            # What was launched may still read what only ``work`` holds.
            return Event(record(self._device).wait, keeps=work)

    def _run_in_thread(self, work: Callable[[], object], stream: AbstractContextManager[object]) -> Event:
        done = accelerator.new_event(self._device)

        def launch() -> None:
            with stream:
                work()
                done.record()

        task = self._thread.run(None, [launch])

        def wait() -> None:
            task.wait()
            done.wait()

        return Event(wait, wait_for=task.wait_for, keeps=work)

    def finish(self) -> None:
        """Hold the caller until its thread has nothing left to do, however that ends."""
        self._thread.forget(None)

    def close(self) -> None:
        """Let go of the thread, which ends after what is queued; another is started if more work comes."""
        self._thread.let_go()


class Workers:
    """A few threads that share work which can be cut in pieces, such as the blocks of a file.

    A job is a list of pieces for one key. Jobs with the same key are done one after the other, in the order in which
    they were handed over; the pieces of a job, and jobs with different keys, are done by whichever thread is free.
    After a job that failed, no other with its key is done until :meth:`forget`: their events raise the same error.

    The threads start with the first job. They are daemons: a request that the system, or a rank that is gone, never
    answers must not keep the process from ending. A process that ends finishes its jobs as long as they go on: a thread
    that comes back to Python from torch's code after the interpreter is gone would abort the process.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = f"partita {name}"
        self._num_threads = num_threads
        self.ready: SimpleQueue[_Job | None] = SimpleQueue()
        self._last: dict[Hashable, _Job] = {}
        self._lock = threading.Lock()
        self._end: weakref.finalize[..., Workers] | None = None
        self._process = 0  # that has the threads

    def run(self, key: Hashable, pieces: Iterable[Piece]) -> Event:
        """Hand over a job, of at least one piece.

        Raises:
            PartitaError: this process was forked from the one that has the threads.
        """
        if self._end is not None and os.getpid() != self._process:  # nothing would ever be done
            raise PartitaError(
                "this process was forked from the one that made the engine, whose threads and connections it does not "
                "have: start processes that train before partita.initialize, or with multiprocessing's method spawn"
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
        return Event(job.wait, wait_for=job.ends_within)

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
        self.let_go()

    def go_on(self) -> bool:
        """Wait for all jobs, however they end; False as soon as nothing has ended for ``STUCK_S``."""
        if self._process != os.getpid():
            return True
        for job in list(self._last.values()):
            before = -1
            while not job.ends_within(STUCK_S):
                if before == _Job.pieces_ended:
                    return False
                before = _Job.pieces_ended
        return True

    def let_go(self) -> None:
        """Have the threads end after what was handed over; others are started if more comes."""
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
    pieces_ended = 0  # of all jobs of this process: whether there is progress

    def __init__(self, pieces: Iterable[Piece], workers: Workers) -> None:
        self._pieces = deque(pieces)
        self._num_left = len(self._pieces)
        assert self._num_left, "a job without pieces would never end"
        self._workers: Workers | None = workers  # whose threads stay until the job is done
        self._lock = threading.Lock()
        self._running = threading.Lock()
        self._running.acquire()  # until it is done: whoever waits takes it then, and lets go at once
        self._following = list[Callable[[Exception | None], object]]()
        self._error: Exception | None = None

    def start(self, failed: Exception | None) -> None:
        """Queue the pieces, which are dropped undone where a job before has ``failed``."""
        assert self._workers is not None
        self._error = failed
        ready = self._workers.ready
        for _ in range(self._num_left):
            ready.put(self)

    def then(self, call: Callable[[Exception | None], object]) -> None:
        """Call once this job is done, with what went wrong so far."""
        with self._lock:
            if self._num_left:
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
        del piece  # and with it the memory it works on, before anybody is told that the job is done
        _Job.pieces_ended += 1
        with self._lock:
            self._error = self._error or error
            self._num_left -= 1
            if self._num_left:
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
    """The thread keeps nothing while it waits: an error's traceback has the engine, and that has the workers."""
    while (job := ready.get()) is not None:
        job.do_piece()
        del job


_STARTED = weakref.WeakSet[Workers]()


@atexit.register
def _finish() -> None:
    all(workers.go_on() for workers in list(_STARTED))


def _end_after(jobs: list[_Job], end: Callable[[], object]) -> None:
    if jobs:
        jobs[0].then(lambda _: _end_after(jobs[1:], end))
    else:
        end()


def _end(ready: "SimpleQueue[_Job | None]", num_threads: int) -> None:
    for _ in range(num_threads):
        ready.put(None)


def after(events: Iterable[Event], work: Callable[..., object], *args: object) -> None:
    """Do ``work`` when these have passed."""
    for event in events:
        event.wait()
    work(*args)
