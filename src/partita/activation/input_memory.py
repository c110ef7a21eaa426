"""Memory of a tier for copies of activations."""

from collections import deque
from collections.abc import Callable

import torch

from partita.errors import PartitaError
from partita.memory.tiers import InMemory, OnHost, StateMemory, StoredState
from partita.table.residence import Tier

STATE = "activations"


class InputMemory:
    """An allocator of buffers in a tier for copies of activations.

    Buffers are reused, and replaced by larger ones if needed. So nothing is allocated any more once the longest
    sequences have occurred.

    If the tier is full, the copy is made on the device. This rank then continues like the other ranks until all of them
    call :meth:`check`.

    Args:
        finish: waits for all copies from and to buffers.
    """

    def __init__(self, memory: StateMemory, tier: Tier, device: torch.device, finish: Callable[[], object]) -> None:
        self._memory = memory
        self.tier = tier
        self._device = device
        self._finish = finish
        self._free = list[StoredState]()
        self._returned = deque[StoredState]()  # appended by any thread that frees a graph
        self._error: PartitaError | None = None

    def allocate(self, num_bytes: int) -> StoredState:
        """Return a buffer of at least ``num_bytes``."""
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort(key=lambda buffer: buffer.num_elements)
        for place, buffer in enumerate(self._free):
            if buffer.num_elements >= num_bytes:
                return self._free.pop(place)
        if self._free:
            self._finish()
            self._memory.drop(STATE, self._free.pop(0))
        try:
            kept = self._memory.keep(STATE, num_bytes, torch.uint8, self.tier)
        except PartitaError as error:
            self._error = self._error or error
            return InMemory(torch.empty(num_bytes, dtype=torch.uint8, device=self._device), Tier.DEVICE)
        # The host never uses it: copies to and from it are in the order of their stream.
        return InMemory(kept.tensor, self.tier) if isinstance(kept, OnHost) else kept

    def free(self, buffer: StoredState) -> None:
        """Free a buffer for later copies, which the stream runs after the current ones."""
        if buffer.tier is self.tier:
            self._returned.append(buffer)

    def check(self) -> None:
        """Check that the tier has not been full since the last call.

        Raises:
            PartitaError: it has been full.
        """
        found, self._error = self._error, None
        if found is not None:
            raise found
