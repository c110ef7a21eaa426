"""A trial: a few measured steps of one config, in processes of their own. However they end, it is an outcome."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partita.memory.capacity import usable_cores
from partita.tune.target import Target

_POLL_S = 0.05
# Seconds for the other ranks to end after one has failed, which causes their errors.
_GRACE_S = 2.0
_LAST_CHARACTERS = 2000


@dataclass(frozen=True)
class Task:
    """The work of one rank: ``steps`` of the ``target`` under ``config``. The ranks connect at ``port``."""

    target: Target
    config: dict[str, Any]
    rank: int
    ranks: int
    port: int
    threads: int
    steps: int

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> "Task":
        found = json.loads(text)
        target = found.pop("target")
        return Task(Target(target["text"], target["tokens"], tuple(target["overrides"])), **found)


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    ``step_s``: the median of the steps of the slowest rank. ``peak_bytes``: the most bytes that a rank held on its
    device. Both are None if the trial failed: ``failed`` says how, and ``lacks_memory`` whether it was for lack of
    memory.
    """

    step_s: float | None = None
    peak_bytes: int | None = None
    failed: str = ""
    lacks_memory: bool = False


@dataclass(frozen=True)
class Trials:
    """Runner of trials of ``target`` on ``ranks`` processes, with ``steps`` each, for at most ``timeout_s``."""

    target: Target
    ranks: int
    steps: int
    timeout_s: float

    def run(self, config: dict[str, Any]) -> Outcome:
        """Run a trial of one config, and return its outcome. Nothing that a trial does ends this process."""
        with tempfile.TemporaryDirectory(prefix="partita-") as folder:
            processes = list[subprocess.Popen[bytes]]()
            files = [Path(folder, f"{rank}.json") for rank in range(self.ranks)]
            try:
                port, threads = _free_port(), max(1, usable_cores() // self.ranks)
                for rank, file in enumerate(files):
                    task = Task(self.target, config, rank, self.ranks, port, threads, self.steps)
                    words = [sys.executable, "-m", "partita.tune.trial_rank", task.text(), str(file)]
                    with file.with_suffix(".log").open("wb") as log:
                        # The pipe closes when this process ends, and each rank exits when its pipe closes.
                        processes.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log))
                codes = self._wait(processes)
            finally:
                for process in processes:
                    process.kill()
                    process.communicate()
            if codes is None:
                return Outcome(failed=f"no end within {self.timeout_s:g} s")
            return _outcome(codes, files)

    def _wait(self, processes: Sequence["subprocess.Popen[bytes]"]) -> list[int | None] | None:
        """Wait until all processes have ended, or for a while after one has failed, and return the exit codes so far.

        Return None if they take too long.
        """
        deadline, failed_at = time.monotonic() + self.timeout_s, float("inf")
        while True:
            codes, now = [process.poll() for process in processes], time.monotonic()
            if any(codes):
                failed_at = min(failed_at, now)
            if None not in codes or now > failed_at + _GRACE_S:
                return codes
            if now > deadline:
                return None
            time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _outcome(codes: Sequence[int | None], files: Sequence[Path]) -> Outcome:
    """Return the outcome of all ranks.

    A rank that was ended by a signal, or lacks memory, makes the others fail, and is reported before them.
    """
    found: list[dict[str, Any]] = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    if all("step_s" in each for each in found):
        return Outcome(max(each["step_s"] for each in found), max(each["peak_bytes"] for each in found))
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return _killed(rank, -code)
    errors = [(not each["lacks_memory"], rank, each["error"]) for rank, each in enumerate(found) if "error" in each]
    if errors:
        otherwise, rank, error = min(errors)
        return Outcome(failed=f"rank {rank}: {error}", lacks_memory=not otherwise)
    rank = next(rank for rank, code in enumerate(codes) if code)
    log = files[rank].with_suffix(".log").read_text(errors="replace")[-_LAST_CHARACTERS:].strip()
    last = log.splitlines()[-1] if log else "without a word"
    return Outcome(failed=f"rank {rank} ended with exit code {codes[rank]}: {last}")


def _killed(rank: int, number: int) -> Outcome:
    is_kill = number == signal.SIGKILL
    hint = "; the system kills a process so when memory runs out" if is_kill else ""
    return Outcome(failed=f"rank {rank} was ended by {signal.Signals(number).name}{hint}", lacks_memory=is_kill)
