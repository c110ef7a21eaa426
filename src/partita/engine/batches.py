"""The micro-batches of one global batch: drawn on all ranks alike, passed to the model, with the loss of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from partita.errors import PartitaError


def draw(iterator: Iterator[Any] | Sequence[Any], num: int, each: Callable[[float], list[float]]) -> list[Any]:
    """Draw ``num`` micro-batches, all before the first is used: no rank is left alone inside a batch.

    Args:
        each: returns a number of every rank, in rank order; called on all ranks.

    Raises:
        StopIteration: there are none, on any rank.
        PartitaError: this is not an iterator, or it ended inside a batch on one rank.
    """
    listed = isinstance(iterator, list | tuple) and len(iterator) <= num
    if not isinstance(iterator, Iterator) and not listed:
        raise PartitaError(
            f"train_batch: a {type(iterator).__name__} is not an iterator over micro-batches, which goes on from "
            "call to call: make `batches = iter(loader)` once, before the loop, and pass that"
        )
    drawn = list(islice(iterator, num))
    counts = [int(number) for number in each(len(drawn))]
    if not any(counts):
        raise StopIteration
    if min(counts) < num:
        rank = counts.index(min(counts))
        raise PartitaError(
            f"train_batch: the iterator of rank {rank} ended after {counts[rank]} of {num} micro-batches "
            "(batch.accumulate); nothing was trained on. Let every rank's data last for the same number of whole "
            "batches, or begin it anew (itertools.cycle)"
        )
    return drawn


def draw_for_evaluation(
    iterator: Iterator[Any] | Sequence[Any], num: int, each: Callable[[float], list[float]]
) -> Sequence[Any]:
    """Return a list as it is, or at most ``num`` micro-batches of an iterator; the same number on all ranks.

    Raises:
        StopIteration: there are none, on any rank.
        PartitaError: this is not an iterator, or ranks have different numbers of micro-batches.
    """
    is_list = isinstance(iterator, list | tuple)
    if not is_list and not isinstance(iterator, Iterator):
        raise PartitaError(
            f"eval_batch: a {type(iterator).__name__} is no iterator over micro-batches and no list of them: pass "
            "iter(loader), or a list"
        )
    drawn = list(iterator if is_list else islice(iterator, num))
    counts = [int(number) for number in each(len(drawn))]
    if not any(counts):
        raise StopIteration
    if len(set(counts)) > 1:
        rank = next(rank for rank, count in enumerate(counts) if count != counts[0])
        raise PartitaError(
            f"eval_batch: rank 0 has {counts[0]} micro-batches and rank {rank} has {counts[rank]}; give every rank the "
            "same number, of any sizes"
        )
    return drawn


def arguments(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of the model for a micro-batch: a mapping as keywords, a tuple or list as arguments."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, tuple | list) else (batch,)), {}


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Return the model's output for a micro-batch."""
    args, kwargs = arguments(batch)
    return model(*args, **kwargs)


def loss_of(output: Any, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """Return the loss: that of ``loss_fn``, or the output itself, or its ``.loss``.

    Raises:
        PartitaError: it is no scalar.
    """
    loss = loss_fn(output, batch) if loss_fn else getattr(output, "loss", output)
    if isinstance(output, Mapping) and not loss_fn:
        loss = output.get("loss", loss)
    if is_scalar(loss):
        return loss
    if loss_fn:
        said = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise PartitaError(f"loss_fn: expected a tensor of one number, the mean loss of a micro-batch; got {said}")
    raise PartitaError(
        f"train_batch, eval_batch: the model returned a {type(output).__name__} without a scalar loss; return the "
        "loss, an output with .loss (pass labels), or give loss_fn to partita.initialize"
    )


def is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1
