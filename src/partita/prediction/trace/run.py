"""Trace of a forward and a backward without data.

Tensors are on the ``meta`` device: they have shapes, and no memory. The model's forward may depend on shapes, and not
on values. Attention is assumed to run in a fused kernel.
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
from partita.parallel.pipeline.deferred_gradients import DeferredGradients, WeightGradients
from partita.parallel.tensor.functions import CopyToTensorRanks
from partita.prediction.trace.block_trace import Trace
from partita.prediction.trace.counted_groups import SentCounter
from partita.prediction.trace.fewer_blocks import BlockMap
from partita.prediction.trace.meta_ops import without_values
from partita.prediction.trace.recorder import Recorder
from partita.prediction.trace.storages import Storages
from partita.sharding.half import HalfParameter
from partita.table.share import Shares


@dataclass(frozen=True)
class TracedRank:
    """The traced rank, and its settings.

    Attributes:
        block_map: for every block of the full model, its name and the block that represents it (:func:`fewer_blocks`).
        dtypes: the dtype in which each parameter is stored, by id.
        collectives: they count the bytes that the model sends.
        shares: the rank's shares of split parameters.
        half: the dtype of the parameters that autocast reads as if they were fp32.
        cast_buffers: called when the buffers are on ``meta``.
        is_cut: the model is cut into pipeline stages, each with copies of the shared parameters that it uses.
        weights: storage of deferred weight gradients; None: they are computed in backward.
        copy_input: the entrance of layers that are split over tensor ranks. It keeps their last input until the next
            one.
    """

    block_map: BlockMap
    dtypes: Mapping[int, torch.dtype]
    collectives: Collectives
    shares: Shares
    half: torch.dtype | None = None
    cast_buffers: Callable[[], None] | None = None
    is_cut: bool = False
    weights: WeightGradients | None = None
    copy_input: CopyToTensorRanks | None = None


def trace(model: nn.Module, batch: Any, rank: TracedRank, samples: int = 1) -> Trace:
    """Run one forward and backward without data. The model is restored at the end.

    Args:
        batch: the arguments of the forward, on the ``meta`` device: a mapping or a tuple.
        rank: the traced rank; its collectives count the bytes that the model sends.
        samples: the number of samples of the batch, if it is from :func:`coprime_batch`, to scale the trace
            (:meth:`Trace.of`).

    Raises:
        ConfigError: the forward cannot be run without data.
    """
    blocks = list(dict.fromkeys(block for _, block in rank.block_map))
    meta_parameters = MetaParameters(model, blocks, rank)
    deferring = nullcontext() if rank.weights is None else rank.weights.deferring(0)
    with meta_parameters, deferring as deferred:
        storages = Storages((param.untyped_storage() for param in meta_parameters.params), samples)
        recorder = Recorder(blocks, SentCounter(rank.collectives), storages, deferred, rank.copy_input)
        meta_parameters.report_to(recorder, deferred)
        try:
            with without_values(), recorder:
                output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
                loss = loss_of(output)
                del output
                recorder.forward_ended()
                loss.backward()
                del loss
                if deferred is not None and rank.weights is not None:
                    recorder.weight_gradients_began()
                    meta_parameters.report_to(recorder)
                    rank.weights.take(0).run()
        except (PartitaError, KeyboardInterrupt):
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"model: the forward of {type(model).__name__} cannot be traced without data ({lines[0]}); if its "
                "shapes depend on values, measure it: partita train with memory reports"
            ) from error
        finally:
            recorder.remove()
    batch_bytes = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return replace(recorder.result(rank.block_map), batch_bytes=batch_bytes, samples=samples)


def coprime_batch(model: nn.Module, sample: Any) -> int:
    """Return a number of samples that identifies the sizes which grow with the number of samples.

    It is coprime to the sizes of all parameters, and of all arguments for one ``sample``. Sizes that it does not divide
    do not depend on the number of samples: gradients of parameters, tables of positions.
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
        raise ConfigError(
            "model: expected a forward that returns a loss, or outputs with a gradient; got no tensor with a gradient"
        )
    return (
        tensors[0] if tensors[0].dim() == 0 else sum((x.float().sum() for x in tensors[1:]), tensors[0].float().sum())
    )


class MetaParameters:
    """Context in which the model's parameters are replaced by ``params``, a rank's parameters on the ``meta`` device.

    These have the rank's shapes and compute dtypes. Complete gradients are moved to gradient storage at once, which is
    counted elsewhere.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], rank: TracedRank) -> None:
        self._model = model
        self._rank = rank
        self._block_of = {id(inner): id(block) for block in blocks for inner in block.modules()}
        self._saved = list[tuple[dict[str, Any], dict[str, Any]]]()
        self._recorder: Recorder | None = None
        self._deferred: DeferredGradients | None = None
        self.params = list[nn.Parameter]()

    def report_to(self, recorder: Recorder, deferred: DeferredGradients | None = None) -> None:
        """Report gradients to ``recorder``.

        If ``deferred`` is given, it receives them instead, until the deferred weight gradients are computed.
        """
        self._recorder = recorder
        self._deferred = deferred

    def __enter__(self) -> Self:
        names = {id(param): name for name, param in self._model.named_parameters()}
        made = dict[object, nn.Parameter]()
        for module in self._model.modules():
            self._saved += [(module._parameters, dict(module._parameters)), (module._buffers, dict(module._buffers))]
            for name, param in module._parameters.items():
                if param is None:
                    continue
                # Each use outside the blocks may be on another stage, which has its own copy.
                block = self._block_of.get(id(module), id(module)) if self._rank.is_cut else None
                key = id(param), block
                if key not in made:
                    made[key] = self._meta_parameter(param, names[id(param)])
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
        for current, values_before in self._saved:
            current.update(values_before)

    def _meta_parameter(self, param: nn.Parameter, name: str) -> nn.Parameter:
        share = self._rank.shares.get(id(param))
        shape = share.place.sizes if share is not None else param.shape
        values = torch.empty(shape, dtype=self._rank.dtypes.get(id(param), param.dtype), device="meta")
        kind = HalfParameter if values.dtype == self._rank.half else nn.Parameter
        made = kind(values, requires_grad=param.requires_grad)
        if made.requires_grad:
            made.register_post_accumulate_grad_hook(partial(self._gradient_ready, name))
        return made

    def _gradient_ready(self, name: str, param: Tensor) -> None:
        assert self._recorder is not None
        gradient, param.grad = param.grad, None
        if self._deferred is not None and gradient is not None:
            assert isinstance(param, nn.Parameter)
            self._deferred.add_gradient(param, gradient)
        else:
            self._recorder.gradient_ready(param, name)
