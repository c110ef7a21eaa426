"""``load_state_dict`` of fp32 values into parameters in 16 bits: master weights take the values unrounded."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from partita.sharding.hooks import Hook
from partita.sharding.unit import Member

Store = Callable[[list[tuple[Member, Tensor]]], None]


class ExactLoads:
    """Hooks on modules whose ``load_state_dict`` would round what it loads.

    Args:
        members: parameters whose master weights have more digits than they.
        store: stores fp32 values of a parameter's shape, which the parameter has been given rounded.
    """

    def __init__(self, members: Iterable[Member], store: Store) -> None:
        self._store = store
        self._by_module = dict[nn.Module, list[tuple[str, Member]]]()
        for member in members:
            for module, name in member.holding.owners:
                self._by_module.setdefault(module, []).append((name, member))
        self._loaded = dict[nn.Module, list[tuple[Member, Tensor]]]()
        self._handles = list[RemovableHandle]()
        for module in self._by_module:
            self._handles.append(module.register_load_state_dict_pre_hook(Hook(self._before)))
            self._handles.append(module.register_load_state_dict_post_hook(Hook(self._after)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        found = [(member, state_dict.get(prefix + name)) for name, member in self._by_module[module]]
        self._loaded[module] = [(m, v) for m, v in found if isinstance(v, Tensor) and _has_digits(m, v)]

    def _after(self, module: nn.Module, _: Any) -> None:
        if loaded := self._loaded.pop(module, []):
            self._store(loaded)


def _has_digits(member: Member, values: Tensor) -> bool:
    """True if a parameter, which is there whole, takes the values and rounds them."""
    param = member.param
    with torch._C.DisableTorchFunctionSubclass():
        fits = param.shape == values.shape and not member.span.place.is_part
        return fits and values.is_floating_point() and values.itemsize > param.itemsize
