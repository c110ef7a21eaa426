"""Publishing: updated master weights reach the stored parameters of all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from partita.memory.step_events import span, told
from partita.memory.streams import Event, Stream, record
from partita.plan.residence import Residence, Tier
from partita.plan.steps import steps
from partita.plan.strategies import PublishPlan
from partita.sharding.interpreter import Interpreter, Running
from partita.sharding.segment import Segment
from partita.sharding.unit import Unit


@dataclass(frozen=True)
class PublishCall:
    """The resources of publishing. ``scratch``: memory of the units' :attr:`~PlannedSegment.scratch_bytes`, if any."""

    interpreter: Interpreter
    scratch: Tensor | None


@dataclass(frozen=True)
class RunnablePublish(PublishPlan, ABC):
    """A way to publish that is no list of operations. Segments take turns: they share the scratch memory."""

    @abstractmethod
    def run(self, segment: Segment, master: Tensor, call: PublishCall) -> None:
        """Bring master weights, in memory, nearer to what all ranks have stored. A collective."""


def store(segment: Segment, values: Tensor, updated: Residence, interpreter: Interpreter) -> Running:
    """Begin to bring ``updated`` weights, master or parameters, into the stored ones, as the table says."""
    if segment.by_kernels and values.dtype != segment.dtype:  # moved as it is, it would be rounded as torch does
        values, updated = segment.rounded(values), replace(updated, encoding=segment.layout.encoding)
        if not steps(updated, segment.plan.param_rest, segment.mesh):
            segment.rest.store(values)
            return Running()
    operations = steps(updated, segment.plan.param_rest, segment.mesh)
    return interpreter.begin(operations, values, segment.rest) if operations else Running()


class Publisher:
    """Publishes units.

    Args:
        stream: publishing runs on it, in one order with gathers.
        scratch: memory of the units' :attr:`~PlannedSegment.scratch_bytes`, if any is needed.
    """

    def __init__(self, interpreter: Interpreter, stream: Stream, scratch: Tensor | None = None) -> None:
        self._interpreter = interpreter
        self._stream = stream
        self._scratch = scratch
        self._is_warming_up = False

    def warm_up(self, is_warming_up: bool) -> None:
        """From the next update on weights are published as in the warm-up, or as later."""
        self._is_warming_up = is_warming_up

    def publish(self, units: Sequence[Unit], *, ahead: bool = False) -> None:
        """Bring updated master weights, which lie in memory, into what rests: encode, and gather where the rest is
        whole.

        Gathers wait for it, and so does the current stream, unless the caller goes ``ahead``: then whoever uses a
        unit's parameters waits for them, in the order of ``units``.
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

        self._stream.run(told(begin, "gather", "updated parameters"))
        for number, unit in enumerate(units):
            published = self._stream.run(told(partial(end, number), "gather", "updated parameters"))
            if ahead:
                unit.await_update(published)
            else:
                unit.updated = published
        if not ahead:
            with span("wait for gather", "updated parameters"):
                published.wait()

    def _begin(self, segment: Segment) -> Callable[[], None]:
        """Return what ends it. Where segments share scratch memory, or are lent memory of another tier than the device,
        one begins when the one before has ended.
        """
        assert segment.master is not None
        master, plan = segment.master.lend().wait(), segment.plan
        publish = self._plan_of(segment)
        if isinstance(publish, RunnablePublish):
            return partial(publish.run, segment, master, self._call)
        begin = partial(store, segment, master, plan.master, self._interpreter)
        return begin().finish if segment.rest.tier is Tier.DEVICE else lambda: begin().finish()

    def run_after(self, event: Event, work: Callable[[], object]) -> Event:
        """Run ``work``, which gathers, in its turn among the gathers, once ``event`` has passed."""

        def run() -> None:
            event.wait()
            work()

        return self._stream.run(run)

    def deliver(self, segment: Segment, values: Tensor, updated: Residence, *, exact: bool = False) -> None:
        """Bring one segment's ``updated`` weights, master or parameters, into the stored ones.

        Args:
            exact: as they are, whatever the row's strategy.
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
