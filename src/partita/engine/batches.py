"""Micro-batches of one global batch: draw them, pass them to the model, and find the loss."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from partita.errors import PartitaError


def draw(iterator: Iterator[Any] | Sequence[Any], num: int, each: Callable[[float], list[float]]) -> list[Any]:
    """Draw ``num`` micro-batches before the first one is used, so that all ranks find a missing one at the same time.

    Args:
        each: a collective that returns a number of every rank, in rank order.

    Raises:
        StopIteration: there are none, on any rank.
        PartitaError: this is not an iterator, or it ended inside a batch on one rank.
    """
    listed = isinstance(iterator, list | tuple) and len(iterator) <= num
    if not isinstance(iterator, Iterator) and not listed:
        raise PartitaError(
            f"train_batch: expected an iterator over micro-batches, which continues from call to call; got a "
            f"{type(iterator).__name__}: make `batches = iter(loader)` once, before the loop, and pass that"
        )
    drawn = list(islice(iterator, num))
    counts = [int(number) for number in each(len(drawn))]
    if not any(counts):
        raise StopIteration
    if min(counts) < num:
        rank = counts.index(min(counts))
        raise PartitaError(
            f"train_batch: the iterator of rank {rank} ended after {counts[rank]} of {num} micro-batches "
            "(batch.accumulate); no update was made. Give every rank data for the same number of complete batches, or "
            "repeat the data (itertools.cycle)"
        )
    return drawn


def draw_for_evaluation(
    iterator: Iterator[Any] | Sequence[Any], num: int, each: Callable[[float], list[float]]
) -> Sequence[Any]:
    """Return all micro-batches of a list, or at most ``num`` of an iterator; the same number on all ranks.

    Raises:
        StopIteration: there are none, on any rank.
        PartitaError: this is not an iterator, or ranks have different numbers of micro-batches.
    """
    is_list = isinstance(iterator, list | tuple)
    if not is_list and not isinstance(iterator, Iterator):
        raise PartitaError(
            f"eval_batch: expected an iterator over micro-batches, or a list of them; got a {type(iterator).__name__}: "
            "pass iter(loader), or a list"
        )
    drawn = list(iterator if is_list else islice(iterator, num))
    counts = [int(number) for number in each(len(drawn))]
    if not any(counts):
        raise StopIteration
    if len(set(counts)) > 1:
        rank = next(rank for rank, count in enumerate(counts) if count != counts[0])
        raise PartitaError(
            f"eval_batch: rank 0 has {counts[0]} micro-batches and rank {rank} has {counts[rank]}; give every rank the "
            "same number (their sizes may differ)"
        )
    return drawn


@dataclass(frozen=True)
class LossCall:
    """A micro-batch with the function that computes its loss, by one call of the model.

    ``inputs`` are the arguments of that call, equal on ranks of one data coordinate.
    """

    inputs: Any
    compute: Callable[[], Tensor]


def arguments(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the model's arguments for a micro-batch: (positional, keyword). A mapping gives keyword arguments."""
    if isinstance(batch, LossCall):
        return arguments(batch.inputs)
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, tuple | list) else (batch,)), {}


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Return the model's output for a micro-batch, or the loss that its function computes.

    Raises:
        PartitaError: the model's forward does not take the values of the micro-batch.
    """
    if isinstance(batch, LossCall):
        return batch.compute()
    args, kwargs = arguments(batch)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        if problem := _misfit(model, args, kwargs):
            raise PartitaError(problem) from error
        raise


def _misfit(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a message if the model's forward does not take these arguments, else an empty string."""
    try:
        inspect.signature(getattr(model, "forward", model)).bind(*args, **kwargs)
    except TypeError as error:
        return (
            f"train_batch, eval_batch: {type(model).__name__}.forward does not take this micro-batch ({error}): a "
            "tuple or list gives its positional arguments, a mapping its keyword arguments; yield only what forward "
            "takes, or compute the loss in a loop of your own: engine.backward(loss_fn(engine(inputs), targets)), "
            "engine.step()"
        )
    except ValueError:  # a forward without a signature
        return ""
    return ""


def loss_of(output: Any, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """Return the loss: the result of ``loss_fn``, the output itself, or its ``.loss``.

    Raises:
        PartitaError: it is not a scalar.
    """
    if isinstance(batch, LossCall):
        loss_fn = None
    loss = loss_fn(output, batch) if loss_fn else getattr(output, "loss", output)
    if isinstance(output, Mapping) and not loss_fn:
        loss = output.get("loss", loss)
    if is_scalar(loss):
        return loss
    if loss_fn:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise PartitaError(f"loss_fn: expected a scalar tensor, the mean loss of a micro-batch; got {got}")
    raise PartitaError(
        f"train_batch, eval_batch: the model returned a {type(output).__name__} without a scalar loss; return the "
        "loss, an output with .loss (pass labels), or pass loss_fn to partita.initialize"
    )


def is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1
