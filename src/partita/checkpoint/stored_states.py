"""The optimizer's states in a checkpoint that is loaded: which of them, in what form, and for which parameters."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partita.checkpoint.backend import Stored
from partita.checkpoint.content import ONE_NUMBER, block_order, blocks_of
from partita.checkpoint.names import BLOCK_ORDER, Names
from partita.errors import PartitaError
from partita.optim.fused import convert_state, rule_of
from partita.optim.states import BLOCK_MOMENTS, BLOCK_STATES, View, decoded, unflattened
from partita.optim.traits import created_states
from partita.optim.updater import Updater
from partita.sharding.segment import Segment
from partita.table.flat_range import FlatRange


class StoredStates:
    """The stored states of an engine's optimizer.

    Args:
        names: the names of the stored parameters.

    Attributes:
        are_loaded: False if they are those of another optimizer: the engine's are removed, and none are loaded.
    """

    def __init__(self, stored: Stored, names: Names, updater: Updater) -> None:
        self._stored = stored
        self._names = names
        self._updater = updater
        self.are_loaded = True
        # The states that the optimizer creates, by the parameter's dtype and group; None: unknown.
        self._created = dict[torch.dtype, list[dict[str, Any]] | None]()
        # The orders of blocks, of parameters for which they differ from this run's.
        self._other_orders = dict[View, list[int]]()

    def targets(self, view: View) -> Iterator[tuple[str, str, FlatRange]]:
        """Yield the states of a parameter that are read into memory of the view: name, key, and the view's elements."""
        keys = self._keys_of(view)
        if keys and (order := self._stored_order(view)) is not None:
            own = sorted(order) if view.is_full_at_owner else block_order(view.member)
            if order != own:
                self._other_orders[view] = order
        for state, key in keys.items():
            if key in self._stored.tensors and not (state in BLOCK_MOMENTS and view in self._other_orders):
                yield state, key, self._elements(view, state, key)

    def remove(self, segment: Segment) -> None:
        """Remove the states of a segment. A parameter without stored states then counts as never updated."""
        for view in self._updater.views.of_segment(segment):
            if view.in_groups is not None:
                self._updater.optimizer.state.pop(view.in_groups, None)

    def allocate(self, view: View, state: str, key: str, elements: FlatRange) -> Tensor:
        """Allocate memory for a state: flat, or a scalar."""
        stored, param = self._stored.tensors[key].dtype, view.tensor
        if elements is ONE_NUMBER:
            groups = self._updater.optimizer.param_groups
            on_device = any(group.get("fused") or group.get("capturable") for group in groups)
            return torch.empty((), dtype=stored, device=param.device if on_device else "cpu")
        keeps = view.is_full_at_owner or not stored.is_floating_point or state in BLOCK_STATES
        dtype = stored if keeps else self._dtype_of(view, state)
        return torch.empty(elements.num_elements, dtype=dtype, device=param.device)

    def set(self, segment: Segment, tensors: Mapping[View, dict[str, Any]]) -> None:
        """Pass the loaded states of a segment to the optimizer, in the encoding in which it keeps them.

        ``tensors``: the states that are tensors. Plain values are read here.
        """
        optimizer, has_states = self._updater.optimizer, False
        for view in self._updater.views.of_segment(segment):
            names, state = self._keys_of(view), tensors.get(view, {})
            values = {name: self._stored.value(key) for name, key in names.items() if key in self._stored.values}
            if (order := self._other_orders.get(view)) is not None:
                state |= self._moments_in_order(view, order)
            converted = {**convert_state(optimizer, state), **values}
            known = {name: value for name, value in converted.items() if self._is_loaded(view, name)}
            if not known:
                continue
            has_states = True
            is_shaped = segment.has_full_master or view.is_full_at_owner
            shaped = {
                name: self._shaped(view, names.get(name, ""), value)
                if isinstance(value, Tensor) and value.dim() and name not in BLOCK_STATES and is_shaped
                else value
                for name, value in known.items()
            }
            assert view.in_groups is not None
            optimizer.state[view.in_groups] = unflattened(shaped)
        if has_states and (on_disk := self._updater.states.on_disk(segment)) is not None:
            on_disk.replace()

    def _keys_of(self, view: View) -> dict[str, str]:
        """Return the keys of one parameter's optimizer states, by state, also of a frozen one: they are used after
        unfreezing, and saved meanwhile.
        """
        if not self.are_loaded or view.in_groups is None or self._updater.views.group_of(view) is None:
            return {}
        return self._names.states(view.member.info.fqns)

    def _stored_order(self, view: View) -> list[int] | None:
        """Return the order of dimensions in which the blocks of a parameter's 8-bit moments were cut.

        None: the checkpoint has no such moments, or is of an earlier version, or the parameter is a part of a larger
        one.
        """
        keys = (BLOCK_ORDER + name for name in view.member.info.fqns)
        key = next((key for key in keys if key in self._stored.values), None)
        if key is None or view.member.span.place.is_part:
            return None
        order: list[int] = self._stored.value(key)
        return order

    def _elements(self, view: View, state: str, key: str) -> FlatRange:
        """Return the elements of a stored state that belong to a view: its elements, its blocks, or a single number."""
        member, start, stop = view.member, view.start, view.start + view.num_elements
        shape, expected = self._stored.tensors[key].shape, view.member.span.place.shape
        if not shape and (expected or state == "step"):
            return ONE_NUMBER
        if view.is_full_at_owner:
            return FlatRange.row_major(shape)
        if state in BLOCK_STATES:
            return blocks_of(member, start, stop)
        if shape == expected:
            return member.elements(start, stop)
        if member.segment.has_full_master:
            return FlatRange.row_major(shape)
        raise PartitaError(f"checkpoint: '{key}' has shape {shape} in '{self._stored.folder}': expected {expected}")

    def _created_for(self, view: View) -> dict[str, Any] | None:
        """Return states that the optimizer creates for a parameter of the view's dtype and group; None if unknown."""
        dtype, number = view.tensor.dtype, self._updater.views.group_of(view)
        if dtype not in self._created:
            self._created[dtype] = created_states(self._updater.optimizer, dtype)
        of_groups = self._created[dtype]
        return None if of_groups is None or number is None else of_groups[number]

    def _is_loaded(self, view: View, state: str) -> bool:
        """Return False for a state of another optimizer that this one does not have."""
        if self._stored.manifest.get("optimizer") in (None, rule_of(self._updater.optimizer)):
            return True
        created = self._created_for(view)
        return created is None or state in created

    def _dtype_of(self, view: View, state: str) -> torch.dtype:
        """Return the floating-point dtype in which the optimizer creates a state; the parameter's if it is unknown."""
        created = (self._created_for(view) or {}).get(state)
        if isinstance(created, Tensor) and created.is_floating_point():
            return created.dtype
        return view.tensor.dtype

    def _moments_in_order(self, view: View, order: Sequence[int]) -> dict[str, Tensor]:
        """Return a view's elements of 8-bit moments whose blocks were cut in another order: decoded, flat."""
        keys, member = self._names.states(view.member.info.fqns), view.member
        dims = [*order, *(dim for dim in range(len(member.shape)) if dim not in order)]
        state = {name: self._stored.value(keys[name]) for name in BLOCK_MOMENTS}
        for name in BLOCK_MOMENTS.difference(BLOCK_STATES):
            in_memory = state[name].permute(dims).contiguous()
            state[name] = in_memory.permute([dims.index(dim) for dim in range(len(dims))])
        moments = decoded(state)
        if view.is_full_at_owner:
            flat = {name: full.reshape(-1) for name, full in moments.items()}
        else:
            own = slice(view.start, view.start + view.num_elements)
            flat = {name: member.flat(full)[own] for name, full in moments.items()}
        return {name: values.to(view.tensor.device) for name, values in flat.items()}

    def _shaped(self, view: View, key: str, value: Tensor) -> Tensor:
        """Return a flat state in the shape that the optimizer keeps: the parameter's, or the one that was stored.

        This is for optimizers on unsharded parameters.
        """
        shape = self._stored.tensors[key].shape if key in self._stored.tensors else ()
        if view.is_full_at_owner:
            return value.view(shape or view.member.span.place.shape)
        return view.member.shaped(value) if shape in ((), view.member.span.place.shape) else value.view(shape)
