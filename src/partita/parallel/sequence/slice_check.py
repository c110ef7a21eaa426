"""Check of each block before its first call: on slices it must give the outputs and gradients of full sequences.

A block may mix positions in an operation that is not intercepted (a convolution, a scan, custom attention). On slices
it would train without an error, and compute something else. The block runs on a shortened batch. A gate or a weight
that is initialized to 0 may hide the difference, so the check also runs with copies of the block's parameters and
buffers to which noise is added.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from partita.comm.collective_errors import shared_errors
from partita.errors import PartitaError
from partita.layout.parameters import is_quantized
from partita.parallel.sequence.apply import KEY
from partita.parallel.sequence.blocks import Blocks, hidden_in, sequence_dim
from partita.parallel.sequence.exchange import PURPOSE, checking
from partita.parallel.sequence.slices import Slices
from partita.sharding.buffers import buffers_kept
from partita.sharding.hooks import Hook
from partita.sharding.placeholder import is_sharded
from partita.sharding.pytree import held_tensors, map_tensors

# Positions of each rank: enough to detect mixing, and not likely to be another size of a model.
_POSITIONS = 11
# The largest accepted difference, relative to a block's largest output: the order of sums differs.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-4, 5e-2
# The same for gradients, relative to their norm. Rounding may turn one unit of a ReLU on or off.
_GRADIENT_TOLERANCE, _GRADIENT_TOLERANCE_16_BIT = 1e-2, 1e-1
# Scales of the noise; the smaller one is used if outputs are not finite with the larger one.
_SCALES = (0.5, 0.05)
_NOISY_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Projections of a gradient along random directions of its rows, and of its columns.
_NUM_PROJECTIONS = 4


def check_block(blocks: Blocks, block: nn.Module, args: Any, kwargs: Any) -> None:
    """Compare a block on full sequences and on slices, before its first call. All sequence ranks must call this.

    Raises:
        PartitaError: the block computes something else on slices. Raised on all ranks.
    """
    slices = blocks.slices
    assert slices is not None
    with checking(slices.group), torch.inference_mode(False), _attributes_kept(block):
        _disable_dropout(block)
        with torch.no_grad(), buffers_kept(block):
            given = blocks.whole(block, (args, kwargs))
            sample = shortened(given, slices, min(slices.length // slices.group.size, _POSITIONS))
            try:
                whole = _output(block, sample)
            except (RuntimeError, ValueError, LookupError):  # it does not accept shorter sequences
                sample = given
                whole = _output(block, sample)
            if whole is None:
                return
            _compare_outputs(blocks, block, sample, whole)
        sample, num_infinite = _noisy_input(sample), _num_infinite(whole)
        with torch.enable_grad():
            for scale in _SCALES:
                with _NoisyCopies(block, scale) as noisy:
                    whole = _output(block, sample)
                    if whole is not None and _num_infinite(whole) <= num_infinite:
                        own = _compare_outputs(blocks, block, sample, whole)
                        _compare_gradients(blocks, block, sample, (whole, own), noisy)
                        return


def _compare_outputs(blocks: Blocks, block: nn.Module, sample: Any, whole: Tensor) -> Tensor:
    """Run a block on slices, compare its output with ``whole``, the output on full sequences, and return this rank's
    slice.

    Raises:
        PartitaError: the outputs differ. Raised on all ranks.
    """
    name, size = blocks.name(block), blocks.group.size
    short = Slices.even(whole.shape[1], blocks.group, blocks.mesh)
    with shared_errors(blocks.group):
        own, expected = _on_slices(blocks, block, sample, short, name), short.take(whole, 1)
        off = float("inf")
        if own is not None and own.shape == expected.shape and own.requires_grad == expected.requires_grad:
            largest = expected.detach().float().nan_to_num().abs().max().clamp_min(1e-12)
            off = float((own - expected).detach().float().nan_to_num().abs().max() / largest)
        if off > (_TOLERANCE if expected.dtype.itemsize >= 4 else _TOLERANCE_16_BIT):
            raise _mixes_positions(
                name,
                size,
                f"computes something else on slices of the sequence (off by {off:.1g} of its largest output)",
            )
    assert own is not None
    return own


def _compare_gradients(
    blocks: Blocks, block: nn.Module, sample: Any, outputs: tuple[Tensor, Tensor], noisy: "_NoisyCopies"
) -> None:
    """Run the backward of a block's ``outputs`` (on full sequences, and on this rank's slice), and compare the
    gradients.

    Raises:
        PartitaError: the gradients differ. Raised on all ranks.
    """
    (output, own), group = outputs, blocks.group
    if not output.requires_grad:
        return
    short = Slices.even(output.shape[1], group, blocks.mesh)
    given = _noise(output.shape, output.device).to(output.dtype).masked_fill(~output.detach().isfinite(), 0)
    whole = _gradients(output, given, sample, noisy)
    sliced = _gradients(own, short.take(given, 1), sample, noisy)
    total = group.sum(sliced.projections, PURPOSE)
    with shared_errors(group):
        inputs = (short.take(gradients.of_input, 1) for gradients in (whole, sliced))
        off = max(_relative_error(*inputs), _relative_error(whole.projections, total))
        if off > (_GRADIENT_TOLERANCE if output.dtype.itemsize >= 4 else _GRADIENT_TOLERANCE_16_BIT):
            name = blocks.name(block)
            raise _mixes_positions(
                name, group.size, f"has other gradients on slices of the sequence (off by {off:.1g} of them)"
            )


def _on_slices(blocks: Blocks, block: nn.Module, sample: Any, slices: Slices, name: str) -> Tensor | None:
    try:
        args, kwargs = blocks.slice_arguments(block, sample, slices)
        return _output(block, (args, kwargs))
    except PartitaError:
        raise
    except Exception as error:
        raise PartitaError(
            f"{KEY}: {slices.group.size}: '{name}' runs on full sequences and fails on slices: {error}"
        ) from error


def _output(block: nn.Module, sample: Any) -> Tensor | None:
    """Return the hidden states that a block computes. What it writes into a cache of keys and values is lost."""
    args, kwargs = sample
    return hidden_in(block.forward(*map(_cache_copy, args), **{key: _cache_copy(kwargs[key]) for key in kwargs}))


def _cache_copy(value: Any) -> Any:
    """Return a copy of a cache of transformers, of which no tensor is shared; any other value unchanged."""
    if not hasattr(value, "get_seq_length"):
        return value
    return copy.deepcopy(value, {id(tensor): tensor.detach().clone() for tensor in held_tensors(value)})


def _mixes_positions(name: str, size: int, what: str) -> PartitaError:
    return PartitaError(
        f"{KEY}: {size}: '{name}' {what}: it mixes positions in an operation that cannot be intercepted. Attention is "
        "intercepted if it calls F.scaled_dot_product_attention or transformers' attention interface. Set "
        "parallel.sequence: 1, and save memory in another way (parallel.tensor, activations.checkpoint)"
    )


def _relative_error(expected: Tensor, found: Tensor) -> float:
    """Return the largest norm of a row of the difference, relative to the largest norm of an expected row."""
    expected, found = (x.float().nan_to_num().flatten(1) for x in (expected, found))
    largest = expected.norm(dim=1).max().clamp_min(1e-12)
    return float((found - expected).norm(dim=1).max() / largest)


# -- gradients ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gradients:
    """The gradient of a block's input, and random projections of the parameters' gradients, one row per parameter."""

    of_input: Tensor
    projections: Tensor


def _gradients(output: Tensor, gradient: Tensor, sample: Any, noisy: "_NoisyCopies") -> _Gradients:
    """Run the backward of an output, given its ``gradient``."""
    hidden, leaves = hidden_in(sample), noisy.leaves
    assert hidden is not None
    size = noisy.num_tensors + 1, _NUM_PROJECTIONS**2
    projections = torch.zeros(size, dtype=torch.float32, device=output.device)
    hooks = [leaf.register_post_accumulate_grad_hook(partial(_project, projections[at])) for at, leaf in leaves]
    try:
        torch.autograd.backward([output], [gradient], inputs=[hidden, *(leaf for _, leaf in leaves)])
    finally:
        for hook in hooks:
            hook.remove()
    of_input, hidden.grad = hidden.grad, None
    return _Gradients(torch.zeros_like(hidden) if of_input is None else of_input, projections)


def _project(total: Tensor, leaf: Tensor) -> None:
    """Replace a parameter's gradient, which may be large, by random projections of it, and add these to ``total``."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    rows = gradient.detach().to_dense().float()
    rows = rows.flatten(1) if rows.dim() > 1 else rows.reshape(-1, 1)
    lhs, rhs = (_noise((_NUM_PROJECTIONS, n), rows.device, number) for number, n in enumerate(rows.shape))
    total += (lhs @ rows @ rhs.mT).flatten()


