"""What a block of another stage returns here: the form of its output, without data."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from partita.memory.generators import generators_kept
from partita.parallel.pipeline.absent import Absent, DataNeededError, Trial, all_away, without_data
from partita.sharding.buffers import buffers_kept
from partita.sharding.pytree import map_tensors, tensors_in

Plain = Callable[[Sequence[nn.Module]], AbstractContextManager[None]]


class StandIn:
    """Stands in for a module's forward. The form of the output is found by running the module without data, once for
    each form of its arguments; where that needs data (a router's choice), it is run with zeros, and if zeros fail as
    well, the output is like the first argument. What the run leaves elsewhere (an auxiliary loss) is absent, too.

    Args:
        plain: makes modules what they were before other axes changed their forwards, in a ``with`` block.
    """

    def __init__(self, module: nn.Module, name: str, device: torch.device, plain: Plain) -> None:
        self._module = module
        self._name = name
        self._device = device
        self._plain = plain
        self._forms = dict[Any, Any]()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        key = (_form(args), _form(kwargs), self._module.training)
        if key not in self._forms:
            self._forms[key] = map_tensors(self._find(args, kwargs), self._form_of)
        return map_tensors(self._forms[key], self._absent)

    def _form_of(self, tensor: Tensor) -> Tensor:
        return without_data(tensor, self._name)._form

    def _absent(self, form: Tensor) -> Tensor:
        return Absent(form, self._device, self._name)

    def _find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return self._run(args, kwargs, Trial(has_data=False))
        except DataNeededError:
            pass
        try:
            return self._run(args, kwargs, Trial(has_data=True))
        except (RuntimeError, ValueError, LookupError):
            return next(tensors_in((args, kwargs)))

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], trial: Trial) -> Any:
        """Run the module. Positions and masks may decide what a forward does; what is computed does not."""

        def absent(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            form = without_data(tensor, self._name)._form
            return Absent(
                torch.zeros_like(form, device=tensor.device) if trial.has_data else form,
                tensor.device,
                self._name,
                trial,
            )

        args, kwargs = map_tensors(args, absent), map_tensors(kwargs, absent)
        try:
            with (
                torch.no_grad(),
                generators_kept(self._device),
                self._plain([self._module]),
                all_away(self._module, self._device),
                buffers_kept(self._module),
            ):
                return self._module.forward(*args, **kwargs)
        finally:
            trial.is_over = True


def _form(value: Any) -> Any:
    """What tells arguments apart of which outputs have different forms. Every absent block is asked for it in every
    micro-batch: what comes most often is looked for first, and by its very type.
    """
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        own = value._form if isinstance(value, Absent) else value  # which answers without a call of Python's
        return own.shape, own.dtype
    if kind is dict or isinstance(value, Mapping):
        return tuple([(key, _form(item)) for key, item in value.items()])
    if isinstance(value, tuple | list):
        return tuple([_form(item) for item in value])
    return value if isinstance(value, bool | int | float | str) else kind


_PLAIN = frozenset((bool, int, float, str))
