"""Transports move flat tensors between ranks. No other file calls the collectives of ``torch.distributed``.

Over gloo, a reduce-scatter is a direct exchange followed by a local sum in rank order. It moves half the bytes of
gloo's own, and its result does not depend on how a ring splits the tensor. An all-gather is a direct exchange, too: it
moves the same bytes as gloo's own, without a flat copy of the result. Ranks of one node can read each other's memory
instead of using the network (:mod:`partita.comm.node.peers`). Accelerators use their own backend (NCCL for CUDA).
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from partita.comm.node.handshake import find_node_peers
from partita.comm.node.peers import Fetch, NodePeer, Offer
from partita.table.purposes import BULK_PURPOSES
from partita.table.scratch import PIECE_BYTES


class Work(Protocol):
    """An operation in flight."""

    def wait(self) -> object: ...


class IncomingTensor(Protocol):
    """A flat tensor ``[n]`` that is being received from one other rank, piece by piece."""

    def piece(self, start: int, stop: int) -> Tensor:
        """Wait for the elements ``[start, stop)``, which must follow the previous piece. The result is valid until the
        next call.

        Raises:
            RuntimeError: the other rank has ended, or does not send them in time.
        """


class Receive:
    """A receive of ``num_elements`` in messages of ``piece`` elements. They are stored in ``buffer`` one after the
    other; if it is smaller, later messages overwrite earlier ones.

    Args:
        post: starts receiving one message into a tensor.
    """

    def __init__(self, post: Callable[[Tensor], Work], buffer: Tensor, num_elements: int, piece: int) -> None:
        self._post = post
        self._num_elements = num_elements
        self._piece = piece
        self._places = buffer.split(piece)
        self._posted = 0
        self._awaited = deque[tuple[Tensor, Work]]()
        for _ in self._places:
            self._await_next()

    def _await_next(self) -> None:
        remaining = self._num_elements - self._posted * self._piece
        if remaining > 0:
            place = self._places[self._posted % len(self._places)][:remaining]
            self._awaited.append((place, self._post(place)))
            self._posted += 1

    def piece(self, start: int, stop: int) -> Tensor:
        if start:  # the caller is done with the previous piece, so its slot is free
            self._await_next()
        place, work = self._awaited.popleft()
        work.wait()
        return place


class Exchange:
    """An exchange with all other ranks, in pieces of ``piece`` elements.

    Args:
        arriving: the receives, in rank order, of ``num_elements`` each.
        leaving: the sends.
    """

    def __init__(
        self, arriving: Sequence[IncomingTensor], leaving: Sequence[Work], num_elements: int, piece: int
    ) -> None:
        self._arriving = arriving
        self._leaving = leaving
        self._starts = range(0, num_elements, piece)
        self._num_elements = num_elements
        self._piece = piece

    def pieces(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield each range of elements with the other ranks' values, as soon as all have arrived. After the last range,
        wait until the sends have completed.
        """
        for start in self._starts:
            stop = min(start + self._piece, self._num_elements)
            yield slice(start, stop), [part.piece(start, stop) for part in self._arriving]
        for work in self._leaving:
            work.wait()

    def wait(self) -> None:
        """Wait until all receives and sends have completed."""
        for _ in self.pieces():
            pass


# Kinds of messages between pipeline stages. Each has its own connections per pair of ranks and direction.
LANES = ("forward", "backward", "request")
_LANE_TAGS = 1  # tag of the first lane; other exchanges of activations have tag 0
# Below this size the latency of an all-reduce dominates its transfer time.
_SMALL_BYTES = 1 << 14

# torch 2.13 renamed the single-tensor collectives; earlier versions only have the former names.
Start = Callable[..., Work]  # returns None only on ranks outside the group
_all_gather: Start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_broadcast, _send, _receive = cast(Start, dist.broadcast), cast(Start, dist.isend), cast(Start, dist.irecv)
_all_to_all, _all_reduce = cast(Start, dist.all_to_all), cast(Start, dist.all_reduce)


# Groups with a message that will never arrive. Their destructor would wait for it.
_ABANDONED = list[dist.ProcessGroup]()


