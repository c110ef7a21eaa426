"""The mesh: this rank's place on the axes, and the process groups over them.

Parameter gathers, gradient reductions and control messages have process groups of their own, so that no order between
them has to be kept. Without other ranks there are no groups, and nothing is ever called on one.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from partita.comm import world
from partita.comm.forks import connections_kept_from_children
from partita.comm.neighbors import Neighbor
from partita.comm.order import Order
from partita.comm.watchdog import Watchdog
from partita.comm.world import Rendezvous
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.memory.streams import Stream
from partita.plan.mesh_shape import MeshShape

PURPOSES = ("parameters", "gradients", "control")
STREAMS = PURPOSES[:2]


class Mesh:
    """Sizes and coordinates of the axes, and one process group an axis and purpose.

    Args:
        shape: the sizes of the axes; their product is the number of ranks.
        device: where tensors live; decides the backend (gloo on the host). Control messages always use gloo.
        rendezvous: used to start ``torch.distributed`` if it is not running yet.
        axes: the axis combinations that will be communicated over.
    """

    def __init__(
        self,
        shape: MeshShape,
        device: torch.device,
        rendezvous: Rendezvous,
        axes: Iterable[tuple[str, ...]] = (("data",),),
    ) -> None:
        self.shape, self.device = shape, device
        self.timeout_s, self.within_node = rendezvous.timeout_s, rendezvous.within_node
        self._timeout = timedelta(seconds=rendezvous.timeout_s)
        self._groups: dict[tuple[tuple[str, ...], str], dist.ProcessGroup] = {}
        self.neighbors: dict[tuple[str, ...], dict[int, Neighbor]] = {}  # in each group, by index
        # Engines that share the mesh share these: on one group, every rank must post in one order.
        self._streams = {purpose: Stream(device, purpose) for purpose in STREAMS}
        self.order = Order()
        self.watchdog: Watchdog | None = None
        self._closed, self._world = False, world.join(rendezvous, device)
        try:
            self.rank, num_ranks = world.running() or (rendezvous.rank, 1)
            if num_ranks != shape.num_ranks:
                raise PartitaError(f"the mesh has {shape.num_ranks} ranks, but {num_ranks} processes are running")
            for names in axes:
                self.open(names)
        except BaseException:
            self.close()
            raise

    def open(self, axes: tuple[str, ...]) -> None:
        """Create this rank's groups over ``axes``, if there are none; every rank takes part in creating all of them, in
        one order.

        Raises:
            PartitaError: the mesh is closed.
        """
        if self._closed:
            raise PartitaError("the mesh is closed, as the engine is that made it: open another engine first")
        if self.shape.group_size(axes) == 1 or (axes, PURPOSES[0]) in self._groups:
            return
        with connections_kept_from_children():
            for ranks in self.shape.groups(axes):
                for purpose in PURPOSES:
                    backend = "gloo" if purpose == "control" else accelerator.backend(self.device)
                    group = dist.new_group(ranks, timeout=self._timeout, backend=backend)
                    if self.rank in ranks:
                        self._groups[axes, purpose] = group

    @property
    def axes(self) -> list[tuple[str, ...]]:
        """The axis combinations that this rank has groups over."""
        return [axes for axes, purpose in self._groups if purpose == "control"]

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
        """This rank's position in its communicator over ``axes``."""
        return self.shape.group_index(self.rank, axes)

    def group(self, axes: tuple[str, ...], purpose: str) -> dist.ProcessGroup:
        """The process group over ``axes`` for one of :data:`PURPOSES`."""
        try:
            return self._groups[axes, purpose]
        except KeyError:
            raise PartitaError(
                f"there is no process group over {', '.join(axes)}: the engine that owns this mesh is closed"
            ) from None

    def stream(self, purpose: str) -> Stream:
        """Where what is sent over the groups for ``purpose`` (parameters or gradients) is posted, in order."""
        return self._streams[purpose]

    def close(self) -> None:
        """Destroy the groups made here, and ``torch.distributed`` itself if it was started here and no other mesh uses
        it.
        """
        if self._closed:
            return
        groups, self._groups, self._closed = self._groups, {}, True
        for stream in self._streams.values():
            stream.close()
        for neighbor in (neighbor for found in self.neighbors.values() for neighbor in found.values()):
            neighbor.close()
        if self.watchdog is not None:
            self.watchdog.close()
        world.leave(self._world, groups.values())