def _noise(shape: Sequence[int], device: torch.device, number: int = 0) -> Tensor:
    """Return normally distributed random numbers from the seed ``number``, the same on every device."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu").to(device)


# -- inputs and parameters of the check --------------------------------------------------------------------------------


def shortened(arguments: Any, slices: Slices, positions: int) -> tuple[Any, Any]:
    """Return a block's arguments with each dim of all positions shortened to ``positions`` per rank."""
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


def _noisy_input(arguments: Any) -> tuple[Any, Any]:
    """Return copies of a block's arguments. Noise is added to the input, since its positions may be equal, and it
    requires a gradient.
    """
    hidden = hidden_in(arguments)
    assert hidden is not None
    noise = _noise(hidden.shape, hidden.device)
    noise *= 0.5 * hidden.detach().float().nan_to_num().square().mean().sqrt().clamp_min(0.1)
    noisy = (hidden.detach() + noise.to(hidden.dtype)).requires_grad_()
    found: tuple[Any, Any] = map_tensors(arguments, lambda x: noisy if x is hidden else x.detach().clone())
    return found


def _num_infinite(output: Tensor) -> int:
    return int((~output.isfinite()).sum())


class _NoisyCopies:
    """Context in which noisy copies replace a block's parameters and buffers.

    Elements of vectors keep their signs, so that variances and scales stay positive. A parameter that is still sharded
    (its own unit is inside the block) is copied when that unit runs.

    Args:
        scale: the scale of the noise.
    """

    def __init__(self, block: nn.Module, scale: float) -> None:
        self._block = block
        self._scale = scale
        self._numbers = {id(tensor): at for at, tensor in enumerate([*block.parameters(), *block.buffers()])}
        self._copies = dict[int, Tensor]()  # by the id of the original
        self._undo = list[Callable[[], object]]()

    def __enter__(self) -> "_NoisyCopies":
        for module in self._block.modules():
            if any(is_sharded(param) for param in module._parameters.values() if param is not None):
                self._undo.append(module.register_forward_pre_hook(Hook(self._replace)).remove)
            self._replace(module)
        return self

    def __exit__(self, *raised: Any) -> None:
        while self._undo:
            self._undo.pop()()

    @property
    def num_tensors(self) -> int:
        return len(self._numbers)

    @property
    def leaves(self) -> list[tuple[int, Tensor]]:
        """The copies of trainable parameters, each with the index of the original in the block."""
        copies = {self._numbers[key]: copy for key, copy in self._copies.items() if copy.requires_grad}
        return [(number, copies[number]) for number in sorted(copies)]

    def _replace(self, module: nn.Module, args: Any = ()) -> None:
        places: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for place in places:
            for name, tensor in list(place.items()):
                if tensor is None or id(tensor) not in self._numbers or is_sharded(tensor) or is_quantized(tensor):
                    continue
                if id(tensor) not in self._copies:
                    self._copies[id(tensor)] = self._copy(tensor)
                self._undo.append(partial(place.__setitem__, name, tensor))
                place[name] = self._copies[id(tensor)]

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        if copy.dtype in _NOISY_DTYPES and self._scale:
            noise = _noise(copy.shape, copy.device, self._numbers[id(tensor)])
            if copy.dim() > 1:
                noise *= (len(copy) / max(copy.numel(), 1)) ** 0.5
            else:
                noise = (noise.abs() + 0.5).copysign(copy)
            copy += (noise * self._scale).to(copy.dtype)
        return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _disable_dropout(block: nn.Module) -> None:
    """Switch dropout off. Batch norms stay in their mode: in training, their statistics mix positions."""
    for module in block.modules():
        module.training = module.training and isinstance(module, _BatchNorm)


@contextmanager
def _attributes_kept(block: nn.Module) -> Iterator[None]:
    """Restore the attributes of a module and of its submodules after the ``with`` block."""
    kept = [(vars(module), dict(vars(module))) for module in block.modules()]
    try:
        yield
    finally:
        for now, before in kept:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
