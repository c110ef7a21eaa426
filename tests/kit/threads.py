"""Ranks as threads of this process: partita's real collectives on a mesh that needs no process group."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from partita.comm.collective_log import CollectiveLog
from partita.comm.collectives import Collectives
from partita.comm.transport import Transport, write_out
from partita.memory.streams import Stream
from partita.table.mesh_shape import MeshShape
from partita.table.purposes import BULK_PURPOSES, all_purposes

T = TypeVar("T")
TIMEOUT_S = 10.0


def on_threads(shape: MeshShape, work: Callable[[Collectives], T], *axes: tuple[str, ...]) -> list[T]:
    """Call ``work`` on every rank of a mesh with groups over ``axes`` and over all axes; return results in rank order.

    Raises:
        Exception: the exception of the first rank, in rank order, that raised one.
    """
    network = Network(shape.num_ranks)
    collectives = [Collectives(FakeMesh(shape, rank, network)) for rank in range(shape.num_ranks)]
    for each in collectives:
        each.open(axes)
    with ThreadPoolExecutor(shape.num_ranks) as threads:
        results = [threads.submit(work, each) for each in collectives]
    return [result.result() for result in results]


class Network:
    """Messages between threads, by operation, and the notes that the threads share."""

    def __init__(self, num_ranks: int) -> None:
        self.notes = [""] * num_ranks
        self._sent: dict[object, dict[int, Any]] = defaultdict(dict)
        self._changed = threading.Condition()

    def send(self, operation: object, index: int, value: object) -> None:
        with self._changed:
            self._sent[operation][index] = value
            self._changed.notify_all()

    def receive(self, operation: object, num: int) -> list[Any]:
        """Wait for the messages of all ``num`` ranks.

        Raises:
            RuntimeError: some ranks have not sent within TIMEOUT_S.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._sent[operation]) == num, TIMEOUT_S):
                raise RuntimeError(f"only ranks {sorted(self._sent[operation])} of {num} do {operation}")
            return [self._sent[operation][index] for index in range(num)]


class Notes:
    """A board of notes that is shared by the ranks of one process."""

    def __init__(self, rank: int, notes: list[str]) -> None:
        self._rank, self._notes = rank, notes

    def post(self, note: str) -> None:
        self._notes[self._rank] = note

    def read(self) -> list[str]:
        return list(self._notes)


