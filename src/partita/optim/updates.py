"""The optimizer run on a model's units: at once, or beside the caller while the next forward goes on.

Both are the same :class:`Update`. Overlapped are the updates of units whose states rest off the device, and all where
an update is a kernel of ours: unit by unit, in the order in which the next forward needs them, each with its states
read, written and copied. Where the ranks are on several nodes, gathers of what was updated at once go on under the next
forward, too. Nothing that is computed depends on it: the global norm is known before the first unit is updated, and
every hyperparameter is the one of :meth:`Engine.step`'s moment.

Source: Ren et al., "ZeRO-Offload", 2021, section 5 (one-step delayed update, which this is not: the next forward sees
every update).
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from partita.memory.streams import Event, Stream, finish
from partita.memory.timeline import span, told
from partita.optim.guard import Guard
from partita.optim.segment_update import Context, SegmentUpdate
from partita.optim.snapshot import Snapshot
from partita.sharding.buckets import Bucket
from partita.sharding.runtime import Runtime
from partita.sharding.unit import Segment, Unit

PASSED = Event()


@dataclass
class Update:
    """One call of the optimizer's step: on what changes in some segments of some units.

    ``done`` passes when what rests has the result; ``stepped`` is what the step has returned by then.
    """

    units: Sequence[Unit]
    segments: list[SegmentUpdate]
    done: Event = field(default_factory=Event)
    stepped: Any = None
    _is_open: bool = False

    @property
    def gathers(self) -> bool:
        """True if publishing the result is a collective."""
        return any(segment.gathers for segment in self.segments)

    def open(self) -> None:
        """Begin to bring states into memory."""
        if not self._is_open:
            self._is_open = True
            for segment in self.segments:
                segment.open()

    def run(self, step: Callable[[AbstractSet[int]], Any]) -> None:
        """Have ``step`` update what changes: the optimizer's parameters with these ids."""
        self.open()
        for segment in self.segments:
            segment.connect()
        self.stepped = step({id(view.tensor) for segment in self.segments for view, _ in segment.changing})
        for segment in self.segments:
            segment.close()

    def deliver(self) -> None:
        """Bring the result into what rests."""
        for segment in self.segments:
            segment.deliver()

    def finish(self) -> None:
        """Wait until it is done, and let go of the gradients, which its event would keep."""
        self.done.wait()
        self.done = PASSED
        self.segments.clear()


