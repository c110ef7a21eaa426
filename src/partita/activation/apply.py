"""Application of the settings in ``activations``, ``tiled`` and ``loss`` to a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from partita.activation.caches import NoCaches
from partita.activation.inputs import StoredInputs
from partita.activation.partition import Partition
from partita.activation.recompute import Recomputation, chosen_modules
from partita.activation.recompute_budget import RecomputeBudget
from partita.activation.tiled_loss import find_heads, tile_heads
from partita.activation.tiles import tiled_modules
from partita.comm.collective_errors import shared_errors
from partita.comm.collectives import Collectives
from partita.config.schema import Activations as ActivationsSection
from partita.config.schema import Config
from partita.memory import accelerator
from partita.memory.tiers import StateMemory
from partita.parallel.random import RandomStreams
from partita.parallel.sequence.apply import SEQUENCE
from partita.parallel.tensor.splitter import TENSOR
from partita.sharding.hooks import Hook
from partita.table.residence import Tier
from partita.transforms.modules import ModuleTransforms, Order


@dataclass(frozen=True)
class SelectedModules:
    """The modules that the config selects, by name: recomputed modules, tiled modules, heads with a tiled loss."""

    recomputed: dict[str, nn.Module]
    tiled: dict[str, nn.Module]
    heads: dict[str, nn.Linear]

    @classmethod
    def of(cls, model: nn.Module, config: Config, units: Sequence[str]) -> "SelectedModules":
        """Return the modules that the config selects, given the names of the model's units.

        Raises:
            ConfigError: a name matches nothing, or a module that does not support the setting.
        """
        return cls(
            chosen_modules(model, units, config.activations.checkpoint),
            tiled_modules(model, config.tiled.mlp),
            find_heads(model, config.loss, units),
        )


class Activations:
    """Storage of activations besides autograd's: inputs of recomputed modules, and calls that are not recomputed.

    Args:
        max_in_flight: the largest number of forwards that await their backward at the same time.
    """

    def __init__(self, config: Config, memory: StateMemory, collectives: Collectives, max_in_flight: int) -> None:
        settings, device = config.activations, collectives.mesh.device
        self.device = device
        self._all_ranks = collectives.all_ranks
        self.inputs: StoredInputs | None = None
        self.kept: RecomputeBudget | None = None
        self.warns = collectives.mesh.rank == 0 and not accelerator.is_simulated(device)
        tier = inputs_tier(settings, device)
        if tier is not Tier.DEVICE or settings.partition:
            split = collectives.group((TENSOR,) if settings.partition else ())
            self.inputs = StoredInputs(memory, device, tier, Partition(split, collectives.group(())))
        if settings.keep_bytes != "none":
            limit = None if isinstance(settings.keep_bytes, str) else settings.keep_bytes
            alike = collectives.group((SEQUENCE,)), collectives.group((TENSOR,))
            self.kept = RecomputeBudget(limit, max_in_flight, alike, memory.ledger)

    def check(self) -> None:
        """Check that inputs fit into their tier on every rank. All ranks must call this.

        Raises:
            PartitaError: the inputs of a rank did not fit. Raised on all ranks.
        """
        if self.inputs is not None and self.inputs.input_memory.tier is not Tier.DEVICE:
            with shared_errors(self._all_ranks):
                self.inputs.input_memory.check()

    def updated(self) -> None:
        """Handle the end of a full step. All ranks must call this."""
        if self.kept is not None:
            self.kept.end_step(self.device, self._all_ranks)


def keep_less(
    model: nn.Module,
    chosen: SelectedModules,
    config: Config,
    transforms: ModuleTransforms,
    stored: Activations | None = None,
    streams: RandomStreams | None = None,
) -> Recomputation:
    """Make the selected modules keep less for backward.

    Args:
        stored: where inputs of recomputed modules are stored, and which calls are not recomputed.
        streams: the random numbers that recomputed forwards draw again.
    """
    changes = transforms.at(Order.RECOMPUTE)
    inputs, kept = (None, None) if stored is None else (stored.inputs, stored.kept)
    if inputs is not None:
        changes.on_undo(inputs.close)
    for each in (inputs, kept):
        if each is not None:
            changes.on_undo(model.register_forward_pre_hook(Hook(partial(_begin, each))).remove)
    is_intercepted = config.attention.packed or config.attention.pattern != "dense"
    warns = stored is not None and stored.warns
    changes.on_undo(NoCaches(model, warns=warns, is_intercepted=is_intercepted).remove)
    selective = config.activations.checkpoint == "selective"
    recomputation = Recomputation(
        chosen.recomputed,
        changes,
        selective=selective,
        tiled=chosen.tiled,
        inputs=inputs,
        kept=kept,
        streams=streams,
        device=accelerator.HOST if stored is None else stored.device,
    )
    tile_heads(chosen.heads, config.loss, transforms.at(Order.LOSS))
    return recomputation


def _begin(follower: StoredInputs | RecomputeBudget, module: nn.Module, args: object) -> None:
    follower.begin_forward()


def open_tier(config: Config, memory: StateMemory) -> None:
    """Open the disk tier before the first forward, if inputs are offloaded to it.

    Raises:
        PartitaError: its folder is missing, is not a folder, is not writable, or has no space.
    """
    if config.activations.offload == Tier.DISK.value:
        memory.provide_disk(0, 1)


def inputs_tier(settings: ActivationsSection, device: torch.device) -> Tier:
    """Return the tier in which inputs are stored. If the model runs on the host, offloading to the host does
    nothing.
    """
    if settings.offload == "none" or (settings.offload == "host" and accelerator.is_host(device)):
        return Tier.DEVICE
    return Tier(settings.offload)
