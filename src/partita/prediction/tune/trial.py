"""A trial: a few measured steps of one config in separate processes. Failures are outcomes, too."""

import json
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partita.memory.capacity import usable_cores
from partita.prediction.processes import RankResult, first_failure, run_ranks
from partita.prediction.tune.target import Target


@dataclass(frozen=True)
class TrialTask:
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
    def of(text: str) -> "TrialTask":
        found = json.loads(text)
        target = found.pop("target")
        return TrialTask(Target(target["text"], target["tokens"], tuple(target["overrides"])), **found)


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial.

    ``step_s``: the median step time of the slowest rank. ``peak_bytes``: the maximum over the ranks of the peak bytes
    on the device. Both are None if the trial failed. ``failed``: the error. ``lacks_memory``: True if memory ran out.
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

    def run(self, config: dict[str, Any]) -> TrialResult:
        """Run a trial of one config in other processes, and return its outcome."""
        port, threads = _free_port(), max(1, usable_cores() // self.ranks)
        tasks = [
            TrialTask(self.target, config, r, self.ranks, port, threads, self.steps).text() for r in range(self.ranks)
        ]
        with tempfile.TemporaryDirectory(prefix="partita-") as folder:
            ended = run_ranks("partita.prediction.tune.trial_rank", tasks, Path(folder), self.timeout_s)
        return TrialResult(failed=f"did not end within {self.timeout_s:g} s") if ended is None else _result_of(ended)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _result_of(ended: Sequence[RankResult]) -> TrialResult:
    """Return the outcome of a trial from the results of its ranks."""
    found: list[dict[str, Any]] = [each.result or {} for each in ended]
    if all("step_s" in each for each in found):
        return TrialResult(max(each["step_s"] for each in found), max(each["peak_bytes"] for each in found))
    failure = first_failure(ended)
    return TrialResult(failed=failure.text, lacks_memory=failure.lacks_memory)
