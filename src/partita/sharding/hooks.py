"""The hooks on the user's modules: they turn calls and gradients into visits, and change nothing that is computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from partita.sharding.nested import map_tensors, tensors_in
from partita.sharding.residency import Residency, Visit
from partita.sharding.unit import Unit


class Hook:
    """A hook that copies of the module (``copy.deepcopy``, pickles) do without: they are not the engine's."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


class UnitHooks:
    """All visits of one unit.

    The unit's own module opens and closes it. The modules inside that own its parameters only mark their outputs, so
    that a backward that does not come through the unit's output (an auxiliary loss on an inner value) finds it whole,
    too. The root unit's owners open and close it as well: methods other than ``forward`` run them directly.
    """

    def __init__(self, unit: Unit, residency: Residency, is_root: bool) -> None:
        self._unit, self._residency = unit, residency
        self._stack: list[Visit] = []
        self._handles: list[RemovableHandle] = []
        owners = {id(m): m for member in unit.members for m, _ in member.holding.owners}
        owners.pop(id(unit.module), None)
        self._visit(unit.module)
        for module in owners.values():
            if is_root:
                self._visit(module)
            else:
                self._handles.append(module.register_forward_hook(Hook(self._mark_inner)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _visit(self, module: nn.Module) -> None:
        self._handles += [
            module.register_forward_pre_hook(Hook(self._enter), prepend=True, with_kwargs=True),
            module.register_forward_hook(Hook(self._leave), always_call=True),
        ]

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        visit = Visit(self._unit, self._residency.version)
        self._stack.append(visit)
        self._residency.open(self._unit)
        if torch.is_grad_enabled():
            for tensor in tensors_in((args, kwargs)):
                visit.inputs.append(tensor)
                # A leaf's gradient is accumulated as soon as it is ready, before the rest of the unit's backward.
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(lambda _: self._residency.close_backward(visit))

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._stack:
            return None
        visit, graph = self._stack.pop(), False
        base = self._unit.storage.data_ptr()

        def own(tensor: Tensor) -> Tensor:
            return tensor.clone() if _lies_at(tensor, base) else tensor

        if any(_lies_at(tensor, base) for tensor in tensors_in(output)):
            output = map_tensors(output, own)
        if torch.is_grad_enabled():
            passed = {id(tensor) for tensor in visit.inputs}
            for tensor in tensors_in(output):
                if id(tensor) not in passed:
                    graph |= self._mark(tensor, visit)
        visit.inputs.clear()
        self._residency.close(self._unit, between=graph)
        return output

    def _mark(self, tensor: Tensor, visit: Visit) -> bool:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._residency.open_backward(visit))
        return tensor.requires_grad

    def _mark_inner(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not self._stack or not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            self._mark(tensor, self._stack[-1])


class UpdateHooks:
    """For a unit that rests whole while its update may run beside the caller: ``finish(unit)`` before it is used."""

    def __init__(self, unit: Unit, finish: Callable[[Unit], None]) -> None:
        self._unit, self._finish = unit, finish
        modules = {id(m): m for member in unit.members for m, _ in member.holding.owners} | {
            id(unit.module): unit.module
        }
        self._handles = [m.register_forward_pre_hook(Hook(self._enter), prepend=True) for m in modules.values()]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._finish(self._unit)


def _lies_at(tensor: Tensor, address: int) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() == address


class ForwardHooks:
    """Hooks on the model itself: what happens once a forward, whatever the stage.

    ``prepare(args, kwargs)`` returns the arguments to use; ``depth_changed`` is told how many forwards are under way (a
    model may call itself); ``graph_ended`` is called at the end of the outermost and returns what to call when a
    gradient reaches its output.
    """

    def __init__(
        self,
        model: nn.Module,
        prepare: Callable[[Any, Any], tuple[Any, Any]],
        depth_changed: Callable[[int], None],
        graph_ended: Callable[[], Callable[[], None]],
    ) -> None:
        self._prepare, self._depth_changed, self._graph_ended = prepare, depth_changed, graph_ended
        self._depth = 0
        self._handles = [
            model.register_forward_pre_hook(Hook(self._enter), prepend=True, with_kwargs=True),
            model.register_forward_hook(Hook(self._leave), always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._depth += 1
        self._depth_changed(self._depth)
        return self._prepare(args, kwargs) if self._depth == 1 else (args, kwargs)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        self._depth_changed(self._depth)
        if torch.is_grad_enabled() and self._depth == 0:
            began = self._graph_ended()
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: began())
