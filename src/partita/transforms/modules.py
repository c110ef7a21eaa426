"""Changes to the modules of a model: wrappers around forwards and calls, attributes, hooks.

All wrappers of a module's forward are held by one object in ``module.forward``, and those of its call (outside its
hooks) by one in ``module._compiled_call_impl``, so a wrapper can be suspended or removed while others stay. Levels
(:class:`Order`) decide which of them is outside.
"""

import inspect
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum, auto
from operator import attrgetter
from types import CodeType
from typing import Any, TypeVar

from torch import nn

# Called as wrapper(inner, *args, **kwargs); `inner` is the wrapped callable.
Wrapper = Callable[..., Any]
Kind = TypeVar("Kind")

_FORWARD, _CALL, _COMPILE = "forward", "_compiled_call_impl", "compile"
_ABSENT = object()


class Order(IntEnum):
    """Levels of the changes, innermost first. Within a level the later change is outside."""

    PARAMETERS = auto()  # classes of parameters, restored last
    WEIGHT_GRADIENT = auto()
    TENSOR = auto()
    SEQUENCE = auto()
    RANDOM = auto()
    PRECISION = auto()
    ATTENTION = auto()
    RECOMPUTE = auto()
    LOSS = auto()
    STAGE = auto()
    COMPILE = auto()


# The levels of the changes that the parallel axes make to a stage's modules, and those of all axes.
WITHIN_STAGE = frozenset({Order.PARAMETERS, Order.WEIGHT_GRADIENT, Order.TENSOR, Order.SEQUENCE})
OF_AXES = WITHIN_STAGE | {Order.STAGE}


class _Link:
    """A wrapper around ``inner``, or ``inner`` alone while it is suspended."""

    def __init__(self, wrapper: Wrapper, order: Order) -> None:
        self.wrapper = wrapper
        self.order = order
        self.inner: Callable[..., Any]
        self.num_suspended = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_suspended:
            return self.inner(*args, **kwargs)
        return self.wrapper(self.inner, *args, **kwargs)


class _Chain:
    """A callable attribute of a module inside its wrappers.

    Copies of the module (``copy.deepcopy``, pickles) have the attribute without wrappers.
    """

    def __init__(self, module: nn.Module, name: str, own: Callable[..., Any]) -> None:
        self.module = module
        self.name = name
        self.before = vars(module).get(name, _ABSENT)
        self.own = own
        self.links = list[_Link]()  # innermost first
        self._outermost = own
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outermost(*args, **kwargs)

    # Attributes that libraries read from a model's forward. ``__wrapped__`` is not set: some would unwrap the forward.
    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    @property
    def __code__(self) -> CodeType:
        code: CodeType = self.own.__code__
        return code

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is _ABSENT:
            return getattr, (self.module, self.name)
        return _same, (self.before,)

    def add(self, link: _Link) -> None:
        insort(self.links, link, key=attrgetter("order"))
        self.connect()

    def remove(self, link: _Link) -> None:
        """Remove a wrapper. Without wrappers the module has the attribute's earlier value again."""
        self.links.remove(link)
        self.connect()
        if not self.links:
            self.leave()

    def leave(self) -> None:
        """Restore the earlier value of the module's attribute."""
        _restore(self.module, self.name, self, self.before)

    def connect(self) -> None:
        """Put each wrapper around the one before it."""
        inner = self.own
        for link in self.links:
            link.inner = inner
            inner = link
        self._outermost = inner


class _CallChain(_Chain):
    """A module's call inside its wrappers. ``module.compile()`` compiles the call, and not the wrappers."""

    def __init__(self, module: nn.Module, own: Callable[..., Any]) -> None:
        super().__init__(module, _CALL, own)
        self._compile = _Attribute(module, _COMPILE, _Compile(self))

    def leave(self) -> None:
        super().leave()
        self._compile.undo()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile as ``nn.Module.compile`` does; the compiled call stays when the wrappers are removed."""
        type(self.module).compile(self.module, *args, **kwargs)
        self.own = self.before = vars(self.module)[_CALL]
        self.connect()
        setattr(self.module, _CALL, self)


class _Compile:
    """``module.compile`` of a module whose call is wrapped. Copies of the module have the method of their class."""

    def __init__(self, chain: _CallChain) -> None:
        self._chain = chain

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._chain.compile(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._chain.module, _COMPILE)


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` or ``module.compile()`` has compiled the module's call."""
    call = vars(module).get(_CALL)
    if isinstance(call, _CallChain):
        return call.own != module._call_impl
    return call is not None or "_orig_mod" in module._modules


def find(module: nn.Module, kind: type[Kind]) -> Kind | None:
    """Return the outermost active wrapper of this class around a module's forward; None if there is none."""
    chain = vars(module).get(_FORWARD)
    links = reversed(chain.links) if isinstance(chain, _Chain) else ()
    return next((x.wrapper for x in links if not x.num_suspended and isinstance(x.wrapper, kind)), None)


