"""Rank processes that each write a result: for measuring this machine, and for the trials of a tuning."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_S = 0.05
# Seconds that the other ranks have to end after one has failed. Their errors follow from the first one.
_GRACE_S = 2.0
_LAST_CHARACTERS = 2000


@dataclass(frozen=True)
class RankResult:
    """The end of a rank's process.

    ``code``: its exit code; None if it was killed because another rank had failed. ``result``: the JSON that it wrote,
    if any. ``log``: the end of its output.
    """

    code: int | None
    result: Any
    log: str


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
