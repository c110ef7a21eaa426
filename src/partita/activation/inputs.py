"""Inputs of recomputed modules that are stored on the host, on disk, or in parts on several ranks until backward.

An input is offloaded while forward continues, and fetched while the module after its own is in backward. Copies exist
for as long as the graph that needs them.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 6.1
(Pa+cpu).
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partita.activation.input_memory import STATE, InputMemory
from partita.activation.partition import Partition, Parts
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.memory.streams import Event, Stream, record
from partita.memory.tiers import Kept, StateMemory
from partita.plan.residence import Tier

# Modules at the end of forward whose inputs stay: their backward comes before a copy would be back.
NUM_STAYING = 2


class StoredInputs:
    """Offloads the inputs of modules and fetches them, overlapping with the caller's work, until it is closed.

    Args:
        tier: where inputs are stored; the device for inputs that are only split over ranks.
        partition: decides how inputs are split.
    """

    def __init__(self, memory: StateMemory, device: torch.device, tier: Tier, partition: Partition) -> None:
        self.device = device
        self._partition = partition
        self.rooms = InputMemory(memory, tier, device, self._finish)
        self.stream = Stream(device, STATE, waits=tier is Tier.DISK)
        self._calls = dict[int, weakref.ref[Call]]()  # whose graph is there, in their order
        self._num_calls = self._num_before = 0
        self._moved = weakref.WeakValueDictionary[int, Moved]()  # by the identity of the tensor that was given
        self._leaving = deque[weakref.ref[Moved]]()
        self.unclaimed = deque[Event]()  # of copies for a backward that never came; they hold what is copied

    def begin_forward(self) -> None:
        """Note that the calls that follow are of another forward of the model."""
        self._num_before = self._num_calls

    def move(self, tensor: Tensor, module: str, place: int) -> "Moved | None":
        """Return the :class:`Moved` for a tensor that a module is given at a place; None for a tensor that stays.

        A tensor stays if it is no activation, or if several modules are given it, which need it at different times.
        """
        if (known := self._moved.get(id(tensor))) is not None and known.source() is tensor:
            known.stay(tensor)
            return None
        computed = tensor.requires_grad and not tensor.is_leaf and type(tensor) is Tensor
        if not (computed and tensor.device == self.device and _is_dense(tensor)):
            return None
        parts = self._partition.parts(module, place, _flat_bytes(tensor))
        moved = self._moved[id(tensor)] = Moved(self, tensor, parts)
        return moved

    def begin(self, call: "Call") -> tuple[int, int]:
        """Register a call; return its number, and the number of calls before its forward."""
        self._num_calls += 1
        self._calls[self._num_calls] = weakref.ref(call)
        return self._num_calls, self._num_before

    def forward_ended(self) -> None:
        """Begin to offload the inputs of an earlier call, and free those that were offloaded before."""
        self._let_go()
        self._calls = {number: call for number, call in self._calls.items() if call() is not None}
        earlier = list(self._calls.values())[:-NUM_STAYING]
        if earlier and (call := earlier[-1]()) is not None:
            for moved in call.moved:
                moved.leave()
                self._leaving.append(weakref.ref(moved))

    def fetch_before(self, number: int, first: int) -> None:
        """Begin to fetch the inputs that backward needs after those of call ``number``: an earlier call's.

        Calls up to ``first`` are left out: their graphs may still exist on some ranks and not on others.
        """
        for other in reversed(list(self._calls)):
            if first < other < number and (call := self._calls[other]()) is not None:
                call.fetch()
                return

    def close(self) -> None:
        """Wait for the copies under way."""
        self._let_go()
        self._finish()
        self.stream.close()

    def _let_go(self) -> None:
        """Wait for the copies off the device, and free the tensors that were copied."""
        self.let_go_of_unclaimed()
        while self._leaving:
            if (moved := self._leaving.popleft()()) is not None:
                moved.has_left()

    def let_go_of_unclaimed(self) -> None:
        """Wait for copies whose graphs are gone, and free the memory that they hold."""
        while self.unclaimed:
            self.unclaimed.popleft().wait()

    def _finish(self) -> None:
        """Block the caller until all copies are done."""
        self.stream.run(lambda: None).wait()
        accelerator.wait_for_all(self.device)


class Call:
    """A call of a module, whose forward may run several times.

    Attributes: ``moved``: its inputs that are moved; ``others``: its other input tensors.

    Args:
        forward: called with the arguments of the module.
        module: its name.
    """

    def __init__(
        self,
        inputs: StoredInputs,
        forward: Callable[..., Any],
        module: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._inputs = inputs
        self._forward = forward
        self._names = tuple(kwargs)
        self.moved = list[Moved]()
        self.others = list[Tensor]()
        self._given = list[Any]()
        for place, value in enumerate((*args, *kwargs.values())):
            if not isinstance(value, Tensor):
                self._given.append(value)
            elif (moved := inputs.move(value, module, place)) is not None:
                self.moved.append(moved)
                self._given.append(_MOVED)
            else:
                self.others.append(value)
                self._given.append(_OTHER)
        self._brought = list[Tensor]()
        self._number, self._first = inputs.begin(self)

    def bring(self) -> None:
        """Fetch the moved inputs for the next run, and begin to fetch those that backward needs after them."""
        self._inputs.let_go_of_unclaimed()
        self.fetch()
        self._inputs.fetch_before(self._number, self._first)
        self._brought = [moved.get() for moved in self.moved]

    def run(self, like: Tensor, *others: Tensor) -> Any:
        """Run the module's forward.

        Args:
            like: a tensor on the device that computes.
            others: the inputs that are not moved.
        """
        brought = iter(self._brought or [moved.get() for moved in self.moved])
        self._brought = []
        rest = iter(others)
        values = [
            next(brought) if value is _MOVED else next(rest) if value is _OTHER else value for value in self._given
        ]
        num_args = len(values) - len(self._names)
        return self._forward(*values[:num_args], **dict(zip(self._names, values[num_args:], strict=True)))

    def fetch(self) -> None:
        """Begin to fetch the inputs that were offloaded."""
        for moved in self.moved:
            moved.fetch()


@dataclass(frozen=True)
class Back:
    """A tensor whose values are valid once ``came`` has passed."""

    tensor: Tensor
    came: Event


class Moved:
    """An input that is moved: on the device, offloaded, or being fetched."""

    def __init__(self, inputs: StoredInputs, tensor: Tensor, parts: Parts) -> None:
        self._inputs = inputs
        self._parts = parts
        self.source = weakref.ref(tensor)
        self._here: Tensor | None = tensor
        self._version = tensor._version
        self._stays = False
        self._room: Kept | None = None
        self._left: Event | None = None
        self._back: Back | None = None
        self._num_bytes = tensor.nbytes
        self._of_bytes = partial(_of_bytes, dtype=tensor.dtype, size=tensor.size(), stride=tensor.stride())

    def stay(self, tensor: Tensor) -> None:
        """Keep the tensor on the device, because others need it, too."""
        self._here = tensor
        self._stays = True

    def leave(self) -> None:
        """Begin to copy the tensor into the tier. It stays on the device until :meth:`has_left`."""
        if self._here is None or self._stays or self._room is not None:
            return
        own = self._parts.own(_flat_bytes(self._here))
        room = self._room = self._inputs.rooms.take(self._parts.part_bytes(self._num_bytes))
        computed = record(self._inputs.device)

        def copy() -> None:
            computed.wait()
            lease = room.lend(read=False)
            lease.wait()[: own.numel()].copy_(own, non_blocking=True)
            lease.end(changed=True)

        self._left = self._inputs.stream.run(copy)

    def has_left(self) -> None:
        """Wait for the copy, and free the tensor.

        Raises:
            PartitaError: it was changed meanwhile, or could not be copied.
        """
        if self._left is None:
            return
        self._left.wait()
        self._left = None
        if not self._stays:
            self._check_unchanged()
            self._here = None

    def fetch(self) -> None:
        """Begin to copy the tensor back to the device."""
        if self._here is not None or self._back is not None:
            return
        room, parts, device = self._room, self._parts, self._inputs.device
        assert room is not None
        whole = torch.empty(parts.whole_bytes(self._num_bytes), dtype=torch.uint8, device=device)
        free = record(device)

        def copy() -> None:
            free.wait()
            lease, own = room.lend(), parts.own(whole)
            own.copy_(lease.wait()[: own.numel()], non_blocking=True)
            lease.end(changed=False)
            parts.complete(whole)

        self._back = Back(self._of_bytes(whole), self._inputs.stream.run(copy))

    def get(self) -> Tensor:
        """Return the tensor, or a fetched one with its values.

        Raises:
            PartitaError: it was changed since the module was called, or could not be copied.
        """
        if self._here is not None:
            self._check_unchanged()
            return self._here
        assert self._back is not None
        back, self._back = self._back, None
        back.came.wait()
        return back.tensor.requires_grad_()

    def __del__(self) -> None:
        # Maybe by a thread that the stream's work needs, which must not wait for it.
        if self._room is not None:
            self._inputs.rooms.give_back(self._room)
        under_way = self._left if self._back is None else self._back.came
        if under_way is not None:
            self._inputs.unclaimed.append(under_way)

    def _check_unchanged(self) -> None:
        assert self._here is not None
        if self._here._version != self._version:
            raise PartitaError(
                f"an input of shape {tuple(self._here.shape)} of a module that is recomputed was changed in place "
                "after the module had read it, so its backward would compute something else: change a copy, or leave "
                "the module out of activations.checkpoint"
            )


_MOVED, _OTHER = object(), object()  # stand for tensors that were given


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a range of memory, in any order: a copy then has the same strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _of_bytes(flat: Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the tensor of this dtype, size and stride that starts at the first byte of ``flat``."""
    return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(size, stride)


def _flat_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as flat bytes, whatever the order of its dims."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
