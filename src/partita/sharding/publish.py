"""Publishing: updated master weights are written into the stored parameters of all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from partita.memory.step_events import in_span, span
from partita.memory.streams import Event, Stream, record
from partita.sharding.interpreter import Interpreter, Running
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit
from partita.table.residence import Residence, Tier
from partita.table.steps import steps
from partita.table.strategies import PublishPlan


@dataclass(frozen=True)
class PublishCall:
    """The resources of publishing. ``scratch``: memory of the units' :attr:`~PlannedSegment.scratch_bytes`, or None."""

    interpreter: Interpreter
    scratch: Tensor | None


@dataclass(frozen=True)
class RunnablePublish(PublishPlan, ABC):
    """A publish strategy with its own code. Segments are published one by one: they share the scratch memory."""

    @abstractmethod
    def run(self, segment: Segment, master: Tensor, call: PublishCall) -> None:
        """Update the stored parameters of all ranks from ``master``, which is in memory. A collective."""


def store(segment: Segment, values: Tensor, updated: Residence, interpreter: Interpreter) -> Running:
    """Start to store updated weights (master weights or parameters, with residence ``updated``), as the table says."""
    if segment.by_kernels and values.dtype != segment.dtype:  # torch's cast would round differently
        values, updated = segment.rounded(values), replace(updated, encoding=segment.layout.encoding)
        if not steps(updated, segment.plan.param_stored, segment.mesh):
            segment.stored.store(values)
            return Running()
    operations = steps(updated, segment.plan.param_stored, segment.mesh)
    return interpreter.begin(operations, values, segment.stored) if operations else Running()


class Publisher:
    """Publishes units.

    Args:
        stream: the stream for publishing, which also runs gathers.
        scratch: memory of the units' :attr:`~PlannedSegment.scratch_bytes`, or None.
    """

    def __init__(self, interpreter: Interpreter, stream: Stream, scratch: Tensor | None = None) -> None:
        self._interpreter = interpreter
        self._stream = stream
        self._scratch = scratch
        self._is_warming_up = False

    def warm_up(self, is_warming_up: bool) -> None:
        """Select the publish strategy for the next updates: the one for the warm-up, or the one for later steps."""
        self._is_warming_up = is_warming_up

    def publish(self, units: Sequence[Unit], *, ahead: bool = False) -> None:
        """Store updated master weights, which are in memory, as parameters: encode them, and all-gather them if the
        parameters are stored unsharded.

        Gathers of the units wait for it. The current stream waits, too, unless ``ahead``: then each use of a unit's
        parameters waits, and units are published in the order given.
        """
        if not units:
            return
        updated, ends = record(self._interpreter.device), list[list[Callable[[], None]]]()

        def begin() -> None:
            updated.wait()
            ends.extend([self._begin(segment) for segment in unit.trained] for unit in units)

        def end(number: int) -> None:
            for end_of_segment in ends[number]:
                end_of_segment()
            ends[number].clear()

        self._stream.run(in_span(begin, "gather", "updated parameters"))
        for number, unit in enumerate(units):
            published = self._stream.run(in_span(partial(end, number), "gather", "updated parameters"))
            if ahead:
                unit.await_update(published)
            else:
                unit.updated = published
        if not ahead:
            with span("wait for gather", "updated parameters"):
                published.wait()

    def _begin(self, segment: Segment) -> Callable[[], None]:
        """Return the function that ends publishing the segment.

        It also begins it if segments share scratch memory or memory of another tier than the device: these are
        published one after the other.
        """
        assert segment.master is not None
        master, plan = segment.master.lease().wait(), segment.plan
        publish = self._plan_of(segment)
        if isinstance(publish, RunnablePublish):
            return partial(publish.run, segment, master, self._call)
        begin = partial(store, segment, master, plan.master, self._interpreter)
        return begin().finish if segment.stored.tier is Tier.DEVICE else lambda: begin().finish()

    def wait_in_thread(self) -> None:
        """Run gathers in a thread from now on, because they wait for updates that the host makes or launches."""
        self._stream.wait_in_thread()

    def run_after(self, event: Event, work: Callable[[], object]) -> Event:
        """Run ``work``, a gather, on the stream of gathers, once ``event`` has passed."""

        def run() -> None:
            event.wait()
            work()

        return self._stream.run(run)

    def deliver(self, segment: Segment, values: Tensor, updated: Residence, *, exact: bool = False) -> None:
        """Store one segment's updated weights (master weights or parameters, with residence ``updated``).

        Args:
            exact: store them uncompressed, whatever the row's strategy.
        """
        publish = self._plan_of(segment)
        if not exact and isinstance(publish, RunnablePublish):
            publish.run(segment, values, self._call)
        else:
            store(segment, values, updated, self._interpreter).finish()

    def _plan_of(self, segment: Segment) -> PublishPlan:
        return segment.planned.publishes[0 if self._is_warming_up else -1]

    @property
    def _call(self) -> PublishCall:
        return PublishCall(self._interpreter, self._scratch)
