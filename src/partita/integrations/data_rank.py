"""The data-parallel coordinate that selects a rank's samples in another library's training loop.

Ranks with the same data coordinate compute one model together and receive the same samples.
"""

from dataclasses import dataclass

from partita.errors import ConfigError
from partita.table.mesh_shape import MeshShape


@dataclass(frozen=True)
class DataRank:
    """Data-parallel position of a rank: ``index`` of ``num``. Ranks with different positions receive different samples.

    ``copies`` ranks have the same position and receive the same samples. ``first`` has the number of one of them for
    each position, and ``is_first`` is True on these ranks.
    """

    num: int
    copies: int
    index: int
    first: range
    is_first: bool


def data_rank(mesh: MeshShape, rank: int, loop: str, *, trains_by_batch: bool = False) -> DataRank:
    """Return the data-parallel position of a rank of a mesh in a training loop.

    Args:
        loop: its name in messages.
        trains_by_batch: the loop passes full batches to the engine, as pipelines need them.

    Raises:
        ConfigError: the mesh has a pipeline, and the loop does not train by full batches.
    """
    if mesh.pipeline > 1 and not trains_by_batch:
        raise ConfigError(
            f"parallel.pipeline: {mesh.pipeline} under {loop}, which calls forward and backward itself, but a pipeline "
            "needs full batches: write the loop with partita.initialize and engine.train_batch, or use 'partita "
            "train'; parallel.tensor and parallel.sequence work with this loop"
        )
    in_stage = mesh.num_ranks // mesh.pipeline  # the pipeline is the outermost axis, and data the next one
    first = range(0, in_stage, in_stage // mesh.data)
    return DataRank(mesh.data, mesh.num_ranks // mesh.data, mesh.coordinate(rank, "data"), first, rank in first)
