"""Communication strategies of a row of the table: for unsharding, gradient sums, and publishing updates.

:class:`Strategies` is the core's choice: states are communicated uncompressed. An optional package
(``partita.compression``) subclasses it, and the plans that it returns. Plans define what a strategy sends, stores and
needs; the runtime objects are created from them (:mod:`partita.sharding.gradient_sync`,
:mod:`partita.sharding.publish`).

If a strategy changes after a warm-up, there are two plans: that of the warm-up, and that of all later steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partita.table.mesh_shape import MeshShape
from partita.table.residence import Residence
from partita.table.steps import Step

if TYPE_CHECKING:
    from partita.table.planned import PlannedSegment
    from partita.table.planned_bucket import PlannedBucket
    from partita.table.planned_gradients import PlannedGradients

Operations = tuple[Step, ...]


@dataclass(frozen=True)
class KeptState:
    """A state of one segment that a strategy keeps between steps, besides parameters, gradients and moments.

    Attributes:
        name: its row in the memory report.
        residence: the residence of the state, whose tier says where it is stored.
    """

    name: str
    residence: Residence
    num_bytes: int


@dataclass(frozen=True)
class Message:
    """A collective outside the table's operations, and the bytes that one rank sends in it."""

    collective: str
    axes: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class Transfer:
    """Operations that a strategy performs for one segment outside the steps of the table, from ``source`` on."""

    operations: Operations
    source: Residence
    purpose: str


@dataclass(frozen=True)
class SyncPlan:
    """A plan for summing gradients over the ranks: operations only, with no state between steps.

    Attributes:
        sums: from collected gradients (on the device, in their stored encoding) to the sums, of which each rank
            measures and scales its shard.
        gathers: from that shard, once the norm is known, to the larger shard that the optimizer uses.
    """

    sums: Operations
    gathers: Operations

    def messages(self, bucket: "PlannedBucket") -> Iterable[Message]:
        """Return the messages of a reduction of the bucket besides, or in place of, :attr:`sums`."""
        return ()

    def kept(self, gradients: "PlannedGradients") -> Iterable[KeptState]:
        """Return the states that are kept of one segment."""
        return ()

    def working_bytes(self, gradients: "PlannedGradients") -> int:
        """Return the device memory of one segment that a reduction needs for states kept in another tier."""
        return 0


@dataclass(frozen=True)
class PublishPlan:
    """A plan for publishing updated master weights in the stored parameters of all ranks: operations only.

    Attributes:
        needs_master: True if the master weights have separate memory even if they could be the parameters.
    """

    operations: Operations
    needs_master: bool = False

    def scratch_bytes(self, segment: "PlannedSegment") -> int:
        """Return the device memory that publishing one segment needs."""
        return 0


@dataclass(frozen=True)
class Strategies:
    """The core's strategies: states are communicated uncompressed."""

    def unshard(self, operations: Operations) -> Operations:
        """Return the operations from stored parameters to those in compute, in their formats."""
        return operations

    def syncs(self, gradients: "PlannedGradients") -> tuple[SyncPlan, ...]:
        """Return the plans by which a segment's gradients are summed: in the warm-up, if it differs, and later."""
        return (gradients.exact,)

    def publishes(self, segment: "PlannedSegment") -> tuple[PublishPlan, ...]:
        """Return the plans by which updated weights are published: in the warm-up, if it differs, and later."""
        return (PublishPlan(segment.publication),)

    def groups_of_sum(self, axes: tuple[str, ...], mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
        """Return the axes of the groups that a sum over ``axes`` may use, where they are not ``axes`` themselves."""
        return ()

    def kept(self, segment: "PlannedSegment") -> Iterable[KeptState]:
        """Return the states that are kept of one segment, except those of its sync."""
        return ()

    def of_round(self, segment: "PlannedSegment", *, is_warming_up: bool) -> Iterable[Transfer]:
        """Return the transfers at the end of a round, if replicas train separately."""
        return ()


UNCOMPRESSED = Strategies()
