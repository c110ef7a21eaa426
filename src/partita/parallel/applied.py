"""What the parallel axes did to a model: what each rank has of its parameters, and what runs in place of forwards."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from partita.parallel.pipeline.absent import bring_back
from partita.parallel.pipeline.cut import Cut
from partita.parallel.random import RandomStreams
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


@dataclass(frozen=True)
class _Change:
    """An attribute of a module alone, and what it was before, unless only its class had one."""

    module: nn.Module
    name: str
    value: object
    before: object

    def make(self) -> None:
        setattr(self.module, self.name, self.value)

    def undo(self) -> None:
        if self.before is _ABSENT:
            delattr(self.module, self.name)
        else:
            setattr(self.module, self.name, self.before)


_ABSENT = object()


class Changes:
    """What is done to modules, until it is taken back."""

    def __init__(self) -> None:
        self._made = list[_Change]()
        self._suspended = set[int]()  # ids of changes
        self._undo = list[Callable[[], None]]()

    def set(self, module: nn.Module, name: str, value: object) -> None:
        """Set an attribute of the module alone."""
        change = _Change(module, name, value, vars(module).get(name, _ABSENT))
        change.make()
        self._made.append(change)

    def add(self, undo: Callable[[], None]) -> None:
        """Have something else undone as well, before the attributes: a hook's ``remove``."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Take all of it back, the last first."""
        while self._undo:
            self._undo.pop()()
        while self._made:
            self._made.pop().undo()

    def undo_within(self, modules: Iterable[nn.Module]) -> None:
        """Take back what was changed of these modules."""
        chosen = {id(module) for module in modules}
        for change in reversed([change for change in self._made if id(change.module) in chosen]):
            change.undo()
            self._made.remove(change)

    @contextmanager
    def suspended(self, items: Iterable[nn.Module | nn.Parameter]) -> Iterator[None]:
        """Have the modules among these, and those inside them, be what they were, for a while. Blocks may be nested."""
        within = {id(inner) for item in items if isinstance(item, nn.Module) for inner in item.modules()}
        taken = [change for change in self._made if id(change.module) in within and id(change) not in self._suspended]
        for change in reversed(taken):
            change.undo()
        self._suspended.update(map(id, taken))
        try:
            yield
        finally:
            self._suspended.difference_update(map(id, taken))
            for change in taken:
                change.make()


@dataclass
class Parallel:
    """``shares``: what this rank has of each parameter that is not whole here alone. ``lines`` say how each module is
    split, and who decided; ``said`` is to be told at the start; ``streams`` are of its random numbers, if they have
    any of their own; ``cut`` is where the pipeline's stages begin, ``away`` are the parameters that only other stages
    hold. ``passing``: of blocks, by id, what is done around their stand-ins where other stages run them; ``ending``:
    what is done when a stage's forward has ended.
    """

    shares: dict[int, Share] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    cut: Cut | None = None
    away: list[nn.Parameter] = field(default_factory=list)
    passing: dict[int, Callable[..., Any]] = field(default_factory=dict)
    ending: list[Callable[[], None]] = field(default_factory=list)
    streams: RandomStreams | None = None

    def begin_micro_batch(self, step: int, number: int) -> None:
        """The forwards that follow are of the micro-batch ``number`` in the batch of a ``step``."""
        if self.streams is not None:
            self.streams.begin_micro_batch(step, number)

    def remove(self) -> None:
        """Give every module its own forward and attributes back. Parameters are left as they are; those that are held
        elsewhere are the model's own again if they still have their values.
        """
        self.changes.undo()
        for param in self.away:
            if not param.is_meta:
                bring_back(param)
