"""The engine's hooks on the user's modules and parameters. They report calls and gradients, and change no value.

Modules' hooks open and close units (:mod:`partita.sharding.unit_events`). :class:`LastHook` runs after the user's own
hooks on an accumulated gradient, whenever those are registered.
"""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from partita.errors import PartitaError
from partita.sharding.compiler import eager
from partita.sharding.parameter import Member
from partita.sharding.placeholder import is_sharded
from partita.sharding.pytree import held_tensors, replace_held, replace_in_containers
from partita.sharding.unit import Unit, UnitState
from partita.sharding.unit_events import Backwards, FollowedUnit, Inputs, Subscriber, UnitCall, levels, on_gradient

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


def announce(member: Member, arrived: Callable[[Member], None]) -> Call:
    """Return a hook that calls the method ``arrived`` with ``member``.

    It refers to neither: the garbage collector does not see what the hooks of tensors refer to.
    """
    to_arrived, to_member = weakref.WeakMethod(arrived), weakref.ref(member)

    def hook(param: Tensor) -> None:
        living, whose = to_arrived(), to_member()
        if living is not None and whose is not None:
            with torch._C.DisableTorchFunctionSubclass():  # what is asked of the parameter is answered without a detour
                living(whose)

    return hook


_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))  # of every module


class Hook:
    """A hook that copies of the module (``copy.deepcopy``, pickles) do without: they are not the engine's."""

    __slots__ = ("__weakref__", "_call")  # torch copies a hook's __dict__ into what it wraps it in

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


def call_within_hooks(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ignored: type[Exception]
) -> Any:
    """Run ``call(args, kwargs)`` in place of a module's forward, inside the forward hooks of others than the engine.

    Args:
        ignored: a hook that raises this changes nothing.
    """
    for key, hook in list(module._forward_pre_hooks.items()):
        with_kwargs = key in module._forward_pre_hooks_with_kwargs
        changed = None if isinstance(hook, Hook) else _run_hook(hook, (module, args), (kwargs,) * with_kwargs, ignored)
        if changed is not None and with_kwargs:
            args, kwargs = changed
        elif changed is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    output = call(args, kwargs)
    for key, hook in list(module._forward_hooks.items()):
        given = (kwargs, output) if key in module._forward_hooks_with_kwargs else (output,)
        changed = None if isinstance(hook, Hook) else _run_hook(hook, (module, args), given, ignored)
        output = output if changed is None else changed
    return output


def _run_hook(
    hook: Callable[..., Any], first: tuple[Any, ...], remaining: tuple[Any, ...], ignored: type[Exception]
) -> Any:
    try:
        return hook(*first, *remaining)
    except ignored:
        return None


class EarlyOutput:
    """Output of a forward that ends by an exception, because the model continues elsewhere.

    Code that ends a forward so sets ``values`` before it raises. Hooks take them for the output of the modules that the
    exception leaves.
    """

    def __init__(self) -> None:
        self.values: Sequence[Tensor] | None = None

    def of(self, output: Any) -> Any:
        """Return a module's ``output``, as an ``always_call`` hook gets it, or the values if an exception left it."""
        return self.values if output is None and self.values is not None else output


