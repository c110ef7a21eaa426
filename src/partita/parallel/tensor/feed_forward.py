"""Feed-forward layers found by their shape, and believed only when they give, on slices, what they give whole.

A layer of linear layers from ``hidden`` to ``width`` (or to several times it, in one matrix) and one from ``width``
back: the former are split by outputs, the latter by inputs. Whether a fused matrix is cut in one piece or in parts does
not show in its shape, and a wrong cut fits: so the layer is run on the slices of all ranks, one after the other.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from partita.parallel.applied import Changes, OwnForward
from partita.parallel.tensor.linear import Ranges, bias_of, is_linear, num_inputs, num_outputs, product
from partita.parallel.tensor.splitter import indices, scaled
from partita.plan.place import even

_TOLERANCE = 1e-4  # of the largest output, in fp32
_SAMPLE = (2, 3)  # rows of the inputs that the proof is run on


@dataclass(frozen=True)
class FeedForward:
    """``ups``: layers by name, with the number of parts that the outputs of each are cut in; ``down``: the last one, of
    ``width`` inputs.
    """

    ups: tuple[tuple[str, int], ...]
    down: str
    width: int

    def outputs(self, num_parts: int, size: int) -> list[Ranges]:
        """Of a layer of so many parts, by rank."""
        unit = even(self.width, size)
        return [
            tuple(place for part in range(num_parts) for place in scaled((cut,), 1, part * self.width)) for cut in unit
        ]


def find_feed_forward(module: nn.Module, size: int) -> FeedForward | None:
    """How to split a module over ``size`` ranks, if it is a feed-forward layer and stands the proof."""
    children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    if len(children) < 2 or not all(is_linear(child) for child in children.values()):
        return None
    if any(True for _ in module.parameters(recurse=False)):
        return None
    for down, last in children.items():
        width, ups = num_inputs(last), {name: child for name, child in children.items() if name != down}
        hidden = {num_inputs(child) for child in ups.values()}
        if width < size or len(hidden) != 1 or any(num_outputs(child) % width for child in ups.values()):
            continue
        if hidden == {width} and len(ups) > 1:
            continue  # projections of attention look like that
        found = FeedForward(tuple((name, num_outputs(child) // width) for name, child in ups.items()), down, width)
        if gives_its_output(module, found, size, hidden.pop()):
            return found
    return None


def gives_its_output(module: nn.Module, found: FeedForward, size: int, hidden: int) -> bool:
    """Run a module whole and on the slices of every rank, with random weights, and compare. The module is left as it
    was.
    """
    generator = torch.Generator().manual_seed(0)
    values = {name: _random(param.shape, generator) for name, param in module.named_parameters()}
    values |= {name: _random(buffer.shape, generator) for name, buffer in module.named_buffers()}
    try:
        num_inputs_ = sum(_is_required(each) for each in inspect.signature(module.forward).parameters.values())
    except ValueError:
        return False
    inputs = [_random((*_SAMPLE, hidden), generator) for _ in range(num_inputs_)]
    was_training = [(each, each.training) for each in module.modules()]
    changes = Changes()
    try:
        module.eval()
        with torch.no_grad():
            whole = _outputs(functional_call(module, values, tuple(inputs)))
            slices = _Slices(found, size)
            for name, num_parts in found.ups:
                up = module.get_submodule(name)
                changes.set(up, "forward", _Up(up, slices, num_parts))
            changes.set(last := module.get_submodule(found.down), "forward", _Down(last, slices))
            for slices.rank in range(size):
                split = _outputs(functional_call(module, values, tuple(inputs)))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):  # not to be called like that
        return False
    finally:
        changes.undo()
        for each, training in was_training:
            each.training = training
    return len(split) == len(whole) and all(map(_near, split, whole))


def _is_required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return named and parameter.default is parameter.empty


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    drawn = torch.randn(tuple(shape), generator=generator)
    return drawn / drawn.shape[-1] ** 0.5 if drawn.dim() else drawn


def _outputs(value: Any) -> tuple[Tensor, ...]:
    values = value if isinstance(value, tuple) else (value,)
    return tuple(each for each in values if isinstance(each, Tensor))


def _near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())


class _Slices:
    """What all ranks' runs share: whose turn it is, and the sum of what they came to so far."""

    def __init__(self, found: FeedForward, size: int) -> None:
        self.found, self.size, self.rank = found, size, 0
        self.sum: Tensor | None = None


class _Up(OwnForward):
    def __init__(self, module: nn.Module, slices: _Slices, num_parts: int) -> None:
        super().__init__(module)
        self._slices, self._num_parts = slices, num_parts

    def __call__(self, x: Tensor) -> Tensor:
        ranges = self._slices.found.outputs(self._num_parts, self._slices.size)[self._slices.rank]
        return product(self.module, x, bias_of(self.module), torch.tensor(indices(ranges)))


class _Down(OwnForward):
    """Adds this rank's part to the sum: the last rank's output is the whole one."""

    def __init__(self, module: nn.Module, slices: _Slices) -> None:
        super().__init__(module)
        self._slices = slices

    def __call__(self, x: Tensor) -> Tensor:
        slices = self._slices
        start, stop = even(slices.found.width, slices.size)[slices.rank]
        if x.shape[-1] != stop - start:
            raise ValueError(f"{x.shape[-1]} features where {stop - start} are expected")
        padded = x.new_zeros((*x.shape[:-1], slices.found.width))
        padded[..., start:stop] = x
        part = product(self.module, padded, None)
        slices.sum = part if slices.sum is None else slices.sum + part
        bias = bias_of(self.module)
        return slices.sum if bias is None else slices.sum + bias
