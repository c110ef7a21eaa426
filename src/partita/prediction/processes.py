"""Rank processes that each write a result: for measuring this machine, and for the trials of a tuning."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.comm.watchdog import follows_from_another_rank
from partita.memory.out_of_memory import is_out_of_memory

_POLL_S = 0.05
# Seconds that the other ranks have to end after one has failed. Their errors follow from the first one.
_GRACE_S = 2.0
_LAST_CHARACTERS = 2000


@dataclass(frozen=True)
class RankResult:
    """The end of a rank's process.

    ``code``: its exit code; None if it was killed because another rank had failed. ``result``: the JSON that it wrote,
    if any: its result, or its error. ``log``: the end of its output.
    """

    code: int | None
    result: Any
    log: str


@dataclass(frozen=True)
class RankFailure:
    """A failure of a rank in one line. ``lacks_memory``: True if memory ran out."""

    text: str
    lacks_memory: bool


def run_ranks(module: str, tasks: Sequence[str], folder: Path, timeout_s: float) -> list[RankResult] | None:
    """Run ``python -m module TASK FILE`` in a process for each task, and return the result of each.

    Each process writes its result to FILE as JSON. Return None if a process is still running after ``timeout_s``. No
    process outlives the call, and the standard input of each closes when this process ends.
    """
    processes, files = list[subprocess.Popen[bytes]](), [folder / f"{rank}.json" for rank in range(len(tasks))]
    try:
        for task, file in zip(tasks, files, strict=True):
            words = [sys.executable, "-m", module, task, str(file)]
            with file.with_suffix(".log").open("wb") as log:
                processes.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log))
        codes = _wait(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    if codes is None:
        return None
    return [
        RankResult(code, _read(file), _log_tail(file.with_suffix(".log")))
        for code, file in zip(codes, files, strict=True)
    ]


def _wait(processes: Sequence["subprocess.Popen[bytes]"], timeout_s: float) -> list[int | None] | None:
    """Wait until all processes have ended, or for a while after one has failed, and return the exit codes so far.

    Return None if they take too long.
    """
    deadline, failed_at = time.monotonic() + timeout_s, float("inf")
    while True:
        codes, now = [process.poll() for process in processes], time.monotonic()
        if any(codes):
            failed_at = min(failed_at, now)
        if None not in codes or now > failed_at + _GRACE_S:
            return codes
        if now > deadline:
            return None
        time.sleep(_POLL_S)


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def _log_tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LAST_CHARACTERS:].strip()


def first_failure(ended: Sequence[RankResult]) -> RankFailure:
    """Return the failure that made the other ranks fail, if at least one rank failed.

    It is that of a rank that was ended by a signal, else of one that lacks memory, else an error that no other rank's
    error caused.
    """
    for rank, each in enumerate(ended):
        if each.code is not None and each.code < 0:
            return _ended_by_signal(rank, -each.code)
    found = [(rank, each.result) for rank, each in enumerate(ended) if each.result and "error" in each.result]
    if found:
        rank, error = min(
            found, key=lambda item: (not item[1]["lacks_memory"], follows_from_another_rank(item[1]["error"]))
        )
        return RankFailure(f"rank {rank}: {error['error']}", error["lacks_memory"])
    rank, failed = next((rank, each) for rank, each in enumerate(ended) if each.code)
    last = failed.log.splitlines()[-1] if failed.log else "without output"
    return RankFailure(f"rank {rank} ended with exit code {failed.code}: {last}", lacks_memory=False)


def _ended_by_signal(rank: int, number: int) -> RankFailure:
    is_kill = number == signal.SIGKILL
    hint = "; Linux sends it when memory runs out" if is_kill else ""
    return RankFailure(f"rank {rank} was ended by {signal.Signals(number).name}{hint}", lacks_memory=is_kill)


def run_rank(work: Callable[[], object], file: Path) -> int:
    """Write the result of a rank's work, or its error, to ``file`` as JSON, and return the exit code of its process."""
    code = 0
    found: object
    try:
        found = work()
    except Exception as error:  # all errors are results of the rank
        message = (str(error) or type(error).__name__).splitlines()[0]
        lacks_memory = is_out_of_memory(error) or any(is_out_of_memory(each) for each in _causes(error))
        code, found = 1, {"error": f"{type(error).__name__}: {message}", "lacks_memory": lacks_memory}
    written = file.with_suffix(".part")
    written.write_text(json.dumps(found))
    written.replace(file)
    return code


def _causes(error: BaseException) -> list[BaseException]:
    cause = error.__cause__ or error.__context__
    return [] if cause is None else [cause, *_causes(cause)]
