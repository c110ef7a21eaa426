"""Live parts of an optional package: optimizers, and listeners that are told of updates."""

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from partita.config.extension import Extension
from partita.config.schema import Config
from partita.optim.states import Views
from partita.plan.mesh_shape import MeshShape
from partita.plan.share import NO_SHARES, Shares
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment


@dataclass(frozen=True)
class ComingUpdate:
    """An update that comes: the ``step``, the ids of the members that got a gradient, and the phase it belongs to."""

    step: int
    used: AbstractSet[int]
    is_warming_up: bool


class UpdateListener:
    """Is told of updates. Every method is called on all ranks, between two updates; all of them may be collectives."""

    reads_weights = False  # True if after_update needs the updated weights: no update may be under way then

    def before_update(self, coming: ComingUpdate) -> None:
        """Gradients are measured and finite; nothing was changed yet."""

    def after_update(self, step: int, *, is_warming_up: bool) -> None:
        """The update was made, or is under way."""

    def settle(self, step: int, *, is_warming_up: bool) -> None:
        """Make what is saved of this run all that it continues from."""

    def clear(self) -> None:
        """Forget what is kept between updates, before other values are loaded."""

    def saved(self, segment: Segment) -> Mapping[str, Tensor]:
        """Return what is saved of this rank's part of a segment, ``[part_elements]``, by the prefix of its keys.

        All ranks that have the same part load it.
        """
        return {}

    @property
    def differs_between_replicas(self) -> bool:
        """True while replicas have weights of their own."""
        return False


class RunExtension(Extension):
    """An extension with live parts."""

    def shares(self, model: nn.Module, mesh: MeshShape, rank: int) -> Shares:
        """Return what a rank holds of parameters of which it holds a part, by the parameters' ids.

        The parameters are whole, and stay so until the engine gives each rank its place of rank 0's values.
        """
        return NO_SHARES

    @abstractmethod
    def optimizer(self, params: list[nn.Parameter], config: Config) -> Optimizer | None:
        """Return the optimizer that the configuration names; None where it is one of the core's."""

    @abstractmethod
    def listeners(
        self, runtime: Runtime, optimizer: Optimizer, views: Views, config: Config
    ) -> tuple[UpdateListener, ...]:
        """Return who is told of updates."""
