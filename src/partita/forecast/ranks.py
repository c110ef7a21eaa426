"""The ranks that share a sample, on paper: their groups count what they are given to send, and all answer as this rank
would."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from partita.comm.collectives import Collectives
from partita.comm.mesh import Mesh
from partita.comm.simulated import Requests, SimulatedRanks
from partita.memory import accelerator
from partita.plan.mesh_shape import MeshShape

# Inside a stage of the pipeline activations travel along these.
WITHIN_STAGE = ("sequence", "tensor")


@contextmanager
def ranks_on_paper(shape: MeshShape) -> Iterator[Collectives]:
    """The groups along :data:`WITHIN_STAGE` of the first rank of a mesh: of them all it has the most positions."""
    alone = MeshShape(sequence=shape.sequence, tensor=shape.tensor)
    mesh = Mesh(alone, accelerator.SIMULATED, SimulatedRanks(0, alone.num_ranks, Requests()))
    try:
        mesh.open((axis,) for axis in WITHIN_STAGE)
        yield Collectives(mesh)
    finally:
        mesh.close()


class Sent:
    """What the groups have sent since they were asked last, by axes (``sequence``; those that go together are one)."""

    def __init__(self, collectives: Collectives) -> None:
        self._meter = collectives.meter
        self._seen = collectives.meter.report()

    def since(self) -> tuple[Counter[str], Counter[str]]:
        """Bytes, and calls."""
        report = self._meter.report()
        new, self._seen = report.since(self._seen), report
        num_bytes, calls = Counter[str](), Counter[str]()
        for key, count in new.rows.items():
            num_bytes[",".join(key.axes)] += count.sent_bytes
            calls[",".join(key.axes)] += count.calls
        return num_bytes, calls
