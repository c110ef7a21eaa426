"""The predicted timeline of a training step on one rank: overlapping jobs, and the waits of the device.

A resource runs one job at a time: the device, the links to other ranks and to the host, the host's cores, the disk. The
updates of a step run in the order of the next forward, which waits for the update of each unit. On average, a step
takes as long as that forward, all other forwards and backwards, and the last reduction.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

DEVICE, RANKS, HOST_LINK, HOST, DISK = "device", "ranks", "host link", "host", "disk"
# Number of micro-batches that are simulated: the first, one that represents all in the middle, and the last.
SIMULATED_MICROS = 3


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of each job of one unit.

    Attributes:
        forward: on the device.
        backward: on the device.
        gather: all-gather from other ranks, before forward.
        gather_again: all-gather before backward; 0 if the unit stays unsharded in between.
        fetch: copy from the host, before forward and before backward.
        read: read from disk, before forward and before backward.
        reduce: reduction of the gradient over the ranks, after a backward.
        complete: communication of reduced gradients before the update: sums over copies, all-gathers.
        offload_gradient: copy of the reduced gradient to the host.
        swap_gradient: a read or a write of the reduced gradient on disk.
        update: the optimizer's update, by the resource ``updated_by``.
        swap: reads and writes on disk for the update, including the read of the gradient.
        upload: copy of this rank's updated parameters to the device.
        publish: communication of the updated parameters to all ranks.
        offload_input: transfer of the unit's offloaded inputs by the resource ``offload_input_by`` after forward, and
            again before backward.
    """

    forward: float
    backward: float
    gather: float = 0.0
    gather_again: float = 0.0
    fetch: float = 0.0
    read: float = 0.0
    reduce: float = 0.0
    offload_gradient: float = 0.0
    swap_gradient: float = 0.0
    complete: float = 0.0
    update: float = 0.0
    updated_by: str = DEVICE
    swap: float = 0.0
    upload: float = 0.0
    publish: float = 0.0
    offload_input: float = 0.0
    offload_input_by: str = HOST_LINK

    def plus(self, forward: float, backward: float, offload_input: float = 0.0) -> "UnitTimes":
        """Return the times with these seconds added."""
        added = {"forward": forward, "backward": backward, "offload_input": offload_input}
        return replace(self, **{name: getattr(self, name) + seconds for name, seconds in added.items()})


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: in total, of computation on the device, and of the device's waits by resource."""

    total_s: float
    compute_s: float
    waits_s: dict[str, float]

    def in_pipeline(self, waiting_per_work: float) -> "StepTime":
        """Return the time of a pipeline stage, given its waits for other stages relative to its own time."""
        bubble = self.total_s * waiting_per_work
        return StepTime(self.total_s + bubble, self.compute_s, {**self.waits_s, "pipeline": bubble})


@dataclass(frozen=True)
class Job:
    """A job in the timeline: ``what`` a resource does for the unit of number ``unit``.

    Seconds count from the step's start.
    """

    what: str
    unit: int
    resource: str
    start_s: float
    stop_s: float


class _Clocks:
    """The time at which each resource becomes free, and the waits of the device. Every job is added to ``jobs``."""

    def __init__(self, ranks: str = RANKS, jobs: list[Job] | None = None) -> None:
        self.ranks = ranks
        self._jobs = jobs
        self.free = defaultdict[str, float](float)
        self.waits = defaultdict[str, float](float)
        self.busy = 0.0

    def run(self, job: tuple[str, int], resource: str, seconds: float, after: float = 0.0) -> float:
        """Run a job (what, number of the unit) on a resource, not before the time ``after``; return its end."""
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
        """Run a job on the device when all inputs in ``needed``, (resource, arrival), are complete; return its end."""
        resource_name, when = max(needed, key=lambda each: each[1], default=(DEVICE, 0.0))
        if when > self.free[DEVICE]:
            self.waits[resource_name] += when - self.free[DEVICE]
            self._note((f"wait for {resource_name}", job[1]), DEVICE, self.free[DEVICE], when)
            self.free[DEVICE] = when
        self._note(job, DEVICE, self.free[DEVICE], self.free[DEVICE] + seconds)
        self.free[DEVICE] += seconds
        self.busy += seconds
        return self.free[DEVICE]


