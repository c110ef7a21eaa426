"""The mesh: this rank's place on the axes, and the connections along them.

An engine makes a mesh of its own, or is given another engine's: then both use its process groups, streams, log and
watchdog, and every rank has to run what they do in one order. Without other ranks there are no process groups, and
nothing is ever called on one.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from partita.comm.collective_log import CollectiveLog
from partita.comm.connections import Connections
from partita.comm.transport import Transport
from partita.comm.watchdog import Watchdog
from partita.errors import PartitaError
from partita.memory.streams import Stream
from partita.plan.mesh_shape import MeshShape, expand
from partita.plan.purposes import BULK_PURPOSES, Needs, all_purposes, purposes_of_all_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Mesh:
    """Sizes and coordinates of the axes, and a transport for each combination of axes that is communicated over. That
    of all ranks is there from the beginning.

    Args:
        shape: the sizes of the axes; their product is the number of ranks.
        device: where tensors live.
        connections: of this rank; the mesh closes them.
    """

    def __init__(self, shape: MeshShape, device: torch.device, connections: Connections) -> None:
        self.shape = shape
        self.device = device
        self._connections = connections
        self.rank = connections.rank
        self.timeout_s = connections.timeout_s
        self.has_store = connections.has_store
        self._alone = connections.alone()
        self.transports: dict[tuple[str, ...], Transport] = {(): self._alone}
        self._opened = dict[tuple[str, ...], frozenset[str]]()  # the purposes
        # Engines that share the mesh share these: on one group, every rank must post in one order.
        self._streams = {purpose: Stream(device, purpose) for purpose in BULK_PURPOSES}
        self.log = CollectiveLog()
        self.watchdog: Watchdog | None = None
        self._device_mesh: DeviceMesh | None = None
        self._closed = False
        try:
            if connections.num_ranks != shape.num_ranks:
                raise PartitaError(
                    f"the mesh has {shape.num_ranks} ranks, but {connections.num_ranks} processes are running"
                )
            self.open({shape.all_axes: purposes_of_all_ranks(shape)})
        except BaseException:
            self.close()
            raise

    def open(self, needs: Needs | Iterable[tuple[str, ...]]) -> None:
        """Connect the ranks over these combinations of axes, where they are not; every rank takes part in all of it, in
        one order.

        Args:
            needs: the purposes, by axes; of axes alone, all that there may be.

        Raises:
            PartitaError: the mesh is closed.
        """
        self.check_open()
        for combination in needs:
            axes = self.shape.named(combination)
            wanted = needs[combination] if isinstance(needs, Mapping) else all_purposes(axes)
            missing = wanted - self._opened.get(axes, frozenset())
            if axes and missing:
                self._opened[axes] = self._opened.get(axes, frozenset()) | missing
                known = self.transports.get(axes)
                if (transport := self._connections.connect(self.shape, axes, missing, known)) is not None:
                    self.transports[axes] = transport

    def transport(self, axes: tuple[str, ...]) -> Transport:
        """Return the transport over ``axes``, named as :meth:`MeshShape.named` does.

        Raises:
            PartitaError: they were never opened, or the mesh is closed.
        """
        try:
            return self.transports[axes]
        except KeyError:
            raise PartitaError(
                f"there is no process group over {', '.join(axes)}: the engine that owns this mesh is closed"
            ) from None

    def purposes(self, axes: tuple[str, ...]) -> frozenset[str]:
        """Return the purposes for which the ranks over ``axes`` are connected."""
        return self._opened.get(axes, frozenset())

    def control_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of the smallest group that has control messages and all ranks over ``axes``."""
        inner = set(expand(axes))
        wider = [
            known for known, purposes in self._opened.items() if "control" in purposes and inner <= set(expand(known))
        ]
        return min(wider, key=self.shape.group_size, default=self.shape.all_axes)

    @property
    def num_ranks(self) -> int:
        return self.shape.num_ranks

    @property
    def device_mesh(self) -> "DeviceMesh":
        """The mesh as a :class:`torch.distributed.device_mesh.DeviceMesh` with the dims ``pipeline``, ``data``,
        ``sequence`` and ``tensor``, for DTensor, ``torch.distributed.checkpoint`` and collectives of one's own:
        ``engine.mesh.device_mesh["data"].get_group()``. Its process groups are those of nothing else. The first use
        makes them: use it on all ranks.

        Raises:
            PartitaError: the mesh is closed, or simulated.
        """
        self.check_open()
        if self._device_mesh is None:
            self._device_mesh = self._connections.device_mesh(self.shape)
        return self._device_mesh

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
        """Return whether this rank saves, reads or writes a state that several ranks have alike (see
        :meth:`MeshShape.is_first_replica`); without axes, of what every rank has whole.
        """
        return self.shape.is_first_replica(self.rank, shard_axes)

    def stream(self, purpose: str) -> Stream:
        """Return the stream on which messages of one purpose (parameters or gradients) are posted, in order."""
        return self._streams[purpose]

    def check_open(self) -> None:
        """Raises PartitaError: the mesh is closed."""
        if self._closed:
            raise PartitaError("the mesh is closed, as the engine is that made it: open another engine first")

    def finish(self) -> None:
        """Wait for what is under way, of all engines that share the mesh, however it ends."""
        for stream in self._streams.values():
            stream.finish()

    def close(self) -> None:
        """Let go of the connections."""
        if self._closed:
            return
        transports = self.transports
        self.transports = {(): self._alone}
        self._closed = True
        for stream in self._streams.values():
            stream.close()
        for transport in transports.values():
            transport.close()
        if self.watchdog is not None:
            self.watchdog.close()
        self._device_mesh = None
        self._connections.close()
