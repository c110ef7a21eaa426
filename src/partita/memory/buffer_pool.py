"""A buffer pool: slots of memory that are borrowed and returned, so that a step neither allocates nor frees them.

A slot is returned with the event of the last work that used it; the next borrower waits for that event on the stream
that will write. Slots have a few size classes (an embedding is larger than a block), each with a planned number of
slots. If all slots of a class are borrowed, the pool grows by one, with a ledger entry and one warning.

Source: constant-size buffers and defragmentation of ZeRO-R (Rajbhandari et al., 2020, sections 6.2 and 6.3).
"""

import warnings
from dataclasses import dataclass, field

import torch

from partita.memory.allocate import allocate, allocate_host
from partita.memory.ledger import Ledger
from partita.memory.streams import Event, record
from partita.table.residence import Tier
from partita.table.slots import PlannedPool, class_of

KEPT = "gathered"  # the ledger's state for memory that slots have transferred to unsharded parameters


@dataclass
class Slot:
    storage: torch.UntypedStorage
    num_bytes: int
    last_use: Event = field(default_factory=Event)
    spare: bool = False


class BufferPool:
    """A pool with the planned slots.

    Args:
        name: the ledger's state, and the name in warnings.
        ledger: records the slots' bytes.
        tier: the memory of the slots, on the device or on the host.
        backed: True if slots own memory; False if a :class:`StorageSwap` resizes storages instead of swapping.
    """

    def __init__(
        self,
        name: str,
        planned: PlannedPool,
        ledger: Ledger,
        device: torch.device,
        *,
        tier: Tier = Tier.DEVICE,
        backed: bool = True,
    ) -> None:
        self._name = name
        self._device = device
        self._ledger = ledger
        self._tier = tier
        self._backed = backed
        self._warned = False
        self._free = {size: [self._new(size) for _ in range(num)] for size, num in planned.slots().items()}

    def provide(self, num_bytes: int, depth: int) -> None:
        """Add ``depth`` slots for tensors of another size, if there are no larger slots."""
        if all(size < num_bytes for size in self._free):
            self._free[num_bytes] = [self._new(num_bytes) for _ in range(depth)]

    def available(self, num_bytes: int) -> bool:
        """Return whether a slot for ``num_bytes`` is free."""
        return bool(self._free[self._class_of(num_bytes)])

    def borrow(self, num_bytes: int, *, spare: bool = False, newest: bool = False) -> Slot:
        """Return a slot of at least ``num_bytes``; its ``last_use`` must be waited for before it is written.

        Args:
            spare: if no slot is free, allocate a temporary slot, which is freed on return, instead of growing the pool.
            newest: take the slot that was returned last, so that slots that were never used occupy no physical memory
                yet; by default the slot that was returned first, whose last use is the most likely to have ended.
        """
        free = self._free[self._class_of(num_bytes)]
        if free:
            return free.pop(-1 if newest else 0)
        if spare:
            return self._new(num_bytes, spare)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"'{self._name}' (see memory_report) grows by {num_bytes / 1e6:.1f} MB: more parameters are unsharded "
                "at the same time than in a plain forward and backward (create_graph, units inside each other, a "
                "parameter read by another unit); the memory stays allocated for the rest of the run",
                stacklevel=2,
            )
        return self._new(self._class_of(num_bytes))

    def give_back(self, slot: Slot, last_use: Event) -> None:
        if slot.spare:
            self._ledger.remove(self._name, slot.num_bytes, self._tier)
            return
        slot.last_use = last_use
        self._free[slot.num_bytes].append(slot)

    def transfer(self, slot: Slot) -> None:
        """Transfer a slot's memory permanently to the storage that uses it (see :meth:`StorageSwap.drop`), and allocate
        new memory for the slot.
        """
        self._ledger.add(KEPT, slot.num_bytes, self._tier)
        if self._backed and not slot.spare:
            slot.storage = self._memory(slot.num_bytes)

    def transfer_freed(self, num_bytes: int) -> None:
        """Record that transferred memory was freed (see :meth:`transfer`)."""
        self._ledger.remove(KEPT, num_bytes, self._tier)

    def _class_of(self, num_bytes: int) -> int:
        found = class_of(list(self._free), num_bytes)
        if found is None:
            self._free[num_bytes] = []
        return num_bytes if found is None else found

    def _new(self, num_bytes: int, spare: bool = False) -> Slot:
        self._ledger.add(self._name, num_bytes, self._tier)
        memory = self._memory(num_bytes if self._backed else 0)
        # The current stream is still filling it with zeros, and may still use earlier tensors at this address.
        return Slot(memory, num_bytes, record(self._device), spare)

    def _memory(self, num_bytes: int) -> torch.UntypedStorage:
        make = allocate if self._tier is Tier.DEVICE else allocate_host
        return make(num_bytes, torch.uint8, self._device).untyped_storage()


class StorageSwap:
    """Moves a slot's memory into a tensor's storage and back, without a copy.

    If torch cannot swap the memory of two storages (before 2.12), or with ``swap=False``, the storage is resized
    instead: the peak is the same, but memory is allocated and freed.
    """

    def __init__(self, swap: bool = True) -> None:
        self.swap = swap and storage_swap_available()

    def attach(self, storage: torch.UntypedStorage, slot: Slot) -> None:
        if self.swap:
            _swap(storage, slot.storage)
        else:
            storage.resize_(slot.num_bytes)

    def detach(self, storage: torch.UntypedStorage, slot: Slot) -> None:
        if self.swap:
            _swap(storage, slot.storage)
        else:
            storage.resize_(0)

    def drop(self, storage: torch.UntypedStorage) -> None:
        """Free the memory that a slot has transferred to a storage."""
        if self.swap:
            _swap(storage, torch.UntypedStorage(0, device=storage.device))
        else:
            storage.resize_(0)


def _swap(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    swap = getattr(storage, "_swap_data_ptr_")  # noqa: B009 - torch's stubs do not know it
    swap(other)


def storage_swap_available() -> bool:
    """Return whether torch can swap the memory of two storages."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")
