"""Placeholder output of a block that another stage runs: shapes and dtypes, without data."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from partita.memory.generators import generators_kept
from partita.parallel.block_outputs import BlockOutputs
from partita.parallel.pipeline.off_stage import DataNeededError, OffStageTensor, Trial, all_off_stage, without_data
from partita.sharding.buffers import buffers_kept
from partita.sharding.pytree import map_tensors, tensors_in

Suspend = Callable[[Sequence[nn.Module]], AbstractContextManager[None]]


class PlaceholderOutput:
    """Replacement for the forward of a module that another stage runs.

    The shapes and dtypes of the output are found by running the module without data, once for each combination of
    shapes and dtypes of its arguments. If the forward needs data (routing, for example), the module runs with zeros. If
    zeros also fail, the output is like the first tensor in the arguments. Other tensors that the run stores (an
    auxiliary loss) are placeholders, too. So are the router logits of the module's routers, which are recorded.

    Args:
        suspended: a context manager that suspends the changes of other axes to the given modules.
        block_outputs: records the router logits.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        device: torch.device,
        suspended: Suspend,
        block_outputs: BlockOutputs | None = None,
    ) -> None:
        self._module = module
        self._name = name
        self._device = device
        self._suspended = suspended
        self._block_outputs = block_outputs
        self._forms = dict[Any, Any]()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        block_outputs = self._block_outputs
        has_logits = block_outputs is not None and block_outputs.collects_router_logits
        key = (_key(args), _key(kwargs), self._module.training, has_logits)
        if key not in self._forms:
            found = self._find(args, kwargs)
            if block_outputs is not None:
                block_outputs.check_found(self._module, self._name, found[1])
            self._forms[key] = map_tensors(found, self._without_data)
        output, router_logits = map_tensors(self._forms[key], self._placeholder_for)
        if block_outputs is not None:
            block_outputs.router_logits += router_logits
        return output

    def _without_data(self, tensor: Tensor) -> Tensor:
        return without_data(tensor, self._name)._form

    def _placeholder_for(self, form: Tensor) -> Tensor:
        return OffStageTensor(form, self._device, self._name)

    def _find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
        """Return an output of the module without data, and its router logits.

        Routers run before their experts, so a run that fails at the experts has found the logits.
        """
        first, second = list[Tensor](), list[Tensor]()
        try:
            return self._run(args, kwargs, Trial(has_data=False), first), first
        except DataNeededError:
            pass
        try:
            return self._run(args, kwargs, Trial(has_data=True), second), second
        except (RuntimeError, ValueError, LookupError):
            return next(tensors_in((args, kwargs))), max(first, second, key=len)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], trial: Trial, router_logits: list[Tensor]) -> Any:
        """Run the module. Floating-point arguments are replaced by placeholders. Other arguments (positions, masks)
        keep their values, because the forward may branch on them. The list receives the router logits.
        """

        def replaced(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            form = without_data(tensor, self._name)._form
            return OffStageTensor(
                torch.zeros_like(form, device=tensor.device) if trial.has_data else form,
                tensor.device,
                self._name,
                trial,
            )

        args, kwargs = map_tensors(args, replaced), map_tensors(kwargs, replaced)
        try:
            with (
                torch.no_grad(),
                generators_kept(self._device),
                self._suspended([self._module]),
                all_off_stage(self._module, self._device),
                buffers_kept(self._module),
                nullcontext() if self._block_outputs is None else self._block_outputs.recorded_in(router_logits),
            ):
                return self._module.forward(*args, **kwargs)
        finally:
            trial.is_over = True


def _key(value: Any) -> Any:
    """Return a hashable key for arguments. If outputs differ in shape or dtype, the keys differ.

    This runs for every off-stage block in every micro-batch, so frequent types are tested first, by exact type.
    """
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        own = (
            value._form if isinstance(value, OffStageTensor) else value
        )  # a plain tensor, read without __torch_function__
        return own.shape, own.dtype
    if kind is dict or isinstance(value, Mapping):
        return tuple([(key, _key(item)) for key, item in value.items()])
    if isinstance(value, tuple | list):
        return tuple([_key(item) for item in value])
    return value if isinstance(value, bool | int | float | str) else kind


_PLAIN = frozenset((bool, int, float, str))
