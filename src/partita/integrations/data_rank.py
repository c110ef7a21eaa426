"""The data-parallel coordinate that selects a rank's samples in another library's training loop.

Ranks with the same data coordinate compute one model together and receive the same samples.
"""

from dataclasses import dataclass

from partita.errors import ConfigError
from partita.plan.mesh_shape import MeshShape


@dataclass(frozen=True)
class Fed:
    """Position of a rank among ``num`` groups that receive different samples.

    Each group has ``copies`` successive ranks, which receive the same samples. This rank is in group ``index``;
    ``is_first`` is True on the first rank of a group.
    """

    num: int
    copies: int
    index: int
    is_first: bool


def fed(mesh: MeshShape, rank: int, loop: str) -> Fed:
    """Return the group that determines which samples a ``loop`` (a name for messages) feeds to a rank of a mesh.

    Raises:
        ConfigError: the mesh has a pipeline, which needs full batches.
    """
    if mesh.pipeline > 1:
        raise ConfigError(
            f"parallel.pipeline: {mesh.pipeline} under {loop}, which calls forward and backward itself, where a "
            "pipeline takes whole batches: write the loop with partita.initialize and engine.train_batch, or take "
            "'partita train'; parallel.tensor and parallel.sequence go with this loop"
        )
    copies = mesh.num_ranks // mesh.data
    return Fed(mesh.data, copies, mesh.coordinate(rank, "data"), rank % copies == 0)
