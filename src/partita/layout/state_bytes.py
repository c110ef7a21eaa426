"""Bytes of model states on a rank, computed from the state table before anything is allocated.

For 16-bit compute and gradients, 32-bit master weights and Adam, P parameters on N ranks, this is 16P, 4P + 12P/N, 2P +
14P/N and 16P/N bytes at stages 0 to 3, up to padding (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020, section 3.1 and figure 1).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from partita.table.planned import PlannedSegment, PlannedUnit
from partita.table.residence import Residence, Tier
from partita.table.span import QUANTUM, Span


@dataclass(frozen=True)
class Moments:
    """The number of values that the optimizer keeps for each element of a parameter.

    Attributes:
        most: the largest number, which most parameters have.
        fewer: the number for each other parameter, by name.
    """

    most: int = 2
    fewer: Mapping[str, int] = field(default_factory=dict)

    def of(self, name: str) -> int:
        """Return the number for a parameter."""
        return self.fewer.get(name, self.most)


ADAM_MOMENTS = Moments()


def model_state_bytes(
    units: Sequence[PlannedUnit], rank: int | None, moments: Moments = ADAM_MOMENTS
) -> dict[tuple[str, str], int]:
    """Return the bytes of each state on ``rank``, by (state, tier), after every trained parameter was updated.

    If ``rank`` is None, return an upper bound for all ranks, so that decisions based on it are the same on all of them.

    The states are ``parameters``, ``gradients``, those of strategies (of compression: ``feedback``, ``momentum`` and
    ``outer``), ``master`` (if it has its own memory) and ``moments``. Padding is included. Gradients that stay in
    ``param.grad`` are counted there, with the size of their parameters. They exist from backward to the step.
    """
    held = Counter[tuple[str, str]]()
    for unit in units:
        for segment in unit.segments:
            for state, residence, num_bytes in _states(segment, rank, moments):
                held[state, residence.tier.value] += num_bytes
    return {key: num_bytes for key, num_bytes in held.items() if num_bytes}


def gradient_bytes_in_place(units: Sequence[PlannedUnit], rank: int) -> int:
    """Return the bytes of the gradients on ``rank`` that stay in ``param.grad``. Each step allocates them."""
    segments = [segment for unit in units for segment in unit.segments if segment.trains and segment.gradients.in_place]
    return sum(_value_bytes(segment, segment.row.grad_arrival, rank) for segment in segments)


def bytes_by_tier(held: Mapping[tuple[str, str], int]) -> Counter[Tier]:
    """Add up the bytes by (state, tier) that :func:`model_state_bytes` returns, for each tier."""
    sums = Counter[Tier]()
    for (_, tier), num_bytes in held.items():
        sums[Tier(tier)] += num_bytes
    return sums


def _states(segment: PlannedSegment, rank: int | None, moments: Moments) -> Iterator[tuple[str, Residence, int]]:
    """Yield (state, residence, bytes) for each state of a segment."""
    row = segment.row
    yield "parameters", row.param_stored, segment.held_bytes(row.param_stored)
    if segment.has_secondary:
        yield "parameters", row.param_between, segment.held_bytes(row.param_between)
    if segment.layout.has_master and not segment.master_is_parameter:
        yield "master", row.master, segment.held_bytes(row.master)
    if not segment.trains:
        return
    if segment.gradients.in_place:
        yield "gradients", row.grad_arrival, _value_bytes(segment, row.grad_arrival, rank)
    elif row.stores_gradients:  # other gradients are in working memory, a few at a time
        yield "gradients", row.grad_between, segment.held_bytes(row.grad_between)
    for kept in (*segment.gradients.sync.kept(segment.gradients), *row.strategies.kept(segment)):
        yield kept.name, kept.residence, kept.num_bytes
    yield "moments", row.moments, moment_bytes(segment, rank, moments)


def moment_bytes(segment: PlannedSegment, rank: int | None, moments: Moments) -> int:
    """Return the bytes of the optimizer's states of a segment on ``rank``; if it is None, an upper bound for all
    ranks.
    """
    residence = segment.row.moments
    num_bytes = residence.encoding.num_bytes
    if rank is None:
        return num_bytes(_most_values(segment, moments))
    spans = segment.spans_of(residence, rank)
    numbers = [moments.of(span.fqn) for span in spans]
    if residence.tier is not Tier.DISK:
        return sum(number * num_bytes(span.num_elements) for number, span in zip(numbers, spans, strict=True))
    if any(numbers):  # a parameter without states has space in each: on disk it looks like one without a first step
        numbers = [number or moments.most for number in numbers]
    if len(set(numbers)) == 1:  # the padding of the shard, or else that between parameters
        return numbers[0] * segment.held_bytes(residence)
    return sum(number * num_bytes(_padded(span)) for number, span in zip(numbers, spans, strict=True))


def _most_values(segment: PlannedSegment, moments: Moments) -> int:
    """Return a bound of the values that the optimizer keeps for a shard: that with the most of them, or more."""
    sizes, least = Counter({moments.most: segment.layout.padded}), 0
    if segment.row.moments.tier is Tier.DISK:
        least = moments.most  # of a parameter without states, as in moment_bytes
    for span in segment.layout.spans:
        sizes[moments.most] -= _padded(span)
        sizes[moments.of(span.fqn) or least] += _padded(span)
    remaining, num_values = segment.row.moments.num_elements(segment.layout.padded, segment.mesh), 0
    for number in sorted(sizes, reverse=True):
        size = min(sizes[number], remaining)
        num_values += number * size
        remaining -= size
    return num_values


def _padded(span: Span) -> int:
    return -(-span.num_elements // QUANTUM) * QUANTUM


def _value_bytes(segment: PlannedSegment, residence: Residence, rank: int | None) -> int:
    """Return the bytes on ``rank`` under ``residence``, without padding. If ``rank`` is None, padding is included."""
    if rank is None:
        return segment.held_bytes(residence)
    return sum(residence.encoding.num_bytes(span.num_elements) for span in segment.spans_of(residence, rank))