class Updates:
    """Runs the optimizer on all units.

    Args:
        counted: names of the attributes that the optimizer counts in.
    """

    def __init__(self, runtime: Runtime, context: Context, counted: Sequence[str]) -> None:
        self._runtime = runtime
        self._context = context
        self._counted = counted
        self._stream = Stream(runtime.executor.device, "updates", waits=True)
        beside = context.rule.runs_beside
        self._overlapped = [u for u in runtime.units if beside or not u.planned.row.updates_on_device]
        self._inline = [unit for unit in runtime.units if unit not in self._overlapped]
        later = [unit for unit in self._inline if runtime.spans_nodes and _is_gathered(unit)]
        self._gathered_later = sorted(later, key=_place_in_model)
        self._unit_of = {id(segment): unit for unit in runtime.units for segment in unit.segments}
        self._under_way: list[Update] = []
        self.note_settings()
        runtime.wait_for_updates([*self._overlapped, *self._gathered_later])

    def unit_of(self, segment: Segment) -> Unit:
        """The unit that the segment is part of."""
        return self._unit_of[id(segment)]

    @property
    def inline_buckets(self) -> list[Bucket]:
        """Buckets whose gradients are used up by updates at once."""
        inline = {id(segment) for unit in self._inline for segment in unit.segments}
        return [bucket for bucket in self._runtime.reducer.buckets if id(bucket.segments[0]) in inline]

    def note_settings(self) -> None:
        """Take the optimizer's settings as they are before any parameter is updated: some optimizers count in them."""
        self._settings = Snapshot(self._context.rule.optimizer, self._counted)

    # ------------------------------------------------------------------ at the step

    def run(self, used: AbstractSet[int], factor: float, guard: Guard) -> None:
        """Update every unit, or have its update under way.

        Args:
            used: ids of the members that got a gradient on any rank.
            factor: what the gradients of overlapped updates are multiplied by.
        """
        self.note_settings()
        if guard.watched:  # hooks find everything updated, and the step that calls them counts
            self._start(used, factor)
            self.wait(takes_up=False)
            self._run_inline(used, guard)
        else:
            self._run_inline(used, guard)
            self._start(used, factor)
        if not self._under_way:
            self._context.states.count()

    def _run_inline(self, used: AbstractSet[int], guard: Guard) -> None:
        """One step on all that changes in the units that are not overlapped."""
        segments = [segment for update in self._one_per_unit(self._inline, used, 1.0) for segment in update.segments]
        with span("update"):
            Update(self._inline, segments).run(lambda _: guard.step(bool(self._inline)))
        executor, later = self._context.executor, self._gathered_later
        executor.publish([unit for unit in self._inline if unit not in later])
        executor.publish([unit for unit in later if unit.trained], ahead=True)

    def _start(self, used: AbstractSet[int], factor: float) -> None:
        if self._overlapped:  # what was launched may read states that the host will write, or write those it will read
            finish(self._context.executor.device)
        changing = [unit for unit in self._overlapped if _changes(unit, used)]
        updates = sorted(self._one_per_unit(changing, used, factor), key=self._place)
        self.queue(updates)
        self.await_all(updates)

    def _one_per_unit(self, units: Sequence[Unit], used: AbstractSet[int], factor: float) -> list[Update]:
        """An update of each unit."""
        bucket_of = {id(segment): bucket for bucket in self._runtime.reducer.buckets for segment in bucket.segments}
        updates = []
        for unit in units:
            segments = [SegmentUpdate(segment, bucket_of[id(segment)], self._context) for segment in unit.trained]
            for segment in segments:
                segment.choose(unit.members, used, factor)
            updates.append(Update([unit], segments))
        return updates

    def _place(self, update: Update) -> int:
        """When the next forward will need a unit. Those that are gathered after their update keep the order that is the
        same on all ranks: the model's, with the root unit, which spans all others, first.
        """
        order = self._runtime.residency.forward_order
        (unit,) = update.units
        if unit in order and not update.gathers:
            return order.index(unit)
        return _place_in_model(unit)

    # ------------------------------------------------------------ beside the caller

    def of_bucket(self, bucket: Bucket) -> list[Update]:
        """An update of each unit that has segments in the bucket, of these; what changes has yet to be chosen."""
        return [
            Update([unit], [SegmentUpdate(segment, bucket, self._context) for segment in segments])
            for unit, segments in groupby(bucket.segments, self.unit_of)
        ]

    def queue(self, updates: Sequence[Update], ready: Event = PASSED) -> None:
        """Run updates beside the caller in this order, not before ``ready``, each with the states of the next one on
        their way meanwhile. Gathers of their units wait for them.
        """
        for update, following in zip(updates, [*updates[1:], None], strict=False):
            name = update.units[0].title
            update.done = self._stream.run(told(partial(self._run, update, following, ready), "update", name))
            if update.gathers:
                update.done = self._context.executor.run_after(update.done, update.deliver)
            for unit in update.units:
                if not unit.rests_whole:
                    self._context.executor.await_update(unit, update.done)

    def _run(self, update: Update, following: Update | None, ready: Event) -> None:
        ready.wait()
        update.open()
        if following is not None:
            following.open()
        update.run(self._settings.step)
        if not update.gathers:
            update.deliver()

    def await_all(self, updates: Sequence[Update]) -> None:
        """Have whoever uses parameters, also those that rest whole, wait for these updates: all that are queued."""
        for update in updates:
            for unit in update.units:
                self._context.executor.await_update(unit, update.done)
        self._under_way = list(updates)

    def wait(self, *, takes_up: bool = True) -> None:
        """Wait until every update is done, and parameters are what they will be in the next forward.

        Args:
            takes_up: whether the optimizer takes up what was counted.
        """
        updates = self._under_way
        self._under_way = []
        for update in updates:
            with span("wait for update", update.units[0].title):
                update.finish()
            for unit in update.units:
                self._context.executor.finish_update(unit)
        for unit in self._gathered_later:
            with span("wait for update", unit.title):
                unit.updated.wait()
            self._context.executor.finish_update(unit)
        if takes_up:
            for update in updates:
                update.stepped()
        self._context.states.count()

    def close(self) -> None:
        """Let go of the thread."""
        self._stream.close()


def _place_in_model(unit: Unit) -> int:
    """The root unit, which spans all others, is first."""
    return unit.number if unit.name else -1


def _is_gathered(unit: Unit) -> bool:
    """Return whether publishing the unit's weights is a collective."""
    return any(segment.planned.update_is_gathered for segment in unit.segments)


def _changes(unit: Unit, used: AbstractSet[int]) -> bool:
    """Return whether the unit changes. A rank that owns nothing of what changes takes part in the gathers."""
    return any(id(member) in used and member.param.requires_grad for member in unit.members)
