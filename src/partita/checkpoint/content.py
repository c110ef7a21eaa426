"""What of an engine's states this rank saves, and what it has to fill, in global coordinates.

Each rank saves the elements that it updates (of parameters that do not train, and of states that every rank holds
whole, an equal part), whatever stage or tier they rest in: master weights, and whatever the optimizer keeps. Names are
those of torch.distributed.checkpoint for a nested state dict: ``model.<parameter>``,
``optimizer.state.<parameter>.<state>``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import Tensor

from partita.checkpoint.layout import Value, most_elements
from partita.checkpoint.record import plain
from partita.errors import PartitaError
from partita.kernels.quantize import join
from partita.kernels.state import num_blocks
from partita.memory.collector import collector_paused
from partita.optim.fused import BLOCK_STATES
from partita.optim.moments import Moments
from partita.optim.updater import Updater
from partita.optim.views import View
from partita.plan.residence import BLOCK, FP32, SPLIT, Tier
from partita.plan.span import Span
from partita.sharding.runtime import Runtime
from partita.sharding.stretch import SCALAR, Stretch, stretch_of
from partita.sharding.unit import Member, Segment, Unit

MODEL, OPTIMIZER = "model.", "optimizer."
STATE = OPTIMIZER + "state."


def blocks_of(member: Member, start: int, stop: int) -> Stretch:
    """The blocks of a parameter's elements, of which a state has one value each."""
    return Stretch((num_blocks(math.prod(member.shape)),), (0,), start // BLOCK, num_blocks(stop))


@dataclass(frozen=True)
class _Piece:
    """A value, and where it is: at ``place`` of what ``flat`` takes out of this rank's weights of the segment (or of
    the optimizer), which is ``stretch`` of the tensor.
    """

    value: Value
    stretch: Stretch = SCALAR
    place: slice = field(default_factory=lambda: slice(0, 1))
    flat: Callable[[Tensor], Tensor] = lambda weights: weights

    def of(self, weights: Tensor) -> Tensor:
        """The box's values, flat, in the order of its own coordinates; a view where they lie so in memory."""
        assert self.value.box is not None
        flat = self.flat(weights)[self.place]
        if not self.stretch.is_row_major:
            flat = self.stretch.shaped(flat, self.value.box).contiguous().view(-1)
        return flat.to(self.value.dtype)


@dataclass
class Stock:
    """What is saved of one segment, as long as ``seen`` (what its states are, and where in memory) is the same.

    ``views``: the boxes' values, where they lie in memory as they are saved. (States that the optimizer replaces by
    others are kept alive by them until the next save finds it out.)
    """

    segment: Segment
    seen: object
    pieces: list[_Piece]
    views: list[Tensor] | None = None

    @property
    def boxes(self) -> list[Value]:
        return [piece.value for piece in self.pieces if piece.value.box is not None]

    @property
    def others(self) -> list[Value]:
        return [piece.value for piece in self.pieces if piece.value.box is None]


class Content:
    """The model states of a running engine, segment by segment."""

    def __init__(self, runtime: Runtime, updater: Updater) -> None:
        self.runtime, self.updater = runtime, updater
        self._index = runtime.gradient_group.index
        self._stocks = dict[int, Stock]()

    @property
    def segments(self) -> Iterator[tuple[Unit, Segment]]:
        for unit in self.runtime.units:
            for segment in unit.segments:
                yield unit, segment

    def aliases(self) -> dict[str, list[str]]:
        """The other names of tied parameters, by key."""
        return {
            MODEL + member.fqn: [MODEL + name for name in member.holding.fqns[1:]]
            for _, member in self.runtime.members()
            if len(member.holding.fqns) > 1
        }

    # ------------------------------------------------------------------- saving

    @collector_paused()
    def stocks(self) -> list[Stock]:
        """What this rank saves of the states: of each segment, what it did last time, where nothing has changed."""
        return [self._stock(unit, segment) for unit, segment in self.segments]

    def forget(self) -> None:
        """States are about to be replaced: keep none of them alive."""
        self._stocks.clear()

    def batches(self, stocks: Sequence[Stock]) -> Iterator[list[Tensor]]:
        """The values of all boxes, flat, some at a time: valid until the next."""
        for stock in stocks:
            if stock.views is None:
                with self._lent(stock.segment) as weights:
                    for piece in stock.pieces:
                        if piece.value.box is not None:
                            yield [piece.of(weights)]
            else:
                yield stock.views

    def _stock(self, unit: Unit, segment: Segment) -> Stock:
        views, states = self.updater.views.of_segment(segment), self.updater.optimizer.state
        kept = [pair for view in views for pair in states.get(view.tensor, {}).items()]
        seen = (
            segment.trains,
            [(key, state.data_ptr() if isinstance(state, Tensor) else id(state)) for key, state in kept],
        )
        known = self._stocks.get(id(segment))
        if known is None or known.seen != seen:
            known = self._stocks[id(segment)] = Stock(segment, seen, list(self._new_pieces(unit, segment)))
            if _stays_in_memory(segment) and all(piece.stretch.is_row_major for piece in known.pieces):
                known.views = self._views(known, [state for _, state in kept if isinstance(state, Tensor)])
        return known

    def _views(self, stock: Stock, states: Sequence[Tensor]) -> list[Tensor] | None:
        """Views of what is saved; None where some of it has to be copied to lie as it is saved."""
        with self._lent(stock.segment) as weights:
            found = [piece.of(weights) for piece in stock.pieces if piece.value.box is not None]
            places = {tensor.untyped_storage().data_ptr() for tensor in (weights, *states)}
        return found if all(view.untyped_storage().data_ptr() in places for view in found) else None

    def _new_pieces(self, unit: Unit, segment: Segment) -> Iterator[_Piece]:
        if not self.runtime.collectives.mesh.is_first_replica(segment.plan.summed_axes):
            return  # another rank saves the same
        members = {member.fqn: member for member in unit.members if member.segment is segment}
        is_master = segment.trains and segment.plan.master.encoding in (FP32, SPLIT)
        spans = segment.layout.part(self._index)
        if self._index == 0:  # what has no elements is in no rank's part
            spans += tuple(span for span in segment.layout.spans if not span.num_elements)
        for span in spans:
            member, place = members[span.fqn], slice(span.offset, span.offset + span.num_elements)
            dtype = torch.float32 if is_master else segment.dtype
            yield from _cut(MODEL + span.fqn, dtype, stretch_of(member, span.start, span.stop), itemgetter(place))
            yield from self._state_pieces(member, span)

    def _state_pieces(self, member: Member, span: Span) -> Iterator[_Piece]:
        """Of the optimizer's states of one parameter. On disk they are in the optimizer only while they are lent."""
        view = self.updater.views.of(member.param)
        states = self.updater.optimizer.state.get(view.tensor, {}) if view is not None and view.num_elements else {}
        for key, state in states.items():
            assert view is not None
            name = f"{STATE}{span.fqn}.{key}"
            if _has_own_shape(view, key, state):
                if span.start == 0:
                    whole = Stretch(tuple(state.shape), tuple(range(state.dim())), 0, state.numel())
                    yield from _cut(name, state.dtype, whole, self._whole_state_of(view, key))
            elif isinstance(state, Tensor) and state.dim():
                yield from _cut(
                    name, state.dtype, self._stretch(member, span, view, key), self._state_of(view, span, key)
                )
            elif span.start == 0 and isinstance(state, Tensor):
                yield from _cut(name, state.dtype, SCALAR, self._state_of(view, span, key))
            elif span.start == 0:
                yield _Piece(Value(name, value=plain(state, f"the optimizer's state '{key}' of '{member.fqn}'")))

    def _stretch(self, member: Member, span: Span, view: View, key: str) -> Stretch:
        """What of a state goes with a parameter's span.

        Raises:
            PartitaError: it has neither an element for each of the parameter's, nor one in all.
        """
        if key in BLOCK_STATES:
            return blocks_of(member, span.start, span.stop)
        state = self.updater.optimizer.state[view.tensor][key]
        if state.numel() not in (view.num_elements, 0):
            raise PartitaError(
                f"checkpoint: the optimizer's state '{key}' of '{member.fqn}' has shape {tuple(state.shape)}: expected "
                f"one number, or one for each of this rank's {view.num_elements} elements of the parameter"
            )
        return stretch_of(member, span.start, span.stop)

    def _whole_state_of(self, view: View, key: str) -> Callable[[Tensor], Tensor]:
        """Takes a state with a shape of its own out of the optimizer."""
        return lambda _: self.updater.optimizer.state[view.tensor][key].contiguous().view(-1)

    def _state_of(self, view: View, span: Span, key: str) -> Callable[[Tensor], Tensor]:
        """Takes the span's part of a state out of the optimizer."""

        def take(_: Tensor) -> Tensor:
            state: Tensor = self.updater.optimizer.state[view.tensor][key]
            if not state.dim():
                return state.view(1)
            first = span.start - view.start
            if key in BLOCK_STATES:
                return state[first // BLOCK : num_blocks(first + span.num_elements)]
            flat = view.member.flat(state) if view.member.segment.holds_whole_master else state
            return flat[first : first + span.num_elements]

        return take

    @contextmanager
    def _lent(self, segment: Segment) -> Iterator[Tensor]:
        """This rank's part of a segment's weights, with its optimizer states in the optimizer."""
        moments = self._moments_of(segment)
        leases = moments.lend() if moments is not None else {}
        rest = segment.rest.lend()
        master = segment.master.lend() if segment.master is not None and not segment.master_is_parameter else None
        try:
            weights = self._part(segment, rest.wait())
            if master is not None:
                own = self._part(segment, master.wait())
                weights = join(weights.to(own.device), own) if segment.plan.master.encoding == SPLIT else own
            if moments is not None:
                moments.connect(leases)
            yield weights
        finally:
            if moments is not None:
                moments.put_back(leases, changed=False)
            rest.end(changed=False)
            if master is not None:
                master.end(changed=False)

    def _moments_of(self, segment: Segment) -> Moments | None:
        on_disk = segment.trains and segment.plan.moments.tier is Tier.DISK
        return self.updater.hidden.moments_of(segment) if on_disk else None

    def _part(self, segment: Segment, values: Tensor) -> Tensor:
        """This rank's part of what it may hold whole."""
        if values.numel() == segment.layout.part_elements:
            return values
        return values.view(segment.layout.num_parts, -1)[self._index]


def _has_own_shape(view: View, key: str, state: object) -> bool:
    """Whether an optimizer that sees parameters whole keeps other than a value for each element."""
    if not isinstance(state, Tensor) or not state.numel() or not state.dim() or key in BLOCK_STATES:
        return False
    return view.member.segment.holds_whole_master and state.shape != view.member.shape


def _stays_in_memory(segment: Segment) -> bool:
    """Whether all of a segment's states have their place there, and none has to be put together."""
    plan = segment.plan
    on_disk = Tier.DISK in (plan.param_rest.tier, plan.master.tier, plan.moments.tier)
    return not on_disk and plan.master.encoding != SPLIT


def _cut(key: str, dtype: torch.dtype, stretch: Stretch, flat: Callable[[Tensor], Tensor]) -> Iterator[_Piece]:
    for box, place in stretch.boxes(most_elements(dtype)):
        yield _Piece(Value(key, stretch.shape, dtype, box), stretch, place, flat)
