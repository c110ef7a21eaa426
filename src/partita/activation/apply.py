"""All that the config says of activations, put on a model."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from partita.activation.offload import Offload
from partita.activation.recompute import Recomputation, chosen_modules
from partita.activation.tiled_loss import TiledHeads, find_heads
from partita.activation.tiles import tiled_modules
from partita.config.schema import Config
from partita.memory import accelerator
from partita.memory.tiers import StateMemory
from partita.plan.residence import Tier


@dataclass(frozen=True)
class Chosen:
    """The modules that the config names, by name: recomputed ones, those run in tiles, heads whose loss is tiled."""

    recomputed: dict[str, nn.Module]
    tiled: dict[str, nn.Module]
    heads: dict[str, nn.Linear]

    @classmethod
    def of(cls, model: nn.Module, config: Config, units: Sequence[str]) -> "Chosen":
        """By the names of the model's units.

        Raises:
            ConfigError: a name fits nothing, or a module that cannot be treated so.
        """
        return cls(
            chosen_modules(model, units, config.activations.checkpoint),
            tiled_modules(model, config.tiled.mlp),
            find_heads(model, config.loss, units),
        )


class Activations:
    """Has the chosen modules keep less for backward, until it is removed."""

    def __init__(self, chosen: Chosen, config: Config, memory: StateMemory, device: torch.device) -> None:
        settings = config.activations
        self._offload: Offload | None = None
        if moves_inputs(config, accelerator.kind_of(device)):
            self._offload = Offload(memory, device, Tier(settings.offload))
        selective = settings.checkpoint == "selective"
        self._recomputation = Recomputation(
            chosen.recomputed, selective=selective, tiled=chosen.tiled, offload=self._offload
        )
        self._heads = TiledHeads(chosen.heads, config.loss)

    def explained(self) -> AbstractContextManager[None]:
        """See :meth:`Recomputation.explained`."""
        return self._recomputation.explained()

    def remove(self) -> None:
        """Give the modules back what they had."""
        self._heads.remove()
        self._recomputation.remove()
        if self._offload is not None:
            self._offload.close()


def moves_inputs(config: Config, device_type: str) -> bool:
    """Whether inputs are moved: to the host there is nothing to move where the host computes."""
    tier = config.activations.offload
    return tier == "disk" or (tier == "host" and device_type != accelerator.HOST.type)
