"""A profile of training steps: the trace of torch.profiler, with rows for the engine's operations and waits."""

import gzip
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import profile, record_function

from partita.errors import PartitaError
from partita.memory import accelerator
from partita.memory.step_events import WAIT, Watcher, watched_by
from partita.table.traffic import TrafficKey

# Rows of a trace are identified by process and thread numbers. No process has these numbers.
PROCESS, PREDICTED, COLLECTIVES = 1_000_000_000, 1_000_000_001, 1_000_000_002


@dataclass(frozen=True)
class Span:
    """An operation or a wait.

    ``what``: its kind; ``name``: its object, such as a unit; ``lane``: its thread. Times are nanoseconds since 1970.
    """

    what: str
    name: str
    lane: str
    start_ns: int
    stop_ns: int


@dataclass(frozen=True)
class ProfileReport:
    """Milliseconds of one step, averaged over ``num_steps``.

    Attributes:
        step_ms: the step.
        waited_ms: waits, by the kind of operation (on an accelerator: while its main stream was idle).
        busy_ms: operations that overlap with the step, by kind.
        sent_bytes: sent bytes, by purpose.
    """

    num_steps: int
    step_ms: float
    waited_ms: dict[str, float]
    busy_ms: dict[str, float]
    sent_bytes: dict[str, float]

    def __str__(self) -> str:
        lines = [f"{'a step':<24}{self.step_ms:>10.2f} ms  (mean of {self.num_steps})"]
        for title, found in (("waited for", self.waited_ms), ("overlapped", self.busy_ms)):
            for what, num_ms in sorted(found.items(), key=lambda item: -item[1]):
                lines.append(f"{f'{title} {what}':<24}{num_ms:>10.2f} ms  {num_ms / self.step_ms:>6.1%}")
        for purpose, num in sorted(self.sent_bytes.items(), key=lambda item: -item[1]):
            lines.append(f"{f'sent for {purpose}':<24}{num / 1e6:>10.3f} MB")
        return "\n".join(lines)


