"""Calls of recomputed modules that keep everything after all: the last ones of a forward, as many as fit.

Their backward comes first, so what they keep is freed before earlier modules run their forward again.
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
# Of what was spare in the first step, `auto` takes so much: forwards differ.
SPARE_SHARE = 0.8


class KeptWhole:
    """Decides how many calls of recomputed modules, from the end of a forward, keep everything for their backward.

    The first forward is measured: everything is recomputed, and the bytes that each call would have kept are counted.
    Later forwards with larger inputs than any before are measured, too; otherwise the number stays as it is. If more
    forwards than ever before await their backward, the additional one keeps nothing, and from then on they share the
    limit.

    Args:
        limit: bytes over all forwards that await their backward; None: :meth:`end_step` sets it.
        under_way: the largest number of such forwards, as far as it is known.
        alike: groups of ranks that compute a forward together, and must keep the same calls: those that have other
            positions, then the others.
    """

    def __init__(self, limit: int | None, under_way: int, alike: tuple[Group, Group], ledger: Ledger) -> None:
        self._limit = limit
        self._under_way = under_way
        self._alike = alike
        self._ledger = ledger
        self._place = 0  # of the next call in its forward
        self._inside = False  # a call: those inside it are part of it
        self._there: Sequence[Tensor] | None = None  # what is in memory anyway, where the call is to be measured
        self._measures = False
        self._largest = 0
        self._sizes = list[int]()  # bytes that each call of a forward keeps
        self._whole = range(0)  # places of calls that are kept
        self._forward = 0  # its number
        self._is_followed = self._is_too_many = False
        self._awaited = set[int]()  # forwards whose backward is to come

    def begin_forward(self) -> None:
        """Note that the calls that follow are of another forward of the model."""
        self._place = 0
        self._inside = False

    def end_step(self, device: torch.device, all_ranks: Group) -> None:
        """Set the limit, if there is none, from the memory that no rank has needed. Called on all ranks after a full
        step.
        """
        self._awaited.clear()  # what no backward came for is not waited for any longer
        if self._limit is None:
            every = all_ranks.exchange_objects((socket.gethostname(), spare_bytes(device)), KEY)
            on_node = Counter(host for host, _ in every)
            shared = accelerator.is_host(device)
            self._limit = min(int(SPARE_SHARE * spare) // (on_node[host] if shared else 1) for host, spare in every)
            self._choose()

    @contextmanager
    def call(self, module: nn.Module, inputs: Sequence[Tensor]) -> Iterator[bool]:
        """Enclose a call of a module with these inputs; yields True if the call is not recomputed."""
        if self._inside:
            yield False
            return
        if self._place == 0:
            self._begin_calls(sum(tensor.numel() for tensor in inputs if tensor.is_floating_point()))
        is_whole = self._place in self._whole and not self._measures and not self._is_too_many
        self._place += 1
        self._inside = True
        if self._measures:
            self._there = [*inputs, *module.parameters(), *module.buffers()]
        try:
            yield is_whole
        finally:
            self._inside = False

    def follow(self, output: object) -> None:
        """Watch for the backward of this forward, by the output of a call."""
        if self._inside or self._is_followed:
            return
        come = partial(self._come, self._forward)
        if any(on_gradient(tensor, come, Inputs()) for tensor in held_tensors(output)):
            self._is_followed = True
            self._awaited.add(self._forward)

    def _come(self, forward: int, gradient: Tensor) -> None:
        self._awaited.discard(forward)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the bytes that a checkpointed forward would keep; entered inside the checkpoint."""
        there, self._there = self._there, None
        if there is None:
            yield
            return
        with _counted(there) as count:
            yield
        self._sizes.append(count())

    def _begin_calls(self, num_elements: int) -> None:
        with_other_positions, with_others = self._alike
        self._forward += 1
        self._is_followed = False
        self._is_too_many = len(self._awaited) >= self._under_way
        if self._is_too_many:
            self._under_way = len(self._awaited) + 1
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
            if (total + size) * self._under_way > self._limit:
                break
            num, total = num + 1, total + size
        self._whole = range(len(self._sizes) - num, len(self._sizes))
        self._ledger.set(STATE, total * self._under_way)


@contextmanager
def _counted(there: Iterable[Tensor]) -> Iterator[Callable[[], int]]:
    """Count the bytes of the storages that autograd saves, except those of ``there``; yields a function that returns
    the sum. The hooks around this block still see every tensor.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    assert hooks is not None
    pack, unpack = hooks
    with torch._C.DisableTorchFunctionSubclass():  # parameters of inner units may be at rest
        storages = [tensor.untyped_storage() for tensor in there]
    seen = {storage.data_ptr(): weakref.ref(storage) for storage in storages}
    total = 0

    def count(tensor: Tensor) -> object:
        nonlocal total
        storage: UntypedStorage = tensor.untyped_storage()
        known = seen.get(storage.data_ptr())
        if known is None or known() is None:  # memory that was another's is counted again
            seen[storage.data_ptr()] = weakref.ref(storage)
            total += storage.nbytes()
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(count, unpack):
        yield lambda: total
