"""Seconds of a training step on one rank: what runs beside what, and what the device waits for.

Each thing that works one job after the other is a resource with a clock: the device, the links to other ranks and to
the host, the host's cores, the disk. Updates of a step are made in the order of the next forward, which waits for each
unit's; in the long run a step takes as long as that forward, all other forwards and backwards, and the last sum.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

DEVICE, RANKS, HOST_LINK, HOST, DISK = "device", "ranks", "host link", "host", "disk"
# Micro-batches that are followed one by one: the first, one like all others, the last.
FOLLOWED = 3


@dataclass(frozen=True)
class UnitTimes:
    """Of one unit, seconds of each job. ``forward`` and ``backward`` on the device; ``gather`` from other ranks, before
    each (0: it stays whole in between: ``gather_again``); ``fetch`` from the host, before each, ``read`` from disk;
    ``reduce`` among the ranks and ``stow`` on the host of a gradient; the ``update`` by the resource ``updated_by``,
    with ``swap`` on disk, and the new parameters' way to the device (``bring``) and to all ranks (``publish``).
    ``leave``: of what it was given, on its way by ``leaves_by`` to where it rests until backward, and back before that.
    """

    forward: float
    backward: float
    gather: float = 0.0
    gather_again: float = 0.0
    fetch: float = 0.0
    read: float = 0.0
    reduce: float = 0.0
    stow: float = 0.0
    update: float = 0.0
    updated_by: str = DEVICE
    swap: float = 0.0
    bring: float = 0.0
    publish: float = 0.0
    leave: float = 0.0
    leaves_by: str = HOST_LINK


@dataclass(frozen=True)
class StepTime:
    """``total_s`` of a step, of which the device computes ``compute_s`` and waits for each resource ``waits_s``."""

    total_s: float
    compute_s: float
    waits_s: dict[str, float]

    def with_bubble(self, num_micros: int, num_stages: int) -> "StepTime":
        """In a pipeline of stages that take as long: each waits for the others' first and last micro-batches."""
        bubble = self.total_s * (num_stages - 1) / num_micros
        return StepTime(self.total_s + bubble, self.compute_s, {**self.waits_s, "pipeline": bubble})


@dataclass(frozen=True)
class Job:
    """``what`` is done for the ``unit`` of that number, by a resource; in seconds from the step's beginning."""

    what: str
    unit: int
    resource: str
    start_s: float
    stop_s: float


class _Clocks:
    """When each resource is free; what the device waited for. ``jobs``: what it did, told as it is found."""

    def __init__(self, ranks: str = RANKS, jobs: list[Job] | None = None) -> None:
        self.ranks = ranks
        self._jobs = jobs
        self.free = defaultdict[str, float](float)
        self.waits = defaultdict[str, float](float)
        self.busy = 0.0

    def run(self, job: tuple[str, int], resource: str, seconds: float, after: float = 0.0) -> float:
        """A job (what, for which unit) that may begin at ``after``; its end."""
        if not seconds:
            return after
        start = max(self.free[resource], after)
        self.free[resource] = start + seconds
        self._note(job, resource, start, start + seconds)
        return start + seconds

    def _note(self, job: tuple[str, int], resource: str, start: float, stop: float) -> None:
        if self._jobs is not None and stop > start:
            self._jobs.append(Job(*job, resource, start, stop))

    def compute(self, job: tuple[str, int], seconds: float, needed: Sequence[tuple[str, float]]) -> float:
        """On the device, once all that is needed is there: (who brings it, when)."""
        who, when = max(needed, key=lambda each: each[1], default=(DEVICE, 0.0))
        if when > self.free[DEVICE]:
            self.waits[who] += when - self.free[DEVICE]
            self._note((f"wait for {who}", job[1]), DEVICE, self.free[DEVICE], when)
            self.free[DEVICE] = when
        self._note(job, DEVICE, self.free[DEVICE], self.free[DEVICE] + seconds)
        self.free[DEVICE] += seconds
        self.busy += seconds
        return self.free[DEVICE]


