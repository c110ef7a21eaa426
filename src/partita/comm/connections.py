"""How a rank reaches the others of its mesh: through process groups of ``torch.distributed``."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from partita.comm import world
from partita.comm.forks import connections_kept_from_children
from partita.comm.transport import LANES, DeviceTransport, HostTransport, Transport, purposes_over
from partita.comm.world import Rendezvous
from partita.memory import accelerator
from partita.plan.mesh_shape import AXES, PIPELINE_AXES, MeshShape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    def device_mesh(self, shape: MeshShape) -> "DeviceMesh":
        """Torch's description of the mesh, with process groups that nothing else uses; called on all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Called once, when nothing is sent any more."""


class Processes(Connections):
    """Between processes, whose default group is started if none is running.

    The first group, of all ranks, is made as torch makes groups by default: every rank takes part. Each further one is
    made by its members alone, so that the number of calls does not grow with the number of ranks. Torch names such a
    group by its ranks and by how many groups a process has, so all ranks make the same number of them: one that is in
    none makes a group of its own in its place. Where that number differs all the same (a script has made groups on some
    ranks alone), or where the default group is bound to a device, every rank takes part in all.

    Args:
        device: where tensors live; decides the backend (gloo on the host). Control messages always use gloo.
    """

    has_store = True

    def __init__(self, device: torch.device, rendezvous: Rendezvous) -> None:
        self._device = device
        self.timeout_s = rendezvous.timeout_s
        self._within_node = rendezvous.within_node
        self._groups: list[dist.ProcessGroup] = []
        self._all_ranks: Transport | None = None
        self._world = world.join(rendezvous, device)
        self.rank, self.num_ranks = world.running() or (rendezvous.rank, 1)

    def alone(self) -> Transport:
        return HostTransport(0, 1, {}, self._within_node, self.timeout_s)

    def connect(self, shape: MeshShape, axes: tuple[str, ...]) -> Transport | None:
        own = dict[str, dist.ProcessGroup]()
        by_members = self._members_can_make_groups()
        with connections_kept_from_children():
            for purpose in purposes_over(axes):
                backend = accelerator.backend(accelerator.HOST if purpose == "control" else self._device)
                if (group := self._make_group(shape.groups(axes), backend, by_members=by_members)) is not None:
                    own[purpose] = group
            edges = self._connect_edges(shape, axes, by_members=by_members)
        if not own:
            return None
        index, size = shape.group_index(self.rank, axes), shape.group_size(axes)
        transport: Transport = DeviceTransport(index, size, own, edges)
        if accelerator.is_host(self._device):
            transport = HostTransport(index, size, own, self._within_node, self.timeout_s)
        if axes == shape.all_axes:
            self._all_ranks = transport
        return transport

    def _connect_edges(
        self, shape: MeshShape, axes: tuple[str, ...], *, by_members: bool
    ) -> dict[tuple[int, int, str], dist.ProcessGroup]:
        """Along the pipeline of accelerators, between each two neighbours: on each of its groups a backend sends in one
        order.
        """
        own = dict[tuple[int, int, str], dist.ProcessGroup]()
        if axes != PIPELINE_AXES or accelerator.is_host(self._device):
            return own
        backend = accelerator.backend(self._device)
        lists, index = shape.groups(axes), shape.group_index(self.rank, axes)
        for pairs, lane in product(neighbours(shape.group_size(axes)), LANES):
            of_pairs = [[ranks[one], ranks[other]] for ranks in lists for one, other in pairs]
            for source_is_first in (True, False):
                group = self._make_group(list(map(sorted, of_pairs)), backend, by_members=by_members)
                if group is not None:
                    source, target = next(pair for pair in pairs if index in pair)
                    own[(source, target, lane) if source_is_first else (target, source, lane)] = group
        return own

    def _members_can_make_groups(self) -> bool:
        """Whether all ranks have equally many groups, from which torch makes the names of those that members make."""
        if self._all_ranks is None or world.is_bound_to_device():
            return False
        row = torch.tensor([world.num_groups()], device="cpu").view(torch.uint8)
        rows = row.new_empty((self.num_ranks, row.numel()))
        self._all_ranks.gather_messages(rows, row).wait()
        return bool((rows == row).all())

    def _make_group(self, lists: Sequence[list[int]], backend: str, *, by_members: bool) -> dist.ProcessGroup | None:
        """Make a group of each of these lists of ranks, none of which is in two. Called on all ranks.

        Returns: this rank's; None if it is in none of the lists.
        """
        found = None
        for ranks in lists:
            assert ranks == sorted(ranks), f"not in the order in which torch numbers ranks: {ranks}"
            if self.rank in ranks or not by_members:
                group = self._new_group(ranks, backend, by_members=by_members)
                found = group if self.rank in ranks else found
        if found is None and by_members:
            self._new_group([self.rank], backend, by_members=True)
        return found

    def _new_group(self, ranks: list[int], backend: str, *, by_members: bool) -> dist.ProcessGroup:
        timeout = timedelta(seconds=self.timeout_s)
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=by_members
        )
        if self.rank in ranks:
            self._groups.append(group)
        return group

    def device_mesh(self, shape: MeshShape) -> "DeviceMesh":
        from torch.distributed.device_mesh import DeviceMesh  # imports much that training does not need

        if self._world is None:
            self._world = world.start_alone(self.timeout_s)
        by_members = self._members_can_make_groups()
        backend = accelerator.backend(self._device)
        with connections_kept_from_children():
            made = dict[str, dist.ProcessGroup]()
            for axis in ("", *(axis for axis in AXES if shape.size(axis) > 1)):  # each rank alone, and those along axes
                group = self._make_group(shape.groups((axis,) if axis else ()), backend, by_members=by_members)
                assert group is not None
                made[axis] = group
        ranks = torch.arange(self.num_ranks, device="cpu").view([shape.size(axis) for axis in AXES])
        groups = [made.get(axis, made[""]) for axis in AXES]
        return DeviceMesh.from_group(groups, self._device.type, ranks, mesh_dim_names=AXES)

    def close(self) -> None:
        """Destroy the groups made here, and ``torch.distributed`` itself if it was started here and no other mesh uses
        it.
        """
        world.leave(self._world, self._groups)
        self._world = None
        self._groups = []


def neighbours(size: int) -> list[list[tuple[int, int]]]:
    """The pairs of neighbours on a ring, in rounds: in each, no rank is in two pairs."""
    ring = [(at, (at + 1) % size) for at in range(size)] if size > 2 else [(0, 1)]
    last = ring[-1:] if size % 2 else []
    pairs = ring[: len(ring) - len(last)]
    return [pairs_of_round for pairs_of_round in (pairs[::2], pairs[1::2], last) if pairs_of_round]
