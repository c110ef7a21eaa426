"""Check of each block before its first call: on full sequences and on slices it must give the same outputs and
gradients.

The block runs on a shortened batch. It may mix positions in a way that is not intercepted (a convolution, a scan,
attention of its own). On slices such a block would train, and learn something else. A gate of 0, or a weight that
starts at 0, may hide this in the first outputs, so the check also runs with copies of the block's parameters and
buffers that noise has moved away from such values.
"""

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
from partita.parallel.sequence.apply import KEY
from partita.parallel.sequence.blocks import Blocks, hidden_in, sequence_dim
from partita.parallel.sequence.exchange import PURPOSE, checking
from partita.parallel.sequence.slices import Slices
from partita.planner.parameters import is_quantized
from partita.sharding.buffers import buffers_kept
from partita.sharding.hooks import Hook
from partita.sharding.placeholder import is_sharded
from partita.sharding.pytree import map_tensors

# Positions of each rank: enough to detect mixing, and not likely to be another size of a model.
_POSITIONS = 11
# Largest accepted difference, as a share of a block's largest output: the order of sums differs.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-4, 5e-2
# The same for gradients, as a share of their norm. Rounding may turn one unit of a ReLU on or off.
_OF_GRADIENTS, _OF_GRADIENTS_16_BIT = 1e-2, 1e-1
# How far parameters are moved: less where outputs would not be finite.
_SCALES = (0.5, 0.05)
_MOVED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Projections of a gradient along random directions of its rows, and of its columns.
_NUM_PROJECTIONS = 4


