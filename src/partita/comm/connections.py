"""Connections of a rank to the other ranks of its mesh: process groups of ``torch.distributed``."""

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from partita.comm import staged, world
from partita.comm.node.forks import connections_kept_from_children
from partita.comm.transport import LANES, DeviceTransport, HostTransport, OrderedDeviceTransport, Transport
from partita.comm.world import Rendezvous
from partita.memory import accelerator
from partita.table.mesh_shape import AXES, PIPELINE_AXES, MeshShape
from partita.table.purposes import PURPOSES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Connections(ABC):
    """The connections of one rank.

    Attributes:
        has_store: ranks can exchange notes through a store, outside of collectives.
        through_host: tensors of accelerators are exchanged through host memory, so ranks may share an accelerator.
    """

    rank: int
    num_ranks: int
    timeout_s: float
    has_store: bool
    through_host: bool

    @abstractmethod
    def alone(self) -> Transport:
        """Return the transport of a rank with itself, along no axis."""

    @abstractmethod
    def connect(
        self, shape: MeshShape, axes: tuple[str, ...], purposes: frozenset[str], known: Transport | None = None
    ) -> Transport | None:
        """Connect the ranks of a mesh over these axes for these purposes. Collective.

        Args:
            known: an existing transport over these axes, to which the connections are added.

        Returns: None if this rank is on none of the stages that ``axes`` name.
        """

    @abstractmethod
    def device_mesh(self, shape: MeshShape) -> "DeviceMesh":
        """Return torch's ``DeviceMesh`` of the mesh, with process groups that nothing else uses. Collective."""

    @abstractmethod
    def abort(self) -> None:
        """End the collectives in flight on the accelerator. Its connections cannot be used afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Release the connections. Called once, when nothing is in flight."""


