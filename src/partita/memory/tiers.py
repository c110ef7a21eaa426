"""The memories a state can rest in, behind one interface: a state is *kept* in a tier, and *lent* while it is used.

On the device and on the host a loan is the memory itself. From the disk it is host memory for a while, read when it is
lent and written back when it has changed; several loans may be under way, from several threads.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall", 2021, section 6 (infinity offload engine).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partita.memory import accelerator
from partita.memory.allocate import allocate, allocate_host, over
from partita.memory.buffer_pool import Slot
from partita.memory.disk import ALIGNMENT, DiskReport, Region
from partita.memory.ledger import Ledger
from partita.memory.scratch import Scratch
from partita.memory.streams import Event, finish
from partita.plan.residence import Tier

# A staging slot serves what needs at least this share of it.
FITS = 0.6


@dataclass
class Lease:
    """A kept state in memory: ``tensor`` may be used once :meth:`wait` returned, until :meth:`end`."""

    tensor: Tensor
    _ready: Event = field(default_factory=Event)
    _end: Callable[[bool], None] = lambda changed: None

    def wait(self) -> Tensor:
        """The values, as soon as they are there."""
        self._ready.wait()
        return self.tensor

    def end(self, *, changed: bool) -> None:
        """Give the memory back; what was ``changed`` is written where the state rests."""
        self._end(changed)


class Kept(ABC):
    """A flat state of ``num_elements`` at rest in ``tier``."""

    tier: Tier
    num_elements: int
    dtype: torch.dtype

    @abstractmethod
    def lend(self, *, read: bool = True) -> Lease:
        """The state in memory; without ``read`` whatever the memory holds, to be written in full."""

    def read_into(self, target: Tensor) -> Event | None:
        """Begin to read the state into memory that can take it as it comes; None where it has to be lent.

        The memory is left alone until the event has passed.
        """
        return None

    def write_from(self, source: Tensor) -> Event | None:
        """Begin to overwrite the state, as :meth:`read_into` reads it."""
        return None

    def load(self) -> Tensor:
        """A copy of the values (on the disk tier: on the host)."""
        loan = self.lend()
        values = loan.wait().clone()
        loan.end(changed=False)
        return values

    def store(self, values: Tensor) -> None:
        """Overwrite the state."""
        loan = self.lend(read=False)
        loan.wait().copy_(values)
        loan.end(changed=True)


class InMemory(Kept):
    """A state that is always there: on the device, or on the host."""

    def __init__(self, tensor: Tensor, tier: Tier) -> None:
        self.tensor = tensor
        self.tier = tier
        self.num_elements = tensor.numel()
        self.dtype = tensor.dtype

    def lend(self, *, read: bool = True) -> Lease:
        return Lease(self.tensor)


class OnDisk(Kept):
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

    def lend(self, *, read: bool = True) -> Lease:
        slot = self._staging.borrow(self.region.num_bytes)
        values = over(slot.storage, self.dtype, self.num_elements)

        def end(changed: bool) -> None:
            self._staging.give_back(slot, (lambda: self._disk.write(self.region, values)) if changed else Event)

        return Lease(values, self._disk.read(self.region, values) if read else Event(), end)

    def read_into(self, target: Tensor) -> Event | None:
        return self._disk.read(self.region, target) if self._is_like(target) else None

    def write_from(self, source: Tensor) -> Event | None:
        return self._disk.write(self.region, source) if self._is_like(source) else None

    def release(self) -> None:
        """Let another state have the region."""
        self._disk.release(self.region)

    def _is_like(self, other: Tensor) -> bool:
        """Return whether the disk can read into, and write from, this memory without a copy."""
        on_page = accelerator.is_host(other.device) and other.data_ptr() % ALIGNMENT == 0
        return on_page and other.dtype == self.dtype and other.shape == (self.num_elements,) and other.is_contiguous()


class Staging:
    """Host memory that states on disk pass through. Used from several threads.

    It grows to what is in use at a time and keeps it: nothing is allocated once a step has been seen.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device = device
        self._ledger = ledger
        self._free = list[Slot]()
        self._lock = threading.Lock()

    def borrow(self, num_bytes: int) -> Slot:
        """A slot of at least ``num_bytes``, when what was written out of it is on the disk."""
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

    def give_back(self, slot: Slot, write: Callable[[], Event] = Event) -> None:
        """Take a slot back when the current stream's copies from and to it are done; then ``write`` out of it."""
        finish(self._device)
        slot.last_use = write()
        with self._lock:
            self._free.append(slot)


class StateMemory:
    """The memory of this rank's states; every byte is entered in the ledger.

    Args:
        disk: opens the disk tier when the first state is kept there.
    """

    def __init__(self, device: torch.device, ledger: Ledger, disk: Callable[[], Scratch]) -> None:
        self._device = device
        self.ledger = ledger
        self._open_disk = disk
        self._staging = Staging(device, ledger)
        self._disk: Scratch | None = None

    def adopt(self, state: str, tensor: Tensor) -> Kept:
        """A state that has its memory on the device already."""
        self.ledger.add(state, tensor.nbytes)
        return InMemory(tensor, Tier.DEVICE)

    def keep(self, state: str, num_elements: int, dtype: torch.dtype, tier: Tier) -> Kept:
        """Room for a state, for good; its values are zeros, on the disk undefined."""
        kept = self._room(num_elements, dtype, tier)
        self.ledger.add(state, num_elements * dtype.itemsize, tier)
        return kept

    def drop(self, state: str, kept: Kept) -> None:
        """Give back the room of a state that nothing is copied from or to any more."""
        self.ledger.remove(state, kept.num_elements * kept.dtype.itemsize, kept.tier)
        if isinstance(kept, OnDisk):
            kept.release()

    def keep_values(self, state: str, values: Tensor, dtype: torch.dtype, tier: Tier) -> Kept:
        """A copy of flat ``values``."""
        kept = self.keep(state, values.numel(), dtype, tier)
        kept.store(values)
        return kept

    def scratch(self, num_elements: int, dtype: torch.dtype, tier: Tier) -> Lease:
        """Room on the device or on the host for a while."""
        if tier is Tier.DEVICE:
            return Lease(torch.empty(num_elements, dtype=dtype, device=self._device))
        slot = self._staging.borrow(num_elements * dtype.itemsize)
        return Lease(over(slot.storage, dtype, num_elements), Event(), lambda changed: self._staging.give_back(slot))

    def _room(self, num_elements: int, dtype: torch.dtype, tier: Tier) -> Kept:
        if tier is Tier.DISK:
            self._disk = self._disk or self._open_disk()
            return OnDisk(num_elements, dtype, self._disk, self._staging)
        if tier is Tier.HOST:
            return InMemory(allocate_host(num_elements, dtype, self._device), tier)
        return InMemory(allocate(num_elements, dtype, self._device), tier)

    def provide_disk(self, num_bytes: int, num_states: int) -> None:
        """Take the disk space of so many states of ``num_bytes`` together before the first of them is kept.

        Raises:
            PartitaError: there is no room for them, or the folder is none that can be used.
        """
        if num_states:
            self._disk = self._disk or self._open_disk()
            self._disk.provide(num_bytes + num_states * ALIGNMENT)  # each begins at a page

    def disk_report(self) -> DiskReport | None:
        """Return the bytes that the disk tier has moved so far; None where nothing is stored on it."""
        return self._disk.report() if self._disk is not None else None

    def close(self) -> None:
        """Let go of the disk tier; what is on it is lost. Host memory may be dropped then: no copy is under way."""
        accelerator.wait_for_all(self._device)
        if self._disk is not None:
            self._disk.close()
