"""The watchdog: a thread on each rank that reports the rank's position and Python stack when other ranks ask.

In normal operation a watchdog only polls the store twice a second for a question. A rank whose collective failed asks;
the watchdogs of all running processes answer. The error message then describes what each rank was doing, and which
ranks do not answer.
"""

import atexit
import json
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from partita.comm.blocked import Blocked, blocked_in, place_of
from partita.comm.collective_log import CollectiveLog
from partita.comm.node.forks import connections_kept_from_children

POLL_S, ANSWER_S, STORE_TIMEOUT_S = 0.5, 2.0, 2.0
# Seconds for which close waits for the thread: several requests to the store, each of which may time out.
END_S = 30.0
MOST_FAILURES = 5
# Number of innermost frames of a stack in a message.
NUM_FRAMES = 12
# Paths in the stack of a thread that waits for other ranks.
COLLECTIVES = ("distributed_c10d.py", "partita/comm/", "partita/sharding/unshard_order.py")
# Text of errors that are caused by another rank's error: that of partita, and those of gloo.
_FOLLOWS = re.compile(r"failed: rank \d+ ended with |Connection (closed|reset) by (remote )?peer")


@dataclass(frozen=True)
class Position:
    """The position of a rank: the number of operations that it has logged, its place in the code, and the collective
    of the user's code in which it waits.
    """

    events: int
    place: str
    blocked: Blocked | None

    @staticmethod
    def of(answer: Mapping[str, Any]) -> "Position":
        """Convert a watchdog's answer to a position."""
        blocked = answer["blocked"]
        made = Blocked(blocked["name"], tuple(blocked["ranks"]), blocked["caller"]) if blocked else None
        return Position(int(answer["events"]), str(answer["at"]), made)


