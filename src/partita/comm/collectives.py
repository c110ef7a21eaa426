"""The communication groups of one engine on a mesh, with a counter of the bytes they send."""

from collections.abc import Iterable
from functools import partial

from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.table.purposes import Needs
from partita.table.traffic import TrafficMeter


class Collectives:
    """Groups by their axes. ``all_ranks`` contains every rank, in rank order; ``meter`` counts all sent bytes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.meter = TrafficMeter()
        self._groups: dict[tuple[str, ...], Group] = {}
        self.all_ranks = self.group(mesh.shape.all_axes)

    def group(self, axes: tuple[str, ...]) -> Group:
        """Return the group of the ranks that differ from this one only along ``axes``. Equivalent axes give the same
        object.
        """
        named = self.mesh.shape.named(axes)
        if named not in self._groups:
            self._groups[named] = Group(named, self.mesh, self.meter)
        return self._groups[named]

    def open(self, needs: Needs | Iterable[tuple[str, ...]]) -> None:
        """Open these connections (see :meth:`Mesh.open`), and use shared memory between ranks of one node where
        possible. Collective.
        """
        self.mesh.open(needs)
        for axes, transport in self.mesh.transports.items():
            transport.handshake(partial(self.group(axes).exchange_objects, call="partita.initialize"))
