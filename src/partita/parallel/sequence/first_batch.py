"""The first batch, shortened, is run on whole sequences and on slices: what a block computes must be the same.

A block may mix positions in a way that nothing here sees (a convolution, a scan, attention of its own). On slices it
would train, and learn something else.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partita.comm.together import together
from partita.errors import PartitaError
from partita.parallel.sequence.apply import KEY, SequenceParallel
from partita.parallel.sequence.blocks import Blocks
from partita.parallel.sequence.slices import Slices
from partita.sharding.hooks import Hook
from partita.sharding.nested import map_tensors, tensors_in

# Positions of each rank: enough to see that they are mixed, and as no other size of a model is.
_POSITIONS = 11
# Share of a block's largest output by which the two ways may differ: sums in another order.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-4, 5e-2


class FirstBatchCheck:
    """Runs before the model's first forward, on all ranks of the group.

    Raises:
        PartitaError: on all of them, from that forward: a block that computes something else on slices, by its name.
    """

    def __init__(self, parallel: SequenceParallel) -> None:
        self._parallel, self._running = parallel, False
        self._handle = parallel.model.register_forward_pre_hook(Hook(self._check), with_kwargs=True, prepend=True)

    def remove(self) -> None:
        self._handle.remove()

    def _check(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._running:
            return
        self._running = True
        whole, found = dict[str, Tensor](), list[str]()
        with _evaluating(model), torch.no_grad():
            with self._parallel.switched_off(), self._watching(lambda name, output, _: whole.update({name: output})):
                sample = _run_one_sample(model, args, kwargs, self._parallel.group.size)
            with together(self._parallel.group):
                with self._watching(partial(_compare, whole, found)):
                    self._run_on_slices(model, *sample)
                if found:  # told when no other rank waits for this one
                    raise PartitaError(found[0])
        self.remove()

    def _run_on_slices(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        try:
            model(*args, **kwargs)
        except PartitaError:
            raise
        except Exception as error:
            raise PartitaError(
                f"{KEY}: {self._parallel.group.size}: the model runs on whole sequences and not on slices: {error}"
            ) from error

    @contextmanager
    def _watching(self, see: Callable[[str, Tensor, Slices | None], None]) -> Iterator[None]:
        """Call ``see`` after each block, with its name, its output, and of what that is a slice."""
        handles = []
        for stack in self._parallel.stacks:
            for name, block in stack.blocks.items():

                def after(module: nn.Module, args: Any, output: Any, name: str = name, stack: Blocks = stack) -> None:
                    hidden = next((x for x in tensors_in(output) if x.dim() == 3 and x.is_floating_point()), None)
                    if hidden is not None:
                        see(name, hidden, stack.slices)

                handles.append(block.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _compare(whole: Mapping[str, Tensor], found: list[str], name: str, output: Tensor, slices: Slices | None) -> None:
    """Note in ``found`` that ``output`` is no slice of what the block gave for the whole sequence."""
    assert slices is not None
    expected = whole[name] if output.shape[1] == slices.length else slices.take(whole[name], 1)
    largest = expected.float().nan_to_num().abs().max().clamp_min(1e-12)
    tolerance = _TOLERANCE if output.dtype.itemsize >= 4 else _TOLERANCE_16_BIT
    off = float((output - expected).float().nan_to_num().abs().max() / largest)
    if off > tolerance:
        found.append(
            f"{KEY}: {slices.group.size}: '{name}' computes something else on slices of the sequence (off by "
            f"{off:.1g} of its largest output): it mixes positions in a way that cannot be seen. Attention is seen "
            "where it is F.scaled_dot_product_attention, or transformers' interface; set parallel.sequence: 1, and "
            "share long samples in another way (parallel.tensor, activations.checkpoint)"
        )


def _run_one_sample(model: nn.Module, args: Any, kwargs: Any, size: int) -> tuple[Any, Any]:
    """Run the model on a sample of the batch, of few positions if it takes so few; returns that."""
    sample = one_sample(args, kwargs, size, _POSITIONS)
    try:
        model(*sample[0], **sample[1])
    except (RuntimeError, ValueError, LookupError):
        sample = one_sample(args, kwargs, size, None)
        model(*sample[0], **sample[1])
    return sample


def one_sample(args: Any, kwargs: Any, size: int, positions: int | None) -> tuple[Any, Any]:
    """The first sample of a batch, and of tokens so many (None: all) for each of ``size`` ranks."""
    tokens = next((x for x in tensors_in((args, kwargs)) if x.dim() == 2 and not x.is_floating_point()), None)
    first = next((x for x in tensors_in((args, kwargs)) if x.dim()), None) if tokens is None else tokens
    batch, length = len(first) if first is not None else 1, tokens.shape[1] if tokens is not None else 0
    kept = length if positions is None else min(length // size, positions) * size

    def short(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == batch:
            tensor = tensor[:1]
        for dim in range(1, tensor.dim()):
            if kept and tensor.shape[dim] == length:
                tensor = tensor.narrow(dim, 0, kept)
        return tensor

    found: tuple[Any, Any] = map_tensors((args, kwargs), short)
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
