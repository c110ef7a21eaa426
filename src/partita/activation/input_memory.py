"""Memory of a tier for copies of activations."""

from collections import deque
from collections.abc import Callable

import torch

from partita.errors import PartitaError
from partita.memory.tiers import InMemory, Kept, StateMemory
from partita.plan.residence import Tier

STATE = "activations"


class InputMemory:
    """An allocator of tier memory for copies of activations.

    There are as many rooms as there were copies at a time, each as large as the largest copy in it: if lengths vary,
    nothing is allocated any more once the longest were seen.

    If the tier is full, a copy is made on the device: this rank continues as the others do, until all of them
    :meth:`check`.

    Args:
        finish: waits for all copies from and to rooms.
    """

    def __init__(self, memory: StateMemory, tier: Tier, device: torch.device, finish: Callable[[], object]) -> None:
        self._memory = memory
        self.tier = tier
        self._device = device
        self._finish = finish
        self._free = list[Kept]()
        self._returned = deque[Kept]()  # by whichever thread drops a graph
        self._problem: PartitaError | None = None

    def take(self, num_bytes: int) -> Kept:
        """Return a room of at least ``num_bytes``."""
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort(key=lambda room: room.num_elements)
        for place, room in enumerate(self._free):
            if room.num_elements >= num_bytes:
                return self._free.pop(place)
        if self._free:
            self._finish()
            self._memory.drop(STATE, self._free.pop(0))
        try:
            return self._memory.keep(STATE, num_bytes, torch.uint8, self.tier)
        except PartitaError as error:
            self._problem = self._problem or error
            return InMemory(torch.empty(num_bytes, dtype=torch.uint8, device=self._device), Tier.DEVICE)

    def give_back(self, room: Kept) -> None:
        """Let later copies use the room, after the work that the stream was given for it."""
        if room.tier is self.tier:
            self._returned.append(room)

    def check(self) -> None:
        """Check that the tier was not full since the last call.

        Raises:
            PartitaError: it was.
        """
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
