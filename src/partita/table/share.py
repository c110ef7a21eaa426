"""A rank's share of one parameter under the axes other than data, and how its gradient becomes the global one."""

from collections.abc import Mapping
from dataclasses import dataclass

from partita.table.mesh_shape import MeshShape, is_part_of_pipeline, part_of_pipeline
from partita.table.place import Place


@dataclass(frozen=True)
class Copies:
    """The axes along which ranks have equal copies of a state, and those along which they have different states.

    Attributes:
        averaged: the copies' gradients are equal up to rounding. They are averaged at the step, so that copies do not
            drift.
        summed: the copies' gradients are partial, and are summed at the step.
        distinct: the axes, among those over which gradients are averaged, along which ranks have different parameters
            (experts). Gradients are summed over the remaining axes only, but divided by the number of ranks along all
            of them: each rank's gradient already includes the samples of the ranks along these axes.
    """

    averaged: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    distinct: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which other ranks have copies, outermost first: pipeline, then tensor."""
        return tuple(sorted((*self.averaged, *self.summed), key=lambda axis: not is_part_of_pipeline(axis)))

    def on(self, mesh: MeshShape) -> "Copies":
        """Return the copies without the axes along which there is one rank."""
        return Copies(mesh.active(self.averaged), mesh.active(self.summed), mesh.active(self.distinct))

    @property
    def is_tied(self) -> bool:
        """True if other stages have copies."""
        return any(map(is_part_of_pipeline, self.summed))


@dataclass(frozen=True)
class Share:
    """A rank's share of one parameter: its ``place``, and the ranks that have copies of it.

    Beyond the mean over data and sequence, gradients are averaged over the ranks along ``averaged`` (they are equal up
    to rounding: norm weights under tensor), or summed over those along ``summed`` (they are partial:
    query norms applied to a rank's own heads, key heads that several ranks use). ``stages`` are the pipeline
    coordinates of all ranks that hold the parameter, if there are several (tied embeddings): gradients are summed over
    them. Along ``distinct`` axes, of data and sequence, ranks have different places of the parameter (experts): see
    :class:`Copies`.

    A parameter without a share is not split, is held by this stage alone, and is averaged over tensor. Code that
    applies an axis leaves the parameter as it was: unsharded, with its values. When the engine is built, every rank
    receives rank 0's values, and the same object becomes the local tensor.
    """

    place: Place
    averaged: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    distinct: tuple[str, ...] = ()

    @property
    def copies(self) -> Copies:
        """The axes along which other ranks have copies of this share."""
        stages = (part_of_pipeline(self.stages),) if len(self.stages) > 1 else ()
        return Copies(self.averaged, (*stages, *self.summed), self.distinct)


NO_COPIES = Copies()
# By the parameter's id.
Shares = Mapping[int, Share]
NO_SHARES: Shares = {}
