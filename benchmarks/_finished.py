"""Results of finished runs, stored in a file, so that a benchmark of hours can be done in parts."""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS

Described = Mapping[str, Any]


@dataclass
class Finished:
    """Results of runs by description, stored in ``path`` as one line of JSON each (None: not stored).

    No run starts after ``seconds``.
    """

    path: Path | None = None
    seconds: float = float("inf")
    _found: dict[str, dict[str, Any]] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for line in self.path.read_text().splitlines():
                described, found = json.loads(line)
                self._found[_key(described)] = found

    def of(self, described: Described) -> dict[str, Any] | None:
        """Return the result of the run with this description, or None if it has not run."""
        return self._found.get(_key(described))

    def complete(self, every: Iterable[Described], run: Callable[[Described], dict[str, Any]]) -> None:
        """Run all unfinished runs in order, until the time is up."""
        for described in every:
            if self.of(described) is not None:
                continue
            if time.monotonic() - self._began > self.seconds:
                return
            found = self._found[_key(described)] = run(described)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps([described, found]) + "\n")


def add_parts(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark that can be done in parts."""
    parser.add_argument("--resume", action="store_true", help="keep what has run in results/, and take what is there")
    parser.add_argument("--hours", type=float, help="begin no run after so many, and keep what has run")


def in_parts(options: argparse.Namespace, name: str) -> Finished:
    """Return the finished runs of the benchmark ``name``, according to the options."""
    path = RESULTS / f"{name}.jsonl" if options.resume or options.hours is not None else None
    return Finished(path, float("inf") if options.hours is None else 3600 * options.hours)


def _key(described: Described) -> str:
    return json.dumps(described, sort_keys=True)