class Watchdog:
    """The watchdog of ``rank``.

    Args:
        topic: prefix of the keys; distinguishes several watchdogs in one store.
        log: the rank's collective log.
    """

    def __init__(self, topic: str, rank: int, num_ranks: int, log: CollectiveLog) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._log = log
        with connections_kept_from_children():
            self._store = _get_default_store().clone()  # type: ignore[attr-defined]  # torch's stubs do not know it
        self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        self._prefix = f"partita/{topic}"
        self._process = os.getpid()
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._ended = self._synchronizes_at = ""
        self._description: str | None = None
        self.endings: list[str] = []  # errors of ranks that have ended; filled by describe_ranks
        self._checks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        _hooked.add(self)
        self._thread = threading.Thread(target=self._watch, name="partita watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def call_regularly(self, check: Callable[[], None]) -> None:
        """Call a method from the watchdog's thread as long as its object exists."""
        self._checks.append(weakref.WeakMethod(check))

    # ------------------------------------------------------------------- answering

    def _watch(self) -> None:
        answered = failures = 0
        while failures < MOST_FAILURES and not self._closed.wait(POLL_S):
            try:
                asked = int(self._get("asked") or 0)
                if asked > answered:  # the answer to the newest question also answers the earlier ones
                    self._answer(asked)
                answered = asked
                for check in [found for reference in self._checks if (found := reference()) is not None]:
                    check()
                failures = 0
            except RuntimeError:  # the store is slow, or the process that served it has ended
                failures += 1

    def _answer(self, number: int) -> None:
        self._log.publish()  # the main thread may be waiting for the device
        with self._lock:
            answer = json.dumps({"number": number, **self._status()})
            self._store.set(f"{self._prefix}/answer/{self._rank}", answer)

    def _status(self) -> dict[str, Any]:
        frame = sys._current_frames().get(self._watched)
        blocked = blocked_in(frame)
        stack = traceback.format_stack(frame)[-NUM_FRAMES:] if frame is not None else []
        return {
            "micro_batches": self._log.num_micro_batches,
            "events": self._log.count,
            "does": self._ended or self._log.doing,
            "call": self._synchronizes_at,
            "stack": "".join(stack).rstrip(),
            "at": place_of(frame) if frame is not None else "",
            "blocked": asdict(blocked) if blocked else None,
        }

    @contextmanager
    def synchronizing(self, call: str) -> Iterator[None]:
        """Report during the block that this rank is at ``call``."""
        self._synchronizes_at = call
        try:
            yield
        finally:
            self._synchronizes_at = ""

    def ended(self, error: BaseException) -> None:
        """Report that this rank ends because of an error. No effect in a forked child."""
        if os.getpid() != self._process:
            return
        first = str(error).partition("\n")[0]
        self._ended = f"ended with {type(error).__name__}: {first}"
        place = f"after {self._log.num_micro_batches} micro-batches, {self._log.doing}"
        try:
            with self._lock:
                self._store.set(f"{self._prefix}/ended/{self._rank}", json.dumps([self._ended, place]))
                self._store.set(f"{self._prefix}/ended", str(self._rank))
        except RuntimeError:
            pass

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.ended(error)
        self._hook(kind, error, trace)

    # ---------------------------------------------------------------------- asking

    def has_ending(self) -> bool:
        """Return whether another rank has ended because of an error, and this one has not."""
        try:
            return not self._ended and bool(self._get("ended"))
        except RuntimeError:  # the store is slow: nothing is known
            return False

    def describe_ranks(self) -> str:
        """Describe what every rank is doing, for an error message; called once."""
        with self._asking:
            if self._description is None:
                try:
                    self._description = self._ask()
                except RuntimeError as error:
                    self._description = (
                        "rank 0's process (or the launcher's), which has the ranks' store, does not answer: it was "
                        f"stopped or has ended ({str(error).partition(chr(10))[0]})"
                    )
            return self._description

    def waiting_in_other_collectives(self, call: str) -> dict[int, int]:
        """Return the ranks that wait in a collective other than ``call``, with the number of operations they have
        logged. Empty if some rank computes or does not answer: the others may be waiting for it.
        """
        try:
            answers, _ = self._answers()
        except RuntimeError:  # the store is slow: nothing is known
            return {}
        elsewhere = {rank: answer for rank, answer in answers.items() if answer["call"] != call}
        waits = all(any(place in str(answer["stack"]) for place in COLLECTIVES) for answer in elsewhere.values())
        if not waits or len(answers) < self._num_ranks:
            return {}
        return {rank: int(answer["events"]) for rank, answer in elsewhere.items()}

    def _ask(self) -> str:
        answers, endings = self._answers()
        self.endings = [f"rank {rank} {text}" for rank, (text, _) in endings.items()]
        return "\n".join(self._line(rank, answers.get(rank), endings.get(rank)) for rank in range(self._num_ranks))

    def _answers(self) -> tuple[dict[int, dict[str, Any]], dict[int, tuple[str, str]]]:
        """Return, by rank, the answers; and the errors of ranks that have ended, with their places."""
        number, every = self.ask(), set(range(self._num_ranks))
        end, answers, endings = time.monotonic() + ANSWER_S, dict[int, dict[str, Any]](), self._endings(every)
        while (missing := every - answers.keys() - endings.keys()) and time.monotonic() < end:
            answers |= self._answers_to(number, missing)
            endings |= self._endings(missing - answers.keys())  # a rank may end in place of answering
            time.sleep(POLL_S / 20)
        return answers, endings

    def _endings(self, ranks: set[int]) -> dict[int, tuple[str, str]]:
        found = ((rank, self._get(f"ended/{rank}")) for rank in sorted(ranks))
        return {rank: tuple(json.loads(text)) for rank, text in found if text}

    def ask(self) -> int:
        """Ask every rank what it is doing. Return the number of the question at once.

        Raises:
            RuntimeError: the store is slow.
        """
        with self._lock:
            number = int(self._store.add(f"{self._prefix}/asked", 1))
        self._answer(number)
        return number

    def positions(self, number: int) -> dict[int, Position]:
        """Return the answers to question ``number`` that have arrived, by rank.

        Raises:
            RuntimeError: the store is slow.
        """
        answers = self._answers_to(number, set(range(self._num_ranks)))
        return {rank: Position.of(answer) for rank, answer in answers.items()}

    def _answers_to(self, number: int, ranks: set[int]) -> dict[int, dict[str, Any]]:
        found = {rank: json.loads(text) for rank in ranks if (text := self._get(f"answer/{rank}"))}
        return {rank: answer for rank, answer in found.items() if answer["number"] >= number}

    def _get(self, key: str) -> str:
        """Return the note under a key; empty if there is none."""
        name = f"{self._prefix}/{key}"
        with self._lock:
            return self._store.get(name).decode() if self._store.check([name]) else ""

    def _line(self, rank: int, answer: dict[str, Any] | None, ending: tuple[str, str] | None) -> str:
        if ending is not None:
            error, place = ending
            return f"rank {rank}, {place}, {error}"
        if answer is None:
            return f"rank {rank} does not answer: its process was stopped or has ended; look at its output first"
        behind = self._log.count - int(answer["events"])
        lag = f", {behind} operations behind rank {self._rank}" if behind > 0 else ""
        stack = f", at\n{answer['stack']}" if rank != self._rank else ""
        return f"rank {rank}, after {answer['micro_batches']} micro-batches, {answer['does']}{lag}{stack}"

    def close(self) -> None:
        """Stop the thread and wait for it: a process that exits while the thread is inside torch's store aborts."""
        self._closed.set()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        for later in _hooked:  # engines may be closed in any order
            if later._hook == self._on_exception:
                later._hook = self._hook


_hooked = weakref.WeakSet[Watchdog]()  # each calls the sys.excepthook that it replaced


def follows_from_another_rank(message: str) -> bool:
    """Return whether the error with this message was caused by another rank's error."""
    return _FOLLOWS.search(message) is not None