def check_block(blocks: Blocks, block: nn.Module, args: Any, kwargs: Any) -> None:
    """Compare a block on full sequences and on slices, before its first call. All ranks of its slices must call this.

    Raises:
        PartitaError: on all of them: the block computes something else on slices.
    """
    slices = blocks.slices
    assert slices is not None
    with checking(slices.group), torch.inference_mode(False), _attributes_kept(block):
        _evaluate(block)
        with torch.no_grad(), buffers_kept(block):
            given = blocks.whole(block, (args, kwargs))
            sample = shortened(given, slices, min(slices.length // slices.group.size, _POSITIONS))
            try:
                whole = hidden_in(block.forward(*sample[0], **sample[1]))
            except (RuntimeError, ValueError, LookupError):  # it takes no shorter ones
                sample = given
                whole = hidden_in(block.forward(*sample[0], **sample[1]))
            if whole is None:
                return
            _compare_outputs(blocks, block, sample, whole)
        sample, most = _moved_input(sample), _num_infinite(whole)
        with torch.enable_grad():
            for scale in _SCALES:
                with _Moved(block, scale) as moved:
                    whole = hidden_in(block.forward(*sample[0], **sample[1]))
                    if whole is not None and _num_infinite(whole) <= most:
                        own = _compare_outputs(blocks, block, sample, whole)
                        _compare_gradients(blocks, block, sample, (whole, own), moved)
                        return


def _compare_outputs(blocks: Blocks, block: nn.Module, sample: Any, whole: Tensor) -> Tensor:
    """Run a block on slices and compare its output with ``whole``, the output on full sequences; return this rank's
    part.

    Raises:
        PartitaError: on all ranks: the outputs differ.
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
            raise _mixes(
                name,
                size,
                f"computes something else on slices of the sequence (off by {off:.1g} of its largest output)",
            )
    assert own is not None
    return own


def _compare_gradients(
    blocks: Blocks, block: nn.Module, sample: Any, outputs: tuple[Tensor, Tensor], moved: "_Moved"
) -> None:
    """Run the backward of a block's ``outputs`` (the full output, and this rank's part of it) and compare the
    gradients.

    Raises:
        PartitaError: on all ranks: the gradients differ.
    """
    (output, own), group = outputs, blocks.group
    if not output.requires_grad:
        return
    short = Slices.even(output.shape[1], group, blocks.mesh)
    given = _noise(output.shape, output.device).to(output.dtype).masked_fill(~output.detach().isfinite(), 0)
    whole = _gradients(output, given, sample, moved)
    sliced = _gradients(own, short.take(given, 1), sample, moved)
    total = group.sum(sliced.projections, PURPOSE)
    with shared_errors(group):
        inputs = (short.take(gradients.of_input, 1) for gradients in (whole, sliced))
        off = max(_off(*inputs), _off(whole.projections, total))
        if off > (_OF_GRADIENTS if output.dtype.itemsize >= 4 else _OF_GRADIENTS_16_BIT):
            name = blocks.name(block)
            raise _mixes(name, group.size, f"has other gradients on slices of the sequence (off by {off:.1g} of them)")


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


def _mixes(name: str, size: int, what: str) -> PartitaError:
    return PartitaError(
        f"{KEY}: {size}: '{name}' {what}: it mixes positions in a way that cannot be seen. Attention is seen "
        "where it is F.scaled_dot_product_attention, or transformers' interface; set parallel.sequence: 1, and "
        "share long samples in another way (parallel.tensor, activations.checkpoint)"
    )


def _off(expected: Tensor, found: Tensor) -> float:
    """Return the largest norm of a row's difference, as a share of the largest norm of a row."""
    expected, found = (x.float().nan_to_num().flatten(1) for x in (expected, found))
    largest = expected.norm(dim=1).max().clamp_min(1e-12)
    return float((found - expected).norm(dim=1).max() / largest)


# -- gradients ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gradients:
    """The gradients of a block's input, and ``projections`` of those of its parameters, one row for each."""

    of_input: Tensor
    projections: Tensor


def _gradients(output: Tensor, gradient: Tensor, sample: Any, moved: "_Moved") -> _Gradients:
    """Run the backward of an output with this ``gradient``; return the gradients of the input and of the parameters."""
    hidden, leaves = hidden_in(sample), moved.leaves
    assert hidden is not None
    size = moved.num_tensors + 1, _NUM_PROJECTIONS**2
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
    left, right = (_noise((_NUM_PROJECTIONS, n), rows.device, number) for number, n in enumerate(rows.shape))
    total += (left @ rows @ right.mT).flatten()


def _noise(shape: Sequence[int], device: torch.device, number: int = 0) -> Tensor:
    """Return normally distributed random numbers, the same on every device for the same ``number``."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu").to(device)


# -- what it is run with -----------------------------------------------------------------------------------------------


def shortened(arguments: Any, slices: Slices, positions: int) -> tuple[Any, Any]:
    """Return a block's arguments with ``positions`` positions for each rank, in every dim that has all of them."""
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


def _moved_input(arguments: Any) -> tuple[Any, Any]:
    """Return copies of a block's arguments. The input gets noise, since its positions may be alike, and requires a
    gradient.
    """
    hidden = hidden_in(arguments)
    assert hidden is not None
    noise = _noise(hidden.shape, hidden.device)
    noise *= 0.5 * hidden.detach().float().nan_to_num().square().mean().sqrt().clamp_min(0.1)
    moved = (hidden.detach() + noise.to(hidden.dtype)).requires_grad_()
    found: tuple[Any, Any] = map_tensors(arguments, lambda x: moved if x is hidden else x.detach().clone())
    return found


def _num_infinite(output: Tensor) -> int:
    return int((~output.isfinite()).sum())


class _Moved:
    """Context in which noisy copies replace a block's parameters and buffers.

    Vectors are moved away from 0, so that those that must be positive (variances, scales) stay so. A parameter that is
    sharded until the unit inside the block that owns it runs is copied at that time.

    Args:
        scale: of the noise.
    """

    def __init__(self, block: nn.Module, scale: float) -> None:
        self._block = block
        self._scale = scale
        self._numbers = {id(tensor): at for at, tensor in enumerate([*block.parameters(), *block.buffers()])}
        self._copies = dict[int, Tensor]()  # by the id of the original
        self._undo = list[Callable[[], object]]()

    def __enter__(self) -> "_Moved":
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
        """The copies of trainable parameters, each with the number of the original in the block."""
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
        if copy.dtype in _MOVED and self._scale:
            noise = _noise(copy.shape, copy.device, self._numbers[id(tensor)])
            if copy.dim() > 1:
                noise *= (len(copy) / max(copy.numel(), 1)) ** 0.5
            else:
                noise = (noise.abs() + 0.5).copysign(copy)
            copy += (noise * self._scale).to(copy.dtype)
        return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _evaluate(block: nn.Module) -> None:
    """Switch dropout off. Batch norms stay in their mode: in training, their statistics mix positions."""
    for module in block.modules():
        module.training = module.training and isinstance(module, _BatchNorm)


@contextmanager
def _attributes_kept(block: nn.Module) -> Iterator[None]:
    """Restore the attributes of a module, and of its submodules, after the block."""
    kept = [(vars(module), dict(vars(module))) for module in block.modules()]
    try:
        yield
    finally:
        for now, before in kept:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
