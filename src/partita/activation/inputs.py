"""Storage of the inputs of recomputed modules on the host, on disk, or sharded over ranks, until backward.

An input is offloaded while forward continues, and prefetched while the next module is in backward. Copies live as long
as the graph that needs them.

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
from partita.activation.partition import InputShards, Partition
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.memory.streams import Event, Stream, record
from partita.memory.tiers import StateMemory, StoredState
from partita.table.residence import Tier

# The number of modules at the end of forward whose inputs are not offloaded: their backward comes too early.
NUM_STAYING = 2


class StoredInputs:
    """Offloads and prefetches the inputs of modules, overlapped with computation, until it is closed.

    Args:
        tier: the tier for inputs; the device if they are only sharded over ranks.
        partition: decides which inputs are sharded.
    """

    def __init__(self, memory: StateMemory, device: torch.device, tier: Tier, partition: Partition) -> None:
        self.device = device
        self._partition = partition
        self.input_memory = InputMemory(memory, tier, device, self._wait_for_copies)
        self.stream = Stream(device, STATE, waits=tier is Tier.DISK)
        self._calls = dict[int, weakref.ref[RecomputedCall]]()  # calls whose graph is alive, in order
        self._num_calls = self._num_before = 0
        self._moved = weakref.WeakValueDictionary[int, OffloadedTensor]()  # by the id of the original tensor
        self._offloading = deque[weakref.ref[OffloadedTensor]]()
        self.unclaimed = deque[Event]()  # of copies whose graph was freed; their memory is in use until they complete

    def begin_forward(self) -> None:
        """Begin a forward of the model: the next calls belong to it."""
        self._num_before = self._num_calls

    def move(self, tensor: Tensor, module: str, place: int) -> "OffloadedTensor | None":
        """Return the :class:`OffloadedTensor` for an input of a module; None for a tensor that is not moved.

        These are tensors that are not activations, and inputs of several modules, which need them at different times.

        Args:
            place: the index of the input among the module's arguments.
        """
        if (known := self._moved.get(id(tensor))) is not None and known.source() is tensor:
            known.keep_on_device(tensor)
            return None
        computed = tensor.requires_grad and not tensor.is_leaf and type(tensor) is Tensor
        if not (computed and tensor.device == self.device and _is_dense(tensor)):
            return None
        shards = self._partition.shards(module, place, _flat_bytes(tensor))
        moved = self._moved[id(tensor)] = OffloadedTensor(self, tensor, shards)
        return moved

    def begin(self, call: "RecomputedCall") -> tuple[int, int]:
        """Register a call; return its number, and the number of calls before its forward."""
        self._num_calls += 1
        self._calls[self._num_calls] = weakref.ref(call)
        return self._num_calls, self._num_before

    def forward_ended(self) -> None:
        """Begin to offload the inputs of an earlier call, and free the inputs whose copies are complete."""
        self._finish_offloads()
        self._calls = {number: call for number, call in self._calls.items() if call() is not None}
        earlier = list(self._calls.values())[:-NUM_STAYING]
        if earlier and (call := earlier[-1]()) is not None:
            for moved in call.moved:
                moved.offload()
                self._offloading.append(weakref.ref(moved))

    def fetch_before(self, number: int, first: int) -> None:
        """Begin to fetch the inputs of the call before ``number``, which backward needs next.

        Calls up to ``first`` are skipped: their graphs may be alive on some ranks and already freed on others.
        """
        for other in reversed(list(self._calls)):
            if first < other < number and (call := self._calls[other]()) is not None:
                call.fetch()
                return

    def close(self) -> None:
        """Wait for all copies, and stop the stream."""
        self._finish_offloads()
        self._wait_for_copies()
        self.stream.close()

    def _finish_offloads(self) -> None:
        """Wait for the copies from the device, and free the tensors that were copied."""
        self.release_unclaimed()
        while self._offloading:
            if (moved := self._offloading.popleft()()) is not None:
                moved.finish_offload()

    def release_unclaimed(self) -> None:
        """Wait for copies whose graphs were freed, and free the memory that they use."""
        while self.unclaimed:
            self.unclaimed.popleft().wait()

    def _wait_for_copies(self) -> None:
        """Wait for all copies on the host."""
        self.stream.run(lambda: None).wait()
        accelerator.wait_for_all(self.device)


class RecomputedCall:
    """A call of a recomputed module, whose forward may run several times.

    Attributes:
        moved: the inputs that are moved.
        others: the other input tensors.

    Args:
        forward: the module's forward.
        module: the module's name.
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
        self.moved = list[OffloadedTensor]()
        self.others = list[Tensor]()
        self._arguments = list[Any]()
        for place, value in enumerate((*args, *kwargs.values())):
            if not isinstance(value, Tensor):
                self._arguments.append(value)
            elif (moved := inputs.move(value, module, place)) is not None:
                self.moved.append(moved)
                self._arguments.append(_MOVED)
            else:
                self.others.append(value)
                self._arguments.append(_OTHER)
        self._fetched = list[Tensor]()
        self._number, self._first = inputs.begin(self)

    def start_reload(self) -> None:
        """Fetch the moved inputs for the next run, and prefetch the inputs of the previous call."""
        self._inputs.release_unclaimed()
        self.fetch()
        self._inputs.fetch_before(self._number, self._first)
        self._fetched = [moved.get() for moved in self.moved]

    def run(self, *others: Tensor) -> Any:
        """Run the module's forward. ``others``: the input tensors that are not moved."""
        fetched = iter(self._fetched or [moved.get() for moved in self.moved])
        self._fetched = []
        remaining = iter(others)
        values = [
            next(fetched) if value is _MOVED else next(remaining) if value is _OTHER else value
            for value in self._arguments
        ]
        num_args = len(values) - len(self._names)
        return self._forward(*values[:num_args], **dict(zip(self._names, values[num_args:], strict=True)))

    def fetch(self) -> None:
        """Begin to fetch the offloaded inputs."""
        for moved in self.moved:
            moved.fetch()


