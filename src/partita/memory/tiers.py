"""States stored in a memory tier (device, host, disk), behind one interface: a state is acquired while in use.

On the device and on the host, a lease is the memory itself. For the disk it is temporary host memory, which is read on
acquisition and written back if it has changed. Several leases may be active, in several threads.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall", 2021, section 6 (infinity offload engine).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partita.memory import accelerator
from partita.memory.allocate import PinnedBuffer, allocate, allocate_host, over
from partita.memory.buffer_pool import Slot
from partita.memory.disk import ALIGNMENT, DiskReport, Region
from partita.memory.ledger import Ledger
from partita.memory.scratch import Scratch
from partita.memory.streams import Event, finish, record_for_host
from partita.table.residence import Tier

# A staging slot is used for requests of at least this share of its size.
FITS = 0.6


@dataclass
class Lease:
    """A state in memory while it is in use: ``tensor`` is valid from :meth:`wait` until :meth:`end`."""

    tensor: Tensor
    _ready: Event = field(default_factory=Event)
    _end: Callable[[bool], None] = lambda changed: None

    def wait(self) -> Tensor:
        """Wait for the values, and return them."""
        self._ready.wait()
        return self.tensor

    def end(self, *, changed: bool) -> None:
        """Return the memory; a ``changed`` state is written back to its tier."""
        self._end(changed)


class StoredState(ABC):
    """A flat state of ``num_elements``, stored in ``tier``."""

    tier: Tier
    num_elements: int
    dtype: torch.dtype

    @abstractmethod
    def lease(self, *, read: bool = True) -> Lease:
        """Return the state in memory. With ``read=False`` its content is undefined, and must be overwritten in full."""

    def read_into(self, target: Tensor) -> Event | None:
        """Start reading the state directly into ``target``; None if that is not possible, and a lease is needed.

        The memory must not be used until the event has passed.
        """
        return None

    def write_from(self, source: Tensor) -> Event | None:
        """Start overwriting the state directly from ``source``; None as in :meth:`read_into`."""
        return None

    def load(self) -> Tensor:
        """Return a copy of the values (on the host for the disk tier)."""
        lease = self.lease()
        values = lease.wait().clone()
        lease.end(changed=False)
        return values

    def store(self, values: Tensor) -> None:
        """Overwrite the state."""
        lease = self.lease(read=False)
        lease.wait().copy_(values)
        lease.end(changed=True)


class InMemory(StoredState):
    """A state that is always in memory: on the device, or on the host."""

    def __init__(self, tensor: Tensor, tier: Tier) -> None:
        self.tensor = tensor
        self.tier = tier
        self.num_elements = tensor.numel()
        self.dtype = tensor.dtype

    def lease(self, *, read: bool = True) -> Lease:
        return Lease(self.tensor)


class OnHost(InMemory):
    """A state in pinned host memory that copies from the device overwrite.

    Copies may still run when the lease ends: the next lease waits for them.
    """

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        super().__init__(tensor, Tier.HOST)
        self._device = device
        self._written = Event()

    def lease(self, *, read: bool = True) -> Lease:
        return Lease(self.tensor, self._written, self._end)

    def _end(self, changed: bool) -> None:
        if changed:
            self._written = record_for_host(self._device)


class OnDisk(StoredState):
    """A state in a region of the rank's scratch file."""

    tier = Tier.DISK

    def __init__(self, num_elements: int, dtype: torch.dtype, disk: Scratch, staging: "Staging") -> None:
        self.num_elements = num_elements
        self.dtype = dtype
        self._disk = disk
        self._staging = staging
        self.region: Region = disk.reserve(self.num_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def lease(self, *, read: bool = True) -> Lease:
        slot = self._staging.borrow(self.region.num_bytes)
        values = over(slot.storage, self.dtype, self.num_elements)

        def end(changed: bool) -> None:
            self._staging.give_back(slot, (lambda: self._disk.write(self.region, values)) if changed else None)

        return Lease(values, self._disk.read(self.region, values) if read else Event(), end)

    def read_into(self, target: Tensor) -> Event | None:
        return self._disk.read(self.region, target) if self._is_like(target) else None

    def write_from(self, source: Tensor) -> Event | None:
        return self._disk.write(self.region, source) if self._is_like(source) else None

    def release(self) -> None:
        """Release the region for other states."""
        self._disk.release(self.region)

    def _is_like(self, other: Tensor) -> bool:
        """Return whether the disk can read into and write from this memory directly."""
        on_page = accelerator.is_host(other.device) and other.data_ptr() % ALIGNMENT == 0
        return on_page and other.dtype == self.dtype and other.shape == (self.num_elements,) and other.is_contiguous()


class Staging:
    """Host staging buffers for states on disk. Thread-safe.

    They grow to the maximum in use at a time and are not freed: nothing is allocated after the first full step.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device = device
        self._ledger = ledger
        self._free = list[Slot]()
        self._lock = threading.Lock()

    def borrow(self, num_bytes: int) -> Slot:
        """Return a slot of at least ``num_bytes``, after its earlier content is written to the disk."""
        with self._lock:
            fitting = [slot for slot in self._free if FITS * slot.num_bytes <= num_bytes <= slot.num_bytes]
            if fitting:
                slot = min(fitting, key=lambda slot: slot.num_bytes)
                self._free.remove(slot)
            else:
                self._ledger.add("staging", num_bytes, Tier.HOST)
                slot = Slot(allocate_host(num_bytes, torch.uint8, self._device).untyped_storage(), num_bytes)
        slot.last_use.wait()
        return slot

    def give_back(self, slot: Slot, write: Callable[[], Event] | None = None) -> None:
        """Return a slot, to be used again after the current stream's copies. ``write``: waits for them, and writes."""
        if write is None:
            slot.last_use = record_for_host(self._device)
        else:
            finish(self._device)
            slot.last_use = write()
        with self._lock:
            self._free.append(slot)


class StateMemory:
    """The memory of this rank's states. The ledger records every byte.

    Args:
        disk: opens the disk tier when the first state is stored there.
    """

    def __init__(self, device: torch.device, ledger: Ledger, disk: Callable[[], Scratch]) -> None:
        self._device = device
        self.ledger = ledger
        self._open_disk = disk
        self._staging = Staging(device, ledger)
        self._copies = PinnedBuffer()
        self._disk: Scratch | None = None

    def register(self, state: str, tensor: Tensor) -> StoredState:
        """Register a tensor that already exists on the device as a state."""
        self.ledger.add(state, tensor.nbytes)
        return InMemory(tensor, Tier.DEVICE)

    def keep(self, state: str, num_elements: int, dtype: torch.dtype, tier: Tier) -> StoredState:
        """Allocate a state. Its values are zeros; on the disk they are undefined."""
        kept = self._allocate(num_elements, dtype, tier)
        self.ledger.add(state, num_elements * dtype.itemsize, tier)
        return kept

    def drop(self, state: str, kept: StoredState) -> None:
        """Free the memory of a state that no copy in flight uses."""
        self.ledger.remove(state, kept.num_elements * kept.dtype.itemsize, kept.tier)
        if isinstance(kept, OnDisk):
            kept.release()

    def keep_values(self, state: str, values: Tensor, dtype: torch.dtype, tier: Tier) -> StoredState:
        """Allocate a state and store a copy of flat ``values`` in it."""
        kept = self.keep(state, values.numel(), dtype, tier)
        kept.store(values)
        return kept

    def scratch(self, num_elements: int, dtype: torch.dtype, tier: Tier) -> Lease:
        """Return temporary memory on the device or on the host."""
        if tier is Tier.DEVICE:
            return Lease(torch.empty(num_elements, dtype=dtype, device=self._device))
        slot = self._staging.borrow(num_elements * dtype.itemsize)
        return Lease(over(slot.storage, dtype, num_elements), Event(), lambda changed: self._staging.give_back(slot))

    def on_host_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return memory on the host for copies of tensors on the device, valid until the next call (by one thread)."""
        before = self._copies.num_bytes
        found = self._copies.like(tensors)
        self.ledger.add("staging", self._copies.num_bytes - before, Tier.HOST)
        return found

    def _allocate(self, num_elements: int, dtype: torch.dtype, tier: Tier) -> StoredState:
        if tier is Tier.DISK:
            self._disk = self._disk or self._open_disk()
            return OnDisk(num_elements, dtype, self._disk, self._staging)
        if tier is Tier.HOST:
            return self.over(allocate_host(num_elements, dtype, self._device), tier)
        return InMemory(allocate(num_elements, dtype, self._device), tier)

    def over(self, tensor: Tensor, tier: Tier) -> StoredState:
        """Return a state in memory that the caller has; it is not in the ledger."""
        is_written_by_copies = tier is Tier.HOST and accelerator.has_streams(self._device)
        return OnHost(tensor, self._device) if is_written_by_copies else InMemory(tensor, tier)

    def provide_disk(self, num_bytes: int, num_states: int) -> None:
        """Reserve disk space for ``num_states`` states with a total of ``num_bytes``, before the first one is stored.

        Raises:
            PartitaError: the disk does not have the space, or the folder cannot be used.
        """
        if num_states:
            self._disk = self._disk or self._open_disk()
            self._disk.provide(num_bytes + num_states * ALIGNMENT)  # each starts at a page

    def disk_report(self) -> DiskReport | None:
        """Return the traffic of the disk tier so far; None if nothing is stored on it."""
        return self._disk.report() if self._disk is not None else None

    def close(self) -> None:
        """Wait for all copies, and close the disk tier; its content is lost. Host memory may be dropped afterwards."""
        accelerator.wait_for_all(self._device)
        if self._disk is not None:
            self._disk.close()
