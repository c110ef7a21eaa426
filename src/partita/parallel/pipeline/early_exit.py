"""Early exit of a pipeline stage: an exception ends the forward at the first block of the next stage.

A stage that returned placeholders instead would run the rest of the forward on them: all later blocks, the loss, and
code of the user that reads values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from partita.sharding.hooks import EarlyOutput


@dataclass(frozen=True)
class Arguments:
    """The arguments of a block's call, and what earlier blocks pass on to the end of the forward. Calls with different
    ``form`` may lack different values.
    """

    leaves: list[Any]
    spec: TreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any], passed_on: Sequence[Tensor] = ()) -> "Arguments":
        return Arguments(*tree_flatten((args, dict(kwargs), tuple(passed_on))))

    @property
    def form(self) -> object:
        return self.spec, tuple(isinstance(leaf, Tensor) for leaf in self.leaves)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


class _NextStageReachedError(Exception):
    """Ends a forward that has called the first block of the next stage, with ``arguments``."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__("the forward continues on the next stage")
        self.arguments = arguments


class EarlyExit:
    """Ends forwards before the first block of the next stage.

    Args:
        early_output: tells the hooks of the modules that the exception leaves which values are their output.
    """

    def __init__(self, early_output: EarlyOutput) -> None:
        self._early_output = early_output

    def run(self, call: Callable[[], Any]) -> Any:
        """Return the result of ``call()``, or the arguments with which it was left by :meth:`leave`."""
        try:
            return call()
        except _NextStageReachedError as reached:
            return reached.arguments
        finally:
            self._early_output.values = None

    def leave(self, arguments: Arguments) -> NoReturn:
        """End the forward that :meth:`run` has called. It continues on the next stage with ``arguments``."""
        self._early_output.values = arguments.tensors
        raise _NextStageReachedError(arguments)