@dataclass(frozen=True)
class PendingReload:
    """A tensor that is being fetched. Its values are valid after ``ready``."""

    tensor: Tensor
    ready: Event


class OffloadedTensor:
    """An input that is moved: on the device, offloaded, or being fetched."""

    def __init__(self, inputs: StoredInputs, tensor: Tensor, shards: InputShards) -> None:
        self._inputs = inputs
        self._shards = shards
        self.source = weakref.ref(tensor)
        self._on_device: Tensor | None = tensor
        self._version = tensor._version
        self._is_kept = False
        self._buffer: StoredState | None = None
        self._offloaded: Event | None = None
        self._back: PendingReload | None = None
        self._num_bytes = tensor.nbytes
        self._of_bytes = partial(_of_bytes, dtype=tensor.dtype, size=tensor.size(), stride=tensor.stride())

    def keep_on_device(self, tensor: Tensor) -> None:
        """Keep the tensor on the device, because several modules need it."""
        self._on_device = tensor
        self._is_kept = True

    def offload(self) -> None:
        """Begin to copy the tensor into the tier. It stays on the device until :meth:`finish_offload`."""
        if self._on_device is None or self._is_kept or self._buffer is not None:
            return
        own = self._shards.own(_flat_bytes(self._on_device))
        buffer = self._buffer = self._inputs.input_memory.allocate(self._shards.shard_bytes(self._num_bytes))
        computed = record(self._inputs.device)

        def copy() -> None:
            computed.wait()
            lease = buffer.lease(read=False)
            lease.wait()[: own.numel()].copy_(own, non_blocking=True)
            lease.end(changed=True)

        self._offloaded = self._inputs.stream.run(copy)

    def finish_offload(self) -> None:
        """Wait for the copy, and free the tensor.

        Raises:
            PartitaError: the tensor was changed during the copy, or could not be copied.
        """
        if self._offloaded is None:
            return
        self._offloaded.wait()
        self._offloaded = None
        if not self._is_kept:
            self._check_unchanged()
            self._on_device = None

    def fetch(self) -> None:
        """Begin to copy the tensor back to the device."""
        if self._on_device is not None or self._back is not None:
            return
        buffer, shards, device = self._buffer, self._shards, self._inputs.device
        assert buffer is not None
        whole = torch.empty(shards.full_bytes(self._num_bytes), dtype=torch.uint8, device=device)
        free = record(device)

        def copy() -> None:
            free.wait()
            lease, own = buffer.lease(), shards.own(whole)
            own.copy_(lease.wait()[: own.numel()], non_blocking=True)
            lease.end(changed=False)
            shards.gather(whole)

        self._back = PendingReload(self._of_bytes(whole), self._inputs.stream.run(copy))

    def get(self) -> Tensor:
        """Return the original tensor, or the fetched copy.

        Raises:
            PartitaError: the tensor was changed after the module's call, or could not be copied.
        """
        if self._on_device is not None:
            self._check_unchanged()
            return self._on_device
        assert self._back is not None
        back, self._back = self._back, None
        back.ready.wait()
        return back.tensor.requires_grad_()

    def __del__(self) -> None:
        # This may run in a thread on which the stream's work depends, so it must not wait for the stream.
        if self._buffer is not None:
            self._inputs.input_memory.free(self._buffer)
        pending = self._offloaded if self._back is None else self._back.ready
        if pending is not None:
            self._inputs.unclaimed.append(pending)

    def _check_unchanged(self) -> None:
        assert self._on_device is not None
        if self._on_device._version != self._version:
            raise PartitaError(
                f"an input of shape {tuple(self._on_device.shape)} of a recomputed module was changed in place after "
                "the module had read it, so recomputation would use other values: change a copy, or leave the module "
                "out of activations.checkpoint"
            )


_MOVED, _OTHER = object(), object()  # mark the positions of tensors among the arguments


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a contiguous range of memory, in any order of dims."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _of_bytes(flat: Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the tensor of this dtype, size and stride that starts at the first byte of ``flat``."""
    return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(size, stride)


def _flat_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as flat bytes, whatever the order of its dims."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
