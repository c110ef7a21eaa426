"""A process group for accelerators that exchanges through host memory, over gloo.

NCCL needs a device per rank. This group does not, so several ranks can share one: to test on one GPU what will run on
many. Each collective copies its input to pinned host memory on a stream of the group, exchanges it in a thread, and
copies the result back. Sums are in rank order, and of 16-bit tensors in fp32, as between CPUs.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from partita.memory import accelerator
from partita.memory.allocate import PinnedBuffer
from partita.memory.streams import Event, Stream, finish, record

BACKEND = "staged"
_ProcessGroup: Any = dist.ProcessGroup  # its overloads have types that differ between versions of torch
Exchange = Callable[[list[Tensor], list[Tensor]], object]


def backend(device: torch.device, *, through_host: bool) -> str:
    """Return the backend of process groups for tensors on the device (see :func:`partita.memory.accelerator.backend`).

    Args:
        through_host: exchange the tensors of accelerators through host memory.
    """
    if accelerator.is_host(device) or not through_host:
        return accelerator.backend(device)
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, StagedGroup, devices=[device.type])
    return BACKEND


class StagedGroup(_ProcessGroup):  # type: ignore[misc]
    """The collectives of :class:`~partita.comm.transport.DeviceTransport` through host memory. Reductions are sums.

    They run in the order in which they are launched. Nothing is connected before the first one.

    Args:
        store: the rendezvous of the group's ranks.
        timeout: how long a collective waits for the other ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._timeout = timeout
        self._gloo: Any = None
        self._stream: Stream | None = None
        self._outgoing = PinnedBuffer()
        self._incoming = PinnedBuffer()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def all_gather_single(self, full: Tensor, part: Tensor, options: Any = None) -> Work:
        every = range(self.size())

        def exchange(sent: list[Tensor], received: list[Tensor]) -> None:
            self._swap(dict.fromkeys(every, sent[0]), dict(enumerate(received)))

        return self._launch([part], list(full.view(self.size(), -1).unbind()), exchange)

    def reduce_scatter_single(self, out: Tensor, full: Tensor, options: Any = None) -> Work:
        _check_sum(options)

        def exchange(sent: list[Tensor], received: list[Tensor]) -> None:
            self._sum_of(sent[0].view(self.size(), -1).unbind(), received[0])

        return self._launch([full], [out], exchange)

    # The names before torch 2.13.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        _check_sum(options)

        def exchange(sent: list[Tensor], received: list[Tensor]) -> None:
            parts = received[0].tensor_split(self.size())
            own = parts[self.rank()]
            self._sum_of(sent[0].tensor_split(self.size()), own)
            self._swap(dict.fromkeys(range(self.size()), own), dict(enumerate(parts)))

        return self._launch(tensors, tensors, exchange)

    def alltoall(self, received: list[Tensor], sent: list[Tensor], options: Any = None) -> Work:
        return self._launch(
            sent, received, lambda given, taken: self._swap(dict(enumerate(given)), dict(enumerate(taken)))
        )

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        root = options.rootRank
        if self.rank() == root:
            others = [rank for rank in range(self.size()) if rank != root]
            return self._launch(tensors, [], lambda sent, _: self._swap(dict.fromkeys(others, sent[0]), {}))
        return self._launch([], tensors, lambda _, received: self._swap({}, {root: received[0]}))

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Work:
        return self._launch(tensors, [], lambda sent, _: self._swap({target: sent[0]}, {}, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        return self._launch([], tensors, lambda _, received: self._swap({}, {source: received[0]}, tag))

    def _launch(self, sent: Sequence[Tensor], received: Sequence[Tensor], exchange: Exchange) -> Work:
        """Start a collective after the work that is queued on the current stream.

        Args:
            exchange: called with flat host tensors, ``sent`` copied to the first ones; writes to the second ones, which
                are then copied to ``received``.
        """
        device = (*sent, *received)[0].device
        if self._stream is None:
            self._stream = Stream(device, BACKEND, waits=True)
        ready = record(device)

        @torch.no_grad()  # which each thread sets for itself
        def run() -> None:
            ready.wait()
            finish(device)  # the last collective's copies from its buffers included
            flat = [tensor.reshape(-1) for tensor in sent]
            outgoing = self._outgoing.like(flat)
            incoming = self._incoming.like([tensor.view(-1) for tensor in received])
            for host, tensor in zip(outgoing, flat, strict=True):
                host.copy_(tensor, non_blocking=True)
            finish(device)
            exchange(outgoing, incoming)
            for tensor, host in zip(received, incoming, strict=True):
                tensor.copy_(host.view(tensor.shape), non_blocking=True)

        return _StagedWork(self._stream.run(run))

    def _sum_of(self, sent: Sequence[Tensor], out: Tensor) -> None:
        """Send ``sent[i]`` to every rank ``i``, and write the sum of the received tensors to ``out``."""
        received = [torch.empty_like(out) for _ in sent]
        self._swap(dict(enumerate(sent)), dict(enumerate(received)))
        total = received[0] if out.itemsize >= 4 else received[0].float()
        for part in received[1:]:
            total += part
        out.copy_(total)

    def _swap(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int = 0) -> None:
        """Send host tensors to ranks and receive from ranks, this one included. Empty tensors are not sent."""
        if self._gloo is None:
            self._connect()
        own = self.rank()
        if own in received and received[own].data_ptr() != sent[own].data_ptr():
            received[own].copy_(sent[own])
        # Receives first: otherwise gloo uses the network in only one direction at a time.
        works = [self._gloo.recv([buffer], rank, tag) for rank, buffer in self._bytes_of_others(received)]
        works += [self._gloo.send([values], rank, tag) for rank, values in self._bytes_of_others(sent)]
        for work in works:
            work.wait()

    def _connect(self) -> None:
        # Of its own: a thread that waits for a key of a store keeps all other threads from using it.
        store: Any = self._store.clone()  # type: ignore[attr-defined]
        self._gloo = dist.ProcessGroupGloo(store, self.rank(), self.size(), self._timeout)
        # A rank that ended before another one has noticed their connection would make that one fail.
        connected = [f"connected/{rank}" for rank in range(self.size())]
        store.set(connected[self.rank()], "")
        store.wait(connected, self._timeout)

    def _bytes_of_others(self, tensors: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
        """Return the tensors of other ranks as bytes, because gloo does not know every dtype."""
        return [
            (rank, each.view(torch.uint8)) for rank, each in tensors.items() if rank != self.rank() and each.numel()
        ]


class _StagedWork(Work):
    """A collective in flight."""

    def __init__(self, done: Event) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block the caller until the exchange is done, and make the current stream wait for the copies of its result.

        Raises:
            RuntimeError: another rank has ended, or did not join in time.
        """
        self._done.wait()
        return True


def _check_sum(options: Any) -> None:
    """Raises NotImplementedError: the reduction is not a sum."""
    if options is not None and options.reduceOp != dist.ReduceOp.SUM:
        raise NotImplementedError(f"communication.through_host: expected a sum; got {options.reduceOp}")
