"""Updates of a model's units, inline or overlapped with the next forward.

Both use the same :class:`Update`. Updates are overlapped for units whose states are stored off the device, and for all
units if an update is one of our kernels. They run unit by unit, in the order in which the next forward needs them, each
with its reads, writes and copies of states. If the ranks are on several nodes, all-gathers after inline updates are
overlapped, too. Results do not depend on it: the global norm is known before the first unit is updated, and
hyperparameters are those at the time of :meth:`Engine.step`.

Source: Ren et al., "ZeRO-Offload", 2021, section 5 (one-step delayed update, which this is not: the next forward sees
every update).
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor

from partita.memory.step_events import in_span, span
from partita.memory.streams import Event, Stream, record_for_host
from partita.optim.extension import CollectiveOptimizer
from partita.optim.optimizer import Guard, Snapshot
from partita.optim.segment_update import Context, SegmentUpdate
from partita.sharding.buckets import Bucket
from partita.sharding.parameter import Member
from partita.sharding.runtime import Runtime
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit

PASSED = Event()


@dataclass(frozen=True)
class Factors:
    """The factors that inline and overlapped updates multiply gradients by."""

    inline: float
    overlapped: float


@dataclass
class Update:
    """One call of the optimizer's step on some segments of some units.

    ``done`` passes when the stored parameters have the result; ``stepped`` is the return value of the step.
    """

    units: Sequence[Unit]
    segments: list[SegmentUpdate]
    context: Context
    done: Event = field(default_factory=Event)
    stepped: Any = None
    _is_open: bool = False

    @property
    def gathers(self) -> bool:
        """True if publishing the result is a collective."""
        return any(segment.gathers for segment in self.segments)

    def open(self) -> None:
        """Start to move states into memory."""
        if not self._is_open:
            self._is_open = True
            for segment in self.segments:
                segment.open()

    def run(self, step: Callable[[AbstractSet[int], Sequence[Member]], Any]) -> None:
        """Call ``step`` with the ids of the optimizer's parameters to update on this rank, and the parameters that are
        updated on any rank.
        """
        self.open()
        for segment, grads in zip(self.segments, self._grads(), strict=True):
            segment.connect(grads)
        chosen = {id(view.tensor) for segment in self.segments for view, _ in segment.changing}
        self.stepped = step(chosen, [member for segment in self.segments for member in segment.coming])
        for segment in self.segments:
            segment.fill()
        for segment in self.segments:
            segment.close()

    def _grads(self) -> list[list[Tensor]]:
        """Return each segment's gradients in the memory of the states: copies in pinned memory, if the host updates
        them.
        """
        grads = [segment.scaled_grads() for segment in self.segments]
        pairs = zip(self.segments, grads, strict=True)
        moved = [grad for segment, found in pairs for grad in found if segment.is_copied(grad)]
        if not moved:
            return grads
        # in one call for all segments, because the next call reuses the memory
        copies = {id(grad): copy for grad, copy in zip(moved, self.context.on_host(moved), strict=True)}
        return [[copies.get(id(grad), grad) for grad in found] for found in grads]

    def deliver(self) -> None:
        """Publish the results to the stored parameters."""
        for segment in self.segments:
            segment.deliver()

    def finish(self) -> None:
        """Wait for the update, and release the gradients, which its event would keep alive."""
        self.done.wait()
        self.done = PASSED
        self.segments.clear()


class Updates:
    """Runs the optimizer on all units.

    Args:
        counted: the names of the optimizer's attributes that its step changes.
    """

    def __init__(self, runtime: Runtime, context: Context, counted: Sequence[str]) -> None:
        self._runtime = runtime
        self._context = context
        self._counted = counted
        self._full_updates = context.full_updates
        self._is_collective = self._full_updates is not None or isinstance(context.rule.optimizer, CollectiveOptimizer)
        gradients = runtime.collectives.mesh.stream("gradients")  # in one order with the collectives on its connections
        self._stream = gradients if self._is_collective else Stream(runtime.device, "updates", waits=True)
        overlaps_all = context.rule.always_overlaps
        self._overlapped = [u for u in runtime.units if overlaps_all or not u.planned.row.updates_on_device]
        self._inline = [unit for unit in runtime.units if unit not in self._overlapped]
        later = [unit for unit in self._inline if runtime.spans_nodes and _is_gathered(unit)]
        self._gathered_later = sorted(later, key=_place_in_model)
        self._unit_of = {id(segment): unit for unit in runtime.units for segment in unit.segments}
        self._under_way: list[Update] = []
        in_backward = [unit for unit in runtime.units if not unit.planned.row.stores_gradients]
        if any(map(_is_gathered, [*self._overlapped, *in_backward])):
            context.publisher.wait_in_thread()
        self.note_settings()
        runtime.wait_for_updates([*self._overlapped, *self._gathered_later])

    def unit_of(self, segment: Segment) -> Unit:
        """Return the unit of a segment."""
        return self._unit_of[id(segment)]

    @property
    def inline_buckets(self) -> list[Bucket]:
        """The buckets whose gradients are used by inline updates."""
        inline = {id(segment) for unit in self._inline for segment in unit.segments}
        return [bucket for bucket in self._runtime.reducer.buckets if id(bucket.segments[0]) in inline]

    @property
    def are_inline(self) -> bool:
        """True if one step of the optimizer itself updates all units."""
        return not self._overlapped

    def gradients(self, used: AbstractSet[int]) -> dict[Tensor, Tensor]:
        """Return copies of the reduced gradients, by the optimizer's parameters.

        Args:
            used: ids of the members that got a gradient on any rank.
        """
        segments = [segment for update in self._one_per_unit(self._inline, used, 1.0) for segment in update.segments]
        found = dict[Tensor, Tensor]()

        def copy(chosen: AbstractSet[int], coming: Sequence[Member]) -> None:
            for view, _ in (each for segment in segments for each in segment.changing):
                assert view.tensor.grad is not None
                found[view.tensor] = view.tensor.grad.clone()

        Update(self._inline, segments, self._context).run(copy)
        return found

    def note_settings(self) -> None:
        """Take a snapshot of the optimizer's settings, before any update: some optimizers count in them."""
        always = self._full_updates is not None
        self._settings = Snapshot(self._context.rule.optimizer, self._counted, always=always)

    # ------------------------------------------------------------------ at the step

    def run(self, used: AbstractSet[int], factors: Factors, guard: Guard, *, has_hooks: bool) -> None:
        """Update every unit; overlapped updates are still running on return.

        Args:
            used: ids of the members that got a gradient on any rank.
            has_hooks: True if any rank's user has hooks on the optimizer's step. If there are both kinds of updates,
                it decides their order, because ranks must start gathers in the same order.
        """
        self.note_settings()
        inline_last = has_hooks if self._inline else guard.watched
        if inline_last:  # hooks before the inline step find the other updates done, and that step does the counting
            self._start(used, factors.overlapped)
            self.wait(copies_counters=False)
            self._run_inline(used, factors.inline, guard)
        else:
            self._run_inline(used, factors.inline, guard)
            self._start(used, factors.overlapped)
        guard.call_hooks()
        if not self._under_way:
            self._context.states.count()

    def _run_inline(self, used: AbstractSet[int], factor: float, guard: Guard) -> None:
        """Run one step on all units that are not overlapped."""
        segments = [segment for update in self._one_per_unit(self._inline, used, factor) for segment in update.segments]
        with span("update"):
            Update(self._inline, segments, self._context).run(partial(self._step_inline, guard))
        publisher, later = self._context.publisher, self._gathered_later
        publisher.publish([unit for unit in self._inline if unit not in later])
        publisher.publish([unit for unit in later if unit.trained], ahead=True)
        if self._full_updates is not None:
            guard.step(False)

    def _step_inline(self, guard: Guard, chosen: AbstractSet[int], coming: Sequence[Member]) -> None:
        if self._full_updates is not None:
            copy_counters = self._step(chosen, coming)
            if not guard.watched:  # else the step that has the hooks does the counting
                copy_counters()
            return
        if isinstance(optimizer := self._context.rule.optimizer, CollectiveOptimizer):
            optimizer.coming = coming
        guard.step(bool(self._inline))

    def _step(self, chosen: AbstractSet[int], coming: Sequence[Member]) -> Callable[[], None]:
        """Run the optimizer with the settings of the last snapshot."""
        if self._full_updates is not None:
            return self._full_updates.run(coming, self._settings.step)
        return self._settings.step(chosen, coming)

    def _start(self, used: AbstractSet[int], factor: float) -> None:
        launched = record_for_host(self._context.device)  # kernels that may use states which the host will use
        changing = [unit for unit in self._overlapped if _changes(unit, used)]
        updates = sorted(self._one_per_unit(changing, used, factor), key=self._place)
        self.queue(updates, launched)
        self.await_all(updates)

    def _one_per_unit(self, units: Sequence[Unit], used: AbstractSet[int], factor: float) -> list[Update]:
        """Return an update of each unit."""
        bucket_of = {id(segment): bucket for bucket in self._runtime.reducer.buckets for segment in bucket.segments}
        updates = []
        for unit in units:
            segments = [SegmentUpdate(segment, bucket_of[id(segment)], self._context) for segment in unit.trained]
            for segment in segments:
                segment.choose(unit.members, used, factor)
            updates.append(Update([unit], segments, self._context))
        return updates

    def _place(self, update: Update) -> int:
        """Return the position of a unit's update in the queue: the order in which forward uses the units.

        Units that are gathered after their update must have the same order on all ranks: that of the model, with the
        root unit first, which contains all others.
        """
        order = self._runtime.unsharder.forward_order
        (unit,) = update.units
        if unit in order and not update.gathers:
            return order.index(unit)
        return _place_in_model(unit)

    # ------------------------------------------------------------------- overlapped

    def of_bucket(self, bucket: Bucket) -> list[Update]:
        """Return an update of each unit for its segments in the bucket; parameters are not chosen yet."""
        return [
            Update([unit], [SegmentUpdate(segment, bucket, self._context) for segment in segments], self._context)
            for unit, segments in groupby(bucket.segments, self.unit_of)
        ]

    def queue(self, updates: Sequence[Update], ready: Event = PASSED) -> None:
        """Queue updates in this order on another stream, after ``ready``; each prefetches the states of the next one.

        Gathers of their units wait for them.
        """
        for update, following in zip(updates, [*updates[1:], None], strict=False):
            name = update.units[0].title
            update.done = self._stream.run(in_span(partial(self._run, update, following, ready), "update", name))
            if update.gathers:
                update.done = self._context.publisher.run_after(update.done, update.deliver)
            for unit in update.units:
                if not unit.always_unsharded:
                    unit.await_update(update.done)

    def _run(self, update: Update, following: Update | None, ready: Event) -> None:
        ready.wait()
        update.open()
        if following is not None:
            following.open()
        update.run(self._step)
        if not update.gathers:
            update.deliver()

    def await_all(self, updates: Sequence[Update]) -> None:
        """Make each use of parameters, also of always unsharded units, wait for these updates: all that are queued."""
        for update in updates:
            for unit in update.units:
                unit.await_update(update.done)
        self._under_way = list(updates)

    def wait(self, *, copies_counters: bool = True) -> None:
        """Wait until every update is complete, and parameters are ready for the next forward.

        Args:
            copies_counters: True to copy changed counters to the optimizer.
        """
        updates = self._under_way
        self._under_way = []
        for update in updates:
            with span("wait for update", update.units[0].title):
                update.finish()
            for unit in update.units:
                unit.finish_update()
        for unit in self._gathered_later:
            with span("wait for update", unit.title):
                unit.updated.wait()
            unit.finish_update()
        if copies_counters:
            for update in updates:
                update.stepped()
        self._context.states.count()

    def close(self) -> None:
        """End the thread of the stream."""
        if not self._is_collective:
            self._stream.close()


def _place_in_model(unit: Unit) -> int:
    """Return a unit's position in the model, with the root unit, which contains all others, first."""
    return unit.number if unit.name else -1


def _is_gathered(unit: Unit) -> bool:
    """Return whether publishing the unit's weights is a collective."""
    return any(segment.planned.update_is_gathered for segment in unit.segments)


def _changes(unit: Unit, used: AbstractSet[int]) -> bool:
    """Return whether the unit is updated on any rank: a rank without a slice of it takes part in the gathers."""
    return any(id(member) in used and member.param.requires_grad for member in unit.members)
