"""The mesh: this rank's coordinates on the axes, and the connections along them.

An engine creates its own mesh, or shares another engine's. Engines that share a mesh use the same process groups,
streams, log and watchdog, so every rank must run their operations in the same order. With a single rank there are no
process groups.
"""

import atexit
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from partita.comm import world
from partita.comm.collective_log import CollectiveLog
from partita.comm.connections import Connections
from partita.comm.transport import Transport
from partita.comm.watchdog import Watchdog
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.memory.streams import Stream, finish_all_jobs
from partita.table.mesh_shape import MeshShape, expand
from partita.table.purposes import BULK_PURPOSES, Needs, all_purposes, purposes_of_all_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Seconds for which the accelerator may complete its work after an error, if other engines use its connections.
GRACE_S = 5.0


class Mesh:
    """Sizes and coordinates of the axes, and a transport for each combination of axes that is used.

    The transport of all ranks exists from the start.

    Args:
        shape: the sizes of the axes; their product is the number of ranks.
        device: the device of the tensors.
        connections: this rank's connections; the mesh closes them.
        for_engines: the last engine that uses the mesh closes it, and so does an error of the first one.
    """

    def __init__(
        self, shape: MeshShape, device: torch.device, connections: Connections, *, for_engines: bool = False
    ) -> None:
        self.shape = shape
        self.device = device
        self._connections = connections
        self.rank = connections.rank
        self.timeout_s = connections.timeout_s
        self.has_store = connections.has_store
        self.through_host = connections.through_host
        self._alone = connections.alone()
        self.transports: dict[tuple[str, ...], Transport] = {(): self._alone}
        self._opened = dict[tuple[str, ...], frozenset[str]]()  # the purposes
        # Shared by all engines of the mesh: on one process group, every rank must post in the same order.
        self._streams = {purpose: Stream(device, purpose) for purpose in BULK_PURPOSES}
        self.log = CollectiveLog()
        self.watchdog: Watchdog | None = None
        self._device_mesh: DeviceMesh | None = None
        self._for_engines = for_engines
        self._num_engines = 0
        self._closed = False
        _open.add(self)
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
        """Connect the ranks over these combinations of axes, unless they are connected. Collective: every rank makes
        the same calls, also for groups that it is not in.

        Args:
            needs: the purposes by axes; an iterable of axes means all purposes.

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
        """Return the transport over ``axes``, as :meth:`MeshShape.named` returns them.

        Raises:
            PartitaError: the axes were never opened, or the mesh is closed.
        """
        try:
            return self.transports[axes]
        except KeyError:
            raise PartitaError(
                f"there is no process group over {', '.join(axes)}: the mesh is closed, or these axes were not opened"
            ) from None

    def purposes(self, axes: tuple[str, ...]) -> frozenset[str]:
        """Return the purposes for which the ranks over ``axes`` are connected."""
        return self._opened.get(axes, frozenset())

    def control_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of the smallest group that has control connections and contains all ranks over ``axes``."""
        inner = set(expand(axes))
        wider = [
            known for known, purposes in self._opened.items() if "control" in purposes and inner <= set(expand(known))
        ]
        return min(wider, key=self.shape.group_size, default=self.shape.all_axes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.shape.num_ranks

    @property
    def device_mesh(self) -> "DeviceMesh":
        """The mesh as a :class:`torch.distributed.device_mesh.DeviceMesh` with the dims ``pipeline``, ``data``,
        ``sequence`` and ``tensor``, for DTensor, ``torch.distributed.checkpoint`` and your own collectives:
        ``engine.mesh.device_mesh["data"].get_group()``. Nothing else uses its process groups. The first access creates
        them, so access it on all ranks.

        Raises:
            PartitaError: the mesh is closed, or simulated.
        """
        self.check_open()
        if self._device_mesh is None:
            self._device_mesh = self._connections.device_mesh(self.shape)
        return self._device_mesh

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``: pipeline, data, sequence or tensor (or node, local)."""
        return self.shape.size(axis)

    def coordinate(self, axis: str) -> int:
        """Return this rank's position along ``axis``."""
        return self.shape.coordinate(self.rank, axis)

    def index(self, axes: tuple[str, ...]) -> int:
        """Return this rank's position in its group over ``axes``."""
        return self.shape.group_index(self.rank, axes)

    def is_first_replica(self, shard_axes: tuple[str, ...] = ()) -> bool:
        """Return True if this rank is the one that saves, reads or writes a state that several ranks have copies of
        (see :meth:`MeshShape.is_first_replica`). No axes: a state of which every rank has a full copy.
        """
        return self.shape.is_first_replica(self.rank, shard_axes)

    def stream(self, purpose: str) -> Stream:
        """Return the stream on which messages of one purpose (parameters or gradients) are posted, in order."""
        return self._streams[purpose]

    def check_open(self) -> None:
        """Raises PartitaError: the mesh is closed."""
        if self._closed:
            raise PartitaError("the mesh is closed, because all its engines are closed: create a new engine")

    @property
    def has_last_engine(self) -> bool:
        """True if the next engine that is closed closes the mesh."""
        return self._for_engines and self._num_engines == 1

    def add_engine(self) -> bool:
        """Count an engine that uses the mesh; return True for the one that the mesh was made for."""
        self._num_engines += 1
        return self._for_engines and self._num_engines == 1

    def remove_engine(self, *, closes: bool = False) -> None:
        """Count an engine less; the last one closes the mesh, if it was made for engines.

        Args:
            closes: close the mesh although other engines use it.
        """
        self._num_engines -= 1
        if self._for_engines and (closes or not self._num_engines):
            self.close()

    def finish(self) -> None:
        """Wait for all operations in flight, of all engines that share the mesh; their errors are ignored."""
        for stream in self._streams.values():
            stream.finish()

    def abort(self) -> None:
        """End the collectives in flight on the accelerator after an error: other ranks may never join them. If other
        engines use the mesh, only do so if the accelerator does not complete its work within ``GRACE_S``.
        """
        if self.has_last_engine or not accelerator.completes_within(self.device, GRACE_S):
            self._connections.abort()

    def close(self) -> None:
        """Release the connections."""
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


# The meshes of this process that may not be closed yet.
_open = WeakSet[Mesh]()
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_at_exit() -> None:
    """Close the meshes that are open at exit, and destroy the default group, which ends gloo's threads.

    Such a thread takes Python's lock to release the tensors of its last operation. If the interpreter shuts down while
    it waits for the lock, it aborts the process. After an uncaught exception, or with an operation that makes no
    progress, nothing is closed: that could wait for ranks that have ended. The same holds for accelerators' backends.
    """
    if getattr(sys, "last_value", None) is None and world.is_on_host() and finish_all_jobs():
        for mesh in list(_open):
            mesh.close()
        world.end()
