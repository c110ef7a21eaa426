"""How a rank reaches the others of its mesh: through process groups of ``torch.distributed``."""

from abc import ABC, abstractmethod
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from partita.comm import world
from partita.comm.forks import connections_kept_from_children
from partita.comm.transport import LANES, DeviceTransport, HostTransport, Transport, purposes_over
from partita.comm.world import Rendezvous
from partita.memory import accelerator
from partita.plan.mesh_shape import PIPELINE_AXES, MeshShape


class Connections(ABC):
    """Those of one rank. ``has_store``: ranks can leave notes for each other, beside all collectives."""

    rank: int
    num_ranks: int
    timeout_s: float
    has_store: bool

    @abstractmethod
    def alone(self) -> Transport:
        """That of a rank with itself, along no axis."""

    @abstractmethod
    def connect(self, shape: MeshShape, axes: tuple[str, ...]) -> Transport | None:
        """Connect the ranks of a mesh over these axes; called on all of them. None: this rank is on none of the stages
        that ``axes`` name.
        """

    @abstractmethod
    def close(self) -> None:
        """Called once, when nothing is sent any more."""


class Processes(Connections):
    """Between processes, whose default group is started if none is running.

    Args:
        device: where tensors live; decides the backend (gloo on the host). Control messages always use gloo.
    """

    has_store = True

    def __init__(self, device: torch.device, rendezvous: Rendezvous) -> None:
        self._device = device
        self.timeout_s = rendezvous.timeout_s
        self._within_node = rendezvous.within_node
        self._groups: list[dist.ProcessGroup] = []
        self._world = world.join(rendezvous, device)
        self.rank, self.num_ranks = world.running() or (rendezvous.rank, 1)

    def alone(self) -> Transport:
        return HostTransport(0, 1, {}, self._within_node, self.timeout_s)

    def connect(self, shape: MeshShape, axes: tuple[str, ...]) -> Transport | None:
        own = dict[str, dist.ProcessGroup]()
        with connections_kept_from_children():
            for ranks in shape.groups(axes):
                assert ranks == sorted(ranks), f"axes out of the mesh's order, in which torch numbers ranks: {axes}"
                for purpose in purposes_over(axes):
                    backend = accelerator.backend(accelerator.HOST if purpose == "control" else self._device)
                    if (group := self._group(ranks, backend)) is not None:
                        own[purpose] = group
        if not own:
            return None
        index, size = shape.group_index(self.rank, axes), shape.group_size(axes)
        if accelerator.is_host(self._device):
            return HostTransport(index, size, own, self._within_node, self.timeout_s)
        return DeviceTransport(index, size, own, self._connect_edges(shape, axes))

    def _connect_edges(self, shape: MeshShape, axes: tuple[str, ...]) -> dict[tuple[int, int, str], dist.ProcessGroup]:
        """Along the pipeline, between each two neighbours: on each of its groups a backend sends in one order."""
        own = dict[tuple[int, int, str], dist.ProcessGroup]()
        size = shape.group_size(axes)
        backend = accelerator.backend(self._device)
        for ranks in shape.groups(axes) if axes == PIPELINE_AXES else ():
            neighbours = {(at, (at + step) % size) for at in range(size) for step in (1, -1)}
            for (source, target), lane in product(sorted(neighbours), LANES):
                group = self._group(sorted((ranks[source], ranks[target])), backend)
                if group is not None:
                    own[source, target, lane] = group
        return own

    def _group(self, ranks: list[int], backend: str) -> dist.ProcessGroup | None:
        """A new one, on every rank; None where this one is not in it."""
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=self.timeout_s), backend=backend)
        if self.rank not in ranks:
            return None
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Destroy the groups made here, and ``torch.distributed`` itself if it was started here and no other mesh uses
        it.
        """
        world.leave(self._world, self._groups)
        self._world = None
        self._groups = []
