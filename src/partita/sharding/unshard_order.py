"""Unshard-order check: all ranks gather the same units in the same order, or an error names those that do not.

Without it, ranks that run different modules (a text-only batch, a layer dropped on one rank) would read wrong
parameters or hang.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from partita.comm.collective_log import STEP, UPDATE, CollectiveLog
from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.comm.stall import FIRST_S, Stall
from partita.comm.synchronization_check import check_synchronized
from partita.errors import PartitaError
from partita.memory.streams import Event

# Seconds without a response after which this rank launches what other ranks may wait for.
PATIENCE_S = 1.0

_log = logging.getLogger("partita")


class UnshardOrder(Protocol):
    """A check of the order, around gathers. ``on_stall`` is called repeatedly while a rank waits too long."""

    def gathers(self, number: int) -> None:
        """Record that this rank begins to gather the unit of that number. Raises as :meth:`wait` does."""

    def wait(self, gathered: Event) -> None:
        """Wait for a gather.

        Raises:
            PartitaError: ranks gather different units; the message names them.
        """

    def synchronize(self, call: str) -> None:
        """Wait until every rank is at ``call`` (its name, at most 40 letters).

        Raises:
            PartitaError: a rank is at another call or waits in another collective.
        """

    def step(self) -> None:
        """Synchronize the ranks at the end of a micro-batch. Raises as :meth:`wait` does."""

    def updated(self) -> None:
        """Record a change of the parameters, which every rank makes at the same time. Raises as :meth:`wait` does."""


def agree(group: Group, mesh: Mesh, on_stall: Callable[[], None]) -> UnshardOrder:
    """Create the check that suits the transport of the ranks that gather the same units. Called on every rank."""
    kind = ComparedLogs if group.transport.separates_tags else RepeatedOrder
    return kind(group, mesh, on_stall)


class ComparedLogs:
    """The check for transports on which ranks that gather different units wait for each other.

    It sends nothing besides gathers. A rank that waits too long publishes its log and reads those of the other ranks.
    """

    def __init__(self, group: Group, mesh: Mesh, on_stall: Callable[[], None]) -> None:
        self._group = group
        self._mesh = mesh
        self._log = mesh.log
        self._on_stall = on_stall
        if self._log.board is None:
            self._log.board = group.board()

    def gathers(self, number: int) -> None:
        self._log.add(number)

    def wait(self, gathered: Event) -> None:
        if self._group.size == 1:  # only the disk can be slow
            gathered.wait()
            return
        found: list[int | None] | None = None
        stall: Stall | None = None
        try:
            while not gathered.wait_for(PATIENCE_S):
                self._on_stall()
                stall = stall or Stall(self._mesh, self._group.ranks)
                stall.check()
                before, found = found, self._log.difference()
                if found is not None and (None not in found or found == before):
                    break
            else:
                return
        except PartitaError:  # other ranks may have ended because they found the difference first
            found = self._log.difference()
            if found is None:
                raise
        raise _different(self._log, self._group.ranks, found)

    def synchronize(self, call: str) -> None:
        check_synchronized(self._group, self._mesh.watchdog, call)

    def step(self) -> None:
        self._log.add(STEP)
        if len(set(self._exchange(self._log.count, "engine.step"))) > 1:
            raise PartitaError(
                f"rank {self._group.index} is at engine.step(), and another rank is not: call the engine's methods in "
                "the same order on every rank"
            )

    def updated(self) -> None:
        pass

    def _exchange(self, number: int, call: str) -> list[int]:
        """Return the number of every rank at this call. Raises as :meth:`wait` does."""
        message = self._group.exchange(torch.tensor([number], device="cpu"), call)
        numbers = list[int]()
        self.wait(Event(lambda: numbers.extend(message.wait().view(-1).tolist()), wait_for=message.wait_for))
        return numbers


class RepeatedOrder(ComparedLogs):
    """The check for transports on which ranks that gather different units would read wrong data.

    It sends nothing as long as gathers are in the order of earlier ones: the logs of the ranks are equal so far, so all
    ranks expect the same unit next. A rank that is about to gather another unit first waits until all ranks are about
    to gather that one. Ranks that are not wait for its gather, and their logs name what they gather instead.

    The host does not wait for gathers; it waits for the device, anywhere in the user's code. So the watchdog's thread
    checks the last gather, and logs an error if ranks that differ keep the device from completing it.
    """

    def __init__(self, group: Group, mesh: Mesh, on_stall: Callable[[], None]) -> None:
        super().__init__(group, mesh, on_stall)
        self._successors = mesh.log.successors[group.axes]
        self._last: _Gather | None = None
        if mesh.watchdog is not None and group.size > 1:
            mesh.watchdog.call_regularly(self._look)

    def wait(self, gathered: Event) -> None:
        self._last = _Gather(gathered, Stall(self._mesh, self._group.ranks))
        super().wait(gathered)

    def _look(self) -> None:
        last = self._last
        if last is None or time.monotonic() - last.began < FIRST_S or not last.event.is_behind():
            return
        try:
            last.stall.check()
            if (found := self._log.difference()) is not None and None not in found:
                raise _different(self._log, self._group.ranks, found)
        except PartitaError as error:
            self._last = None  # once
            _log.error("%s", error)

    def gathers(self, number: int) -> None:
        self._log.add(number)
        if not self._successors.expect(number):
            numbers = self._exchange(number, "a gather")
            if len(set(numbers)) > 1:
                raise _different(self._log, self._group.ranks, numbers)
        self._successors.add(number)

    def step(self) -> None:
        self.gathers(STEP)

    def updated(self) -> None:
        self.gathers(UPDATE)


@dataclass(frozen=True)
class _Gather:
    """A gather that the device waits for, and the diagnosis if that takes long."""

    event: Event
    stall: Stall
    began: float = field(default_factory=time.monotonic)


def _different(log: CollectiveLog, ranks: Sequence[int], events: Sequence[int | None]) -> PartitaError:
    known = ((rank, event) for rank, event in zip(ranks, events, strict=True) if event is not None)
    does = "; ".join(f"rank {rank} {log.describe(event)}" for rank, event in known)
    return PartitaError(
        f"the ranks run different modules: {does}. With sharded parameters every rank must run the same modules in the "
        "same order: run the module on every rank (multiply an unwanted output by 0), put it into one unit with a "
        "module that always runs (zero.units), or use zero.stage 2"
    )