class UnderWay:
    """An asynchronous operation that completes in ``wait``."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


class FakeTransport(Transport):
    """A transport between threads.

    A collective waits for the other ranks. The n-th call of a kind on each rank belongs to the same collective.
    """

    separates_tags = True

    def __init__(self, network: Network, ranks: list[int], index: int, axes: tuple[str, ...] = ()) -> None:
        self._axes = axes
        self._network, self._ranks, self._index, self._size = network, tuple(ranks), index, len(ranks)
        self._numbers = Counter[str]()

    def add(self, groups: Any) -> None:
        pass

    def _exchange(self, kind: str, value: Tensor) -> Callable[[], list[Tensor]]:
        operation = (self._axes, self._ranks, kind, self._numbers[kind])
        self._numbers[kind] += 1
        self._network.send(operation, self._index, value.clone())
        return lambda: self._network.receive(operation, self._size)

    def handshake(self, exchange: Callable[[object], list[Any]]) -> None:
        pass

    def all_gather(self, whole: Tensor, part: Tensor, purpose: str, tag: int) -> UnderWay:
        receive = self._exchange(f"{purpose} {tag}", part)
        return UnderWay(lambda: whole.copy_(torch.cat(receive())))

    def reduce_scatter(self, out: Tensor, sent: Tensor, received: Tensor, *, accumulate: bool) -> None:
        parts = [whole.view(self._size, -1)[self._index] for whole in self._exchange("gradients", sent)()]
        write_out(in_rank_order(parts), out, accumulate=accumulate)

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(in_rank_order(self._exchange("all-reduce", tensor)()))

    def sum(self, tensor: Tensor, connections: str = "activations") -> Tensor:
        return in_rank_order(self._exchange("sum", tensor)()).to(tensor.dtype)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], connections: str = "activations") -> None:
        ends = [0, *accumulate(part.numel() for part in sent)]
        every = self._exchange("all-to-all", torch.tensor(ends))()
        for rank, whole in enumerate(self._exchange("sent", torch.cat(list(sent)))()):
            if rank != self._index or received[rank].data_ptr() != sent[rank].data_ptr():
                received[rank].copy_(whole[every[rank][self._index] : every[rank][self._index + 1]])

    def send(self, tensor: Tensor, to: int, lane: str) -> UnderWay:
        self._network.send(self._next_on(lane, self._index, to), 0, tensor.clone())
        return UnderWay(lambda: None)

    def receive(self, tensor: Tensor, source: int, lane: str) -> UnderWay:
        operation = self._next_on(lane, source, self._index)
        return UnderWay(lambda: tensor.copy_(self._network.receive(operation, 1)[0]))

    def _next_on(self, lane: str, source: int, target: int) -> tuple[Any, ...]:
        kind = f"{lane} from {source} to {target}"
        self._numbers[kind] += 1
        return self._axes, self._ranks, kind, self._numbers[kind]

    def broadcast(self, tensor: Tensor) -> UnderWay:
        receive = self._exchange("broadcast", tensor)
        return UnderWay(lambda: tensor.copy_(receive()[0]))

    def gather_messages(self, rows: Tensor, row: Tensor) -> UnderWay:
        receive = self._exchange("messages", row)
        return UnderWay(lambda: rows.copy_(torch.stack(receive())))

    def broadcast_message(self, message: Tensor) -> UnderWay:
        receive = self._exchange("broadcast messages", message)
        return UnderWay(lambda: message.copy_(receive()[0]))

    def abandon_messages(self) -> None:
        pass

    def close(self) -> None:
        pass


def in_rank_order(parts: list[Tensor]) -> Tensor:
    """Sum the parts in rank order; 16-bit tensors are summed in fp32."""
    total = parts[0].float() if parts[0].dtype.itemsize < 4 else parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class FakeMesh:
    """The part of :class:`~partita.comm.mesh.Mesh` that groups and engines use."""

    def __init__(self, shape: MeshShape, rank: int, network: Network) -> None:
        self.shape, self.rank, self.num_ranks, self.timeout_s = shape, rank, shape.num_ranks, TIMEOUT_S
        self.device = torch.device("cpu")
        self.through_host = False
        self.log = CollectiveLog()
        board: Any = Notes(rank, network.notes)
        self.log.board = board
        self.watchdog = SimpleNamespace(
            describe_ranks=lambda: "nobody watches",
            synchronizing=lambda call: nullcontext(),
            close=lambda: None,
            call_regularly=lambda check: None,
            endings=[],
        )
        self._network = network
        self.transports: dict[tuple[str, ...], Transport] = {}
        self.open([(), shape.all_axes])
        self._streams = {purpose: Stream(self.device, purpose) for purpose in BULK_PURPOSES}
        self.has_last_engine = False

    def add_engine(self) -> bool:
        return False

    def remove_engine(self, *, closes: bool = False) -> None:
        pass

    def purposes(self, axes: tuple[str, ...]) -> frozenset[str]:
        return all_purposes(axes)

    def open(self, combinations: Iterable[tuple[str, ...]]) -> None:
        for axes in map(self.shape.named, combinations):
            if axes not in self.transports:
                ranks = next((group for group in self.shape.groups(axes) if self.rank in group), None)
                if ranks is None:  # groups of other pipeline stages
                    continue
                self.transports[axes] = FakeTransport(self._network, ranks, self.index(axes), axes)

    def transport(self, axes: tuple[str, ...]) -> Transport:
        return self.transports[axes]

    def index(self, axes: tuple[str, ...]) -> int:
        return self.shape.group_index(self.rank, axes)

    def size(self, axis: str) -> int:
        return self.shape.size(axis)

    def coordinate(self, axis: str) -> int:
        return self.shape.coordinate(self.rank, axis)

    def is_first_replica(self, shard_axes: tuple[str, ...] = ()) -> bool:
        return self.shape.is_first_replica(self.rank, shard_axes)

    def stream(self, purpose: str) -> Stream:
        return self._streams[purpose]
