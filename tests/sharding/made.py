"""Units of a small model on one rank of a mesh, without config, optimizer or engine."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from partita.comm.collectives import Collectives
from partita.memory.buffer_pool import BufferPool, Loan
from partita.memory.ledger import Ledger
from partita.memory.streams import Event
from partita.memory.tiers import StateMemory
from partita.plan.mesh_shape import MeshShape
from partita.plan.planned import PlannedSegment, PlannedUnit
from partita.plan.planned_bucket import PlannedBucket
from partita.plan.residence import FP32
from partita.plan.slots import PlannedPool
from partita.plan.span import Entry, lay_out
from partita.plan.state_plan import Tiers, preset
from partita.planner.parameters import find_holdings
from partita.sharding import resting
from partita.sharding.buckets import Bucket
from partita.sharding.events import FollowedUnit
from partita.sharding.executor import Executor
from partita.sharding.reducer import GradientReducer
from partita.sharding.residency import Residency
from partita.sharding.runtime import make_buckets
from partita.sharding.unit import Member, Segment, Unit
from partita.sharding.written import Written

WIDTH = 5
ON_DEVICE = Tiers()


def blocks(num: int) -> nn.Sequential:
    """Linear layers, with values that tell them apart."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num)))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.arange(float(param.numel())).view_as(param) + 100 * number)
    return model


def units_of(model: nn.Sequential, name: str, mesh: MeshShape, rank: int, tiers: Tiers) -> list[Unit]:
    """Each layer is a unit under the preset ``name``."""
    units = list[Unit]()
    row = preset(name, tiers=tiers, mesh=mesh)
    for number, layer in enumerate(model):
        holdings = {f"{number}.{holding.fqns[0]}": holding for holding in find_holdings(layer)}
        for fqn, holding in holdings.items():
            holding.fqns = [fqn]
        entries = [Entry(fqn, tuple(holding.param.shape), FP32, True) for fqn, holding in holdings.items()]
        layouts = lay_out(entries, mesh.group_size(row.summed_axes))
        planned = PlannedUnit(str(number), tuple(PlannedSegment(layout, row, mesh) for layout in layouts))
        units.append(Unit(planned, layer, holdings, number, rank))
    return units


class User:
    """Uses no gradients: notes when they would be used."""

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
    """Ranks that all do the same; ``gathered``: the numbers of the units, in the order in which they were gathered."""

    def __init__(self) -> None:
        self.gathered, self.num_steps = list[int](), 0

    def gathers(self, number: int) -> None:
        self.gathered.append(number)

    def wait(self, gathered: Event) -> None:
        gathered.wait()

    def step(self) -> None:
        self.num_steps += 1


@dataclass
class Made:
    """The runtime's parts for the units of one rank, and the guardian of their parameters."""

    units: list[Unit]
    executor: Executor
    residency: Residency
    agreement: Agreeing
    pool: BufferPool
    memory: StateMemory
    collectives: Collectives
    followed: list[FollowedUnit] = field(default_factory=list)

    def touched(self, param: nn.Parameter, what: str) -> None:
        self.residency.touched(param, what)

    @property
    def members(self) -> list[Member]:
        return [member for unit in self.units for member in unit.members]

    def reducer(self, accumulate: int = 1) -> tuple[GradientReducer, User]:
        """The reducer of all units' gradients, last unit first, each in a bucket of its own."""
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
    """``num_units`` units at rest, with ``depth`` slots to gather into."""
    mesh, ledger = collectives.mesh, Ledger()
    memory = StateMemory(mesh.device, ledger, lambda: pytest.fail("nothing rests on disk here"))
    units = units_of(blocks(num_units), name, mesh.shape, mesh.rank, tiers)
    sharded, loan, agreement = [unit for unit in units if not unit.rests_whole], Loan(), Agreeing()
    sizes = tuple(unit.planned.num_bytes for unit in sharded)
    pool = BufferPool("buffer_pool", PlannedPool(sizes, depth), ledger, mesh.device, backed=loan.swap)
    executor = Executor(collectives, pool, loan)
    residency = Residency(sharded, executor, agreement, prefetch_bytes, Written(units, 0))
    result = Made(units, executor, residency, agreement, pool, memory, collectives)
    for unit in units:
        executor.lay(unit)
        for member in unit.members:
            unit.adopt(member)
            resting.claim(member.param, member.fqn, result)
        for segment in unit.segments:
            segment.keep_rest(memory)
        if not unit.rests_whole:
            executor.release(unit)
    return result
