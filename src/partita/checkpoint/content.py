"""The engine states that this rank saves, in global coordinates.

Each rank saves the elements that it updates: their master weights and optimizer states, whatever ZeRO stage or memory
tier stores them. Each rank saves an equal part of parameters that do not train and of states that every rank holds in
full.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from partita.checkpoint.backend import Value, saved_boxes
from partita.checkpoint.names import BLOCK_ORDER, ERROR_FEEDBACK, MODEL, STATE
from partita.checkpoint.serializable import digest, to_serializable
from partita.errors import PartitaError
from partita.kernels.state import num_blocks
from partita.layout.parameters import find_all_parameters
from partita.memory.collector import collector_paused
from partita.optim.states import BLOCK_STATES, View, flattened, has_tensors
from partita.optim.updater import Updater
from partita.sharding.parameter import Member
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit
from partita.sharding.weights import weights_read
from partita.table.box import Box
from partita.table.flat_range import FlatRange, memory_order
from partita.table.residence import BLOCK, FP32, SPLIT
from partita.table.span import Span

ONE_NUMBER = FlatRange.row_major(())


def blocks_of(member: Member, start: int, stop: int) -> FlatRange:
    """Return the range of quantization blocks of a parameter's elements. A block state has one value per block.

    Raises:
        PartitaError: the parameter is a part of a larger one, whose blocks are different.
    """
    if member.span.place.is_part:
        raise PartitaError(
            f"checkpoint: '{member.fqn}' is a part of a larger parameter: a checkpoint cannot store its 8-bit "
            "optimizer states; set precision.moments to fp32"
        )
    return FlatRange.row_major((num_blocks(math.prod(member.shape)),), start // BLOCK, num_blocks(stop))


def block_order(member: Member) -> list[int]:
    """Return the dimensions of a parameter in memory order, in which quantization blocks are cut.

    Dimensions of size 1, whose position changes nothing, are left out.
    """
    return [dim for dim in memory_order(member.stride) if member.shape[dim] != 1]


@dataclass(frozen=True)
class _Piece:
    """A box to save.

    ``take`` extracts ``elements``, flat, from this rank's weights of the segment or from the optimizer. The box is the
    slice ``place`` of them.
    """

    key: str
    dtype: torch.dtype
    elements: FlatRange
    box: Box
    place: slice
    take: Callable[[Tensor], Tensor]

    @property
    def value(self) -> Value:
        return Value(self.key, self.elements.shape, self.dtype, self.box)

    def values(self, weights: Tensor) -> Tensor:
        """Return the box's values, flat, in the order of its own coordinates.

        The result is a view if the values have this order, and the saved dtype, in memory.
        """
        flat = self.take(weights)[self.place]
        if not self.elements.is_row_major:
            flat = self.elements.shaped(flat, self.box).contiguous().view(-1)
        return flat.to(self.dtype)


def _pieces(key: str, dtype: torch.dtype, elements: FlatRange, take: Callable[[Tensor], Tensor]) -> Iterator[_Piece]:
    for box, place in saved_boxes(elements, dtype):
        yield _Piece(key, dtype, elements, box, place, take)


@dataclass
class SegmentContent:
    """The content saved for one segment, cached as long as ``identity`` is unchanged.

    ``identity`` identifies the segment's states: the memory addresses of tensors, and digests of plain values, which
    may change in place. ``boxes`` have their values in ``pieces``; ``others`` are plain values. ``views`` are the
    boxes' values, if memory already has the saved order. (States that the optimizer replaces are kept alive by them
    until the next save detects the change.)
    """

    segment: Segment
    identity: object
    pieces: list[_Piece]
    boxes: list[Value]
    others: list[Value]
    views: list[Tensor] | None = None


class Content:
    """The model states of a running engine, segment by segment."""

    def __init__(self, runtime: Runtime, updater: Updater) -> None:
        self.runtime = runtime
        self.updater = updater
        self._known = dict[int, SegmentContent]()

    def aliases(self) -> dict[str, list[str]]:
        """Return the further names of tied parameters, by key."""
        return {
            MODEL + info.fqns[0]: [MODEL + name for name in info.fqns[1:]]
            for info in find_all_parameters(self.runtime.model)
            if len(info.fqns) > 1
        }

    def forget(self) -> None:
        """Clear the cache, so that states which are about to be replaced are not kept alive."""
        self._known.clear()

    @collector_paused()
    def segments(self) -> list[SegmentContent]:
        """Return the content that this rank saves, per segment. Unchanged segments come from the cache."""
        return [self._content_of(unit, segment) for unit in self.runtime.units for segment in unit.segments]

    def batches(self, contents: Sequence[SegmentContent]) -> Iterator[list[Tensor]]:
        """Yield the flat values of all boxes, batch by batch. A batch is valid until the next one."""
        for content in contents:
            if content.views is None:
                with self._loaded(content.segment) as weights:
                    for piece in content.pieces:
                        yield [piece.values(weights)]
            else:
                yield content.views

    def _content_of(self, unit: Unit, segment: Segment) -> SegmentContent:
        views = self.updater.views.of_segment(segment)
        kept = [pair for view in views for pair in self._state_in(view).items()]
        addresses = [(key, state.data_ptr() if isinstance(state, Tensor) else digest(state)) for key, state in kept]
        additional = self.additional_states(segment)
        identity = (segment.trains, addresses, [values.data_ptr() for values in additional.values()])
        known = self._known.get(id(segment))
        if known is None or known.identity != identity:
            found = list(self._new_content(unit, segment))
            pieces = [piece for piece in found if isinstance(piece, _Piece)]
            others = [value for value in found if isinstance(value, Value)]
            known = SegmentContent(segment, identity, pieces, [piece.value for piece in pieces], others)
            self._known[id(segment)] = known
            in_memory = not segment.plan.uses_disk and segment.plan.master.encoding != SPLIT
            if in_memory and all(piece.elements.is_row_major for piece in known.pieces):
                states_in_memory = [state for _, state in kept if isinstance(state, Tensor)]
                known.views = self._views(known, [*states_in_memory, *additional.values()])
        return known

    def additional_states(self, segment: Segment) -> dict[str, Tensor]:
        """Return the states saved in addition to weights and optimizer states, by the prefix of their keys.

        Each is this rank's shard of the segment, in memory.
        """
        residuals = self.runtime.reducer.sync_states.saved(segment)
        return ({} if residuals is None else {ERROR_FEEDBACK: residuals}) | self.listener_states(segment)

    def listener_states(self, segment: Segment) -> dict[str, Tensor]:
        """Return the listeners' states, a subset of :meth:`additional_states`.

        Ranks with the same shard have the same values.
        """
        return {key: values for each in self.updater.listeners for key, values in each.saved(segment).items()}

    @property
    def averages(self) -> list[str]:
        """The prefixes of the keys of the averages of the weights."""
        return [listener.average for listener in self.updater.listeners if listener.average]

    def _views(self, content: SegmentContent, states: Sequence[Tensor]) -> list[Tensor] | None:
        """Return views of the values to save; None if some of them must be copied into the saved order."""
        with self._loaded(content.segment) as weights:
            found = [piece.values(weights) for piece in content.pieces]
            places = {tensor.untyped_storage().data_ptr() for tensor in (weights, *states)}
        return found if all(view.untyped_storage().data_ptr() in places for view in found) else None

    def _new_content(self, unit: Unit, segment: Segment) -> Iterator[_Piece | Value]:
        members = {member.fqn: member for member in unit.members if member.segment is segment}
        is_master = segment.master is not None and segment.plan.master.encoding in (FP32, SPLIT)
        dtype = torch.float32 if is_master else segment.dtype
        if not segment.is_first_copy:
            return  # another rank saves the same
        spans = segment.layout.part(segment.shard_index)
        if segment.shard_index == 0:  # a parameter without elements is in no rank's shard
            spans += tuple(span for span in segment.layout.spans if not span.num_elements)
        additional = self.additional_states(segment)
        for span in spans:
            place = slice(span.offset, span.offset + span.num_elements)
            elements = members[span.fqn].elements(span.start, span.stop)
            yield from _pieces(MODEL + span.fqn, dtype, elements, itemgetter(place))
            for key, values in additional.items():
                yield from _pieces(key + span.fqn, values.dtype, elements, _slice_of(values, place))
            yield from self._states_of(members[span.fqn], span)
        for view in self.updater.views.of_segment(segment) if segment.is_first_owner else ():
            if view.is_full_at_owner:
                yield from self._full_states_of(view)

    def _states_of(self, member: Member, span: Span) -> Iterator[_Piece | Value]:
        """Yield the optimizer states of one parameter. States on disk have values only inside :meth:`_loaded`."""
        view = self.updater.views.of(member.param)
        if view is None or view.is_full_at_owner or not view.num_elements:
            return
        first = span.place.begins_at
        has_first = first is not None and span.start <= first < span.stop
        states = self._state_in(view)
        if has_first and not states.keys().isdisjoint(BLOCK_STATES):
            yield Value(BLOCK_ORDER + span.fqn, value=block_order(member))
        for key, state in states.items():
            name, take = f"{STATE}{span.fqn}.{key}", self._state_of(view, span, key)
            if not isinstance(state, Tensor):
                if has_tensors(state) and not member.segment.has_full_master:
                    raise PartitaError(
                        f"checkpoint: the optimizer's state '{key}' of '{member.fqn}' is a {type(state).__name__} with "
                        "tensors for a slice of the parameter: expected tensors, or lists, tuples and dictionaries of "
                        "them, whose keys are numbers or text"
                    )
                if has_first:
                    yield Value(name, value=to_serializable(state, f"the optimizer's state '{key}' of '{member.fqn}'"))
            elif key in BLOCK_STATES:
                yield from _pieces(name, state.dtype, blocks_of(member, span.start, span.stop), take)
            elif not state.dim() or _has_own_shape(view, state):
                if has_first:
                    yield from _pieces(name, state.dtype, FlatRange.row_major(state.shape), take)
            elif state.numel() in (view.num_elements, 0):
                yield from _pieces(name, state.dtype, member.elements(span.start, span.stop), take)
            else:
                raise PartitaError(
                    f"checkpoint: the optimizer's state '{key}' of '{member.fqn}' has shape {tuple(state.shape)}: "
                    f"expected one number, or one for each of this rank's {view.num_elements} elements of the parameter"
                )

    def _state_of(self, view: View, span: Span, key: str) -> Callable[[Tensor], Tensor]:
        """Return a function that reads the span's slice of a state from the optimizer."""

        def take(_: Tensor) -> Tensor:
            state: Tensor = self._state_in(view)[key]
            first = span.start - view.start
            if key in BLOCK_STATES:
                return state[first // BLOCK : num_blocks(first + span.num_elements)]
            if not state.dim() or _has_own_shape(view, state):
                return state.contiguous().view(-1)
            flat = view.member.flat(state) if view.member.segment.has_full_master else state
            return flat[first : first + span.num_elements]

        return take

    def _full_states_of(self, view: View) -> Iterator[_Piece | Value]:
        """Yield the optimizer states of a parameter that this rank owns."""
        for key, state in self._state_in(view).items():
            name = f"{STATE}{view.member.fqn}.{key}"
            if isinstance(state, Tensor):
                take = partial(self._full_state, view, key)
                yield from _pieces(name, state.dtype, FlatRange.row_major(state.shape), take)
            else:
                where = f"the optimizer's state '{key}' of '{view.member.fqn}'"
                yield Value(name, value=to_serializable(state, where))

    def _full_state(self, view: View, key: str, _: Tensor) -> Tensor:
        state: Tensor = self._state_in(view)[key]
        return state.contiguous().view(-1)

    def _state_in(self, view: View) -> dict[str, Any]:
        """Return the states of one parameter in the optimizer, with the items of containers."""
        if view.in_groups is None:
            return {}
        return flattened(self.updater.optimizer.state.get(view.in_groups, {}))

    @contextmanager
    def _loaded(self, segment: Segment) -> Iterator[Tensor]:
        """Yield this rank's shard of a segment's weights, while the segment's optimizer states are in the optimizer."""
        on_disk = self.updater.states.on_disk(segment)
        leases = on_disk.lease() if on_disk is not None else {}
        with weights_read(segment) as weights:
            try:
                if on_disk is not None:
                    on_disk.connect(leases)
                yield weights
            finally:
                if on_disk is not None:
                    on_disk.put_back(leases, changed=False)


def _slice_of(values: Tensor, place: slice) -> Callable[[Tensor], Tensor]:
    """Return a function that ignores the weights and returns the slice ``place`` of ``values``."""
    return lambda weights: values[place]


def _has_own_shape(view: View, state: Tensor) -> bool:
    """Return True if an optimizer on unsharded parameters keeps a state in another shape than the parameter's."""
    return bool(state.numel()) and view.member.segment.has_full_master and state.shape != view.member.shape