class ParameterViews:
    """Views of sharded parameters in the values that modules return or keep: forward gives their memory back.

    Args:
        units: the units whose memory it is, by their storages.
    """

    def __init__(self, units: Mapping[int, Unit]) -> None:
        self._units = units

    def among(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the tensors that are such views, or unsharded parameters."""
        if not self._units:
            return []
        strided = (tensor for tensor in tensors if tensor.layout is torch.strided and not is_sharded(tensor))
        return [tensor for tensor in strided if _storage_of(tensor) in self._units]

    def replace(self, output: Any) -> tuple[Any, Sequence[Tensor], list[Tensor]]:
        """Replace views in a module's output by copies. Return the output, its tensors, and the views that remain."""
        held = held_tensors(output)
        if views := self.among(held):
            copied = {id(view): view.clone() for view in views if self._has_data(view)}
            output = replace_held(output, lambda tensor: copied.get(id(tensor), tensor))
            held = held_tensors(output)
            views = self.among(held)
        return output, held, views

    def replace_kept(self, modules: Iterable[nn.Module]) -> None:
        """Replace views that these modules keep as attributes, or in lists and dicts, by copies."""
        if not self._units:
            return
        copies = dict[int, Tensor]()  # by the ids of the views

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                loses_data = type(tensor) is Tensor and bool(self.among([tensor])) and self._has_data(tensor)
                copies[id(tensor)] = tensor.clone() if loses_data else tensor
            return copies[id(tensor)]

        for attributes in map(vars, modules):
            kept = {name: value for name, value in attributes.items() if name not in _OWN_ATTRIBUTES}
            values = dict(kept)
            replace_in_containers(values, copied)
            attributes.update((name, value) for name, value in values.items() if value is not kept[name])

    def _has_data(self, view: Tensor) -> bool:
        return self._units[_storage_of(view)].state is UnitState.UNSHARDED


def _check_replaced(views: Iterable[Tensor], output: object, title: str) -> None:
    """Check the views that remain in a module's output.

    Raises:
        PartitaError: one of them is no parameter.
    """
    if not all(isinstance(tensor, nn.Parameter) for tensor in views):
        raise PartitaError(
            f"'{title}' returned a {type(output).__name__} that holds a view of a parameter, whose data "
            "is sharded after this forward, where it cannot be replaced by a copy: return a tensor, or make the "
            "view a copy (view.clone())"
        )


class UnitHooks:
    """All visits of one unit; hooks are put on modules only as its subscribers need them.

    The unit's own module opens and closes it. The modules inside that own its parameters only mark their outputs, so
    that a backward that does not come through the unit's output (an auxiliary loss on an inner value) finds it open,
    too. The root unit's owners open and close it as well: methods other than ``forward`` run them directly.
    """

    def __init__(
        self, unit: Unit, backwards: Backwards, sharded: Mapping[int, Unit], early_output: EarlyOutput
    ) -> None:
        self._unit = unit
        self._early_output = early_output
        own = unit.storage._cdata
        self._views = ParameterViews(sharded if not unit.name else {own: unit} if own in sharded else {})
        self._has_warned = False
        self._followed = FollowedUnit(unit, backwards)
        self._follows = False
        self._stack = list[UnitCall]()
        self._handles = list[RemovableHandle]()
        owners = {id(m): m for member in unit.members for m, _ in member.info.owners if m is not unit.module}
        self._inner = list(owners.values()) if unit.name else []
        # Modules of torch's own classes keep nothing as attributes.
        self._keep_values = [module for module in self._inner if not type(module).__module__.startswith("torch.nn.")]
        self._visited = [unit.module] if unit.name else [unit.module, *owners.values()]
        for module in self._visited:
            enter = Hook(self._enter)
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell one more of this unit's visits."""
        self._followed.subscribers.append(subscriber)
        if not (self._follows or subscriber.only_opens):
            self._follows = True
            leave, mark = Hook(self._leave), Hook(self._mark_inner)
            self._handles += [module.register_forward_hook(leave, always_call=True) for module in self._visited]
            self._handles += [module.register_forward_hook(mark) for module in self._inner]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def reset(self) -> None:
        """Forget running forwards (see :meth:`UnitEvents.reset`)."""
        self._stack.clear()

    @property
    def are_of_root(self) -> bool:
        """True if these are the root unit's, whose outputs are the model's."""
        return not self._unit.name

    @eager
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        visit = UnitCall(self._followed)
        if self._follows:
            self._stack.append(visit)
        for subscriber in visit.subscribers:
            subscriber.opened(visit)
        if self._follows and torch.is_grad_enabled():
            visit.inputs.note(held_tensors((args, kwargs)))

    @eager
    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._stack:
            return None
        visit, has_graph, output = self._stack.pop(), False, self._early_output.of(output)
        self._views.replace_kept([module, *self._keep_values])
        output, held, views = self._views.replace(output)
        if torch.is_grad_enabled():
            for tensor in held:
                has_graph |= on_gradient(tensor, visit.open_backward, visit.inputs)
        visit.inputs.on_gradients(visit.close_backward)
        visit.inputs.clear()
        if any(isinstance(tensor, nn.Parameter) for tensor in views):
            self._keep_whole(output)
        for subscriber in reversed(visit.subscribers):
            subscriber.closed(visit, has_graph)
        _check_replaced(views, output, self._unit.title)
        return output

    def _keep_whole(self, output: object) -> None:
        """Have the unit's parameters stay whole until the step ends: an object that is returned holds one of them."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"'{self._unit.title}' returned a {type(output).__name__} that holds a parameter, so its parameters "
                "stay unsharded until the step ends; to save this memory, return copies (param.clone()) or tensors",
                stacklevel=2,
            )
        self._unit.pinned = True

    def _mark_inner(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not self._stack or not torch.is_grad_enabled():
            return
        visit = self._stack[-1]
        for tensor in held_tensors(output):
            on_gradient(tensor, visit.open_backward, visit.inputs)


def _storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, also inside the transforms of ``torch.func``."""
    *_, plain = levels(tensor)
    identity: int = plain.untyped_storage()._cdata
    return identity


class UnitEvents:
    """Subscriptions to the visits of units, and hooks on the model. A unit that nobody subscribed to has no hooks.

    Attributes:
        check_inputs: called with the arguments of each forward of the model, except those recomputed in a backward.
    """

    def __init__(self) -> None:
        self._hooks = dict[int, UnitHooks]()
        self._of_model: ForwardHooks | None = None
        self._sharded = dict[int, Unit]()  # units that do not rest whole, by their storages
        self.backwards = Backwards()
        self.early_output = EarlyOutput()
        self.check_inputs: Callable[[Sequence[Any], Mapping[str, Any]], object] = _nothing

    def subscribe(self, units: Iterable[Unit], subscriber: Subscriber) -> None:
        """Have ``subscriber`` called at the events of these units."""
        for unit in units:
            if id(unit) not in self._hooks:
                if not unit.always_unsharded:
                    self._sharded[unit.storage._cdata] = unit
                self._hooks[id(unit)] = UnitHooks(unit, self.backwards, self._sharded, self.early_output)
            self._hooks[id(unit)].subscribe(subscriber)

    def follow(
        self,
        model: nn.Module,
        prepare: Callable[[Any, Any], tuple[Any, Any]],
        depth_changed: Callable[[int], None],
        graph_ended: Callable[[], Callable[[], None]],
    ) -> None:
        """Follow the model's forwards (see :class:`ForwardHooks`). Its sharded units have subscribers already."""
        has_root = any(hooks.are_of_root for hooks in self._hooks.values())
        views = ParameterViews(self._sharded) if self._sharded and not has_root else None
        self._of_model = ForwardHooks(model, prepare, depth_changed, graph_ended, self.early_output, views)

    def reset(self) -> None:
        """Forget running forwards: an interrupt has ended them, after which torch calls no hooks (it does after an
        ``Exception``). Called when no forward is running.
        """
        for hooks in self._all_hooks():
            hooks.reset()

    def remove(self) -> None:
        """Take all hooks off."""
        for hooks in self._all_hooks():
            hooks.remove()

    def _all_hooks(self) -> "list[UnitHooks | ForwardHooks]":
        return [*self._hooks.values(), *([] if self._of_model is None else [self._of_model])]


class ForwardHooks:
    """Hooks on the model itself: what happens once a forward, whatever the stage.

    ``prepare(args, kwargs)`` returns the arguments to use; ``depth_changed`` is told how many forwards are under way (a
    model may call itself); ``graph_ended`` is called at the end of the outermost and returns what to call when a
    gradient reaches its output. ``views`` in the output are replaced by copies, if no root unit does so (then None).
    """

    def __init__(
        self,
        model: nn.Module,
        prepare: Callable[[Any, Any], tuple[Any, Any]],
        depth_changed: Callable[[int], None],
        graph_ended: Callable[[], Callable[[], None]],
        early_output: EarlyOutput,
        views: ParameterViews | None,
    ) -> None:
        self._prepare = prepare
        self._depth_changed = depth_changed
        self._graph_ended = graph_ended
        self._early_output = early_output
        self._views = views
        self._depth = 0
        self._handles = [
            model.register_forward_pre_hook(Hook(self._enter), prepend=True, with_kwargs=True),
            model.register_forward_hook(Hook(self._leave), always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def reset(self) -> None:
        """Forget running forwards (see :meth:`UnitEvents.reset`)."""
        self._depth = 0
        self._depth_changed(0)

    @eager
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._depth += 1
        self._depth_changed(self._depth)
        return self._prepare(args, kwargs) if self._depth == 1 else (args, kwargs)

    @eager
    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._depth = max(self._depth - 1, 0)
        self._depth_changed(self._depth)
        output, views = self._early_output.of(output), list[Tensor]()
        if self._views is not None:
            self._views.replace_kept([module])
            output, _, views = self._views.replace(output)
        if torch.is_grad_enabled() and self._depth == 0:
            began = self._graph_ended()
            for tensor in held_tensors(output):
                on_gradient(tensor, lambda _: began(), Inputs())
        _check_replaced(views, output, f"{type(module).__name__} (root)")
        return output
