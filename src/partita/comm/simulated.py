"""Connections of a simulated rank: sends are dropped, and the other ranks send what this one sends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from partita.comm.connections import Connections
from partita.comm.transport import DeviceTransport, HostTransport, Transport, Work
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.table.mesh_shape import MeshShape


@dataclass
class Requests:
    """The requests of pipeline stages to their predecessors, by pipeline index and number of arguments."""

    _asked: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def note(self, index: int, request: Tensor) -> None:
        self._asked[index, request.numel()] = request.clone()

    def find(self, index: int, num_arguments: int) -> Tensor | None:
        """Return a rank's request for a call with ``num_arguments`` arguments.

        A rank that also has an earlier stage may not have been simulated yet. Then this is another rank's request.
        """
        others = (request for (_, num), request in self._asked.items() if num == num_arguments)
        found = self._asked.get((index, num_arguments))
        return next(others, None) if found is None else found


class SimulatedRanks(Connections):
    """The connections of one rank among ``num_ranks``.

    Args:
        requests: requests of the stages that were simulated before this one. Only the next stage knows which values it
            needs from its predecessor; blocks of one kind need the same.
    """

    has_store = False
    through_host = False
    timeout_s = 0.0

    def __init__(self, rank: int, num_ranks: int, requests: Requests) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._requests = requests

    def alone(self) -> Transport:
        return self._transport(0, 1)

    def connect(
        self, shape: MeshShape, axes: tuple[str, ...], purposes: frozenset[str], known: Transport | None = None
    ) -> Transport | None:
        if not any(self.rank in ranks for ranks in shape.groups(axes)):
            return None
        return self._transport(shape.group_index(self.rank, axes), shape.group_size(axes))

    def _transport(self, index: int, size: int) -> Transport:
        like: Transport = DeviceTransport(index, size, {}, {})
        if accelerator.is_host(accelerator.SIMULATED):
            like = HostTransport(index, size, {}, "network", self.timeout_s)
        return SimulatedTransport(index, size, like, self._requests)

    def device_mesh(self, shape: MeshShape) -> NoReturn:
        raise PartitaError("engine.mesh.device_mesh: a simulated rank has no process groups")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class CompletedWork:
    """An operation that is complete from the start."""

    def wait(self) -> None:
        pass


COMPLETED = CompletedWork()


class SimulatedTransport(Transport):
    """A transport in which all ranks send what this one sends.

    Args:
        like: the transport whose properties it copies; nothing is sent through it.
    """

    def __init__(self, index: int, size: int, like: Transport, requests: Requests) -> None:
        self._index = index
        self._size = size
        self._requests = requests
        self.separates_tags = like.separates_tags

    def add(self, groups: Mapping[str, Any]) -> None:
        pass

    def handshake(self, exchange: Callable[[object], list[Any]]) -> None:
        pass

    def all_gather(self, whole: Tensor, part: Tensor, purpose: str, tag: int) -> Work:
        return COMPLETED

    def reduce_scatter(self, out: Tensor, sent: Tensor, received: Tensor, *, accumulate: bool) -> None:
        pass

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.mul_(self._size)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], connections: str = "activations") -> None:
        pass

    def sum(self, tensor: Tensor, connections: str = "activations") -> Tensor:
        return tensor * self._size

    def send(self, tensor: Tensor, to: int, lane: str) -> Work:
        if lane == "request":
            self._requests.note(self._index, tensor)
        return COMPLETED

    def receive(self, tensor: Tensor, source: int, lane: str) -> Work:
        if lane == "request":
            if (request := self._requests.find(source, tensor.numel())) is None:
                raise PartitaError(
                    "simulate pipeline stages from the last to the first, as partita simulate does: a stage needs to "
                    "know which values the next one requests"
                )
            tensor.copy_(request)
        return COMPLETED

    def broadcast(self, tensor: Tensor) -> Work:
        return COMPLETED

    def gather_messages(self, rows: Tensor, row: Tensor) -> Work:
        torch.stack([row] * self._size, out=rows)
        return COMPLETED

    def broadcast_message(self, message: Tensor) -> Work:
        return COMPLETED

    def abandon_messages(self) -> None:
        pass

    def close(self) -> None:
        pass