class Transport(ABC):
    """Communication of flat, contiguous tensors between the ranks of a group; shard ``i`` belongs to rank ``i``.

    Operations are asynchronous: their result is valid after ``wait``. The call or ``wait`` raises a RuntimeError if
    another rank has ended or does not join in time.

    Attributes:
        separates_tags: the transport matches tags: all-gathers under different tags wait for each other. Without
            that, each rank would take the other's data for its own.
    """

    separates_tags: bool

    @abstractmethod
    def add(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Add the process groups of further purposes. Collective."""

    @abstractmethod
    def handshake(self, exchange: Callable[[object], list[Any]]) -> None:
        """Find the ranks whose memory can be read directly, once. Collective. ``exchange`` all-gathers a value."""

    @abstractmethod
    def all_gather(self, whole: Tensor, part: Tensor, purpose: str, tag: int) -> Work:
        """Start an all-gather of every rank's ``part`` ``[n]`` into ``whole`` ``[size * n]``."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, sent: Tensor, received: Tensor, *, accumulate: bool) -> None:
        """Reduce-scatter ``sent`` ``[size * n]`` into ``out`` ``[n]``, or add the result to it. ``received`` is scratch
        memory of :func:`~partita.table.scratch.received_elements` elements.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sum in place, in the backend's order."""

    @abstractmethod
    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], connections: str = "activations") -> None:
        """Send ``sent[i]`` to every rank ``i``, including this one, and receive ``received[i]`` from it. Sizes may
        differ and may be 0, as long as sender and receiver agree. ``connections``: one of :data:`BULK_PURPOSES`.
        """

    @abstractmethod
    def sum(self, tensor: Tensor, connections: str = "activations") -> Tensor:
        """Return the sum of a tensor over the ranks as a new tensor, with the same bits on all of them."""

    @abstractmethod
    def send(self, tensor: Tensor, to: int, lane: str) -> Work:
        """Start sending a flat tensor to one rank, which receives the tensors of a lane of :data:`LANES` in order. It
        must not change until ``wait`` returns.
        """

    @abstractmethod
    def receive(self, tensor: Tensor, source: int, lane: str) -> Work:
        """Start receiving the next tensor that a rank sends on a lane into a flat tensor."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> Work:
        """Start a broadcast of bytes from the group's first rank."""

    @abstractmethod
    def gather_messages(self, rows: Tensor, row: Tensor) -> Work:
        """Start an all-gather of bytes on the host, ``[n]`` to ``[size, n]``."""

    @abstractmethod
    def broadcast_message(self, message: Tensor) -> Work:
        """Start a broadcast of bytes on the host from the group's first rank, in order with gathered messages."""

    @abstractmethod
    def abandon_messages(self) -> None:
        """Allow :meth:`close` although a gathered message will never arrive."""

    @abstractmethod
    def close(self) -> None:
        """Release the process groups. Called once, when nothing is in flight."""


class _Backed(Transport):
    """Operations that are the same for all backends. ``groups``: a process group per purpose."""

    def __init__(self, index: int, size: int, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._index = index
        self._size = size
        self._groups = groups

    def add(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = {**self._groups, **groups}

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._groups["gradients"])

    def broadcast(self, tensor: Tensor) -> Work:
        group = self._groups["parameters" if "parameters" in self._groups else "gradients"]
        return _broadcast(tensor, group=group, group_src=0, async_op=True)

    def gather_messages(self, rows: Tensor, row: Tensor) -> Work:
        return _all_gather(rows.view(-1), row, group=self._groups["control"], async_op=True)

    def broadcast_message(self, message: Tensor) -> Work:
        return _broadcast(message, group=self._groups["control"], group_src=0, async_op=True)

    def abandon_messages(self) -> None:
        _ABANDONED.append(self._groups["control"])

    def close(self) -> None:
        """Drop the process groups, which stops their threads. A thread that is still running could abort the process
        when it exits, because it needs the interpreter to drop its works.
        """
        self._groups = {}


class _SumsInRankOrder(_Backed):
    """Sums of exchanged tensors, in rank order."""

    def sum(self, tensor: Tensor, connections: str = "activations") -> Tensor:
        flat, total = tensor.view(-1), torch.empty_like(tensor)
        if self._size == 2 or tensor.nbytes < _SMALL_BYTES:  # one exchange of full tensors instead of two of slices
            self._sum_of([flat] * self._size, total.view(-1), connections)
            return total
        parts = list(total.view(-1).tensor_split(self._size))
        mine = parts[self._index]
        self._sum_of(flat.tensor_split(self._size), mine, connections)
        self.all_to_all(parts, [mine] * self._size, connections)
        return total

    def _sum_of(self, sent: Sequence[Tensor], out: Tensor, connections: str) -> None:
        """Reduce-scatter the tensors ``sent[i]`` to each rank ``i`` into ``out``, summing in rank order."""
        own = sent[self._index]
        received = [own if rank == self._index else torch.empty_like(out) for rank in range(self._size)]
        self.all_to_all(received, sent, connections)
        values = _sum([*received[: self._index], *received[self._index + 1 :]], own, self._index, out)
        if values is not out:
            out.copy_(values)


Edges = Mapping[tuple[int, int, str], dist.ProcessGroup]


class DeviceTransport(_Backed):
    """The transport between accelerators, over their own backend (NCCL for CUDA).

    Args:
        edges: process groups between pipeline stages, by (source index, target index, lane).
    """

    separates_tags = False

    def __init__(self, index: int, size: int, groups: Mapping[str, dist.ProcessGroup], edges: Edges) -> None:
        super().__init__(index, size, groups)
        self._edges = edges

    def send(self, tensor: Tensor, to: int, lane: str) -> Work:
        group = self._edges[self._index, to, lane]
        return _send(tensor, group=group, group_dst=int(to > self._index))

    def receive(self, tensor: Tensor, source: int, lane: str) -> Work:
        group = self._edges[source, self._index, lane]
        return _receive(tensor, group=group, group_src=int(source > self._index))

    def handshake(self, exchange: Callable[[object], list[Any]]) -> None:
        pass

    def all_gather(self, whole: Tensor, part: Tensor, purpose: str, tag: int) -> Work:
        return _all_gather(whole, part, group=self._groups[purpose], async_op=True)

    def reduce_scatter(self, out: Tensor, sent: Tensor, received: Tensor, *, accumulate: bool) -> None:
        _reduce_scatter(received, sent, group=self._groups["gradients"], async_op=True).wait()
        write_out(received, out, accumulate=accumulate)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], connections: str = "activations") -> None:
        _all_to_all(list(received), list(sent), group=self._groups[connections], async_op=True).wait()

    def sum(self, tensor: Tensor, connections: str = "activations") -> Tensor:
        total = tensor.clone()
        _all_reduce(total, group=self._groups[connections], async_op=True).wait()
        return total

    def close(self) -> None:
        super().close()
        self._edges = {}


