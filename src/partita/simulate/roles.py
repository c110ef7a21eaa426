"""The ranks of a mesh that may differ in what they hold and send."""

from dataclasses import dataclass

from partita.plan.mesh_shape import AXES, STATE_AXES, MeshShape


@dataclass(frozen=True)
class Role:
    """A ``rank``, and its ``place``: its coordinates on the axes that have several ranks."""

    rank: int
    place: str


def role_of(rank: int, mesh: MeshShape) -> Role:
    """Return the role of one rank.

    Raises:
        ConfigError: there is no such rank.
    """
    places = [f"{axis} {mesh.coordinate(rank, axis)}" for axis in AXES if mesh.size(axis) > 1]
    return Role(rank, ", ".join(places) or "the only rank")


def distinct_roles(mesh: MeshShape) -> list[Role]:
    """Return the roles of ranks that may differ.

    For each stage of the pipeline, and for the first and the last tensor coordinate, these are the first and the last
    of the ranks that share the states. Ranks between them hold the same as the first; the last may hold less.
    """
    shares = mesh.group_size(STATE_AXES)
    ranks = [
        (stage * shares + share) * mesh.tensor + part
        for stage in range(mesh.pipeline)
        for part in sorted({0, mesh.tensor - 1})
        for share in sorted({0, shares - 1})
    ]
    return [role_of(rank, mesh) for rank in ranks]
