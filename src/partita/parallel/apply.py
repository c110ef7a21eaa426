"""Application of the parallel axes other than data to an unmodified model: pipeline, then tensor, then sequence."""

from torch import nn

from partita.comm.collectives import Collectives
from partita.config.resolve import Resolved
from partita.memory.accelerator import is_simulated
from partita.parallel.applied import Parallel
from partita.parallel.pipeline.apply import cut_model, remove_from_other_stages
from partita.parallel.random import RandomStreams
from partita.parallel.sequence.apply import SEQUENCE, SequenceParallel
from partita.parallel.sequence.first_batch import check_block
from partita.parallel.tensor.functions import Entrance
from partita.parallel.tensor.rules import split_model
from partita.parallel.tensor.splitter import TENSOR, Splitter
from partita.transforms.modules import ModuleTransforms, Order


def apply(
    model: nn.Module,
    resolved: Resolved,
    collectives: Collectives,
    transforms: ModuleTransforms,
    seed: int | None = None,
) -> Parallel:
    """Change the model so that it computes this rank's part.

    Parameters stay unsplit, with their values, until the engine takes them over. No rank waits for another one here.

    Args:
        transforms: receives the changes to the modules, and undoes them.
        seed: the seed of random numbers that are the same on every mesh; None: modules draw from torch's generators.

    Raises:
        ConfigError: the model cannot be split as the config asks.
    """
    parallel, mesh = Parallel(transforms=transforms), collectives.mesh
    if mesh.size("pipeline") > 1:
        cut_model(model, resolved, mesh, parallel)
    if mesh.size(TENSOR) > 1:
        parallel.entrance = Entrance(collectives.group((TENSOR,)))
        splitter = Splitter(model, parallel.entrance, parallel)
        split_model(splitter, mesh, resolved.config.parallel.tensor_rules)
        parallel.lines += splitter.lines()
        if parallel.cut is not None:
            remove_from_other_stages(model, transforms)
    if mesh.size(SEQUENCE) > 1:
        applied = SequenceParallel(model, mesh, collectives.group((SEQUENCE,)), transforms.at(Order.SEQUENCE))
        parallel.lines += applied.lines
        parallel.stacks += applied.stacks
        for stack in applied.stacks if not is_simulated(mesh.device) else ():  # there, tensors have no values
            stack.before_first = check_block
    if seed is not None:
        part = f"{SEQUENCE} {mesh.coordinate(SEQUENCE)}" if mesh.size(SEQUENCE) > 1 else ""
        parallel.streams = RandomStreams(model, seed, mesh.coordinate("data"), mesh.device, part)
        transforms.at(Order.RANDOM).on_undo(parallel.streams.remove)
    return parallel
