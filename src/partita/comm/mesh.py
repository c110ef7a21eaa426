"""The mesh: this rank's place on the axes, and the connections along them.

An engine makes a mesh of its own, or is given another engine's: then both use its process groups, streams, log and
watchdog, and every rank has to run what they do in one order. Without other ranks there are no process groups, and
nothing is ever called on one.
"""

from collections.abc import Iterable
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from partita.comm import world
from partita.comm.collective_log import CollectiveLog
from partita.comm.forks import connections_kept_from_children
from partita.comm.transport import BULK_PURPOSES, LANES, PURPOSES, DeviceTransport, HostTransport, Transport
from partita.comm.watchdog import Watchdog
from partita.comm.world import Rendezvous
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.memory.streams import Stream
from partita.plan.mesh_shape import PIPELINE_AXES, MeshShape


class Mesh:
    """Sizes and coordinates of the axes, and a transport for each combination of axes that is communicated over. That
    of all ranks is there from the beginning.

    Args:
        shape: the sizes of the axes; their product is the number of ranks.
        device: where tensors live; decides the backend (gloo on the host). Control messages always use gloo.
        rendezvous: used to start ``torch.distributed`` if it is not running yet.
    """

    def __init__(self, shape: MeshShape, device: torch.device, rendezvous: Rendezvous) -> None:
        self.shape, self.device = shape, device
        self.timeout_s, self._within_node = rendezvous.timeout_s, rendezvous.within_node
        self._alone = HostTransport(0, 1, {}, self._within_node, self.timeout_s)  # along no axis
        self.transports: dict[tuple[str, ...], Transport] = {(): self._alone}
        self._opened: set[tuple[str, ...]] = {()}
        self._process_groups: list[dist.ProcessGroup] = []
        # Engines that share the mesh share these: on one group, every rank must post in one order.
        self._streams = {purpose: Stream(device, purpose) for purpose in BULK_PURPOSES}
        self.log = CollectiveLog()
        self.watchdog: Watchdog | None = None
        self._closed, self._world = False, world.join(rendezvous, device)
        try:
            self.rank, num_ranks = world.running() or (rendezvous.rank, 1)
            if num_ranks != shape.num_ranks:
                raise PartitaError(f"the mesh has {shape.num_ranks} ranks, but {num_ranks} processes are running")
            self.open([shape.all_axes])
        except BaseException:
            self.close()
            raise

    def open(self, combinations: Iterable[tuple[str, ...]]) -> None:
        """Connect the ranks over these combinations of axes, where they are not; every rank takes part in all of it, in
        one order.

        Raises:
            PartitaError: the mesh is closed.
        """
        self.check_open()
        for axes in map(self.shape.named, combinations):
            if axes not in self._opened:
                self._opened.add(axes)
                if (transport := self._connect(axes)) is not None:
                    self.transports[axes] = transport

    def _connect(self, axes: tuple[str, ...]) -> Transport | None:
        """None: this rank is on none of the stages."""
        own = dict[str, dist.ProcessGroup]()
        size = self.shape.group_size(axes)
        with connections_kept_from_children():
            for ranks in self.shape.groups(axes):
                assert ranks == sorted(ranks), f"axes out of the mesh's order, in which torch numbers ranks: {axes}"
                for purpose in PURPOSES:
                    backend = accelerator.backend(accelerator.HOST if purpose == "control" else self.device)
                    group = dist.new_group(ranks, timeout=timedelta(seconds=self.timeout_s), backend=backend)
                    if self.rank in ranks:
                        own[purpose] = group
                        self._process_groups.append(group)
        if not own:
            return None
        if accelerator.is_host(self.device):
            return HostTransport(self.index(axes), size, own, self._within_node, self.timeout_s)
        return DeviceTransport(self.index(axes), size, own, self._connect_edges(axes))

    def _connect_edges(self, axes: tuple[str, ...]) -> dict[tuple[int, int, str], dist.ProcessGroup]:
        """Along the pipeline, between each two neighbours: on each of its groups a backend sends in one order."""
        own = dict[tuple[int, int, str], dist.ProcessGroup]()
        size = self.shape.group_size(axes)
        backend = accelerator.backend(self.device)
        for ranks in self.shape.groups(axes) if axes == PIPELINE_AXES else ():
            neighbours = {(at, (at + step) % size) for at in range(size) for step in (1, -1)}
            for (source, target), lane in product(sorted(neighbours), LANES):
                pair = sorted((ranks[source], ranks[target]))
                group = dist.new_group(pair, timeout=timedelta(seconds=self.timeout_s), backend=backend)
                if self.rank in pair:
                    own[source, target, lane] = group
                    self._process_groups.append(group)
        return own

    def transport(self, axes: tuple[str, ...]) -> Transport:
        """What moves tensors over ``axes``, named as :meth:`MeshShape.named` does.

        Raises:
            PartitaError: they were never opened, or the mesh is closed.
        """
        try:
            return self.transports[axes]
        except KeyError:
            raise PartitaError(
                f"there is no process group over {', '.join(axes)}: the engine that owns this mesh is closed"
            ) from None

    @property
    def num_ranks(self) -> int:
        return self.shape.num_ranks

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``: pipeline, data, sequence or tensor (or node, local)."""
        return self.shape.size(axis)

    def coordinate(self, axis: str) -> int:
        """This rank's position along ``axis``."""
        return self.shape.coordinate(self.rank, axis)

    def index(self, axes: tuple[str, ...]) -> int:
        """This rank's position in its group over ``axes``."""
        return self.shape.group_index(self.rank, axes)

    def is_first_replica(self, shard_axes: tuple[str, ...] = ()) -> bool:
        """Whether this rank is the one that saves, reads or writes what each of several ranks has of a state (see
        :meth:`MeshShape.is_first_replica`); without axes, of what every rank has whole.
        """
        return self.shape.is_first_replica(self.rank, shard_axes)

    def stream(self, purpose: str) -> Stream:
        """Where what is sent for ``purpose`` (parameters or gradients) is posted, in order."""
        return self._streams[purpose]

    def check_open(self) -> None:
        """Raises PartitaError: the mesh is closed."""
        if self._closed:
            raise PartitaError("the mesh is closed, as the engine is that made it: open another engine first")

    def close(self) -> None:
        """Destroy the groups made here, and ``torch.distributed`` itself if it was started here and no other mesh uses
        it.
        """
        if self._closed:
            return
        transports, self.transports, self._closed = self.transports, {(): self._alone}, True
        for stream in self._streams.values():
            stream.close()
        for transport in transports.values():
            transport.close()
        if self.watchdog is not None:
            self.watchdog.close()
        world.leave(self._world, self._process_groups)
