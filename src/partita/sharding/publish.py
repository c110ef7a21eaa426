"""Publishing: updated weights of one segment reach its stored parameters on all ranks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor

from partita.plan.residence import Residence
from partita.plan.steps import steps
from partita.plan.strategies import PublishPlan
from partita.sharding.interpreter import Interpreter, Running
from partita.sharding.unit import Segment


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
