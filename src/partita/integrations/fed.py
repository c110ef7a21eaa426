"""Whose samples a rank is fed by another library's training loop: ranks with one data coordinate compute one model
together, and take the same.
"""

from dataclasses import dataclass

from partita.errors import ConfigError
from partita.plan.mesh_shape import MeshShape


@dataclass(frozen=True)
class Fed:
    """``num`` groups of ``copies`` successive ranks are fed different samples; a rank is in group ``index``, and
    ``is_first`` there.
    """

    num: int
    copies: int
    index: int
    is_first: bool


def fed(mesh: MeshShape, rank: int, loop: str) -> Fed:
    """How a ``loop`` feeds a rank of a mesh.

    Raises:
        ConfigError: the mesh has a pipeline, to which only whole batches are fed.
    """
    if mesh.pipeline > 1:
        raise ConfigError(
            f"parallel.pipeline: {mesh.pipeline} under {loop}, which calls forward and backward itself, where a "
            "pipeline takes whole batches: write the loop with partita.initialize and engine.train_batch, or take "
            "'partita train'; parallel.tensor and parallel.sequence go with this loop"
        )
    copies = mesh.num_ranks // mesh.data
    return Fed(mesh.data, copies, mesh.coordinate(rank, "data"), rank % copies == 0)
