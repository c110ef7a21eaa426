"""Simulated process groups of the ranks that compute one sample: they count the bytes that this rank sends."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from partita.comm.collectives import Collectives
from partita.comm.mesh import Mesh
from partita.comm.simulated import Requests, SimulatedRanks
from partita.memory import accelerator
from partita.table.mesh_shape import MeshShape

# Axes along which activations are sent inside a pipeline stage.
WITHIN_STAGE = ("sequence", "tensor")


@contextmanager
def counted_groups(shape: MeshShape) -> Iterator[Collectives]:
    """Open the groups along :data:`WITHIN_STAGE` for a mesh's first rank, which has the most positions of all ranks."""
    stage_mesh = MeshShape(sequence=shape.sequence, tensor=shape.tensor)
    mesh = Mesh(stage_mesh, accelerator.SIMULATED, SimulatedRanks(0, stage_mesh.num_ranks, Requests()))
    try:
        mesh.open((axis,) for axis in WITHIN_STAGE)
        yield Collectives(mesh)
    finally:
        mesh.close()


class SentCounter:
    """Counter of bytes and calls since the last query, by axes.

    Keys are axis names (``sequence``); axes of one group are joined to one key.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._meter = collectives.meter
        self._last_report = collectives.meter.report()

    def since(self) -> tuple[Counter[str], Counter[str]]:
        """Return bytes and calls since the last query."""
        report = self._meter.report()
        new, self._last_report = report.since(self._last_report), report
        num_bytes, calls = Counter[str](), Counter[str]()
        for key, count in new.rows.items():
            num_bytes[",".join(key.axes)] += count.sent_bytes
            calls[",".join(key.axes)] += count.calls
        return num_bytes, calls
