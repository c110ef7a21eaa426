"""A cheap check that all ranks gather the same unit: before data, its number is exchanged over the control group.

Ranks that run different modules (a text-only batch, a layer dropped on one rank) would otherwise gather each other's
parameters, or wait for ever. The exchange of a few bytes is asynchronous and is read when the gathered unit is opened.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from partita.comm.collectives import Collectives, Handle
from partita.errors import PartitaError

DATA = ("data",)
STEP = -1
# After so many seconds without an answer, this rank lets go of what the others may be waiting for.
PATIENCE_S = 1.0


class Agreement:
    """Messages of equal size, sent by every rank in its own order of events and compared in that order.

    An event is the number of a unit that is gathered, or :data:`STEP` for the end of a micro-batch. ``on_stall`` is
    called again and again while the others do not answer.
    """

    def __init__(self, collectives: Collectives, names: Sequence[str], on_stall: Callable[[], None]) -> None:
        self._collectives, self._names, self._on_stall = collectives, names, on_stall
        self._pending: deque[tuple[torch.Tensor, Handle]] = deque()

    def post(self, event: int) -> None:
        """Say what this rank does next."""
        message = torch.tensor([event], dtype=torch.int64)
        self._pending.append(self._collectives.exchange(message, DATA))

    def verify(self) -> None:
        """Compare everything posted so far.

        Raises:
            PartitaError: ranks do different things; the message names them and their units.
        """
        while self._pending:
            every, handle = self._pending.popleft()
            while not handle.wait_for(PATIENCE_S):
                self._on_stall()
            handle.wait()
            events = every.view(-1).tolist()
            if len(set(events)) > 1:
                does = "; ".join(f"rank {rank} {self._describe(event)}" for rank, event in enumerate(events))
                raise PartitaError(
                    f"the ranks run different modules: {does}. With sharded parameters every rank must run the same "
                    "modules in the same order: run the module on every rank (multiply what is not wanted by 0), put "
                    "it into one unit with a module that always runs (zero.units), or use zero.stage 2"
                )

    def _describe(self, event: int) -> str:
        return "is at engine.step()" if event == STEP else f"gathers '{self._names[event]}'"