class ModuleTransforms:
    """All changes to the modules of one model. They are made by level (:meth:`at`) and undone in reverse order."""

    def __init__(self) -> None:
        self.changes = list[_Change]()  # innermost first

    def at(self, order: Order) -> "Level":
        """Return the level at which to make changes."""
        return Level(self, order)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Undo the changes made in the block if it raises."""
        before = set(self.changes)
        try:
            yield
        except BaseException:
            self._undo(change for change in self.changes if change not in before)
            raise

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Undo the changes made in the block when it ends."""
        before = set(self.changes)
        try:
            yield
        finally:
            self._undo(change for change in self.changes if change not in before)

    def undo(self) -> None:
        """Undo all changes."""
        self._undo(self.changes)

    def remove(self, modules: Iterable[nn.Module]) -> None:
        """Undo the changes to these modules. Functions given to :meth:`Level.on_undo` stay registered."""
        self._undo(self._on({id(module) for module in modules}))

    @contextmanager
    def suspended(self, items: Iterable[nn.Module | nn.Parameter], levels: Collection[Order]) -> Iterator[None]:
        """Skip the changes of these levels on the modules among ``items`` and their submodules.

        Blocks may be nested.
        """
        modules = {id(inner) for item in items if isinstance(item, nn.Module) for inner in item.modules()}
        changes = [change for change in self._on(modules) if change.order in levels]
        for change in reversed(changes):
            change.suspend()
        try:
            yield
        finally:
            for change in changes:
                change.resume()

    def _on(self, modules: set[int]) -> list["_Change"]:
        return [change for change in self.changes if id(change.module) in modules]

    def _undo(self, changes: Iterable["_Change"]) -> None:
        chosen = dict.fromkeys(changes)
        self.changes = [change for change in self.changes if change not in chosen]
        with ExitStack() as stack:  # runs them all in reverse order, even if one raises
            for change in chosen:
                stack.callback(change.undo)


@dataclass(frozen=True)
class Level:
    """Makes the changes of one level."""

    transforms: ModuleTransforms
    order: Order

    def wrap_forward(self, module: nn.Module, wrapper: Wrapper, *, always: bool = False) -> None:
        """Wrap ``module.forward``, inside the module's hooks. ``always``: it is never suspended."""
        chain = vars(module).get(_FORWARD)
        if not isinstance(chain, _Chain):
            chain = _Chain(module, _FORWARD, module.forward)
        self._add(_Wrapped(chain, _Link(wrapper, self.order), None if always else module))

    def wrap_call(self, module: nn.Module, wrapper: Wrapper) -> None:
        """Wrap the module's call, outside its hooks. The compiled call stays innermost, even if compiled later."""
        chain = vars(module).get(_CALL)
        if not isinstance(chain, _CallChain):
            chain = _CallChain(module, chain or module._call_impl)
        self._add(_Wrapped(chain, _Link(wrapper, self.order), module))

    def compile(self, module: nn.Module, **settings: Any) -> None:
        """Compile the module's call inside its wrappers, with these arguments of ``torch.compile``."""
        self._add(_Compiled(module, settings))

    def set_attribute(self, module: nn.Module, name: str, value: object) -> None:
        """Set an attribute of the module itself."""
        self._add(_Attribute(module, name, value))

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when the changes are undone, in its turn; for example a hook's ``remove``."""
        self._add(_Other(undo))

    def _add(self, change: "_Change") -> None:
        change.order = self.order
        insort(self.transforms.changes, change, key=attrgetter("order"))


class _Change(ABC):
    """One change; ``module`` is None if it is never suspended."""

    module: nn.Module | None = None
    order: Order

    @abstractmethod
    def undo(self) -> None:
        """Undo the change for good."""

    def suspend(self) -> None:
        """Switch the change off until :meth:`resume` has been called as often."""
        raise NotImplementedError

    def resume(self) -> None:
        """See :meth:`suspend`."""
        raise NotImplementedError


class _Wrapped(_Change):
    """A wrapper in a chain."""

    def __init__(self, chain: _Chain, link: _Link, module: nn.Module | None) -> None:
        self.module = module
        self._chain = chain
        self._link = link
        chain.add(link)

    def undo(self) -> None:
        self._chain.remove(self._link)

    def suspend(self) -> None:
        self._link.num_suspended += 1

    def resume(self) -> None:
        self._link.num_suspended -= 1


class _Attribute(_Change):
    """An attribute of a module. Undoing restores it only if it still has the value that was set."""

    def __init__(self, module: nn.Module, name: str, value: object) -> None:
        self.module: nn.Module = module
        self._name = name
        self._value = value
        self._before = vars(module).get(name, _ABSENT)
        self._num_suspended = 0
        self._is_undone = False
        setattr(module, name, value)

    def undo(self) -> None:
        self._is_undone = True
        _restore(self.module, self._name, self._value, self._before)

    def suspend(self) -> None:
        self._num_suspended += 1
        if self._num_suspended == 1:
            _restore(self.module, self._name, self._value, self._before)

    def resume(self) -> None:
        self._num_suspended -= 1
        if self._num_suspended == 0 and not self._is_undone:
            setattr(self.module, self._name, self._value)


class _Compiled(_Change):
    """A compiled call."""

    def __init__(self, module: nn.Module, settings: dict[str, Any]) -> None:
        self._compiled = module
        module.compile(**settings)

    def undo(self) -> None:
        call = vars(self._compiled)[_CALL]
        if isinstance(call, _CallChain):
            call.own = self._compiled._call_impl
            call.before = _ABSENT
            call.connect()
        else:
            delattr(self._compiled, _CALL)


class _Other(_Change):
    """A change made elsewhere, of which only the function that undoes it is known."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def undo(self) -> None:
        self._undo()


def _restore(module: nn.Module, name: str, value: object, before: object) -> None:
    """Restore an attribute's earlier value, unless other code has replaced ``value``."""
    if vars(module).get(name) is not value:
        return
    if before is _ABSENT:
        delattr(module, name)
    else:
        setattr(module, name, before)


def _same(value: Any) -> Any:
    return value
