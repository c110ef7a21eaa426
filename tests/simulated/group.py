"""Process groups of the simulated accelerator: gloo between ranks, with their own stream, like NCCL."""

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simulated.device import BACKEND, NAME

NAME_BYTES = 64  # size of a collective's description


class Work(dist._Work):
    """A running collective. ``wait`` makes the current stream wait, and blocks the host until gloo has the values.

    Args:
        land: writes the values received by gloo into the device's memory.
        check: called when the first of gloo's works has completed.
    """

    def __init__(
        self,
        works: Sequence[Any],
        done: torch.Event,
        written: Sequence[Tensor],
        land: Callable[[], object],
        check: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._works, self._done, self._written, self._land, self._check = works, done, written, land, check
        self._landed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._landed:
            for number, work in enumerate(self._works):
                work.wait()
                if number == 0:
                    self._check()
            self._land()
            self._landed = True
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._written))
        return future


class Group(dist.ProcessGroup):
    """The collectives that the engine uses on an accelerator; sums are in rank order and at least in fp32.

    Like an NCCL communicator, it is connected by the first collective, which waits for all ranks. The n-th collective
    of every rank must be the same.
    """

    def __init__(self, native: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._native, self._stream = native, torch.Stream(device=NAME)
        self._store, self._timeout, self._connecting = store, timeout, threading.Lock()
        if not dist.is_initialized():  # torch drops the CPU's default group now, while other ranks may be connecting
            made = [f"made/{other}" for other in range(size)]
            store.set(made[rank], "")
            store.wait(made, timeout)

    @cached_property
    def _connected(self) -> Any:
        store: Any = self._store.clone()  # type: ignore[attr-defined]  # a thread that waits on a store occupies it
        return dist.ProcessGroupGloo(store, self.rank(), self.size(), self._timeout)

    @property
    def _gloo(self) -> Any:
        with self._connecting:
            return self._connected

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def _on_stream(self, read: Sequence[Tensor], written: Sequence[Tensor], name: str) -> torch.Event:
        """Record reads and writes on the group's stream, after all work queued so far; return an event after them."""
        before, done = torch.Event(NAME), torch.Event(NAME)
        before.record()
        self._stream.wait_event(before)
        with self._stream:
            self._native.access(list(read), list(written), name)
            done.record()
        return done

    def _bytes(self, tensor: Tensor) -> Tensor:
        """Return the values as bytes on the host, because gloo does not support every dtype."""
        values = self._native.host_view(tensor).clone(memory_format=torch.contiguous_format)
        return values.view(-1).view(torch.uint8)

    def _launch(self, name: str, read: Tensor, written: Tensor, land: Callable[[list[Tensor]], object]) -> Work:
        """All-gather ``read`` and pass the ranks' values to ``land``, which fills ``written``."""
        done = self._on_stream([read], [written], name)
        sent = self._bytes(read)
        call = torch.frombuffer(
            bytearray(f"{name} of {sent.numel()} bytes".encode().ljust(NAME_BYTES)), dtype=torch.uint8
        )
        calls = list(torch.empty(self.size(), NAME_BYTES, dtype=torch.uint8).unbind())
        named = self._gloo.allgather([calls], [call])
        arrived = [torch.empty_like(sent) for _ in range(self.size())]
        sends = self._gloo.allgather([arrived], [sent])

        def check() -> None:
            found = [bytes(each.tolist()).decode().strip() for each in calls]
            if len({*found}) > 1:
                raise RuntimeError(f"the ranks are at different collectives of a communicator: {found}")

        def write() -> None:
            land([part.view(read.dtype) for part in arrived])

        return Work([named, sends], done, [written], write, check)

    def _exchange(self, name: str, received: Mapping[int, Tensor], sent: Mapping[int, Tensor], tag: int = 0) -> Work:
        """Send to and receive from other ranks; empty tensors are skipped."""
        received, sent = ({rank: t for rank, t in side.items() if t.numel()} for side in (received, sent))
        done = self._on_stream(list(sent.values()), list(received.values()), name)
        arriving = {rank: torch.empty_like(self._bytes(tensor)) for rank, tensor in received.items()}
        works = [self._gloo.recv([buffer], rank, tag) for rank, buffer in arriving.items()]
        works += [self._gloo.send([self._bytes(tensor)], rank, tag) for rank, tensor in sent.items()]

        def land() -> None:
            for rank, buffer in arriving.items():
                target = self._native.host_view(received[rank])
                target.copy_(buffer.view(target.dtype).view_as(target))

        return Work(works, done, list(received.values()), land)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Work:
        return self._exchange("send", {}, {target: tensors[0]}, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        return self._exchange("receive", {source: tensors[0]}, {}, tag)

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
        own = self.rank()
        if received[own] is not sent[own]:
            received[own].copy_(sent[own])
        others = [rank for rank in range(self.size()) if rank != own]
        return self._exchange(
            "all_to_all", {rank: received[rank] for rank in others}, {rank: sent[rank] for rank in others}
        )

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        (tensor,) = tensors
        target, root = self._native.host_view(tensor), options.rootRank
        return self._launch("broadcast", tensor, tensor, lambda parts: target.copy_(parts[root].view_as(target)))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float() if parts[0].itemsize < 4 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
