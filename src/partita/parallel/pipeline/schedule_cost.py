"""Simulation of a pipeline schedule: its cost, and a check that it can run."""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache

from partita.errors import PartitaError
from partita.parallel.pipeline.schedule import Action, Schedule, Shape, Work, make_schedule

# Times of work for one micro-batch, in units of a forward. BACKWARD includes the weight gradients.
BACKWARD, WEIGHTS = 2.0, 1.0


@dataclass(frozen=True)
class ScheduleCost:
    """The cost of a schedule.

    Attributes:
        bubble: the fraction of a batch's time in which ranks are idle.
        max_kept_forwards: for each rank, the largest number of forwards (of one chunk each) whose activations it keeps.
    """

    bubble: float
    max_kept_forwards: tuple[int, ...]


# A rank's work in order: each action, with its start and its end in units of a forward.
Spans = list[tuple[Action, float, float]]


def simulate(schedule: Schedule, backward: float = BACKWARD) -> ScheduleCost:
    """Simulate a schedule in which each rank does its work in order, as early as possible.

    Args:
        backward: the time of a backward with its weight gradients, in units of a forward. Weight gradients take as long
            as a forward: they need the same products.

    Raises:
        PartitaError: the schedule has a deadlock, or a rank receives in another order than the sender sends.
    """
    shape = schedule.shape
    end = max(row[-1][2] for row in spans(schedule, backward))
    _check_edges(schedule)
    busy = shape.micros * (1 + backward)
    return ScheduleCost(1 - busy / end, tuple(_max_kept(schedule, rank) for rank in range(shape.ranks)))


def spans(schedule: Schedule, backward: float = BACKWARD) -> list[Spans]:
    """Return when each rank does its work, if every rank works in order and as early as possible.

    Args:
        backward: as for :func:`simulate`.

    Raises:
        PartitaError: the schedule has a deadlock.
    """
    shape, last = schedule.shape, schedule.shape.num_stages - 1
    if schedule.splits_weights:
        backward -= WEIGHTS
    cost = {Work.FORWARD: 1.0, Work.BACKWARD: backward, Work.WEIGHTS: WEIGHTS}
    done = dict[tuple[Work, int, int], float]()
    rows: list[Spans] = [[] for _ in range(shape.ranks)]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            row = rows[rank]
            while len(row) < len(order):
                action = order[len(row)]
                stage = shape.stage(rank, action.chunk)
                needed = _needed(action, stage, last)
                if any(need not in done for need in needed):
                    break
                free = row[-1][2] if row else 0.0
                start = max([free, *(done[need] for need in needed)])
                row.append((action, start, start + cost[action.work] / shape.chunks))
                done[action.work, stage, action.micro] = row[-1][2]
                moved = True
    for rank, order in enumerate(schedule.orders):
        if len(rows[rank]) < len(order):
            raise PartitaError(
                f"the schedule {schedule.name} of {shape} cannot be run: rank {rank} would wait forever before "
                f"{order[len(rows[rank])]}\n{schedule}"
            )
    return rows


def _needed(action: Action, number: int, last: int) -> list[tuple[Work, int, int]]:
    """Return the work that an action of stage ``number`` depends on: (work, stage, micro-batch)."""
    micro = action.micro
    if action.work is Work.FORWARD:
        return [(Work.FORWARD, number - 1, micro)] if number else []
    if action.work is Work.WEIGHTS:
        return [(Work.BACKWARD, number, micro)]
    after = [(Work.BACKWARD, number + 1, micro)] if number < last else []
    return [(Work.FORWARD, number, micro), *after]


def _check_edges(schedule: Schedule) -> None:
    """Check that a rank receives messages from another rank, in one direction, in the order in which they are sent.

    Raises:
        PartitaError: the orders differ.
    """
    shape, last = schedule.shape, schedule.shape.num_stages - 1
    sent, received = (
        defaultdict[tuple[Work, int, int], list[tuple[int, int]]](list),
        defaultdict[tuple[Work, int, int], list[tuple[int, int]]](list),
    )
    for rank, order in enumerate(schedule.orders):
        for action in order:
            stage, step = shape.stage(rank, action.chunk), 1 if action.work is Work.FORWARD else -1
            if action.work is Work.WEIGHTS:
                continue
            if 0 <= stage + step <= last:
                sent[action.work, rank, (rank + step) % shape.ranks].append((stage + step, action.micro))
            if 0 <= stage - step <= last:
                received[action.work, (rank - step) % shape.ranks, rank].append((stage, action.micro))
    for edge, messages in sent.items():
        if messages != received[edge]:
            raise PartitaError(
                f"the schedule {schedule.name} of {shape} cannot be run: rank {edge[1]} sends to rank {edge[2]} in "
                f"another order than rank {edge[2]} receives\n{schedule}"
            )


def _max_kept(schedule: Schedule, rank: int) -> int:
    kept = most = 0
    for action in schedule.orders[rank]:
        kept += (action.work is Work.FORWARD) - (action.work is schedule.last_work)
        most = max(most, kept)
    return most


def waiting_per_work(name: str, shape: Shape, backward: float = BACKWARD) -> float:
    """Return the time that a rank waits for other stages in a batch, relative to the time that it works.

    The schedules repeat after a few micro-batches, so long batches wait for as long as short ones.

    Args:
        name: ``parallel.schedule``.
        backward: as for :func:`simulate`.
    """
    most = 3 * shape.ranks
    short = shape
    if shape.micros > most and (shape.chunks == 1 or shape.micros % shape.ranks == 0):
        short = replace(shape, micros=most)
    bubble = _bubble(name, short, backward)
    return bubble / (1 - bubble) * short.micros / shape.micros


@cache
def _bubble(name: str, shape: Shape, backward: float) -> float:
    return simulate(make_schedule(name, shape), backward).bubble
