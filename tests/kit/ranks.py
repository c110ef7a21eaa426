"""A pool of persistent worker processes for tests on several ranks.

`on_ranks(world, fn, *args)` calls `fn(*args)` on `world` ranks and returns their results in rank order:

    def sum_of_ranks() -> float:                      # at the top level of a test module
        value = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(value)
        return value.item()

    def test_sum() -> None:
        assert on_ranks(4, sum_of_ranks) == [6.0] * 4

Workers are forked on first use from a server that has imported torch and transformers; rank r is always worker r. Each
call has a fresh rendezvous, a different seed on each rank, the test's warning filters, and one thread per rank. Results
are pickled by value: ranks and test share no memory.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch.distributed import TCPStore

from tests.kit import worker

T = TypeVar("T")

# Imported once, in the server. Workers import the rest themselves, including partita, which some tests mutate.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.device_mesh", "transformers.modeling_utils"]

# Time that the other ranks, whose collectives then break, have to answer after the first failure.
GRACE_AFTER_FAILURE_S = 5.0

# The time of a rank's death sorts before all errors: a death causes the errors of other ranks, even if they are
# reported before the pool notices it.
BEFORE_ALL_ERRORS_S = 0.0


class WorkerError(Exception):
    """A rank died, hung, or raised something that cannot be pickled."""


class Failure(NamedTuple):
    """An error on one rank, with its time."""

    rank: int
    time_s: float
    error: BaseException
    traceback: str


@dataclass
class _Worker:
    process: ForkServerProcess
    pipe: connection.Connection
    stacks: Path  # faulthandler writes this file on SIGUSR1 and on a crash

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        self.stacks.unlink(missing_ok=True)


@dataclass
class _Pool:
    workers: list[_Worker] = field(default_factory=list)

    def grow(self, num_workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        while len(self.workers) < num_workers:
            ours, theirs = context.Pipe()
            handle, stacks = tempfile.mkstemp(prefix="partita-stacks-")
            os.close(handle)
            process = context.Process(target=worker.main, args=(theirs, stacks), name=f"rank-{len(self.workers)}")
            process.start()
            theirs.close()
            self.workers.append(_Worker(process, ours, Path(stacks)))

    def shrink(self) -> None:
        """Kill all workers, including busy ones."""
        while self.workers:
            self.workers.pop().kill()


_pool = _Pool()


def on_ranks(world: int, fn: Callable[..., T], *args: Any, timeout: float = 60, with_group: bool = True) -> list[T]:
    """Call `fn(*args)` on `world` ranks and return the results in rank order.

    `fn` is a function at the top level of an importable module. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT are set as by torchrun, with the store in this process as in torchrun's agent.
    `with_group` initializes a default gloo process group. `timeout` is in seconds.

    Raises the exception of the first rank that failed, with each failed rank's traceback in its notes. Raises
    `WorkerError` if a rank died, raised an exception that cannot be pickled, or did not answer in time; after a
    timeout the message has the Python stack of every busy rank.
    """
    task = pickle.dumps((fn, args))
    _pool.grow(world)
    workers = _pool.workers[:world]
    # The store picks its port itself: a free port that was looked up before could be taken by now.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        for rank, member in enumerate(workers):
            job = worker.Job(task, rank, world, store.port, timeout, with_group, list(warnings.filters))
            member.pipe.send_bytes(pickle.dumps(job))
        results, failures, busy = _collect(workers, timeout)
        for rank in results if not busy else ():
            workers[rank].pipe.send_bytes(worker.RELEASE)
    except BaseException:
        _pool.shrink()
        raise
    if busy:
        stacks = _stacks({rank: workers[rank] for rank in busy})
        _pool.shrink()
        _raise_stuck(failures, stacks, timeout)
    if failures:
        if any(isinstance(failure.error, WorkerError) for failure in failures):
            _pool.shrink()
        _raise_first(failures)
    return [results[rank] for rank in range(world)]


def close_pool() -> None:
    """Kill the workers. The next `on_ranks` starts new ones."""
    _pool.shrink()


def own_processes() -> set[int]:
    """Return the process ids of the pool: its workers, their fork server, and Python's resource tracker."""
    helpers = [
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    ]
    workers = [member.process.pid for member in _pool.workers]
    return {pid for pid in helpers + workers if pid is not None}


def _collect(workers: list[_Worker], timeout: float) -> tuple[dict[int, Any], list[Failure], set[int]]:
    """Return the results by rank, the failures by time, and the ranks that did not answer in time."""
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    busy = set(range(len(workers)))
    deadline = time.monotonic() + timeout
    while busy and (left_s := deadline - time.monotonic()) > 0:
        waited: dict[Any, int] = {workers[rank].pipe: rank for rank in busy}
        for pipe in connection.wait(list(waited), left_s):
            rank = waited[pipe]
            busy.discard(rank)
            answer = _receive(rank, workers[rank])
            if isinstance(answer, Failure):
                failures.append(answer)
                deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
            else:
                results[rank] = answer
    return results, sorted(failures, key=lambda failure: failure.time_s), busy


def _receive(rank: int, member: _Worker) -> Any:
    try:
        answer: worker.Answer = pickle.loads(member.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        member.process.join(5)
        error = WorkerError(f"rank {rank} died with exit code {member.process.exitcode}")
        return Failure(rank, BEFORE_ALL_ERRORS_S, error, member.stacks.read_text())
    value: Any = None if answer.value is None else pickle.loads(answer.value)
    if answer.traceback is None:
        return value
    error = WorkerError(f"rank {rank} raised {answer.summary}") if value is None else value
    return Failure(rank, answer.time_s, error, answer.traceback)


def _stacks(busy: dict[int, _Worker]) -> dict[int, str]:
    """Return the Python stacks of busy workers. faulthandler writes them even if the interpreter is blocked."""
    for member in busy.values():
        assert member.process.pid is not None
        os.kill(member.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5
    stacks: dict[int, str] = {}
    while len(stacks) < len(busy) and time.monotonic() < deadline:
        time.sleep(0.1)  # faulthandler writes a stack at once: after this pause it is complete
        stacks = {rank: text for rank, member in busy.items() if (text := member.stacks.read_text())}
    return {rank: stacks.get(rank, "no stack: the process does not answer") for rank in busy}


def _raise_first(failures: list[Failure]) -> NoReturn:
    first = failures[0]
    for failure in failures:
        note = failure.traceback if failure is first else _summary(failure)
        first.error.add_note(f"on rank {failure.rank}:\n{note}".rstrip())
    raise first.error


def _raise_stuck(failures: list[Failure], stacks: dict[int, str], timeout: float) -> NoReturn:
    for rank, stack in stacks.items():
        text = f"rank {rank} was stuck at:\n{stack}".rstrip()
        if failures:
            failures[0].error.add_note(text)
    if failures:
        _raise_first(failures)
    listing = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in stacks.items())
    raise WorkerError(f"ranks {sorted(stacks)} did not answer within {timeout:g} s; they were at:\n{listing}")


def _summary(failure: Failure) -> str:
    return f"{type(failure.error).__name__}: {failure.error}"


atexit.register(close_pool)
