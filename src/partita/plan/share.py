"""What a rank has of one parameter under the axes beside data, and how its gradient becomes the global one."""

from collections.abc import Mapping
from dataclasses import dataclass

from partita.plan.mesh_shape import MeshShape, is_part_of_pipeline, part_of_pipeline
from partita.plan.place import Place


@dataclass(frozen=True)
class Copies:
    """The axes along which ranks have equal copies of a state, whose gradients are added up over them at the step.

    ``averaged``: the gradients are equal up to rounding, and their mean is taken, so that copies do not drift.
    ``summed``: they are parts of the true one.
    """

    averaged: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All of them, outermost first: of the pipeline, then of tensor."""
        return tuple(sorted((*self.averaged, *self.summed), key=lambda axis: not is_part_of_pipeline(axis)))

    def on(self, mesh: MeshShape) -> "Copies":
        """Without the axes along which there is one rank."""
        return Copies(mesh.active(self.averaged), mesh.active(self.summed))

    @property
    def is_tied(self) -> bool:
        """Whether other stages have copies."""
        return any(map(is_part_of_pipeline, self.summed))


@dataclass(frozen=True)
class Share:
    """What a rank has of one parameter: its ``place``, and who has a copy of that.

    Beyond the mean over data and sequence, gradients are averaged over the ranks along ``averaged`` (they are equal up
    to rounding: norm weights under tensor), or summed over those along ``summed`` (they are parts of the true one:
    query norms applied to own heads, key heads that several ranks use). ``stages`` are the pipeline coordinates of all
    ranks that hold the parameter, where there are several (tied embeddings): gradients are summed over them.

    A parameter without a share is whole, held by this stage alone, and averaged over tensor. Whoever applies an axis
    leaves the parameter as it was: whole, with its values. When the engine is built every rank is given rank 0's
    values, and the same object becomes the local tensor.
    """

    place: Place
    averaged: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()

    @property
    def copies(self) -> Copies:
        """The axes along which others have the same."""
        stages = (part_of_pipeline(self.stages),) if len(self.stages) > 1 else ()
        return Copies(self.averaged, (*stages, *self.summed))


NO_COPIES = Copies()
# By the parameter's id.
Shares = Mapping[int, Share]
NO_SHARES: Shares = {}
