"""Unread tensors: parameters and buffers without values, which are read from their source once something needs them.

Other ranks than rank 0 have them, because an engine broadcasts rank 0's values and needs no others. Their shape, dtype
and device can be read, and their module can be converted (``model.to(...)``) and copied, without a read. Anything else
reads all values of the source, and all its tensors become plain ones.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from partita.memory.accelerator import HOST
from partita.sharding.parameter import replace_data
from partita.sharding.placeholder import METADATA, asked_for

Read = Callable[[], Mapping[str, Tensor]]

_NEEDS_NO_VALUES = METADATA | {"_has_compatible_shallow_copy_type"}
_OF_DEVICE = frozenset(("device", "is_meta", "is_cpu", "is_cuda", "is_xpu", "is_mps"))
_CONVERSIONS = frozenset("to cpu cuda xpu type float double half bfloat16 detach".split())


@dataclass(frozen=True)
class _Pending:
    """The values that a unread tensor gets: those called ``name`` in its source, converted in turn.

    Args:
        kind: the class of the tensor with values.
    """

    read: Read
    name: str
    kind: type[Tensor]
    device: torch.device = HOST
    conversions: tuple[Callable[[Tensor], Tensor], ...] = ()


_pending = WeakIdKeyDictionary()  # unread tensor -> _Pending; __torch_function__ gets only the tensor


class UnreadTensor(Tensor):
    """The class of a buffer while it has no values."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = asked_for(func), kwargs or {}
        own = args[0] if args and is_unread(args[0]) else None
        if own is not None:
            if name in _OF_DEVICE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(torch.empty(0, dtype=torch.uint8, device=_pending[own].device))
            if name in _CONVERSIONS:
                return _converted(own, func, args[1:], kwargs)
            if name == "data" and len(args) == 2 and is_unread(args[1]):
                with torch._C.DisableTorchFunctionSubclass():
                    func(*args)
                _pending[own] = replace(_pending[args[1]], kind=_pending[own].kind)
                return None
        if name in _NEEDS_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            if is_unread(leaf):
                _read_all(_pending[leaf].read)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            made = _on_meta(self).requires_grad_(self.requires_grad)
            made.__dict__.update(self.__dict__)
            memo[id(self)] = _unread(made, type(self), _then(_pending[self], torch.clone))
        copied: Tensor = memo[id(self)]
        return copied


class UnreadParameter(UnreadTensor, nn.Parameter):
    """The class of a parameter while it has no values."""


def is_unread(value: Any) -> bool:
    """Return whether a value is a tensor whose values are not read yet."""
    return issubclass(type(value), UnreadTensor)


def leave_unread(tensors: Mapping[str, Tensor], read: Read) -> None:
    """Make plain parameters and buffers on the ``meta`` device unread tensors, which are on the host for their users.

    Args:
        tensors: the tensors, by name.
        read: returns the values, by the same names.
    """
    for name, tensor in tensors.items():
        kind = type(tensor)
        if kind in (nn.Parameter, Tensor):
            _unread(tensor, UnreadParameter if kind is nn.Parameter else UnreadTensor, _Pending(read, name, kind))


def release(model: nn.Module) -> None:
    """Make unread tensors of a model plain ones whose values are not read any more: rank 0's replace them.

    Their memory is not initialized: it occupies no physical memory until it is written.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if is_unread(tensor):
            _fill(tensor, _pending[tensor], torch.empty_like(_on_meta(tensor), device=HOST))


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model, whose plain parameters and buffers are on the ``meta`` device."""
    copied = dict[int, Tensor]()
    for tensor in (*model.parameters(), *model.buffers()):
        kind = _pending[tensor].kind if is_unread(tensor) else type(tensor)
        if kind in (nn.Parameter, Tensor):
            made = _on_meta(tensor)
            copied[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if kind is nn.Parameter else made
    return copy.deepcopy(model, memo=copied)


def _unread(tensor: Tensor, kind: type[UnreadTensor], pending: _Pending) -> Tensor:
    tensor.__class__ = kind
    _pending[tensor] = pending
    return tensor


def _on_meta(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty_like(tensor, device="meta", requires_grad=False)


def _then(pending: _Pending, convert: Callable[[Tensor], Tensor]) -> _Pending:
    return replace(pending, conversions=(*pending.conversions, convert))


def _converted(tensor: Tensor, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a conversion makes of an unread tensor: an unread one, or the tensor itself if nothing changes."""
    pending = _pending[tensor]
    before = torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=pending.device)
    after = func(before, *args, **kwargs)
    if not isinstance(after, Tensor):  # type() returns a name
        return after
    if after is before:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.empty_like(tensor, dtype=after.dtype, device="meta", requires_grad=False)
    if after.is_meta:
        return made
    # nn.Parameter(tensor) needs a detached tensor of the same class.
    kind: Any = type(tensor) if asked_for(func) == "detach" else UnreadTensor
    convert = _then(pending, lambda values: func(values, *args, **kwargs))
    return _unread(made, kind, replace(convert, kind=Tensor, device=after.device))


def _read_all(read: Read) -> None:
    """Read the values of a source, and give all its unread tensors their values."""
    waiting = [(tensor, pending) for tensor, pending in _pending.items() if pending.read is read]
    with torch.no_grad():
        values = read()
        for tensor, pending in waiting:
            own = values[pending.name].detach()
            for convert in pending.conversions:
                own = convert(own)
            _fill(tensor, pending, own)


def _fill(tensor: Any, pending: _Pending, values: Tensor) -> None:
    del _pending[tensor]
    tensor.__class__ = pending.kind
    attributes = dict(tensor.__dict__)  # lost where data of another device replaces the tensor's
    replace_data(tensor, values)
    tensor.__dict__.update(attributes)
