"""The ranks of a mesh whose memory or traffic may differ."""

from dataclasses import dataclass

from partita.table.mesh_shape import AXES, STATE_AXES, MeshShape


@dataclass(frozen=True)
class Role:
    """A ``rank``, and a text with its coordinates on the axes with several ranks."""

    rank: int
    coordinates: str


def role_of(rank: int, mesh: MeshShape) -> Role:
    """Return the role of one rank.

    Raises:
        ConfigError: there is no such rank.
    """
    labels = [f"{axis} {mesh.coordinate(rank, axis)}" for axis in AXES if mesh.size(axis) > 1]
    return Role(rank, ", ".join(labels) or "the only rank")


def distinct_roles(mesh: MeshShape) -> list[Role]:
    """Return one role for each group of ranks with equal memory and traffic.

    For each stage of the pipeline, and for the first and the last tensor coordinate, these are the first and the last
    of the ranks over which states are sharded. The ranks between them equal the first; the last may store less.
    """
    num_shards = mesh.group_size(STATE_AXES)
    ranks = [
        (stage * num_shards + shard) * mesh.tensor + tensor
        for stage in range(mesh.pipeline)
        for tensor in sorted({0, mesh.tensor - 1})
        for shard in sorted({0, num_shards - 1})
    ]
    return [role_of(rank, mesh) for rank in ranks]
