"""Search and replacement of tensors in module arguments and outputs: in containers, objects and closures."""

import contextlib
import copy
import dataclasses
import gc
import logging
import types
import warnings
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of a module's arguments or output, in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with its tensors replaced, in containers of the same types; others are not copied."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict | UserDict):
        changed = _changed(value, change)
        value = copy.copy(value) if changed else value
        for key, item in changed.items():
            value[key] = item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = _changed({name: getattr(value, name) for name in value.__dataclass_fields__}, change)
        value = copy.copy(value) if changed else value
        for name, item in changed.items():
            object.__setattr__(value, name, item)  # also a frozen one: nobody else refers to the copy
    return value


def _changed(items: Mapping[Any, Any], change: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
    """Return the mapped items, without those that ``change`` leaves unchanged."""
    mapped = ((key, item, map_tensors(item, change)) for key, item in items.items())
    return {key: new for key, old, new in mapped if new is not old}


# Objects without results of a forward, or shared by the program.
_CLOSED = (
    *(str, bytes, int, float, complex, type(None), torch.Size, torch.dtype, torch.device),
    *(type, nn.Module, logging.Logger),
    *(types.ModuleType, types.CodeType, types.FrameType, types.TracebackType, types.BuiltinFunctionType),
)
_CONTAINERS = (list, deque, dict)  # mutable
_SLOTS = types.MemberDescriptorType
LIMIT = 20_000  # maximum number of objects that are searched


def held_tensors(value: object) -> Sequence[Tensor]:
    """Return the tensors that ``value`` is or contains. Modules, classes and global names are not searched."""
    found, others = list[Tensor](), list[object]()
    _search_containers(value, found, others)
    if others:
        found += [held for held in _reachable(others) if _is_instance(held, Tensor)]  # type: ignore[misc]
    return found


def replace_held(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replace the tensors that ``value`` is or contains by the results of ``change``.

    Containers are copied (see :func:`~partita.sharding.pytree.map_tensors`); other objects and closures are modified in
    place. Read-only places (the variables of a generator, a set) stay as they are. So do parameters in objects, which
    may belong to the object for longer than this forward.
    """
    changed = dict[int, tuple[Tensor, Tensor]]()  # by the ids of the tensors before and after

    def change_once(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            new = change(tensor)
            changed[id(tensor)] = changed[id(new)] = (tensor, new)
        return changed[id(tensor)][1]

    def renewed(item: object) -> object:
        return map_tensors(item, lambda held: held if _is_instance(held, nn.Parameter) else change_once(held))

    value = map_tensors(value, change_once)
    others = list[object]()
    _search_containers(value, [], others)
    for holder in list(_reachable(others)):
        for item, write in _writable_items(holder):
            if (_is_instance(item, Tensor) or type(item) is tuple) and (new := renewed(item)) is not item:
                with contextlib.suppress(AttributeError, TypeError):  # read only
                    write(new)
    return value


def replace_in_containers(value: object, change: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors in a list, deque or dict, and in those inside it, by the results of ``change``.

    The containers stay the same objects. Tuples in them are copied; objects of other classes are not searched.
    """
    pending, seen = [value], set[int]()
    while pending:
        holder: Any = pending.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for key, item in list(holder.items() if _is_instance(holder, dict) else enumerate(holder)):
            if _is_instance(item, _CONTAINERS):
                pending.append(item)
            elif _is_instance(item, Tensor | tuple) and (new := map_tensors(item, change)) is not item:
                holder[key] = new


def _is_instance(item: object, kinds: Any) -> bool:
    """``isinstance`` without ``__class__`` of the object, which a proxy may override."""
    return issubclass(type(item), kinds)


def _search_containers(value: object, found: list[Tensor], others: list[object]) -> None:
    """Append the contents of containers to ``found`` (tensors) and ``others`` (objects of other classes)."""
    if _is_instance(value, Tensor):
        found.append(value)  # type: ignore[arg-type]
    elif isinstance(value, list | tuple):
        for item in value:
            _search_containers(item, found, others)
    elif type(value) is dict:
        for item in value.values():
            _search_containers(item, found, others)
    elif not _is_instance(value, _CLOSED):
        others.append(value)


def _reachable(values: Iterable[object]) -> Iterator[object]:
    """Yield ``values`` and all objects reachable from them, each once; references of tensors are not followed."""
    seen, pending = dict[int, object](), deque(values)
    while pending:
        item = pending.popleft()
        if _is_instance(item, _CLOSED) or id(item) in seen:
            continue
        if len(seen) == LIMIT:
            warnings.warn(
                f"a forward takes or returns a {type(seen[next(iter(seen))]).__name__} with more than {LIMIT} objects: "
                "with sharded parameters, tensors beyond these are not found; return tensors, tuples or dicts",
                stacklevel=2,
            )
            return
        seen[id(item)] = item  # keeps the id unique
        yield item
        if not _is_instance(item, Tensor):
            pending.extend(_referents(item))


def _referents(item: object) -> Sequence[Any]:
    """Return the objects that an object refers to."""
    if _is_instance(item, types.FunctionType):  # not its global names
        return [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]  # type: ignore[attr-defined]
    return gc.get_referents(item)


def _writable_items(holder: Any) -> Iterator[tuple[object, Callable[[Any], None]]]:
    """Yield the values in an object, each with a function that replaces it."""
    if _is_instance(holder, list | deque):
        for number, item in enumerate(holder):
            yield item, partial(holder.__setitem__, number)
    elif _is_instance(holder, dict):
        yield from _items(holder)
    if _is_instance(holder, Tensor | tuple | list):
        return
    if type(attributes := getattr(holder, "__dict__", None)) is dict:
        yield from _items(attributes)
    slots = [slot for kind in type(holder).__mro__ for slot in vars(kind).values() if _is_instance(slot, _SLOTS)]
    for slot in [types.CellType.cell_contents] if _is_instance(holder, types.CellType) else slots:
        try:
            item = slot.__get__(holder)
        except (AttributeError, ValueError):  # not set; an empty cell
            continue
        yield item, partial(slot.__set__, holder)


def _items(values: dict[Any, Any]) -> Iterator[tuple[object, Callable[[Any], None]]]:
    for key, item in list(values.items()):
        yield item, partial(values.__setitem__, key)
