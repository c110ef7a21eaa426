"""Placeholder output of a block that another stage runs: shapes and dtypes, without data."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from partita.memory.generators import generators_kept
from partita.parallel.pipeline.off_stage import Absent, DataNeededError, Trial, all_away, without_data
from partita.sharding.buffers import buffers_kept
from partita.sharding.pytree import map_tensors, tensors_in

Plain = Callable[[Sequence[nn.Module]], AbstractContextManager[None]]


class StandIn:
    """Replacement for the forward of a module that another stage runs.

    The shapes and dtypes of the output are found by running the module without data, once for each form of its
    arguments. If that needs data (a router's choice), the module is run with zeros. If zeros fail as well, the output
    is like the first tensor of the arguments. Values that the run stores elsewhere (an auxiliary loss) are absent, too.

    Args:
        plain: a context manager that undoes the changes of other axes to the given modules inside its block.
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
        """Run the module. Floating-point arguments become absent; others (positions, masks) keep their values, as
        forwards may branch on them.
        """

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
    """Return a key of arguments. Arguments for which the output has different shapes or dtypes have different keys.

    This runs for every absent block in every micro-batch, so the most frequent types are tested first, by exact type.
    """
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        own = value._form if isinstance(value, Absent) else value  # a plain tensor, read without __torch_function__
        return own.shape, own.dtype
    if kind is dict or isinstance(value, Mapping):
        return tuple([(key, _form(item)) for key, item in value.items()])
    if isinstance(value, tuple | list):
        return tuple([_form(item) for item in value])
    return value if isinstance(value, bool | int | float | str) else kind


_PLAIN = frozenset((bool, int, float, str))