def step_time(
    units: Sequence[UnitTimes],
    num_micros: int,
    *,
    reduces_each: bool,
    ranks: str = RANKS,
    jobs: list[Job] | None = None,
) -> StepTime:
    """Follow a step of ``num_micros`` micro-batches through the units, in their order.

    Args:
        reduces_each: gradients are summed after each micro-batch; otherwise after the last.
        ranks: the resource that sends and receives.
        jobs: gets what is done in the micro-batches that are followed one by one.
    """
    clocks = _Clocks(ranks, jobs)
    updated = [_update(clocks, number, unit) for number, unit in enumerate(units)]
    followed = min(num_micros, FOLLOWED)
    ends, end = list[dict[str, float]](), 0.0
    for micro in range(followed):
        is_last = micro == followed - 1
        _pass(clocks, units, updated if micro == 0 else None, backward=False)
        end = _pass(clocks, units, None, backward=True, reduces=reduces_each or is_last)
        ends.append(dict(clocks.free))
    total = max(end, clocks.free[DEVICE])
    if total > clocks.free[DEVICE]:
        clocks.waits[RANKS] += total - clocks.free[DEVICE]
    more = num_micros - followed
    if more:
        middle = max(ends[1][who] - ends[0].get(who, 0.0) for who in ends[1])  # of whoever is the slowest
        busy = sum(unit.forward + unit.backward for unit in units)
        total += more * middle
        clocks.busy += more * busy
        waited = sum(clocks.waits.values())
        for who in clocks.waits if waited else ():
            clocks.waits[who] *= 1 + more * max(0.0, middle - busy) / waited
    return StepTime(total, clocks.busy, dict(clocks.waits))


def _update(clocks: _Clocks, number: int, unit: UnitTimes) -> tuple[str, float]:
    """Who makes the unit's parameters new, the last of all, and when they are."""
    jobs = (
        ("update", unit.updated_by, unit.update),
        ("swap", DISK, unit.swap),
        ("copy", HOST_LINK, unit.bring),
        ("publish", clocks.ranks, unit.publish),
    )
    who, end = unit.updated_by, 0.0
    for what, resource, seconds in jobs:
        if seconds:
            who, end = resource, clocks.run((what, number), resource, seconds, end)
    return who, end


def _pass(
    clocks: _Clocks,
    units: Sequence[UnitTimes],
    updated: Sequence[tuple[str, float]] | None,
    *,
    backward: bool,
    reduces: bool = False,
) -> float:
    """One forward or backward; when the last gradient is where it rests. One unit is brought ahead of its use."""
    order = range(len(units) - 1, -1, -1) if backward else range(len(units))
    begun, end = [clocks.free[DEVICE]] * 2, 0.0
    for at in order:
        unit = units[at]
        needed = list[tuple[str, float]]()
        ready = begun[-2]
        if updated is not None:
            needed.append(updated[at])
            ready = max(ready, updated[at][1])
        if unit.read:
            needed.append((DISK, ready := clocks.run(("read", at), DISK, unit.read, ready)))
        if unit.fetch:
            needed.append((HOST_LINK, ready := clocks.run(("copy", at), HOST_LINK, unit.fetch, ready)))
        if gather := (unit.gather_again if backward else unit.gather):
            needed.append((clocks.ranks, clocks.run(("gather", at), clocks.ranks, gather, ready)))
        if unit.leave and backward:
            needed.append((unit.leaves_by, clocks.run(("copy", at), unit.leaves_by, unit.leave, begun[-2])))
        job = ("backward" if backward else "forward", at)
        ends = clocks.compute(job, unit.backward if backward else unit.forward, needed)
        begun.append(ends)
        if not backward:
            clocks.run(("copy", at), unit.leaves_by, unit.leave, ends)
        if backward and reduces:
            summed = clocks.run(("reduce", at), clocks.ranks, unit.reduce, ends)
            end = max(end, clocks.run(("copy", at), HOST_LINK, unit.stow, summed))
    return end
