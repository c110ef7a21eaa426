"""The ranks as a grid with named axes.

From the outermost (slowest-varying) axis to the innermost: pipeline, data, sequence, tensor. The data axis may itself
be split into ``node`` x ``local`` (a rank's data coordinate is ``node * size("local") + local``), which is what the
hierarchical preset communicates over.
"""

from dataclasses import dataclass

from partita.errors import ConfigError

AXES = ("pipeline", "data", "sequence", "tensor")
DATA_PARTS = ("node", "local")
# Ranks with other coordinates on these are fed other samples.
BATCH_AXES = ("data",)
# Ranks along these compute the same parameters, of other samples or other parts of a sample.
STATE_AXES = ("data", "sequence")
# Ranks along these run the same modules.
MODULE_AXES = ("data", "sequence", "tensor")
TENSOR_AXES = ("tensor",)
# Ranks along these have other blocks of the model.
PIPELINE_AXES = ("pipeline",)
# Along one of these, activations travel.
ACTIVATION_AXES = ("pipeline", "sequence", "tensor")
_STAGES = "pipeline:"


def expand(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``axes`` with ``data`` replaced by its parts, ``node`` and ``local``."""
    return tuple(part for axis in axes for part in (DATA_PARTS if axis == "data" else (axis,)))


def part_of_pipeline(stages: tuple[int, ...]) -> str:
    """Return the name of the axis along which these stages of the pipeline are, in this order: ``pipeline:0,3``."""
    return _STAGES + ",".join(map(str, stages))


def is_part_of_pipeline(axis: str) -> bool:
    """Return whether :func:`part_of_pipeline` made the axis."""
    return axis.startswith(_STAGES)


def _stages_of(axis: str) -> tuple[int, ...] | None:
    """Return the stages of an axis that :func:`part_of_pipeline` made; None for another axis."""
    return tuple(map(int, axis.removeprefix(_STAGES).split(","))) if is_part_of_pipeline(axis) else None


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes; ``node`` divides ``data``.

    Raises:
        ConfigError: a size is below 1, or ``node`` does not divide ``data``.
    """

    pipeline: int = 1
    data: int = 1
    sequence: int = 1
    tensor: int = 1
    node: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "node"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"mesh axis '{axis}' must have at least 1 rank; got {getattr(self, axis)}")
        if self.data % self.node:
            raise ConfigError(f"the data axis ({self.data} ranks) cannot be split over {self.node} nodes evenly")

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data * self.sequence * self.tensor

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis (of :data:`AXES`, ``node``, ``local``, or a
        :func:`part_of_pipeline`).
        """
        if axis == "local":
            return self.data // self.node
        if (stages := _stages_of(axis)) is not None:
            return len(stages)
        if axis not in (*AXES, "node"):
            raise ConfigError(f"unknown mesh axis '{axis}'; the axes are {', '.join((*AXES, *DATA_PARTS))}")
        return int(getattr(self, axis))

    @property
    def all_axes(self) -> tuple[str, ...]:
        """The axes of the communicator of all ranks."""
        return self.named(AXES)

    def active(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return ``axes`` without those of size 1, with data replaced by its parts."""
        return tuple(axis for axis in expand(axes) if self.size(axis) > 1)

    def named(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return ``axes`` as messages and counts name them: without those of size 1, and with the parts of data as
        ``data``, if all of them that are larger are there in their order. Two ways to write one communicator get the
        same name.
        """
        axes, parts = self.active(axes), self.active(DATA_PARTS)
        for at in range(len(axes)):
            if parts and axes[at : at + len(parts)] == parts:
                return (*axes[:at], "data", *axes[at + len(parts) :])
        return axes

    def group_size(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks in a communicator over several axes together."""
        product = 1
        for axis in axes:
            product *= self.size(axis)
        return product

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of a rank along one axis.

        Raises:
            ConfigError: there is no such rank.
            ValueError: it is on none of the stages that the axis consists of.
        """
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank {rank} is outside the mesh of {self.num_ranks} ranks")
        if (stages := _stages_of(axis)) is not None:
            return stages.index(self.coordinate(rank, "pipeline"))
        if axis in DATA_PARTS:
            node, local = divmod(self.coordinate(rank, "data"), self.size("local"))
            return node if axis == "node" else local
        size, inner = self.size(axis), 1
        for other in AXES[AXES.index(axis) + 1 :]:
            inner *= self.size(other)
        return rank // inner % size

    def group_index(self, rank: int, axes: tuple[str, ...]) -> int:
        """Return the position of a rank inside its communicator over ``axes`` (the first axis varies slowest)."""
        index = 0
        for axis in axes:
            index = index * self.size(axis) + self.coordinate(rank, axis)
        return index

    def is_first_replica(self, rank: int, shard_axes: tuple[str, ...] = ()) -> bool:
        """Return whether a rank has coordinate 0 on every axis over which a state is replicated, if it is sharded over
        ``shard_axes``. This is true of exactly one of the ranks that hold the same part.
        """
        whole = (axis for axis in expand(AXES) if axis not in expand(shard_axes))
        return all(self.coordinate(rank, axis) == 0 for axis in whole)

    def groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Return all communicators over ``axes``: lists of ranks in the order of :meth:`group_index`. Ranks of stages
        that are not on ``axes`` are in none.
        """
        stages = next((found for axis in axes if (found := _stages_of(axis)) is not None), None)
        named = expand(axes) if stages is None else ("pipeline", *expand(axes))
        others = tuple(axis for axis in expand(AXES) if axis not in named)
        groups: dict[int, list[int]] = {}
        for rank in range(self.num_ranks):
            if stages is not None and self.coordinate(rank, "pipeline") not in stages:
                continue
            groups.setdefault(self.group_index(rank, others), []).append(rank)
        return [sorted(ranks, key=lambda rank: self.group_index(rank, axes)) for ranks in groups.values()]
