"""A forward and a backward, run without data.

Tensors are on the ``meta`` device: they have shapes and no memory. So any model works whose forward depends on shapes
alone. Attention is taken for a fused kernel's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from partita.comm.collectives import Collectives
from partita.errors import ConfigError, PartitaError
from partita.forecast.pieces import Trace
from partita.forecast.ranks import Sent
from partita.forecast.recorder import Recorder
from partita.forecast.shortened import Stand
from partita.forecast.without_values import without_values
from partita.plan.share import NO_SHARES, Shares


def trace(
    model: nn.Module,
    stand: Stand,
    batch: Any,
    dtypes: Mapping[int, torch.dtype],
    collectives: Collectives,
    shares: Shares = NO_SHARES,
) -> Trace:
    """Run one forward and backward without data. The model is left as it was.

    Args:
        stand: of every block of the whole model, as :func:`shortened` gives them.
        batch: what the forward takes, on the ``meta`` device: a mapping or a tuple of arguments.
        dtypes: of each parameter, by id, as it is computed with.
        collectives: count what the model sends meanwhile.
        shares: what of each parameter this rank has, where it is a part.

    Raises:
        ConfigError: the forward cannot be run without data.
    """
    recorder = Recorder(list(dict.fromkeys(block for _, block in stand)), Sent(collectives))
    with _on_paper(model, dtypes, shares, recorder):
        compute = next(iter(dtypes.values()), torch.float32)
        given = tree_map_only(Tensor, lambda x: x.to(compute) if x.is_floating_point() else x, batch)
        try:
            with without_values(), recorder:
                output = model(**given) if isinstance(given, Mapping) else model(*given)
                loss = loss_of(output)
                del output
                loss.backward()
                del loss
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
    return recorder.result(stand)


def loss_of(output: Any) -> Tensor:
    """What backward begins with: ``output.loss``, a scalar, or the sum of all outputs."""
    named = getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        raise ConfigError("model: its forward returns no tensor with a gradient; return a loss, or outputs")
    return (
        tensors[0] if tensors[0].dim() == 0 else sum((x.float().sum() for x in tensors[1:]), tensors[0].float().sum())
    )


@contextmanager
def _on_paper(
    model: nn.Module, dtypes: Mapping[int, torch.dtype], shares: Shares, recorder: Recorder
) -> Iterator[None]:
    """The model with a rank's parameters, as they are computed with, on the ``meta`` device. A gradient goes where
    gradients rest as soon as it is there; what that takes is another estimate's.
    """

    def drop(param: Tensor) -> None:
        param.grad = None
        recorder.arrived(param.nbytes)

    made, before = dict[int, Tensor](), list[tuple[dict[str, Any], dict[str, Any]]]()
    try:
        for module in model.modules():
            before += [(module._parameters, dict(module._parameters)), (module._buffers, dict(module._buffers))]
            for name, param in module._parameters.items():
                if param is None:
                    continue
                if id(param) not in made:
                    share = shares.get(id(param))
                    shape = share.place.sizes if share is not None else param.shape
                    values = torch.empty(shape, dtype=dtypes.get(id(param), param.dtype), device="meta")
                    made[id(param)] = fake = nn.Parameter(values, requires_grad=param.requires_grad)
                    if fake.requires_grad:
                        fake.register_post_accumulate_grad_hook(drop)
                module._parameters[name] = made[id(param)]  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="meta")
        yield
    finally:
        for own, values_before in before:
            own.update(values_before)
