"""What the parallel axes did to a model: what each rank has of its parameters, and what runs in place of forwards."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from partita.plan.share import Share


class OwnForward(ABC):
    """What runs in place of a module's forward. Copies of the module (``copy.deepcopy``, pickles) have the module's
    own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, module.forward

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")


class Changes:
    """What is done to modules, until it is taken back."""

    def __init__(self) -> None:
        self._undo = list[Callable[[], None]]()

    def set(self, module: nn.Module, name: str, value: object) -> None:
        """Set an attribute of the module alone: its class, and what it was, come back with :meth:`undo`."""
        if name in vars(module):
            before = vars(module)[name]
            self._undo.append(lambda: setattr(module, name, before))
        else:
            self._undo.append(lambda: delattr(module, name))
        setattr(module, name, value)

    def add(self, undo: Callable[[], None]) -> None:
        """Have something else undone as well: a hook's ``remove``."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Take all of it back, the last first."""
        while self._undo:
            self._undo.pop()()


@dataclass
class Parallel:
    """``shares``: what this rank has of each parameter that is not whole here alone. ``lines`` say how each module is
    split, and who decided.
    """

    shares: dict[int, Share] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)

    def remove(self) -> None:
        """Give every module its own forward and attributes back. Parameters are left as they are."""
        self.changes.undo()