class OrderedDeviceTransport(_SumsInRankOrder, DeviceTransport):
    """The transport between accelerators that sums in rank order, not in the order of their backend. It sends as many
    bytes, in more and smaller messages.
    """

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(self.sum(tensor, "gradients"))

    def reduce_scatter(self, out: Tensor, sent: Tensor, received: Tensor, *, accumulate: bool) -> None:
        # As much at a time as the scratch memory holds of all ranks, and at least one element.
        if received.numel() < self._size:
            received = received.new_empty(self._size)
        outgoing, step = sent.view(self._size, -1), received.numel() // self._size
        for start in range(0, out.numel(), step):
            target = out[start : start + step]
            parts = list(received[: self._size * target.numel()].view(self._size, -1).unbind())
            self.all_to_all(parts, [row[start : start + step] for row in outgoing], "gradients")
            own = parts.pop(self._index)
            values = _sum(parts, own, self._index, own)
            write_out(values, target, accumulate=accumulate)


class HostTransport(_SumsInRankOrder):
    """The transport between hosts over gloo, and between ranks of one node by reading each other's memory.

    Args:
        within_node: ``network``: gloo within a node, too; ``memory``: raise if ranks of a node cannot read each other's
            memory; ``auto``: read memory where possible.
        timeout_s: how long to wait for a peer of the node.
    """

    separates_tags = True

    def __init__(
        self, index: int, size: int, groups: Mapping[str, dist.ProcessGroup], within_node: str, timeout_s: float
    ) -> None:
        super().__init__(index, size, groups)
        self._within_node = within_node
        self._timeout_s = timeout_s
        self.peers: dict[int, NodePeer] | None = None  # by index; None before the handshake

    def add(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        super().add(groups)
        self._close_peers()  # they have no channels for the new purposes
        self.peers = None

    def handshake(self, exchange: Callable[[object], list[Any]]) -> None:
        if self.peers is None and self._within_node != "network":
            required = self._within_node == "memory"
            purposes = [purpose for purpose in BULK_PURPOSES if purpose in self._groups]
            self.peers = find_node_peers(self._index, exchange, purposes, timeout_s=self._timeout_s, required=required)

    def all_gather(self, whole: Tensor, part: Tensor, purpose: str, tag: int) -> Work:
        rows = whole.view(self._size, -1)
        own = rows[self._index]
        exchange = self._exchange(rows, [part] * self._size, purpose, tag)
        if own.data_ptr() != part.data_ptr():  # overlaps the exchange, which only reads `part`
            own.copy_(part)
        return exchange

    def reduce_scatter(self, out: Tensor, sent: Tensor, received: Tensor, *, accumulate: bool) -> None:
        outgoing, buffers = sent.view(self._size, -1), received.view(self._size - 1, -1)
        own = outgoing[self._index]
        rows = [*buffers[: self._index], own, *buffers[self._index :]]
        for at, parts in self._exchange(rows, outgoing, "gradients", piece_bytes=PIECE_BYTES).pieces():
            target = out[at]
            values = _sum(parts, own[at], self._index, parts[0] if accumulate else target)
            if values is not target:
                write_out(values, target, accumulate=accumulate)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], connections: str = "activations") -> None:
        arriving, leaving = self._begin(received, sent, connections)
        own = received[self._index]
        if own.data_ptr() != sent[self._index].data_ptr():  # a copy onto itself would mark a saved tensor as changed
            own.copy_(sent[self._index])
        for source, part in arriving.items():
            part.piece(0, received[source].numel())
        for work in leaving:
            work.wait()

    def send(self, tensor: Tensor, to: int, lane: str) -> Work:
        tag = _LANE_TAGS + LANES.index(lane)
        if self.peers and to in self.peers:
            return Offer(tensor, self.peers[to].channels["activations"], tag)
        return _send(tensor, group=self._groups["activations"], group_dst=to, tag=tag)

    def receive(self, tensor: Tensor, source: int, lane: str) -> Work:
        tag = _LANE_TAGS + LANES.index(lane)
        if self.peers and source in self.peers:
            peer = self.peers[source]
            return _SinglePiece(Fetch(tensor, tensor.numel(), peer.process, peer.channels["activations"], tag), tensor)
        return _receive(tensor, group=self._groups["activations"], group_src=source, tag=tag)

    def _exchange(
        self,
        buffers: Sequence[Tensor] | Tensor,
        parts: Sequence[Tensor] | Tensor,
        purpose: str,
        tag: int = 0,
        piece_bytes: int | None = None,
    ) -> Exchange:
        """Start sending ``parts[i]`` to every other rank ``i`` and receiving from it into ``buffers[i]``. All have the
        same size, and are sent in pieces of ``piece_bytes`` (None: in one piece).
        """
        own = parts[self._index]
        piece = own.numel() if piece_bytes is None else piece_bytes // own.itemsize
        begun = self._begin(buffers, parts, purpose, tag, (own.numel(), piece))
        return Exchange([begun[0][source] for source in sorted(begun[0])], begun[1], own.numel(), piece)

    def _begin(
        self,
        buffers: Sequence[Tensor] | Tensor,
        parts: Sequence[Tensor] | Tensor,
        purpose: str,
        tag: int = 0,
        cut: tuple[int, int] | None = None,
    ) -> tuple[dict[int, IncomingTensor], list[Work]]:
        """Start the receives from, and sends to, the other ranks.

        Receives are posted before sends: if a send arrives before its receive, gloo uses the network in only one
        direction at a time.

        Args:
            cut: number of elements from each rank, and per piece (None: the size of the buffer, in one piece).
        """
        size, own, group, peers = self._size, self._index, self._groups[purpose], self.peers or {}
        arriving, leaving = dict[int, IncomingTensor](), list[Work]()
        for source in ((own - distance) % size for distance in range(1, size)):
            buffer = buffers[source]
            num_elements, piece = cut or (buffer.numel(), buffer.numel())
            if num_elements == 0:
                continue
            if source in peers:
                peer = peers[source]
                arriving[source] = Fetch(buffer, num_elements, peer.process, peer.channels[purpose], tag)
            else:
                post = partial(_receive, group=group, group_src=source, tag=tag)
                arriving[source] = Receive(post, buffer, num_elements, piece)
        for target in ((own + distance) % size for distance in range(1, size)):
            sent = parts[target]
            if sent.numel() == 0:
                continue
            if target in peers:
                leaving.append(Offer(sent, peers[target].channels[purpose], tag))
            else:
                piece = cut[1] if cut else sent.numel()
                leaving += [_send(part, group=group, group_dst=target, tag=tag) for part in sent.split(piece)]
        return arriving, leaving

    def _close_peers(self) -> None:
        for peer in (self.peers or {}).values():
            peer.close()

    def close(self) -> None:
        self._close_peers()
        super().close()


class _SinglePiece:
    """A receive in a single piece."""

    def __init__(self, arriving: IncomingTensor, tensor: Tensor) -> None:
        self._arriving = arriving
        self._num_elements = tensor.numel()

    def wait(self) -> None:
        self._arriving.piece(0, self._num_elements)


def write_out(values: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """Copy ``values`` into ``out``, which may be on another device, or add them to it."""
    if accumulate:
        out.add_(values.to(out.device))
    else:
        out.copy_(values)


def _sum(incoming: list[Tensor], own: Tensor, place: int, out: Tensor) -> Tensor:
    """Return the sum in rank order of ``incoming``, with ``own`` inserted at ``place``. The result is in ``out``, or a
    new fp32 tensor for 16-bit tensors. ``incoming[0]`` is overwritten.
    """
    scratch, parts = incoming[0], [*incoming[:place], own, *incoming[place:]]
    total = parts[0]
    if total.dtype.itemsize < 4:
        total = total.float()
        for part in parts[1:]:
            total.add_(part)
        return total
    for part in parts[1:-1]:
        total = torch.add(total, part, out=scratch)
    return torch.add(total, parts[-1], out=out)
