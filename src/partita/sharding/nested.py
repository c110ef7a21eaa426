"""Tensors inside the containers that modules take and return."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors of a module's arguments or output: in tuples, lists, mappings and dataclasses."""
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
    """``value`` with its tensors changed, in containers of the same kinds; the same object where nothing changed."""
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
            object.__setattr__(value, name, item)  # a frozen one is changed too: the copy is not yet anyone's
    return value


def _changed(items: Mapping[Any, Any], change: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
    """Those of the items that contain tensors which ``change`` replaces, mapped."""
    mapped = ((key, item, map_tensors(item, change)) for key, item in items.items())
    return {key: new for key, old, new in mapped if new is not old}
