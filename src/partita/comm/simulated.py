"""A rank of a cluster that is not there: what it sends goes nowhere, and all others answer as it would."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from partita.comm.connections import Connections
from partita.comm.transport import DeviceTransport, HostTransport, Transport, Work
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.plan.mesh_shape import MeshShape


@dataclass
class Requests:
    """The requests of pipeline stages to the ones before them, each by its rank's index along the pipeline."""

    _asked: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def note(self, index: int, request: Tensor) -> None:
        self._asked[index, request.numel()] = request.clone()

    def find(self, index: int, num_arguments: int) -> Tensor | None:
        """Return the request of a rank about a call with so many arguments; of a rank that was not simulated yet (it
        has an earlier stage, too), that of any other.
        """
        others = (request for (_, num), request in self._asked.items() if num == num_arguments)
        found = self._asked.get((index, num_arguments))
        return next(others, None) if found is None else found


class SimulatedRanks(Connections):
    """The connections of one rank among ``num_ranks``.

    Args:
        requests: of the stages that were simulated before this one. A stage is told what the next one lacks, which no
            rank but that one knows; blocks of one kind lack the same.
    """

    has_store = False
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

    def close(self) -> None:
        pass


class Arrived:
    """A message that is complete from the start."""

    def wait(self) -> None:
        pass


ARRIVED = Arrived()


class SimulatedTransport(Transport):
    """Between this rank and others that send what it sends.

    Args:
        like: the transport that it stands for; nothing is sent through it.
    """

    def __init__(self, index: int, size: int, like: Transport, requests: Requests) -> None:
        self._index = index
        self._size = size
        self._requests = requests
        self.keeps_tags_apart = like.keeps_tags_apart

    def add(self, groups: Mapping[str, Any]) -> None:
        pass

    def handshake(self, exchange: Callable[[object], list[Any]]) -> None:
        pass

    def all_gather(self, whole: Tensor, part: Tensor, purpose: str, tag: int) -> Work:
        return ARRIVED

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
        return ARRIVED

    def receive(self, tensor: Tensor, source: int, lane: str) -> Work:
        if lane == "request":
            if (request := self._requests.find(source, tensor.numel())) is None:
                raise PartitaError(
                    "a stage of the pipeline is simulated after a later one, which tells what it lacks; simulate the "
                    "last stage first (partita.simulate does)"
                )
            tensor.copy_(request)
        return ARRIVED

    def broadcast(self, tensor: Tensor) -> Work:
        return ARRIVED

    def gather_messages(self, rows: Tensor, row: Tensor) -> Work:
        torch.stack([row] * self._size, out=rows)
        return ARRIVED

    def close(self) -> None:
        pass
