"""Application of the parallel axes other than data to an unmodified model: pipeline, then tensor, then sequence."""

import logging
from functools import partial

from torch import nn

from partita.comm.collectives import Collectives
from partita.comm.mesh import Mesh
from partita.config.resolve import Resolved
from partita.memory.accelerator import is_simulated
from partita.parallel.applied import Parallel
from partita.parallel.pipeline.apply import cut_model, leave_alone_elsewhere
from partita.parallel.random import RandomStreams
from partita.parallel.sequence.apply import SEQUENCE, SequenceParallel
from partita.parallel.sequence.first_batch import check_block
from partita.parallel.tensor.functions import Entrance
from partita.parallel.tensor.rules import split_model
from partita.parallel.tensor.splitter import TENSOR, Splitter

_log = logging.getLogger("partita")


def apply(
    model: nn.Module, resolved: Resolved, mesh: Mesh, collectives: Collectives, seed: int | None = None
) -> Parallel:
    """Change the model so that it computes this rank's part.

    Parameters stay unsplit, with their values, until the engine takes them over. No rank waits for another one here. If
    this raises, the model is left as it was.

    Args:
        seed: the seed of random numbers that are the same on every mesh; None: modules draw from torch's generators.

    Raises:
        ConfigError: the model cannot be split as the config asks.
    """
    parallel = Parallel()
    try:
        if mesh.size("pipeline") > 1:
            cut_model(model, resolved, mesh, parallel)
        if mesh.size(TENSOR) > 1:
            _apply_tensor(model, resolved, mesh, collectives, parallel)
        leave_alone_elsewhere(model, parallel)
        if mesh.size(SEQUENCE) > 1:
            _apply_sequence(model, mesh, collectives, parallel)
        if seed is not None:
            part = f"{SEQUENCE} {mesh.coordinate(SEQUENCE)}" if mesh.size(SEQUENCE) > 1 else ""
            parallel.streams = RandomStreams(model, seed, mesh.coordinate("data"), mesh.device, part)
            parallel.changes.on_undo(parallel.streams.remove)
    except BaseException:
        parallel.remove()
        raise
    for said in parallel.said if mesh.rank == 0 else ():
        _log.info("%s", said)
    return parallel


def _apply_tensor(
    model: nn.Module, resolved: Resolved, mesh: Mesh, collectives: Collectives, parallel: Parallel
) -> None:
    splitter = Splitter(model, Entrance(collectives.group((TENSOR,))), parallel)
    split_model(splitter, mesh, resolved.config.parallel.tensor_rules)
    parallel.lines += splitter.lines()


def _apply_sequence(model: nn.Module, mesh: Mesh, collectives: Collectives, parallel: Parallel) -> None:
    applied = SequenceParallel(model, mesh, collectives.group((SEQUENCE,)), parallel.changes)
    parallel.lines += applied.lines
    for stack in applied.stacks:
        parallel.passing |= {id(block): partial(stack.pass_by, block) for block in stack.blocks.values()}
        parallel.ending.append(stack.forget)
        if not is_simulated(mesh.device):  # there, tensors have no values to compare
            stack.before_first = check_block
