"""Run-time interface of optimizers that communicate, and of optional packages."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from partita.config.extension import Extension
from partita.config.schema import Config
from partita.layout.blueprint import Blueprint
from partita.layout.owners import FullWork
from partita.optim.states import Views
from partita.sharding.parameter import Member
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment
from partita.table.mesh_shape import MeshShape
from partita.table.purposes import Needs
from partita.table.share import NO_SHARES, Shares


class CollectiveOptimizer(Optimizer):
    """An optimizer whose step is a collective, for example because it reads full matrices.

    Its gradients are reduced and clipped. They and its parameters are flat slices, or full if master weights are not
    sharded. A rank without a slice of a parameter does not have it in its groups.

    The engine steps a clone of it for each unit whose update overlaps (see :class:`partita.optim.optimizer.Snapshot`).
    Its collectives use the connections of gradients, on whose stream these steps run.

    Attributes:
        coming: the parameters that the next step updates, the same on all ranks that have slices of them.
        notices: lines to log at the start.
    """

    coming: Sequence[Member] = ()
    notices: Sequence[str] = ()

    def groups(self, blueprint: Blueprint) -> Needs:
        """Return the groups of its collectives, besides those of the blueprint, with their purposes."""
        return {}

    def full_work(self, model: nn.Module) -> FullWork:
        """Return the work on full parameters of ``model``, before they are sharded, for predictions."""
        return FullWork()

    @abstractmethod
    def connect(self, runtime: Runtime, views: Views) -> None:
        """Take the ranks' slices of all parameters. Called once, on all ranks, before the first step.

        A step on other parameters (a trial, see :mod:`partita.optim.traits`) must call no collective.

        Raises:
            ConfigError: the optimizer cannot run on these slices.
        """


@dataclass(frozen=True)
class ComingUpdate:
    """The next update: its ``step``, the ids of the members that got a gradient, and its phase."""

    step: int
    used: AbstractSet[int]
    is_warming_up: bool


class UpdateListener:
    """Called at updates. Every method is called on all ranks, between two updates, and may be a collective."""

    setting = "an optimizer that communicates"  # what it belongs to, for errors
    average = ""  # prefix of the keys of an average of the weights, which starts from them if a checkpoint has none
    reads_weights = False  # True if after_update needs the updated weights, so that no update may be running then

    def before_update(self, coming: ComingUpdate) -> None:
        """Called when gradients are measured and finite, before anything is changed."""

    def after_update(self, step: int, *, is_warming_up: bool) -> None:
        """Called when the update is complete or running."""

    def prepare_for_checkpoint(self, step: int, *, is_warming_up: bool) -> None:
        """Reduce all states to what a checkpoint saves, so that this run continues as one that loads it."""

    def prepare(self, segment: Segment) -> None:
        """Create the average of a segment that does not train yet, before stored values are loaded into it."""

    def clear(self) -> None:
        """Forget the states kept between updates, before other values are loaded."""

    def saved(self, segment: Segment) -> Mapping[str, Tensor]:
        """Return the states to save of this rank's shard of a segment, ``[shard_elements]``, by the prefix of their
        keys.

        All ranks with the same shard load them.
        """
        return {}

    @property
    def differs_between_replicas(self) -> bool:
        """True while replicas have different weights."""
        return False


class RunExtension(Extension):
    """An extension with parts that run in training."""

    def shares(self, model: nn.Module, mesh: MeshShape, rank: int) -> Shares:
        """Return a rank's share of each split parameter, by the parameter's id.

        The parameters are unsplit, and stay so until the engine gives each rank its slice of rank 0's values.
        """
        return NO_SHARES

    @abstractmethod
    def optimizer(self, params: list[nn.Parameter], config: Config) -> Optimizer | None:
        """Return the optimizer that the config names; None if it is one of the core's."""

    @abstractmethod
    def listeners(
        self, runtime: Runtime, optimizer: Optimizer, views: Views, config: Config
    ) -> tuple[UpdateListener, ...]:
        """Return the listeners to call at updates."""
