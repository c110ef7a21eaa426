"""The ranks as a grid with named axes.

From the outermost (slowest-varying) axis to the innermost: pipeline, data, sequence, tensor. The data axis may itself
be split into ``node`` x ``local`` (a rank's data coordinate is ``node * size("local") + local``), which is what the
hierarchical preset communicates over.
"""

from dataclasses import dataclass

from partita.errors import ConfigError

AXES = ("pipeline", "data", "sequence", "tensor")
DATA_PARTS = ("node", "local")
# Ranks with different coordinates on these axes get different samples.
BATCH_AXES = ("data",)
# Ranks along these use the same parameters, for different samples or parts of a sample.
STATE_AXES = ("data", "sequence")
# Ranks along these run the same modules.
MODULE_AXES = ("data", "sequence", "tensor")
TENSOR_AXES = ("tensor",)
# Ranks along these have different blocks of the model.
PIPELINE_AXES = ("pipeline",)
# Activations are communicated along each of these.
ACTIVATION_AXES = ("pipeline", "sequence", "tensor")
_STAGES = "pipeline:"


def expand(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``axes`` with ``data`` replaced by ``node`` and ``local``."""
    return tuple(part for axis in axes for part in (DATA_PARTS if axis == "data" else (axis,)))


def part_of_pipeline(stages: tuple[int, ...]) -> str:
    """Return the name of the axis of these pipeline stages, in this order: ``pipeline:0,3``."""
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
        """Return ``axes`` without those of size 1, with data replaced by ``node`` and ``local``."""
        return tuple(axis for axis in expand(axes) if self.size(axis) > 1)

    def named(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the canonical names of ``axes``, for messages and counts.

        Axes of size 1 are left out, and ``node`` and ``local`` become ``data`` if all of data is there in order. So
        different spellings of one communicator get the same name.
        """
        axes, parts = self.active(axes), self.active(DATA_PARTS)
        for at in range(len(axes)):
            if parts and axes[at : at + len(parts)] == parts:
                return (*axes[:at], "data", *axes[at + len(parts) :])
        return axes

    def group_size(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks in a communicator over several axes."""
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
        """Return whether a rank is the first of those with the same shard of a state, which is sharded over
        ``shard_axes`` and replicated over all other axes.
        """
        replicated = (axis for axis in expand(AXES) if axis not in expand(shard_axes))
        return all(self.coordinate(rank, axis) == 0 for axis in replicated)

    def groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Return all communicators over ``axes``: lists of ranks in the order of :meth:`group_index`. Ranks of stages
        that are not on ``axes`` are in no group.
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
