"""A forward and a backward, run without data.

Tensors are on the ``meta`` device: they have shapes and no memory. Any model works whose forward depends on shapes
alone. Attention is assumed to run in a fused kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import gcd
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partita.comm.collectives import Collectives
from partita.errors import ConfigError, PartitaError
from partita.forecast.pieces import Trace
from partita.forecast.ranks import Sent
from partita.forecast.recorder import Recorder
from partita.forecast.shortened import Stand
from partita.forecast.storages import Storages
from partita.forecast.without_values import without_values
from partita.parallel.pipeline.weights import Left, WeightGradients
from partita.parallel.tensor.functions import Entrance
from partita.plan.share import Shares
from partita.sharding.half import HalfParameter


@dataclass(frozen=True)
class Rank:
    """The rank that is traced, and how a model runs on it.

    Attributes:
        stand: for every block of the full model, its name and the block that represents it (:func:`shortened`).
        dtypes: the dtype in which each parameter is stored, by id.
        collectives: those that count what the model sends.
        shares: the rank's shares of the parameters that it has in part.
        half: the dtype of the parameters that autocast reads as if they were fp32.
        cast_buffers: called once the buffers are on ``meta``.
        is_cut: other ranks of a pipeline have other blocks, and copies of parameters that are used in several.
        weights: where backwards leave weight gradients, if these are computed separately.
        entrance: that of layers split over tensor ranks, which holds their last input until the next one.
    """

    stand: Stand
    dtypes: Mapping[int, torch.dtype]
    collectives: Collectives
    shares: Shares
    half: torch.dtype | None = None
    cast_buffers: Callable[[], None] | None = None
    is_cut: bool = False
    weights: WeightGradients | None = None
    entrance: Entrance | None = None


def trace(model: nn.Module, batch: Any, rank: Rank, samples: int = 1) -> Trace:
    """Run one forward and backward without data. The model is left as it was.

    Args:
        batch: the arguments of the forward, on the ``meta`` device: a mapping or a tuple.
        rank: the rank that runs it; its collectives count what the model sends meanwhile.
        samples: samples of the batch, if they are :func:`telling` and the trace is to be scaled (:meth:`Trace.of`).

    Raises:
        ConfigError: the forward cannot be run without data.
    """
    blocks = list(dict.fromkeys(block for _, block in rank.stand))
    paper = Paper(model, blocks, rank)
    apart = nullcontext() if rank.weights is None else rank.weights.apart(0)
    with paper, apart as left:
        storages = Storages((param.untyped_storage() for param in paper.params), samples)
        recorder = Recorder(blocks, Sent(rank.collectives), storages, left, rank.entrance)
        paper.follow(recorder, left)
        try:
            with without_values(), recorder:
                output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
                loss = loss_of(output)
                del output
                recorder.forward_ended()
                loss.backward()
                del loss
                if left is not None and rank.weights is not None:
                    recorder.weights_began()
                    paper.follow(recorder)
                    rank.weights.take(0).run()
        except (PartitaError, KeyboardInterrupt):
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"model: the forward of {type(model).__name__} cannot be traced without data ({lines[0]}); a forward "
                "whose shapes depend on values has to be measured: partita train with memory reports"
            ) from error
        finally:
            recorder.remove()
    batch_bytes = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return replace(recorder.result(rank.stand), batch_bytes=batch_bytes, samples=samples)


def telling(model: nn.Module, sample: Any) -> int:
    """Return a number of samples that shows which sizes grow with the samples.

    It has no divisor in common with the size of a parameter, or of an argument for one ``sample``. A size that it does
    not divide is the same for every number of samples: gradients of parameters, tables of positions.
    """
    sizes = {leaf.numel() for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)}
    sizes |= {param.numel() for param in model.parameters()}
    sizes.discard(0)
    return next(num for num in count(3, 2) if all(gcd(num, size) == 1 for size in sizes))


def loss_of(output: Any) -> Tensor:
    """Return the tensor that backward starts from: ``output.loss``, a scalar output, or the sum of outputs."""
    named = getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        raise ConfigError("model: its forward returns no tensor with a gradient; return a loss, or outputs")
    return (
        tensors[0] if tensors[0].dim() == 0 else sum((x.float().sum() for x in tensors[1:]), tensors[0].float().sum())
    )


class Paper:
    """A context in which the model has a rank's parameters, ``params``, on the ``meta`` device.

    They have the shapes and dtypes that the rank computes with. A gradient is moved to gradient storage as soon as it
    is complete; the memory for that is part of another estimate.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], rank: Rank) -> None:
        self._model = model
        self._rank = rank
        self._within = {id(inner): id(block) for block in blocks for inner in block.modules()}
        self._before = list[tuple[dict[str, Any], dict[str, Any]]]()
        self._recorder: Recorder | None = None
        self._left: Left | None = None
        self.params = list[nn.Parameter]()

    def follow(self, recorder: Recorder, left: Left | None = None) -> None:
        """Report gradients to ``recorder``.

        If ``left`` is given, it receives them instead, until the backward of the weights.
        """
        self._recorder = recorder
        self._left = left

    def __enter__(self) -> Self:
        names = {id(param): name for name, param in self._model.named_parameters()}
        made = dict[object, nn.Parameter]()
        for module in self._model.modules():
            self._before += [(module._parameters, dict(module._parameters)), (module._buffers, dict(module._buffers))]
            for name, param in module._parameters.items():
                if param is None:
                    continue
                # Every stage has copies of its own: each use outside the blocks may be on another stage.
                place = self._within.get(id(module), id(module)) if self._rank.is_cut else None
                key = id(param), place
                if key not in made:
                    made[key] = self._made_of(param, names[id(param)])
                module._parameters[name] = made[key]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="meta")
        if self._rank.cast_buffers is not None:
            self._rank.cast_buffers()
        self.params = list(made.values())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for own, values_before in self._before:
            own.update(values_before)

    def _made_of(self, param: nn.Parameter, name: str) -> nn.Parameter:
        share = self._rank.shares.get(id(param))
        shape = share.place.sizes if share is not None else param.shape
        values = torch.empty(shape, dtype=self._rank.dtypes.get(id(param), param.dtype), device="meta")
        kind = HalfParameter if values.dtype == self._rank.half else nn.Parameter
        made = kind(values, requires_grad=param.requires_grad)
        if made.requires_grad:
            made.register_post_accumulate_grad_hook(partial(self._arrived, name))
        return made

    def _arrived(self, name: str, param: Tensor) -> None:
        assert self._recorder is not None
        gradient, param.grad = param.grad, None
        if self._left is not None and gradient is not None:
            assert isinstance(param, nn.Parameter)
            self._left.add_gradient(param, gradient)
        else:
            self._recorder.arrived(param, name)
