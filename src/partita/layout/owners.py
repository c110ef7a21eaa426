"""Owners: each parameter has one rank that works on all of it at an update, although ranks store slices.

An all-to-all brings the slices of each parameter to its owner, which works on the full parameter, and a second one
brings the results back. With N ranks and P elements in these parameters, a rank sends about ``2 P (N - 1) / N**2``
elements, or less where owners hold much of their parameters. Slices of tensor ranks take the same routes.

Owners are assigned by the cost of their work, the largest first, always to the rank with the least work so far (longest
processing time first: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, groupby, islice

from partita.errors import ConfigError
from partita.layout.operations import Operation
from partita.table.mesh_shape import TENSOR_AXES, MeshShape
from partita.table.place import Place
from partita.table.planned import PlannedSegment, PlannedUnit, reduction_order
from partita.table.planned_bucket import share_buckets
from partita.table.span import Span

# The most elements that a rank exchanges at once: the working memory of an exchange is about four times as many bytes,
# for each of sent and received values.
ROUND_ELEMENTS = 2**26


@dataclass(frozen=True)
class FullWork:
    """The work of an optimizer on full parameters at their owners.

    Attributes:
        costs: the cost of the work on each parameter, by name, in any unit; no other parameters have owners.
        num_sent: the number of tensors that each slice sends to the owner (a momentum; weights and gradients).
    """

    costs: Mapping[str, float] = field(default_factory=dict)
    num_sent: int = 1


NO_WORK = FullWork()


@dataclass(frozen=True)
class Slices:
    """The slices of one parameter on a tensor rank.

    Attributes:
        place: of the tensor rank's local tensor.
        ranges: the range of its elements ``(start, stop)`` in each shard that has some, by the shard's index.
    """

    place: Place
    ranges: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, segment: PlannedSegment, span: Span) -> "Slices":
        """Return the slices of a parameter in the shards of a segment's master weights."""
        size = segment.layout.padded // segment.num_shards(segment.row.master)
        found = dict[int, tuple[int, int]]()
        for shard in range(span.offset // size, -(-(span.offset + span.num_elements) // size)):
            start, stop = shard * size - span.offset, (shard + 1) * size - span.offset
            found[shard] = max(start, 0), min(stop, span.num_elements)
        return cls(span.place, found)


@dataclass(frozen=True)
class Owned:
    """A parameter with an owner.

    Attributes:
        axes: the axes of the ranks that have slices of it.
        pieces: the place of the local tensor, and the range of its elements, by the position of a rank in that group;
            ranks without elements are left out.
        owner: the owner's position.
    """

    segment: PlannedSegment
    span: Span
    axes: tuple[str, ...]
    pieces: Mapping[int, tuple[Place, int, int]]
    owner: int = -1

    @property
    def is_split(self) -> bool:
        """True if tensor ranks have different parts of each matrix of the parameter."""
        return _is_split(self.segment, self.span)

    @property
    def elements_per_rank(self) -> int:
        """The average number of elements that a rank has."""
        return self.span.place.num_elements // self.segment.mesh.group_size(self.axes)

    def num_elements(self, position: int) -> int:
        """Return the number of elements that the rank at this position of the group has."""
        _, start, stop = self.pieces.get(position, (None, 0, 0))
        return stop - start


def find_owners(
    parameters: Iterable[tuple[PlannedSegment, Span]],
    costs: Mapping[str, float],
    of_tensor_ranks: Sequence[Mapping[str, Slices]] = (),
) -> list[Owned]:
    """Return the parameters that have a cost, with their owners.

    Args:
        parameters: in the model's order, each with its segment.
        of_tensor_ranks: for each tensor rank, its slices by the parameter's name; empty: like those of this rank.

    Raises:
        ConfigError: a parameter is split over ranks in a way that no exchange can join.
    """
    found = [_unowned(*each, of_tensor_ranks) for each in parameters if each[1].fqn in costs]
    loads = dict[tuple[str, ...], list[float]]()
    owners = dict[int, int]()
    for axes, owned in exchanges(found):
        group_loads = loads.setdefault(axes, [0.0] * owned[0].segment.mesh.group_size(axes))
        held = [each.num_elements for each in owned]
        chosen = assign([costs[each.span.fqn] for each in owned], held, group_loads)
        owners |= {id(each): owner for each, owner in zip(owned, chosen, strict=True)}
    return [replace(each, owner=owners[id(each)]) for each in found]


def assign(costs: Sequence[float], held: Sequence[Callable[[int], int]], loads: list[float]) -> list[int]:
    """Return the owner of each of the parameters with these costs, and add the costs to the ranks' ``loads``.

    Among parameters of equal cost, owners are exchanged so that ranks own what they hold most of.

    Args:
        held: for each parameter, returns the number of elements that a rank has.
    """
    owners, alike = [0] * len(costs), dict[float, list[int]]()
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        load, rank = least[0]
        owners[number], loads[rank] = rank, load + costs[number]
        heapq.heapreplace(least, (loads[rank], rank))
        alike.setdefault(costs[number], []).append(number)
    for numbers in alike.values():
        places = Counter(owners[number] for number in numbers)
        pairs = [(-held[number](rank), number, rank) for number in numbers for rank in places]
        waiting = set(numbers)
        for _, number, rank in sorted(pairs):
            if number in waiting and places[rank]:
                waiting.remove(number)
                places[rank] -= 1
                owners[number] = rank
    return owners


def exchanges(owned: Iterable[Owned]) -> Iterator[tuple[tuple[str, ...], list[Owned]]]:
    """Yield the parameters of each exchange with its axes: rounds of a limited number of elements per rank."""
    rounds, num_elements = [list[Owned]()], 0
    for each in owned:
        if rounds[-1] and num_elements + each.elements_per_rank > ROUND_ELEMENTS:
            rounds.append([])
            num_elements = 0
        rounds[-1].append(each)
        num_elements += each.elements_per_rank
    for chosen in rounds:
        by_axes = dict[tuple[str, ...], list[Owned]]()
        for each in chosen:
            by_axes.setdefault(each.axes, []).append(each)
        yield from by_axes.items()


class Exchanges:
    """The exchanges with owners in a step in which every trained parameter gets a gradient.

    Attributes:
        cost: the cost of the owners' work, one exchange after the other, each at the owner with the most.

    Raises:
        ConfigError: as :func:`find_owners`.
    """

    def __init__(self, units: Sequence[PlannedUnit], work: FullWork) -> None:
        self.cost = 0.0
        self._sent = list[tuple[tuple[str, ...], MeshShape, list[int]]]()
        segments = {(at, place): s for at, unit in enumerate(units) for place, s in enumerate(unit.segments)}
        parameters = [(segment, span) for segment in segments.values() for span in segment.layout.spans]
        owned = iter(find_owners(parameters, work.costs))
        of_segment = {
            key: [next(owned) for span in segment.layout.spans if span.fqn in work.costs]
            for key, segment in segments.items()
        }
        for keys in _updates(units):
            for axes, chosen in exchanges(each for key in keys for each in of_segment[key]):
                self._add(axes, chosen, work)

    def operations(self, rank: int) -> list[Operation]:
        """Return the collectives of a rank."""
        return [Operation("all_to_all", axes, sent[mesh.group_index(rank, axes)]) for axes, mesh, sent in self._sent]

    @property
    def longest_operations(self) -> list[Operation]:
        """The collectives, each of the rank that sends most in it."""
        return [Operation("all_to_all", axes, max(sent)) for axes, _, sent in self._sent]

    @property
    def most_operations(self) -> list[Operation]:
        """The collectives of the rank that sends most in all."""
        ranks = self._sent[0][1].num_ranks if self._sent else 0
        every = (self.operations(rank) for rank in range(ranks))
        return max(every, key=lambda found: sum(each.num_bytes for each in found), default=[])

    def _add(self, axes: tuple[str, ...], owned: Sequence[Owned], work: FullWork) -> None:
        """Add an exchange: the bytes that each rank of the group sends to owners, and returns as one."""
        mesh = owned[0].segment.mesh
        num_ranks = mesh.group_size(axes)
        sent, returned, loads = [0] * num_ranks, [0] * num_ranks, [0.0] * num_ranks
        for each in owned:
            itemsize = each.segment.row.master.encoding.itemsize
            loads[each.owner] += work.costs[each.span.fqn]
            for position in each.pieces:
                if position != each.owner:
                    sent[position] += itemsize * work.num_sent * each.num_elements(position)
                    returned[each.owner] += itemsize * each.num_elements(position)
        self.cost += max(loads)
        if axes:
            self._sent += [(axes, mesh, sent), (axes, mesh, returned)]


def _updates(units: Sequence[PlannedUnit]) -> Iterator[list[tuple[int, int]]]:
    """Yield the trained segments of each update, by the positions of unit and segment.

    One update is of all units on the device. Each other unit has its own, and each unit's part of a bucket if the
    optimizer runs in backward.
    """
    trained = [[(at, place) for place, s in enumerate(unit.segments) if s.trains] for at, unit in enumerate(units)]
    if units[0].row.stores_gradients:
        on_device = [unit.row.updates_on_device for unit in units]
        yield [key for keys, inline in zip(trained, on_device, strict=True) if inline for key in keys]
        yield from (keys for keys, inline in zip(trained, on_device, strict=True) if not inline)
        return
    coming = chain.from_iterable(reversed(trained))
    for bucket in share_buckets(reduction_order(units)):
        of_bucket = list(islice(coming, len(bucket.segments)))
        yield from (list(part) for _, part in groupby(of_bucket, lambda key: key[0]))


@cache
def _positions(mesh: MeshShape, axes: tuple[str, ...], shard_axes: tuple[str, ...]) -> Sequence[tuple[int, int]]:
    """Return the tensor rank, and the index of the shard, at each position of a group."""
    group = mesh.groups(axes)[0]
    return [(mesh.coordinate(rank, "tensor"), mesh.group_index(rank, shard_axes)) for rank in group]


def _unowned(segment: PlannedSegment, span: Span, of_tensor_ranks: Sequence[Mapping[str, Slices]]) -> Owned:
    """Return a parameter that has no owner yet."""
    mesh, is_split = segment.mesh, _is_split(segment, span)
    shard_axes = segment.row.master.shard_axes
    axes = mesh.named((*shard_axes, *TENSOR_AXES) if is_split else shard_axes)
    own, pieces = Slices.of(segment, span), dict[int, tuple[Place, int, int]]()
    for position, (tensor_rank, shard) in enumerate(_positions(mesh, axes, shard_axes)):
        slices = of_tensor_ranks[tensor_rank][span.fqn] if of_tensor_ranks and is_split else own
        if bounds := slices.ranges.get(shard):
            pieces[position] = slices.place if is_split else Place(slices.place.sizes), *bounds
    return Owned(segment, span, axes, pieces)


def _is_split(segment: PlannedSegment, span: Span) -> bool:
    """Return whether other tensor ranks have other parts of each matrix of the parameter.

    Ranks along ``distinct`` axes have matrices of their own (experts): these are complete.

    Raises:
        ConfigError: they have other parts of each matrix.
    """
    place, distinct = span.place, segment.layout.copies.distinct
    if place.is_part and distinct and (len(place.shape) < 3 or place.dim > 0):
        raise ConfigError(
            f"'{span.fqn}' is split along dim {place.dim} over {', '.join(distinct)}, and its optimizer needs "
            "full matrices: use an elementwise optimizer such as AdamW for it"
        )
    return place.is_part and not distinct