class Profile(Watcher):
    """A context manager that profiles this rank's steps.

    On exit it writes a trace to ``path``, for Perfetto (ui.perfetto.dev) or chrome://tracing, compressed if the path
    ends in ``.gz``. :attr:`report` has the times of a step.

    Args:
        steps: returns the number of optimizer steps taken so far.

    Raises:
        PartitaError: the trace cannot be written; another profile is running.
    """

    def __init__(self, path: Path, device: torch.device, rank: int, steps: Callable[[], int]) -> None:
        self._path = path
        self._device = device
        self._rank = rank
        self._steps = steps
        self._spans = list[Span]()
        self._sent = Counter[str]()
        self._stalls = list[tuple[str, Any, Any]]()
        self._num_steps = 0  # steps in the block, after it has ended
        self._main = threading.get_ident()
        self._entered = ExitStack()
        self._torch: Any = None

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            raise PartitaError(f"engine.profile: cannot write '{self._path}': {error.strerror}; name another") from None
        self._main = threading.get_ident()
        accelerator.wait_for_all(self._device)
        try:
            self._torch = self._entered.enter_context(profile())
        except RuntimeError as error:
            raise PartitaError(f"engine.profile: another profile is running ({error}): end it first") from error
        self._entered.enter_context(watched_by(self))
        self._first_step = self._steps()
        self._start_ns = time.time_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon()
            return
        accelerator.wait_for_all(self._device)
        self._num_steps = self._steps() - self._first_step
        self._stop_ns = time.time_ns()
        self._entered.close()
        self._write()

    def abandon(self) -> None:
        """End the profile without writing a trace."""
        self._entered.close()
        self._path.unlink(missing_ok=True)

    # ------------------------------------------------------------- inside the block

    def span(self, what: str, name: str) -> AbstractContextManager[None]:
        return self._timed(what, name)

    @contextmanager
    def _timed(self, what: str, name: str) -> Iterator[None]:
        waits = what.startswith(WAIT) and accelerator.has_streams(self._device)
        before = accelerator.timed_event(self._device) if waits else None
        start_ns = time.time_ns()
        with record_function(f"{what} {name}".rstrip()):
            try:
                yield
            finally:
                thread = threading.current_thread()
                lane = "main" if threading.get_ident() == self._main else thread.name.removeprefix("partita ")
                self._spans.append(Span(what, name, lane, start_ns, time.time_ns()))
                if before is not None:
                    self._stalls.append((what, before, accelerator.timed_event(self._device)))

    def sent(self, key: TrafficKey, num_bytes: int) -> None:
        self._sent[key.purpose] += num_bytes

    # ---------------------------------------------------------------- after the block

    @property
    def report(self) -> ProfileReport:
        """The times and waits of a step.

        Raises:
            PartitaError: no optimizer step was taken inside the block, or it has not ended.
        """
        num = self._num_steps
        if not num:
            raise PartitaError(
                "engine.profile: no optimizer step was taken inside the block, or it has not ended: take one or more "
                "steps inside, and read the report after the block"
            )
        waited, busy = defaultdict[str, float](float), defaultdict[str, float](float)
        for each in self._spans:
            if each.lane != "main" and not each.what.startswith(WAIT):
                busy[each.what] += (each.stop_ns - each.start_ns) / 1e6
            elif each.lane == "main" and each.what.startswith(WAIT) and not self._stalls:
                waited[each.what.removeprefix(WAIT)] += (each.stop_ns - each.start_ns) / 1e6
        for what, before, after in self._stalls:
            waited[what.removeprefix(WAIT)] += before.elapsed_time(after)
        step_ms = (self._stop_ns - self._start_ns) / 1e6 / num
        figures = ({what: total / num for what, total in found.items()} for found in (waited, busy, self._sent))
        return ProfileReport(num, step_ms, *figures)

    def _write(self) -> None:
        """Add the engine's rows to the trace that torch's profiler exports."""
        exported = self._path.with_name(self._path.name + ".torch.json")
        try:
            self._torch.export_chrome_trace(str(exported))
            content = json.loads(exported.read_text())
            origin_ns = int(content.get("baseTimeNanoseconds", 0))
            content["traceEvents"] += rows(self._spans, origin_ns, f"partita, rank {self._rank}")
            write_trace(self._path, content)
        except OSError as error:
            raise PartitaError(f"engine.profile: cannot write '{self._path}': {error.strerror}; name another") from None
        finally:
            exported.unlink(missing_ok=True)


def rows(spans: Sequence[Span], origin_ns: int, title: str, process: int = PROCESS) -> list[dict[str, Any]]:
    """Return spans as events of a Chrome trace: a ``process`` called ``title``, with a row for each lane.

    Source: Trace Event Format (Google, 2016): complete events, in microseconds.
    """
    lanes = {lane: number for number, lane in enumerate(sorted({span.lane for span in spans}, key=_main_first))}
    found: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}]
    for lane, number in lanes.items():
        found.append({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": lane}})
    for span in spans:
        found.append(
            {
                "ph": "X",
                "name": f"{span.what} {span.name}".rstrip(),
                "cat": span.what,
                "pid": process,
                "tid": lanes[span.lane],
                "ts": (span.start_ns - origin_ns) / 1e3,
                "dur": (span.stop_ns - span.start_ns) / 1e3,
            }
        )
    return found


def _main_first(lane: str) -> tuple[bool, str]:
    return lane != "main", lane


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace that :func:`write_trace` has written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a trace.
    """
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    if not isinstance(content, dict) or "traceEvents" not in content:
        raise ValueError("no traceEvents")
    return content


def write_trace(path: Path, content: dict[str, Any]) -> None:
    """Write a trace, compressed if ``path`` ends in ``.gz``.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(content)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
