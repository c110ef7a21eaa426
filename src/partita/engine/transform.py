"""Changes to the forwards of a model that is already split and in its precision mode, in the order of
:class:`~partita.transforms.modules.Order`. The engine and predictions share them.

Before, :func:`partita.parallel.apply.apply` splits the model, and :func:`partita.sharding.precision.forward_precision`
sets its precision. Afterwards the engine wraps the calls of pipeline stages.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from partita.activation.apply import Activations, Chosen, keep_less
from partita.activation.recompute import Recomputation
from partita.config.extension import optional
from partita.config.schema import Config
from partita.parallel.applied import Parallel
from partita.parallel.pipeline.weights import WeightGradients, keep_apart
from partita.transforms.modules import Level, Order


class ModuleChange(Protocol):
    """A change to the model's modules. ``lines`` say what was done, for :meth:`Engine.explain`."""

    @property
    def lines(self) -> list[str]: ...

    def apply(self, changes: Level) -> None:
        """Make the change."""


def find_attention(model: nn.Module, settings: Config) -> ModuleChange | None:
    """Return the change that the optional package ``partita.attention`` makes; None where none is asked for.

    Raises:
        ConfigError: the package is not there, or the model's attention cannot be changed so.
    """
    if settings.attention == Config().attention:
        return None
    change: ModuleChange = optional("partita.attention.apply", "attention").SparseAttention(model, settings.attention)
    return change


@dataclass(frozen=True)
class Transformed:
    """The changed model's recomputation, and its deferred weight gradients if backwards do not compute them."""

    recomputation: Recomputation
    weights: WeightGradients | None


def transform(
    model: nn.Module,
    settings: Config,
    parallel: Parallel,
    attention: ModuleChange | None,
    chosen: Chosen,
    *,
    splits_weights: bool,
    activations: Activations | None = None,
) -> Transformed:
    """Change the model's forwards as the config asks.

    Args:
        parallel: the split of the model. Its transforms receive the changes, its lines what was done.
        attention: of :func:`find_attention`.
        chosen: the modules that keep less for backward.
        splits_weights: the pipeline's schedule computes weight gradients separately.
        activations: stores inputs of recomputed modules; None: they stay where they are.
    """
    transforms = parallel.transforms
    weights = keep_apart(model, transforms.at(Order.WEIGHT_GRADIENT)) if splits_weights else None
    if attention is not None:
        attention.apply(transforms.at(Order.ATTENTION))
        parallel.lines += attention.lines
    return Transformed(keep_less(model, chosen, settings, transforms, activations), weights)
