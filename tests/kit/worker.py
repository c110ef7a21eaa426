"""A worker of the pool: a process that runs jobs one after another, each as a rank."""

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.kit import seeds
from tests.kit.hygiene import Snapshot

# The pool sends this to each rank when all ranks have answered: the rank may destroy its process group.
RELEASE = b"release"
# Time for partita's threads to end after a job.
GRACE_S = 2.0


@dataclass(frozen=True)
class Job:
    """One call on one rank. `task` is the pickled (function, arguments)."""

    task: bytes
    rank: int
    world: int
    port: int
    timeout_s: float
    with_group: bool
    warning_filters: list[Any]


@dataclass(frozen=True)
class Answer:
    """A pickled result; or, if `traceback` is set, an exception (None if it cannot be pickled) and its `summary`."""

    value: bytes | None
    traceback: str | None = None
    summary: str = ""
    time_s: float = 0.0


def main(pipe: Connection, stacks: str) -> None:
    """Serve jobs until the other end of the pipe is closed."""
    with Path(stacks).open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test's process ends the workers
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        num_modules = 0
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                if len(sys.modules) > num_modules:  # exclude objects of imported modules from garbage collection
                    gc.freeze()
                    num_modules = len(sys.modules)
                _serve(pipe, pickle.loads(pipe.recv_bytes()))


def _serve(pipe: Connection, job: Job) -> None:
    """Run one job as a rank, then restore the process's state."""
    before = Snapshot.take()
    _set_environment(job)
    seeds.start(1000 + job.rank)  # differs by rank, so that nothing is equal on all ranks by accident
    random.seed(1000 + job.rank)
    try:
        answer = _answer(job)
        if answer.traceback is None:
            pipe.send_bytes(pickle.dumps(answer))
            released = pipe.recv_bytes()  # other ranks may need this rank's process group until all have answered
            assert released == RELEASE
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        before.restore()
        torch.set_num_threads(1)
    if answer.traceback is not None:
        pipe.send_bytes(pickle.dumps(answer))
    del answer
    _collect_garbage()


def _collect_garbage() -> None:
    """Free the job's objects after partita's threads, which may hold references to them, have ended.

    Before torch frees a process group, it waits for the group's operations, which wait for the other ranks as long as
    these have their group.
    """
    gc.collect()
    deadline = time.monotonic() + GRACE_S
    for thread in threading.enumerate():
        if thread.name.startswith("partita"):
            thread.join(max(0.0, deadline - time.monotonic()))
    gc.collect()


def _answer(job: Job) -> Answer:
    before = Snapshot.take()
    try:
        with warnings.catch_warnings():
            warnings.filters = job.warning_filters
            if job.with_group:
                # Longer than the pool's timeout, so that the pool detects a hang and reports the stacks of all ranks.
                dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s + 30))
            fn, args = pickle.loads(job.task)
            result = pickle.dumps(fn(*args))
        if leaks := before.leaks():
            raise AssertionError(f"the test leaked on rank {job.rank}: " + ", ".join(leaks))
    except BaseException as error:  # includes pytest.fail and SystemExit
        return _failure(error)
    return Answer(result)


def _set_environment(job: Job) -> None:
    os.environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.world),
        LOCAL_RANK=str(job.rank),
        LOCAL_WORLD_SIZE=str(job.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def _failure(error: BaseException) -> Answer:
    time_s = time.monotonic()
    summary = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_exception(error))
    try:
        carried = pickle.dumps(error)
        pickle.loads(carried)
    except Exception:  # a class's own __reduce__ may raise anything
        carried = None
    return Answer(carried, text, summary, time_s)
