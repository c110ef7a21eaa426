"""The engine's hook on an accumulated gradient, which runs after the user's, whenever those are registered."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[Tensor], None]
_LAST = -1  # a key that no handle of torch's has


class _Hooks(OrderedDict[int, Call]):
    """The post-accumulate hooks of one parameter, in the order in which autograd calls them: the engine's is last.

    ``earlier`` are those registered before it. They stay in their own mapping, from which their handles remove them.
    """

    def __init__(self, earlier: Mapping[int, Call], last: Call) -> None:
        super().__init__()
        self[_LAST - 1] = _CallEach(earlier)
        self[_LAST] = last

    def __setitem__(self, key: int, hook: Call) -> None:
        super().__setitem__(key, hook)
        if key != _LAST and _LAST in self:
            super().__setitem__(_LAST, self.pop(_LAST))

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


class _CallEach:
    """Calls all hooks of a mapping."""

    def __init__(self, hooks: Mapping[int, Call]) -> None:
        self._hooks = hooks

    def __call__(self, param: Tensor) -> None:
        for hook in tuple(self._hooks.values()):
            hook(param)


class LastHook:
    """A post-accumulate hook of ``param`` that sees the gradient as the user's hooks leave it."""

    def __init__(self, param: nn.Parameter, hook: Call) -> None:
        self._param = param
        with torch._C.DisableTorchFunctionSubclass():
            self._earlier = param._post_accumulate_grad_hooks
            self._hooks = _Hooks(self._earlier or {}, hook)
            param._post_accumulate_grad_hooks = self._hooks

    def remove(self) -> None:
        """Remove the hook; the user's stay."""
        self._hooks.pop(_LAST, None)
        with torch._C.DisableTorchFunctionSubclass():
            if len(self._hooks) == 1 and self._param._post_accumulate_grad_hooks is self._hooks:
                self._param._post_accumulate_grad_hooks = self._earlier
