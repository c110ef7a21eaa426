"""The data-parallel coordinate that selects a rank's samples in another library's training loop.

Ranks with the same data coordinate compute one model together and receive the same samples.
"""

from dataclasses import dataclass

from partita.errors import ConfigError
from partita.table.mesh_shape import MeshShape


@dataclass(frozen=True)
class DataRank:
    """Data-parallel position of a rank: ``index`` of ``num``. Ranks with different positions receive different samples.

    ``copies`` successive ranks have the same position and receive the same samples; ``is_first`` is True on the first
    of them.
    """

    num: int
    copies: int
    index: int
    is_first: bool


def data_rank(mesh: MeshShape, rank: int, loop: str) -> DataRank:
    """Return the data-parallel position of a rank of a mesh in a training loop. ``loop`` is its name in messages.

    Raises:
        ConfigError: the mesh has a pipeline, which needs full batches.
    """
    if mesh.pipeline > 1:
        raise ConfigError(
            f"parallel.pipeline: {mesh.pipeline} under {loop}, which calls forward and backward itself, but a pipeline "
            "needs full batches: write the loop with partita.initialize and engine.train_batch, or use 'partita "
            "train'; parallel.tensor and parallel.sequence work with this loop"
        )
    copies = mesh.num_ranks // mesh.data
    return DataRank(mesh.data, copies, mesh.coordinate(rank, "data"), rank % copies == 0)
