"""A simulation as rows for a table, and as a dictionary."""

from collections.abc import Iterator, Sequence
from typing import Any

from partita.prediction.simulate.cluster import Simulation
from partita.prediction.simulate.rank import Collective, RankReport
from partita.table.residence import Tier

# Maximal length of a series of calls whose repetitions are found: all-gathers with their unit numbers, and a reduction.
LONGEST_CYCLE = 6

Row = tuple[str, ...]


def bytes_rows(simulation: Simulation) -> Iterator[tuple[Row, list[int]]]:
    """Yield (rank, coordinates) of each role, with its bytes.

    These are the bytes on the device, on the host, on disk, those of activations among them, and those sent in a step.
    """
    for rank in simulation.ranks:
        found = rank.bytes_by_tier
        held = [found.get(tier, 0) for tier in Tier]
        yield (
            (str(rank.role.rank), rank.role.coordinates),
            [*held, rank.activation_bytes, rank.traffic.sent_bytes()],
        )


def state_rows(rank: RankReport) -> Iterator[tuple[Row, int]]:
    """Yield (state, tier) and the peak bytes of each, the largest first."""
    peak = {**rank.memory.peak, ("activations", Tier.DEVICE.value): rank.activation_bytes}
    for key in sorted((key for key in peak if peak[key]), key=lambda key: -peak[key]):
        yield key, peak[key]


def sequence(calls: Sequence[Collective]) -> Iterator[tuple[int, tuple[Collective, ...]]]:
    """Yield the calls in order as (repetitions, calls): a series of calls that repeats is yielded once."""
    at = 0
    while at < len(calls):
        length, times = max(
            ((length, _times(calls, at, length)) for length in range(1, LONGEST_CYCLE + 1)),
            key=lambda found: (found[0] * found[1] if found[1] > 1 else 1, -found[0]),
        )
        length = length if times > 1 else 1
        yield times, tuple(calls[at : at + length])
        at += length * times


def _times(calls: Sequence[Collective], at: int, length: int) -> int:
    """Return how many times the ``length`` calls from ``at`` on occur in a row."""
    cycle, times = calls[at : at + length], 1
    while len(cycle) == length and calls[at + times * length : at + (times + 1) * length] == cycle:
        times += 1
    return times


def plain(simulation: Simulation) -> dict[str, Any]:
    """Return the simulation as numbers, strings, lists and mappings."""
    mesh = simulation.resolved.mesh
    axes = {axis: mesh.size(axis) for axis in ("pipeline", "data", "sequence", "tensor")}
    return {"mesh": axes, "ranks": [_rank_dict(rank) for rank in simulation.ranks]}


def _rank_dict(rank: RankReport) -> dict[str, Any]:
    traffic = [
        {**_key_dict(key.collective, key.axes, key.purpose), "calls": count.calls, "sent_bytes": count.sent_bytes}
        for key, count in rank.traffic.rows.items()
    ]
    calls = [
        {**_key_dict(call.key.collective, call.key.axes, call.key.purpose), "sent_bytes": call.sent_bytes}
        for call in rank.collectives
    ]
    return {
        "rank": rank.role.rank,
        "place": rank.role.coordinates,
        "bytes": {tier.value: num for tier, num in rank.bytes_by_tier.items()},
        "activation_bytes": rank.activation_bytes,
        "held": [{"state": state, "tier": tier, "bytes": num} for (state, tier), num in rank.memory.held.items()],
        "planned": [{"state": state, "tier": tier, "bytes": num} for (state, tier), num in rank.planned_bytes.items()],
        "traffic": traffic,
        "collectives": calls,
    }


def _key_dict(collective: str, axes: Sequence[str], purpose: str) -> dict[str, Any]:
    return {"collective": collective, "axes": list(axes), "purpose": purpose}
