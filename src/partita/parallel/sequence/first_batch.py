"""Before its first call each block is run on the batch, shortened, whole and on slices: it must compute the same.

A block may mix positions in a way that nothing here sees (a convolution, a scan, attention of its own). On slices it
would train, and learn something else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partita.comm.together import together
from partita.errors import PartitaError
from partita.parallel.sequence.apply import KEY
from partita.parallel.sequence.blocks import Blocks, hidden_in, sequence_dim
from partita.parallel.sequence.slices import Slices
from partita.sharding.nested import map_tensors

# Positions of each rank: enough to see that they are mixed, and as no other size of a model is.
_POSITIONS = 11
# Share of a block's largest output by which the two ways may differ: sums in another order.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-4, 5e-2


def check_block(blocks: Blocks, block: nn.Module, args: Any, kwargs: Any) -> None:
    """Run a block both ways, before its first call; on all ranks of its slices.

    Raises:
        PartitaError: on all of them: it computes something else on slices.
    """
    slices, name = blocks.slices, blocks.name(block)
    assert slices is not None
    with _evaluating(block), torch.no_grad():
        given = blocks.whole(block, (args, kwargs))
        sample = shortened(given, slices, min(slices.length // slices.group.size, _POSITIONS))
        try:
            whole = hidden_in(block.forward(*sample[0], **sample[1]))
        except (RuntimeError, ValueError, LookupError):  # it takes no shorter ones
            sample = given
            whole = hidden_in(block.forward(*sample[0], **sample[1]))
        if whole is None:
            return
        short = Slices.even(whole.shape[1], slices.group, slices.mesh)
        with together(slices.group):
            own = _on_slices(blocks, block, sample, short, name)
            _compare(short.take(whole, 1), own, name, slices.group.size)


def _on_slices(blocks: Blocks, block: nn.Module, sample: Any, slices: Slices, name: str) -> Tensor | None:
    try:
        args, kwargs = blocks.cut(block, sample, slices)
        return hidden_in(block.forward(*args, **kwargs))
    except PartitaError:
        raise
    except Exception as error:
        raise PartitaError(
            f"{KEY}: {slices.group.size}: '{name}' runs on whole sequences and not on slices: {error}"
        ) from error


def _compare(expected: Tensor, own: Tensor | None, name: str, size: int) -> None:
    off = float("inf")
    if own is not None and own.shape == expected.shape:
        largest = expected.float().nan_to_num().abs().max().clamp_min(1e-12)
        off = float((own - expected).float().nan_to_num().abs().max() / largest)
    if off > (_TOLERANCE if expected.dtype.itemsize >= 4 else _TOLERANCE_16_BIT):
        raise PartitaError(
            f"{KEY}: {size}: '{name}' computes something else on slices of the sequence (off by "
            f"{off:.1g} of its largest output): it mixes positions in a way that cannot be seen. Attention is seen "
            "where it is F.scaled_dot_product_attention, or transformers' interface; set parallel.sequence: 1, and "
            "share long samples in another way (parallel.tensor, activations.checkpoint)"
        )


def shortened(arguments: Any, slices: Slices, positions: int) -> tuple[Any, Any]:
    """A block's arguments with so many positions for each rank, in every dim that has all of them."""
    hidden, length = hidden_in(arguments), slices.length
    assert hidden is not None
    batch = hidden.shape[0]

    def short(tensor: Tensor) -> Tensor:
        for dim in range(0 if sequence_dim(tensor, length, batch) == 0 else 1, tensor.dim()):
            if tensor.shape[dim] == length:
                tensor = tensor.narrow(dim, 0, positions * slices.group.size)
        return tensor

    found: tuple[Any, Any] = map_tensors(arguments, short)
    return found


@contextmanager
def _evaluating(block: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in block.modules()]
    block.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
