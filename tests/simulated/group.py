"""Process groups of the simulated accelerator: gloo between the ranks, on a stream of its own, as NCCL has one."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simulated.device import BACKEND, NAME


class Work(dist._Work):
    """A collective under way. What waits for it is the current stream; the host stands still until gloo is done, so
    that the values are there.

    Args:
        land: writes what gloo has brought into the device's memory.
    """

    def __init__(self, work: Any, done: torch.Event, written: Tensor, land: Callable[[], object]) -> None:
        super().__init__()
        self._work, self._done, self._written, self._land = work, done, written, land
        self._landed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._landed:
            self._work.wait()
            self._land()
            self._landed = True
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._written])
        return future


class Group(dist.ProcessGroup):
    """The collectives that the engine uses on an accelerator; sums are in rank order and fp32 at least."""

    def __init__(self, native: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._native, self._stream = native, torch.Stream(device=NAME)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def _launch(self, name: str, read: Tensor, written: Tensor, land: Callable[[list[Tensor]], object]) -> Work:
        """Bring every rank's ``read`` to ``land``, which fills ``written``."""
        before, done = torch.Event(NAME), torch.Event(NAME)
        before.record()
        self._stream.wait_event(before)
        with self._stream:
            self._native.access([read], [written], name)
            done.record()
        values = self._native.host_view(read).clone(memory_format=torch.contiguous_format)
        sent = values.view(-1).view(torch.uint8)  # gloo does not know every dtype
        arrived = [torch.empty_like(sent) for _ in range(self.size())]
        work = self._gloo.allgather([arrived], [sent])
        return Work(work, done, written, lambda: land([part.view(read.dtype) for part in arrived]))

    def all_gather_single(self, whole: Tensor, part: Tensor, options: Any = None) -> Work:
        target = self._native.host_view(whole).view(-1)
        return self._launch("all_gather", part, whole, lambda parts: torch.cat(parts, out=target))

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, out: Tensor, whole: Tensor, options: Any = None) -> Work:
        target = self._native.host_view(out).view(-1)
        own = slice(self.rank() * out.numel(), (self.rank() + 1) * out.numel())
        return self._launch("reduce_scatter", whole, out, lambda wholes: target.copy_(_sum([w[own] for w in wholes])))

    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        (tensor,) = tensors
        target = self._native.host_view(tensor)
        return self._launch("all_reduce", tensor, tensor, lambda parts: target.copy_(_sum(parts).view_as(target)))

    def alltoall(self, received: list[Tensor], sent: list[Tensor], options: Any = None) -> Work:
        """Of parts of equal sizes, which lie side by side."""
        targets, own = [self._native.host_view(part) for part in received], self.rank()
        whole, into = (parts[0].as_strided((len(parts) * parts[0].numel(),), (1,)) for parts in (sent, received))
        assert all(part.data_ptr() == whole.data_ptr() + i * part.nbytes for i, part in enumerate(sent))

        def land(wholes: list[Tensor]) -> None:
            for target, from_rank in zip(targets, wholes, strict=True):
                target.copy_(from_rank.view(len(targets), -1)[own])

        return self._launch("all_to_all", whole, into, land)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        (tensor,) = tensors
        target, root = self._native.host_view(tensor), options.rootRank
        return self._launch("broadcast", tensor, tensor, lambda parts: target.copy_(parts[root].view_as(target)))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float() if parts[0].itemsize < 4 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
