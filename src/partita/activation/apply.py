"""All that the config says of activations, put on a model."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from partita.activation.inputs import RestingInputs
from partita.activation.partition import Partition
from partita.activation.recompute import Recomputation, chosen_modules
from partita.activation.tiled_loss import TiledHeads, find_heads
from partita.activation.tiles import tiled_modules
from partita.comm.collectives import Collectives
from partita.comm.together import together
from partita.config.schema import Activations as ActivationsSection
from partita.config.schema import Config
from partita.memory import accelerator
from partita.memory.tiers import StateMemory
from partita.parallel.tensor.splitter import TENSOR
from partita.plan.residence import Tier
from partita.sharding.hooks import Hook


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

    def __init__(
        self, model: nn.Module, chosen: Chosen, config: Config, memory: StateMemory, collectives: Collectives
    ) -> None:
        settings, device = config.activations, collectives.mesh.device
        self._all_ranks = collectives.all_ranks
        self._inputs: RestingInputs | None = None
        self._begun: RemovableHandle | None = None
        tier = inputs_tier(settings, device)
        if tier is not Tier.DEVICE or settings.partition:
            split = collectives.group((TENSOR,) if settings.partition else ())
            self._inputs = RestingInputs(memory, device, tier, Partition(split, collectives.group(())))
            self._begun = model.register_forward_pre_hook(Hook(self._begin_forward))
        selective = settings.checkpoint == "selective"
        self._recomputation = Recomputation(
            chosen.recomputed, selective=selective, tiled=chosen.tiled, inputs=self._inputs
        )
        self._heads = TiledHeads(chosen.heads, config.loss)

    def explained(self) -> AbstractContextManager[None]:
        """See :meth:`Recomputation.explained`."""
        return self._recomputation.explained()

    def check(self) -> None:
        """Tell all ranks where inputs found no room in their tier on one of them. Called on all ranks.

        Raises:
            PartitaError: on all ranks: they found none.
        """
        if self._inputs is not None and self._inputs.rooms.tier is not Tier.DEVICE:
            with together(self._all_ranks):
                self._inputs.rooms.check()

    def remove(self) -> None:
        """Give the modules back what they had."""
        self._heads.remove()
        self._recomputation.remove()
        if self._begun is not None:
            self._begun.remove()
        if self._inputs is not None:
            self._inputs.close()

    def _begin_forward(self, module: nn.Module, args: object) -> None:
        assert self._inputs is not None
        self._inputs.begin_forward()


def open_tier(config: Config, memory: StateMemory) -> None:
    """Have the disk tier there before the first forward, if inputs are to rest in it.

    Raises:
        PartitaError: its folder is missing or none, may not be written, or has no space.
    """
    if config.activations.offload == Tier.DISK.value:
        memory.provide_disk(0, 1)


def inputs_tier(settings: ActivationsSection, device: torch.device) -> Tier:
    """The tier in which inputs rest: there is nothing to move to the host where the host computes."""
    if settings.offload == "none" or (settings.offload == "host" and accelerator.is_host(device)):
        return Tier.DEVICE
    return Tier(settings.offload)
