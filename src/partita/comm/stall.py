"""Diagnosis of a long wait for other ranks: they are late, or they will never arrive.

Ranks that are late (they load data, compile, evaluate) are named once in a warning. A rank that is blocked in a
collective of ``torch.distributed`` which needs this rank will never arrive, so the wait ends with an error.
"""

import contextlib
import logging
import time
from collections.abc import Sequence

from partita.comm.mesh import Mesh
from partita.comm.watchdog import Position
from partita.errors import PartitaError

# Seconds of waiting before the first question to the other ranks; at most between two questions; between a deadlock and
# the question that confirms it.
FIRST_S, MOST_S, CONFIRM_S = 2.0, 60.0, 2.0
# Seconds of waiting before ranks that are late are named.
WARN_S = 10.0

_log = logging.getLogger("partita")


class Stall:
    """One wait for the ``ranks`` of the mesh, which take part in the same operation.

    Nothing here blocks: ranks are asked in one call of :meth:`check`, and their answers are read in the next.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        self._mesh = mesh
        self._watchdog = mesh.watchdog
        self._ranks = ranks
        self._began = time.monotonic()
        self._next_s = FIRST_S
        self._question = 0
        self._stuck: dict[int, Position] = {}

    def check(self) -> None:
        """Ask the other ranks, or read their answers. Called about once a second during the wait.

        Raises:
            PartitaError: a rank waits for this one in a collective of torch.distributed.
        """
        if self._watchdog is None:
            return
        waited_s, positions = time.monotonic() - self._began, None
        with contextlib.suppress(RuntimeError):  # the store is slow: nothing is known
            if self._question:
                number, self._question = self._question, 0
                positions = self._watchdog.positions(number)
            elif waited_s >= self._next_s:
                self._next_s = waited_s + min(waited_s, MOST_S)
                self._question = self._watchdog.ask()
        if positions is not None:
            self._judge(positions, waited_s)

    def _judge(self, positions: dict[int, Position], waited_s: float) -> None:
        own = self._mesh.rank
        stuck = {
            rank: position
            for rank, position in positions.items()
            if rank != own
            and rank in self._ranks
            and position.events < self._mesh.log.count  # it has not launched what this rank waits for
            and position.blocked
            and own in position.blocked.ranks
        }
        for rank, position in stuck.items():
            if self._stuck.get(rank) == position:
                raise self._error(rank, position)
        if stuck:
            self._next_s = waited_s + CONFIRM_S
        self._stuck = stuck
        if not stuck and waited_s >= WARN_S:
            self._warn(positions, waited_s)

    def _error(self, rank: int, position: Position) -> PartitaError:
        assert position.blocked is not None
        assert self._watchdog is not None
        return PartitaError(
            f"rank {self._mesh.rank} {self._mesh.log.last} and waits for rank {rank}, which waits for rank "
            f"{self._mesh.rank} in torch.distributed.{position.blocked.name} ({position.blocked.caller}): neither can "
            "continue. With sharded parameters (zero.stage 3) every rank takes part in a forward: run the model on "
            "every rank, or run it on one rank inside `with engine.gathered(engine.module):`, which every rank enters"
            f"\n{self._watchdog.describe_ranks()}"
        )

    def _warn(self, positions: dict[int, Position], waited_s: float) -> None:
        """Warn about late ranks, once per mesh, on the first of the ranks that wait for them."""
        own = self._mesh.log.count
        late = [rank for rank in self._ranks if rank not in positions or positions[rank].events < own]
        waiting = [rank for rank in self._ranks if rank not in late]
        if not late or self._mesh.log.has_named_late or self._mesh.rank != min(waiting):
            return
        self._mesh.log.has_named_late = True
        places = [f"rank {rank} ({positions[rank].place if rank in positions else 'no answer'})" for rank in late[:4]]
        _log.warning(
            "rank %d %s and has waited %.0f s for %s; it waits for communication.timeout_s (%g s)",
            self._mesh.rank,
            self._mesh.log.last,
            waited_s,
            ", ".join(places),
            self._mesh.timeout_s,
        )
