"""All changes to a model's modules, for the engine and for predictions, in the order of
:class:`~partita.transforms.modules.Order`.

Between the two functions :func:`partita.sharding.precision.forward_precision` sets the precision, in the engine after
the parameters are sharded. Pipeline stages wrap calls last (:class:`partita.parallel.pipeline.run.Pipeline`).
"""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from partita.activation.apply import Activations, SelectedModules, keep_less
from partita.activation.recompute import Recomputation
from partita.comm.collectives import Collectives
from partita.config.extension import optional
from partita.config.resolve import Resolved
from partita.config.schema import Config
from partita.memory.accelerator import is_simulated
from partita.parallel.applied import AppliedParallelism
from partita.parallel.block_outputs import BlockOutputs
from partita.parallel.pipeline.apply import check_passed_biases, cut_model, remove_from_other_stages
from partita.parallel.pipeline.deferred_gradients import WeightGradients, defer_weight_gradients
from partita.parallel.random import RandomStreams
from partita.parallel.sequence.apply import SEQUENCE, SequenceParallel
from partita.parallel.sequence.slice_check import check_block
from partita.parallel.tensor.functions import CopyToTensorRanks
from partita.parallel.tensor.rules import split_model
from partita.parallel.tensor.splitter import TENSOR, Splitter
from partita.transforms.modules import Level, ModuleTransforms, Order


def apply_axes(
    model: nn.Module,
    resolved: Resolved,
    collectives: Collectives,
    transforms: ModuleTransforms,
    seed: int | None = None,
) -> AppliedParallelism:
    """Change an unmodified model so that it computes this rank's part under the axes other than data.

    Parameters stay unsplit, with their values, until the engine takes them over. No rank waits for another one here.

    Args:
        transforms: receives the changes to the modules, and undoes them.
        seed: the seed of random numbers that are the same on every mesh; None: modules draw from torch's generators.

    Raises:
        ConfigError: the model cannot be split as the config asks.
    """
    parallel, mesh = AppliedParallelism(transforms=transforms), collectives.mesh
    if mesh.size("pipeline") > 1:
        cut_model(model, resolved, mesh, parallel)
    if mesh.size(TENSOR) > 1:
        parallel.copy_input = CopyToTensorRanks(collectives.group((TENSOR,)))
        splitter = Splitter(model, parallel.copy_input, parallel, mesh.device)
        split_model(splitter, mesh, resolved.config.parallel.tensor_rules)
        parallel.lines += splitter.lines()
        if parallel.cut is not None:
            check_passed_biases(model, parallel)
            remove_from_other_stages(model, transforms)
    if mesh.size(SEQUENCE) > 1:
        group, alone = collectives.group((SEQUENCE,)), collectives.group(())
        applied = SequenceParallel(model, mesh, group, alone, transforms.at(Order.SEQUENCE))
        parallel.lines += applied.lines
        parallel.stacks += applied.stacks
        for stack in applied.stacks if not is_simulated(mesh.device) else ():  # there, tensors have no values
            stack.on_first_call = check_block
    if parallel.cut is not None or parallel.stacks:
        is_cut = parallel.cut is not None
        blocks = parallel.cut.blocks if parallel.cut else [name for stack in parallel.stacks for name in stack.blocks]
        changes = transforms.at(Order.SEQUENCE)
        parallel.block_outputs = BlockOutputs(model, blocks, parallel.stacks, changes, across_stages=is_cut)
    if seed is not None:
        part = f"{SEQUENCE} {mesh.coordinate(SEQUENCE)}" if mesh.size(SEQUENCE) > 1 else ""
        parallel.streams = RandomStreams(model, seed, mesh.coordinate("data"), mesh.device, part)
        transforms.at(Order.RANDOM).on_undo(parallel.streams.remove)
    return parallel


class AttentionChange(Protocol):
    """A change to the model's attention. ``lines`` say what was done, for :meth:`Engine.explain`."""

    @property
    def lines(self) -> list[str]: ...

    def apply(self, changes: Level) -> None:
        """Make the change."""


def find_attention(model: nn.Module, settings: Config) -> AttentionChange | None:
    """Return the change that the optional package ``partita.attention`` makes; None where none is asked for.

    Raises:
        ConfigError: the package is not there, or the model's attention cannot be changed so.
    """
    if settings.attention == Config().attention:
        return None
    change: AttentionChange = optional("partita.attention.apply", "attention").SparseAttention(
        model, settings.attention
    )
    return change


@dataclass(frozen=True)
class Transformed:
    """The changed model's recomputation, and its deferred weight gradients if backwards do not compute them."""

    recomputation: Recomputation
    weights: WeightGradients | None


def apply_to_forwards(
    model: nn.Module,
    settings: Config,
    parallel: AppliedParallelism,
    attention: AttentionChange | None,
    chosen: SelectedModules,
    *,
    splits_weights: bool,
    activations: Activations | None = None,
) -> Transformed:
    """Change the forwards of a split model as the config asks.

    Args:
        parallel: the split. Its transforms receive the changes, its lines what was done.
        attention: of :func:`find_attention`.
        chosen: the modules that keep less for backward.
        splits_weights: the pipeline's schedule computes weight gradients separately.
        activations: stores inputs of recomputed modules; None: they stay where they are.
    """
    transforms = parallel.transforms
    weights = defer_weight_gradients(model, transforms.at(Order.WEIGHT_GRADIENT)) if splits_weights else None
    if attention is not None:
        attention.apply(transforms.at(Order.ATTENTION))
        parallel.lines += attention.lines
    return Transformed(keep_less(model, chosen, settings, transforms, activations, parallel.streams), weights)
