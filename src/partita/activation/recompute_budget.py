"""Budget for skipping recomputation: the last calls of a forward, as many as fit, keep all activations for backward.

Their backward comes first, so their activations are freed before earlier modules are recomputed.
"""

import socket
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, UntypedStorage, nn

from partita.comm.group import Group
from partita.memory import accelerator
from partita.memory.capacity import spare_bytes
from partita.memory.ledger import Ledger
from partita.sharding.pytree import held_tensors
from partita.sharding.unit_events import Inputs, on_gradient

KEY = "activations.keep_bytes"
STATE = "kept_whole"
# The fraction of the memory that was unused in the first step that `auto` uses; other steps may need more.
SPARE_SHARE = 0.8


class RecomputeBudget:
    """Decides how many calls of recomputed modules, from the end of a forward, are not recomputed.

    The first forward is measured: all calls are recomputed, and the bytes that each would have kept are counted. Later
    forwards with larger inputs than any before are measured again. If more forwards than ever before await their
    backward, the additional one recomputes all calls, and from then on the limit is divided by the new number.

    Args:
        limit: the limit in bytes for all forwards that await their backward; None: :meth:`end_step` sets it.
        max_in_flight: the expected largest number of such forwards.
        peers: the sequence ranks, and the tensor ranks. They compute a forward together, and must choose the same
            calls.
    """

    def __init__(self, limit: int | None, max_in_flight: int, peers: tuple[Group, Group], ledger: Ledger) -> None:
        self._limit = limit
        self._max_in_flight = max_in_flight
        self._peers = peers
        self._ledger = ledger
        self._index = 0  # index of the next call in its forward
        self._inside = False  # a call is running; nested calls count as part of it
        self._existing: Sequence[Tensor] | None = None  # tensors that a measured call does not add to the memory
        self._measures = False
        self._largest = 0
        self._sizes = list[int]()  # bytes that each call of a forward would keep
        self._not_recomputed = range(0)  # indices of the calls that are not recomputed
        self._forward = 0  # the number of the current forward
        self._is_followed = self._is_too_many = False
        self._awaited = set[int]()  # forwards that await their backward

    def begin_forward(self) -> None:
        """Begin a forward of the model: the next calls belong to it."""
        self._index = 0
        self._inside = False

    def end_step(self, device: torch.device, all_ranks: Group) -> None:
        """Set the limit, if there is none, to the memory that is unused on every rank. All ranks must call this after a
        full step.
        """
        self._awaited.clear()  # forwards without a backward
        if self._limit is None:
            every = all_ranks.exchange_objects((socket.gethostname(), spare_bytes(device)), KEY)
            on_node = Counter(host for host, _ in every)
            shared = accelerator.is_host(device)
            self._limit = min(int(SPARE_SHARE * spare) // (on_node[host] if shared else 1) for host, spare in every)
            self._choose()

    @contextmanager
    def call(self, module: nn.Module, inputs: Sequence[Tensor]) -> Iterator[bool]:
        """The context of a module's call with these inputs; yields True if the call is not recomputed."""
        if self._inside:
            yield False
            return
        if self._index == 0:
            self._begin_calls(sum(tensor.numel() for tensor in inputs if tensor.is_floating_point()))
        is_whole = self._index in self._not_recomputed and not self._measures and not self._is_too_many
        self._index += 1
        self._inside = True
        if self._measures:
            self._existing = [*inputs, *module.parameters(), *module.buffers()]
        try:
            yield is_whole
        finally:
            self._inside = False

    def follow(self, output: object) -> None:
        """Register a hook on the output of a call that records the backward of this forward."""
        if self._inside or self._is_followed:
            return
        on_backward = partial(self._record_backward, self._forward)
        if any(on_gradient(tensor, on_backward, Inputs()) for tensor in held_tensors(output)):
            self._is_followed = True
            self._awaited.add(self._forward)

    def _record_backward(self, forward: int, gradient: Tensor) -> None:
        self._awaited.discard(forward)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the bytes that a checkpointed forward would keep. The context is entered inside the checkpoint."""
        existing, self._existing = self._existing, None
        if existing is None:
            yield
            return
        with _counted(existing) as count:
            yield
        self._sizes.append(count())

    def _begin_calls(self, num_elements: int) -> None:
        with_other_positions, with_others = self._peers
        self._forward += 1
        self._is_followed = False
        self._is_too_many = len(self._awaited) >= self._max_in_flight
        if self._is_too_many:
            self._max_in_flight = len(self._awaited) + 1
            self._choose()
        if self._measures:
            self._measures = False
            for group in (with_other_positions, with_others):
                self._sizes = group.exchange(torch.tensor(self._sizes, device="cpu"), KEY).wait().amax(0).tolist()
            self._choose()
        num_elements = int(with_other_positions.exchange(torch.tensor([num_elements], device="cpu"), KEY).wait().amax())
        if num_elements > self._largest:
            self._largest = num_elements
            self._measures = True
            self._sizes.clear()

    def _choose(self) -> None:
        if self._limit is None or self._measures:
            return
        num, total = 0, 0
        for size in reversed(self._sizes):
            if (total + size) * self._max_in_flight > self._limit:
                break
            num, total = num + 1, total + size
        self._not_recomputed = range(len(self._sizes) - num, len(self._sizes))
        self._ledger.set(STATE, total * self._max_in_flight)


@contextmanager
def _counted(existing: Iterable[Tensor]) -> Iterator[Callable[[], int]]:
    """Count the bytes of the storages that autograd saves, except those of the tensors ``existing``. Yields a function
    that returns the sum. Enclosing saved-tensor hooks still get every tensor.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    assert hooks is not None
    pack, unpack = hooks
    with torch._C.DisableTorchFunctionSubclass():  # parameters of inner units may be sharded
        storages = [tensor.untyped_storage() for tensor in existing]
    seen = {storage.data_ptr(): weakref.ref(storage) for storage in storages}
    total = 0

    def count(tensor: Tensor) -> object:
        nonlocal total
        storage: UntypedStorage = tensor.untyped_storage()
        known = seen.get(storage.data_ptr())
        if known is None or known() is None:  # new, or in memory of a freed storage
            seen[storage.data_ptr()] = weakref.ref(storage)
            total += storage.nbytes()
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(count, unpack):
        yield lambda: total