class Processes(Connections):
    """Connections between processes. Starts the default process group if none is running.

    All ranks create the first group, which contains every rank. Only the members create each further group
    (``use_local_synchronization``), so the number of calls does not grow with the number of ranks. If the default group
    is bound to a device, torch splits groups from it, and all ranks create every group.

    Args:
        device: the device of the tensors; decides the backend (gloo on the host). Control messages always use gloo.
    """

    has_store = True

    def __init__(self, device: torch.device, rendezvous: Rendezvous) -> None:
        self._device = device
        self.timeout_s = rendezvous.timeout_s
        self._within_node = rendezvous.within_node
        self.through_host = rendezvous.through_host
        self._backend = staged.backend(device, through_host=rendezvous.through_host)
        self._on_device = OrderedDeviceTransport if rendezvous.reduction == "ordered" else DeviceTransport
        self._groups: list[dist.ProcessGroup] = []
        self._groups_of_device: list[dist.ProcessGroup] = []  # those of them that use the accelerator's backend
        self._names = ""  # prefix of the names of groups that only members create; empty: every rank creates all groups
        self._num_made = 0  # number of groups, including those without this rank
        self._world = world.join(rendezvous, device)
        self.rank, self.num_ranks = world.running() or (rendezvous.rank, 1)

    def alone(self) -> Transport:
        return HostTransport(0, 1, {}, self._within_node, self.timeout_s)

    def connect(
        self, shape: MeshShape, axes: tuple[str, ...], purposes: frozenset[str], known: Transport | None = None
    ) -> Transport | None:
        own = dict[str, dist.ProcessGroup]()
        with connections_kept_from_children():
            for purpose in (each for each in PURPOSES if each in purposes):
                backend = accelerator.backend(accelerator.HOST) if purpose == "control" else self._backend
                if (group := self._make_group(shape.groups(axes), backend)) is not None:
                    own[purpose] = group
            edges = self._connect_edges(shape, axes) if "activations" in purposes else {}
        if not own:
            return None
        if known is not None:
            known.add(own)
            return known
        index, size = shape.group_index(self.rank, axes), shape.group_size(axes)
        transport: Transport = self._on_device(index, size, own, edges)
        if accelerator.is_host(self._device):
            transport = HostTransport(index, size, own, self._within_node, self.timeout_s)
        if axes == shape.all_axes:
            self._names = self._agreed_names(transport)
        return transport

    def _agreed_names(self, all_ranks: Transport) -> str:
        """Return a prefix of group names that no earlier group in the same store uses."""
        if world.is_bound_to_device():
            return ""
        row = torch.frombuffer(bytearray(secrets.token_bytes(8)), dtype=torch.uint8)
        rows = row.new_empty((self.num_ranks, row.numel()))
        all_ranks.gather_messages(rows, row).wait()
        return f"partita/{bytes(rows[0].tolist()).hex()}"

    def _connect_edges(self, shape: MeshShape, axes: tuple[str, ...]) -> dict[tuple[int, int, str], dist.ProcessGroup]:
        """Create a process group per pair of neighbouring pipeline stages and lane, on accelerators only. A backend
        sends in a fixed order within each group.
        """
        own = dict[tuple[int, int, str], dist.ProcessGroup]()
        if axes != PIPELINE_AXES or accelerator.is_host(self._device):
            return own
        lists, size = shape.groups(axes), shape.group_size(axes)
        neighbours = {(at, (at + step) % size) for at in range(size) for step in (1, -1)}
        for (source, target), lane in product(sorted(neighbours), LANES):
            group = self._make_group([sorted((ranks[source], ranks[target])) for ranks in lists], self._backend)
            if group is not None:
                own[source, target, lane] = group
        return own

    def _make_group(self, lists: Sequence[list[int]], backend: str) -> dist.ProcessGroup | None:
        """Create a group for each of these disjoint lists of ranks. Collective.

        Returns: this rank's group; None if it is in none of the lists.
        """
        found = None
        self._num_made += 1
        for ranks in lists:
            assert ranks == sorted(ranks), f"not in the order in which torch numbers ranks: {ranks}"
            if self.rank in ranks or not self._names:
                name = f"{self._names}/{self._num_made}/{ranks[0]}" if self._names else ""
                group = self._new_group(ranks, backend, name)
                found = group if self.rank in ranks else found
        return found

    def _new_group(self, ranks: list[int], backend: str, name: str) -> dist.ProcessGroup:
        """Create one process group.

        Args:
            name: the name of a group that only its members create; empty: every rank calls this.
        """
        timeout = timedelta(seconds=self.timeout_s)
        with world.named(name) if name else nullcontext():
            group: dist.ProcessGroup = dist.new_group(
                ranks, timeout=timeout, backend=backend, use_local_synchronization=bool(name)
            )
        if self.rank in ranks:
            self._groups.append(group)
            if backend != accelerator.backend(accelerator.HOST):
                self._groups_of_device.append(group)
        return group

    def device_mesh(self, shape: MeshShape) -> "DeviceMesh":
        from torch.distributed.device_mesh import DeviceMesh  # imports much that training does not need

        if self._world is None:
            self._world = world.start_alone(self.timeout_s)
        with connections_kept_from_children():
            made = dict[str, dist.ProcessGroup]()
            for axis in ("", *(axis for axis in AXES if shape.size(axis) > 1)):  # "": a group of this rank only
                group = self._make_group(shape.groups((axis,) if axis else ()), self._backend)
                assert group is not None
                made[axis] = group
        ranks = torch.arange(self.num_ranks, device="cpu").view([shape.size(axis) for axis in AXES])
        groups = [made.get(axis, made[""]) for axis in AXES]
        return DeviceMesh.from_group(groups, self._device.type, ranks, mesh_dim_names=AXES)

    def abort(self) -> None:
        # At the same time: the end of one group waits for the device, which may be waiting in another group.
        aborts = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in self._groups_of_device]
        for each in aborts:
            each.start()
        for each in aborts:
            each.join()

    def close(self) -> None:
        """Destroy the groups made here, and ``torch.distributed`` itself if it was started here and no other mesh uses
        it.
        """
        world.leave(self._world, self._groups)
        self._world = None
        self._groups = []
        self._groups_of_device = []


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # some backends cannot
        group.abort()