def simulate_step(
    units: Sequence[UnitTimes],
    num_micros: int,
    *,
    reduces_each: bool,
    ranks: str = RANKS,
    jobs: list[Job] | None = None,
) -> StepTime:
    """Simulate a step of ``num_micros`` micro-batches through the units, in their order.

    Args:
        reduces_each: gradients are reduced after each micro-batch instead of after the last one.
        ranks: the resource that sends and receives.
        jobs: the jobs of the simulated micro-batches are appended to it.
    """
    clocks = _Clocks(ranks, jobs)
    updated = [_update(clocks, number, unit) for number, unit in enumerate(units)]
    num_simulated = min(num_micros, SIMULATED_MICROS)
    ends, last, end = list[dict[str, float]](), RANKS, 0.0
    for micro in range(num_simulated):
        is_last = micro == num_simulated - 1
        _pass(clocks, units, updated if micro == 0 else None, backward=False)
        # The first reduction writes the gradient, later ones read it, add to it, and write it.
        num_swaps = 1 if micro == 0 or not reduces_each else 2
        last, end = _pass(clocks, units, None, backward=True, num_swaps=num_swaps if reduces_each or is_last else None)
        ends.append(dict(clocks.free))
    total = max(end, clocks.free[DEVICE])
    if total > clocks.free[DEVICE]:
        clocks.waits[last] += total - clocks.free[DEVICE]
    more = num_micros - num_simulated
    if more:
        # One micro-batch takes as long as its slowest resource.
        middle = max(ends[1][resource_name] - ends[0].get(resource_name, 0.0) for resource_name in ends[1])
        busy = sum(unit.forward + unit.backward for unit in units)
        total += more * middle
        clocks.busy += more * busy
        waited = sum(clocks.waits.values())
        for resource_name in clocks.waits if waited else ():
            clocks.waits[resource_name] *= 1 + more * max(0.0, middle - busy) / waited
    return StepTime(total, clocks.busy, dict(clocks.waits))


def _update(clocks: _Clocks, number: int, unit: UnitTimes) -> tuple[str, float]:
    """Run the jobs of a unit's update; return the resource and the end of the last one."""
    jobs = (
        ("reduce", clocks.ranks, unit.complete),
        ("update", unit.updated_by, unit.update),
        ("swap", DISK, unit.swap),
        ("copy", HOST_LINK, unit.upload),
        ("publish", clocks.ranks, unit.publish),
    )
    return _run_in_turn(clocks, number, jobs, (unit.updated_by, 0.0))


def _reduce(clocks: _Clocks, number: int, unit: UnitTimes, num_swaps: int, after: float) -> tuple[str, float]:
    """Reduce and store a unit's gradient, not before ``after``; return the resource and the end of the last job."""
    jobs = (
        ("reduce", clocks.ranks, unit.reduce),
        ("copy", HOST_LINK, unit.offload_gradient),
        ("swap", DISK, num_swaps * unit.swap_gradient),
    )
    return _run_in_turn(clocks, number, jobs, (RANKS, after))


def _run_in_turn(
    clocks: _Clocks, number: int, jobs: Sequence[tuple[str, str, float]], last: tuple[str, float]
) -> tuple[str, float]:
    """Run the jobs (what, resource, seconds) of a unit one after the other, and after ``last``, the end of another job.

    Return the resource and the end of the last one.
    """
    for what, resource, seconds in jobs:
        if seconds:
            last = resource, clocks.run((what, number), resource, seconds, last[1])
    return last


def _pass(
    clocks: _Clocks,
    units: Sequence[UnitTimes],
    updated: Sequence[tuple[str, float]] | None,
    *,
    backward: bool,
    num_swaps: int | None = None,
) -> tuple[str, float]:
    """Run one forward or backward; return the resource and the time at which the last gradient is stored.

    Transfers for a unit start with the computation of the previous unit, or later.

    Args:
        num_swaps: number of reads and writes by which the reduction of a gradient on disk stores it; None: this
            backward does not reduce gradients.
    """
    order = range(len(units) - 1, -1, -1) if backward else range(len(units))
    begun, last = [clocks.free[DEVICE]] * 2, (RANKS, 0.0)
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
        if unit.offload_input and backward:
            needed.append(
                (unit.offload_input_by, clocks.run(("copy", at), unit.offload_input_by, unit.offload_input, begun[-2]))
            )
        job = ("backward" if backward else "forward", at)
        ends = clocks.compute(job, unit.backward if backward else unit.forward, needed)
        begun.append(ends)
        if not backward:
            clocks.run(("copy", at), unit.offload_input_by, unit.offload_input, ends)
        if num_swaps is not None:
            last = max(last, _reduce(clocks, at, unit, num_swaps, ends), key=lambda each: each[1])
    return last
