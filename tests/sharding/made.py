"""The units of a small model on one rank of a mesh, without config, optimizer or engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from partita.comm.collectives import Collectives
from partita.memory.buffer_pool import BufferPool, StorageSwap
from partita.memory.ledger import Ledger
from partita.memory.streams import Event
from partita.memory.tiers import StateMemory
from partita.sharding.assemble import make_units
from partita.sharding.buckets import Bucket
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member
from partita.sharding.placeholder import claim
from partita.sharding.publish import Publisher
from partita.sharding.reducer import GradientReducer
from partita.sharding.runtime import make_buckets
from partita.sharding.segment import Segment
from partita.sharding.structure import Written
from partita.sharding.unit import Unit, UnitResources
from partita.sharding.unit_events import FollowedUnit
from partita.sharding.unshard import Unsharder
from partita.table.mesh_shape import MeshShape
from partita.table.planned import PlannedSegment, PlannedUnit
from partita.table.planned_bucket import PlannedBucket
from partita.table.residence import FP32
from partita.table.slots import PlannedPool
from partita.table.span import Entry, build_layout
from partita.table.state_plan import Tiers, preset

WIDTH = 5
ON_DEVICE = Tiers()


def blocks(num: int) -> nn.Sequential:
    """Return linear layers whose parameters have different values."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num)))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.arange(float(param.numel())).view_as(param) + 100 * number)
    return model


def planned_units(model: nn.Sequential, name: str, mesh: MeshShape, tiers: Tiers) -> list[PlannedUnit]:
    """Plan each layer as a unit with the preset ``name``."""
    units = list[PlannedUnit]()
    row = preset(name, tiers=tiers, mesh=mesh)
    for number, layer in enumerate(model):
        entries = [Entry(f"{number}.{name}", tuple(p.shape), FP32, True) for name, p in layer.named_parameters()]
        layouts = build_layout(entries, mesh.group_size(row.summed_axes))
        units.append(PlannedUnit(str(number), tuple(PlannedSegment(layout, row, mesh) for layout in layouts)))
    return units


class User:
    """A gradient user without an optimizer. It records the calls."""

    steps = 0

    def __init__(self) -> None:
        self.began, self.used = 0, list[str]()
        self.unfrozen = list[Segment]()

    def begin(self) -> None:
        self.began += 1

    def use(self, bucket: Bucket) -> Event:
        self.used.append(bucket.members[0].fqn)
        return Event()

    def unfreeze(self, segment: Segment) -> None:
        self.unfrozen.append(segment)


class Agreeing:
    """An unshard-order check that never finds a difference.

    Attributes:
        gathered: the numbers of the units, in the order in which they were gathered.
        num_steps: the number of calls of :meth:`step`.
    """

    def __init__(self) -> None:
        self.gathered, self.num_steps = list[int](), 0

    def gathers(self, number: int) -> None:
        self.gathered.append(number)

    def wait(self, gathered: Event) -> None:
        gathered.wait()

    def synchronize(self, call: str) -> None:
        pass

    def step(self) -> None:
        self.num_steps += 1

    def updated(self) -> None:
        pass


@dataclass(eq=False)
class Made:
    """The parts of the runtime for the units of one rank. It is also the guardian of their parameters."""

    units: list[Unit]
    publisher: Publisher
    unsharder: Unsharder
    agreement: Agreeing
    pool: BufferPool
    memory: StateMemory
    collectives: Collectives
    followed: list[FollowedUnit] = field(default_factory=list)

    def touched(self, params: Sequence[nn.Parameter], what: str) -> None:
        self.unsharder.touched(params, what)

    def keeps_unsharded(self, param: nn.Parameter) -> bool:
        return self.unsharder.keeps_unsharded

    def is_reading(self, param: nn.Parameter) -> bool:
        return self.unsharder.is_reading(param)

    def exposed(self, param: nn.Parameter, values: torch.Tensor) -> None:
        pass

    @property
    def members(self) -> list[Member]:
        return [member for unit in self.units for member in unit.members]

    def reducer(self, accumulate: int = 1) -> tuple[GradientReducer, User]:
        """Return a reducer of all units' gradients, last unit first, with one bucket per segment; and its user."""
        planned = [PlannedBucket((s.planned,)) for unit in reversed(self.units) for s in unit.segments]
        buckets = make_buckets(planned, self.units, accumulate, self.memory.ledger)
        for bucket in buckets:
            bucket.allocate(self.memory)
        reducer, user = GradientReducer(buckets, self.collectives, self.memory.ledger), User()
        reducer.connect(user)
        return reducer, user


def made(
    collectives: Collectives, name: str, num_units: int, depth: int, tiers: Tiers = ON_DEVICE, prefetch_bytes: int = 0
) -> Made:
    """Create ``num_units`` units with the preset ``name``, resharded if they are stored sharded.

    Args:
        depth: the number of slots for unsharded units.
        prefetch_bytes: the number of bytes that may be gathered ahead of the unit in use.
    """
    mesh, ledger = collectives.mesh, Ledger()
    memory = StateMemory(mesh.device, ledger, lambda: pytest.fail("nothing rests on disk here"))
    model, loan, agreement = blocks(num_units), StorageSwap(), Agreeing()
    planned = planned_units(model, name, mesh.shape, tiers)
    sizes = tuple(unit.num_bytes for unit in planned if not unit.always_unsharded)
    pool = BufferPool("buffer_pool", PlannedPool(sizes, depth), ledger, mesh.device, backed=loan.swap)
    interpreter, stream = Interpreter(collectives), mesh.stream("parameters")
    resources = UnitResources(interpreter, pool, loan, stream)
    units = make_units(model, planned, mesh.rank, resources, by_kernels=False)
    sharded = [unit for unit in units if not unit.always_unsharded]
    unsharder = Unsharder(sharded, agreement, prefetch_bytes, Written(units, 0))
    result = Made(units, Publisher(interpreter, stream), unsharder, agreement, pool, memory, collectives)
    for unit in units:
        unit.allocate()
        for member in unit.members:
            unit.move_to_buffer(member)
            claim(member.param, member.fqn, result)
        for segment in unit.segments:
            segment.keep_stored(memory)
        if not unit.always_unsharded:
            unit.reshard()
    return result
