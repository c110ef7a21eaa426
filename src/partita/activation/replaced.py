"""What a module runs in the place of its own forward."""

from collections.abc import Callable
from typing import Any

from torch import nn


class ReplacedForward:
    """Has ``call`` run in the place of ``module.forward``, which is its first argument, until it is removed.

    The module's hooks stay around it. Copies of the module (``copy.deepcopy``, pickles) have its own forward.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = module, call
        self._before, self._own = module.forward, vars(module).get("forward")
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._before, *args, **kwargs)

    def remove(self) -> None:
        """Give the module what it had."""
        del self._module.forward
        if self._own is not None:
            self._module.forward = self._own

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")
