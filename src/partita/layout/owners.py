"""Owners: each parameter has one rank that works on all of it at an update, although ranks store slices.

An all-to-all brings the slices of each parameter to its owner, which works on the full parameter, and a second one
brings the results back. With N ranks and P elements in these parameters, a rank sends about ``2 P (N - 1) / N**2``
elements, or less where owners hold much of their parameters. Slices of tensor ranks take the same routes.

Parameters are exchanged in rounds of similar cost, so that all owners work in each round. Owners are assigned by the
cost of their work, the largest first, always to the rank with the least work so far (longest processing time first:
Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, groupby, islice

from partita.errors import ConfigError
from partita.layout.operations import Operation
from partita.table.mesh_shape import TENSOR_AXES, MeshShape
from partita.table.place import Place
from partita.table.planned import PlannedSegment, PlannedUnit, reduction_order
from partita.table.planned_bucket import share_buckets
from partita.table.span import Span

# The most elements that a rank exchanges at once, if that is enough for a parameter on every rank.
ROUND_ELEMENTS = 2**26


@dataclass(frozen=True)
class FullWork:
    """The work of an optimizer on full parameters at their owners.

    Attributes:
        costs: the cost of the work on each parameter, by name, in any unit; no other parameters, and none without
            elements, have owners.
        num_sent: the number of tensors that each slice sends to the owner (a momentum; weights and gradients).
        stacks: for parameters ``[..., a, b]`` of independent matrices, by name, the number of matrices that may have an
            owner of their own, and are worked on together. Their memory is in the order of the dims.
    """

    costs: Mapping[str, float] = field(default_factory=dict)
    num_sent: int = 1
    stacks: Mapping[str, int] = field(default_factory=dict)


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


@dataclass(eq=False)
class Owned:
    """A parameter, or part of a stack of matrices, and its owner.

    Attributes:
        shape: of what the owner works on.
        first: the index of its first element in the parameter.
        axes: the axes of the ranks that have slices of it.
        pieces: the place of the local tensor, and the range of its elements, by the position of a rank in that group;
            ranks without elements are left out.
        owner: the owner's position.
    """

    segment: PlannedSegment
    span: Span
    shape: tuple[int, ...]
    first: int
    cost: float
    axes: tuple[str, ...]
    pieces: Mapping[int, tuple[Place, int, int]]
    owner: int = -1

    @property
    def is_some(self) -> bool:
        """True if it consists of some matrices of a parameter."""
        return self.total < math.prod(self.span.place.sizes)

    @cached_property
    def total(self) -> int:
        """The number of elements of the full parameter."""
        return sum(stop - start for _, start, stop in self.pieces.values())

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the group."""
        return self.segment.mesh.group_size(self.axes)

    def num_elements(self, position: int) -> int:
        """Return the number of elements that the rank at this position of the group has."""
        _, start, stop = self.pieces.get(position, (None, 0, 0))
        return stop - start


# The owners of the parameters of each segment, by the positions of the unit and of the segment.
OwnedBySegment = Mapping[tuple[int, int], Sequence[Owned]]


def find_owners(
    units: Sequence[PlannedUnit], work: FullWork, of_tensor_ranks: Sequence[Mapping[str, Slices]] = ()
) -> OwnedBySegment:
    """Assign an owner to each parameter that has a cost.

    Args:
        of_tensor_ranks: for each tensor rank, its slices by the parameter's name; empty: like those of this rank.

    Raises:
        ConfigError: a parameter is split over ranks in a way that no exchange can join.
    """
    segments = {(at, place): s for at, unit in enumerate(units) for place, s in enumerate(unit.segments)}
    found = {
        key: [
            each
            for span in segment.layout.spans
            if span.fqn in work.costs
            for each in _unowned(segment, span, work, of_tensor_ranks)
        ]
        for key, segment in segments.items()
    }
    updates = list(_updates(units))
    updates.append([key for key, segment in segments.items() if not segment.trains])  # they may train later
    loads = dict[tuple[str, ...], list[float]]()
    for keys in updates:
        for axes, owned in exchanges(each for key in keys for each in found[key]):
            assign(owned, loads.setdefault(axes, [0.0] * owned[0].num_ranks))
    return found


def assign(owned: Sequence[Owned], loads: list[float]) -> None:
    """Choose the owners of the parameters of a round, and add their costs to the ranks' ``loads`` in all rounds.

    Among parameters of equal cost, owners are exchanged so that ranks own what they hold most of.
    """
    least = [(0.0, load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    alike = dict[float, list[Owned]]()
    for each in sorted(owned, key=lambda each: -each.cost):
        in_round, _, each.owner = least[0]
        loads[each.owner] += each.cost
        heapq.heapreplace(least, (in_round + each.cost, loads[each.owner], each.owner))
        alike.setdefault(each.cost, []).append(each)
    for same in alike.values():
        places = Counter(each.owner for each in same)
        pairs = [(-each.num_elements(rank), number, rank) for number, each in enumerate(same) for rank in places]
        waiting = set(range(len(same)))
        for _, number, rank in sorted(pairs):
            if number in waiting and places[rank]:
                waiting.remove(number)
                places[rank] -= 1
                same[number].owner = rank


def exchanges(owned: Iterable[Owned]) -> Iterator[tuple[tuple[str, ...], list[Owned]]]:
    """Group parameters into exchanges, in the order of falling cost; yield the axes and the parameters of each.

    A round is limited to :data:`ROUND_ELEMENTS` per rank, or those of the largest parameter: both of what ranks own, on
    average, and twice as many of what a rank sends. It may send more, so that every rank can own a parameter.
    """
    by_axes = dict[tuple[str, ...], list[Owned]]()
    for each in owned:
        by_axes.setdefault(each.axes, []).append(each)
    for axes, of_group in by_axes.items():
        num_ranks, chosen, size = of_group[0].num_ranks, list[Owned](), _RoundSize()
        for each in sorted(of_group, key=lambda each: -each.cost):
            size.add(each)
            limit = max(ROUND_ELEMENTS, size.largest)
            sends_much = len(chosen) >= num_ranks and max(size.sent.values()) > 2 * limit
            if chosen and (size.total > num_ranks * limit or sends_much):
                kept = _kept(chosen, num_ranks)
                yield axes, chosen[:kept]
                chosen, size = chosen[kept:], _RoundSize()
                for other in (*chosen, each):
                    size.add(other)
            chosen.append(each)
        yield axes, chosen


@dataclass
class _RoundSize:
    """The elements of a round: of all parameters, of the largest, and of those that each rank has."""

    total: int = 0
    largest: int = 0
    sent: Counter[int] = field(default_factory=Counter)

    def add(self, owned: Owned) -> None:
        self.total += owned.total
        self.largest = max(self.largest, owned.total)
        for position in owned.pieces:
            self.sent[position] += owned.num_elements(position)


def _kept(chosen: Sequence[Owned], num_ranks: int) -> int:
    """Return the number of parameters that stay in a round: all, or a multiple of the number of ranks, whichever leaves
    owners less idle. The others go into the next round.
    """
    multiple = len(chosen) // num_ranks * num_ranks
    return max((len(chosen), multiple), key=lambda num: _utilization(chosen[:num], num_ranks))


def _utilization(chosen: Sequence[Owned], num_ranks: int) -> float:
    """Return the mean load of the owners in a round, relative to the largest."""
    loads = [0.0] * num_ranks
    for each in chosen:
        heapq.heapreplace(loads, loads[0] + each.cost)
    return sum(loads) / (num_ranks * max(loads)) if chosen else 0.0


class Exchanges:
    """The exchanges with owners in a step in which every trained parameter gets a gradient.

    Attributes:
        cost: the cost of the owners' work, one exchange after the other, each at the owner with the most.
        mean_cost: the cost of all work, evenly over the ranks.
        largest_cost: the largest cost of one owner's work on one parameter or part of it.

    Raises:
        ConfigError: as :func:`find_owners`.
    """

    def __init__(self, units: Sequence[PlannedUnit], work: FullWork) -> None:
        self.cost = self.mean_cost = self.largest_cost = 0.0
        self._sent = list[tuple[tuple[str, ...], MeshShape, list[int]]]()
        of_segment = find_owners(units, work)
        for keys in _updates(units):
            for axes, owned in exchanges(each for key in keys for each in of_segment[key]):
                self._add(axes, owned, work.num_sent)

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

    def _add(self, axes: tuple[str, ...], owned: Sequence[Owned], num_sent: int) -> None:
        """Add an exchange: the bytes that each rank of the group sends to owners, and returns as one."""
        num_ranks = owned[0].num_ranks
        sent, returned, loads = [0] * num_ranks, [0] * num_ranks, [0.0] * num_ranks
        for each in owned:
            itemsize = each.segment.row.master.encoding.itemsize
            loads[each.owner] += each.cost
            self.mean_cost += each.cost / num_ranks
            self.largest_cost = max(self.largest_cost, each.cost)
            for position in each.pieces:
                if position != each.owner:
                    sent[position] += itemsize * num_sent * each.num_elements(position)
                    returned[each.owner] += itemsize * each.num_elements(position)
        self.cost += max(loads)
        if axes:
            mesh = owned[0].segment.mesh
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


def _unowned(
    segment: PlannedSegment, span: Span, work: FullWork, of_tensor_ranks: Sequence[Mapping[str, Slices]]
) -> Iterator[Owned]:
    """Yield a parameter, or the parts of it that may have different owners. The owners are not assigned yet."""
    mesh, is_split, place = segment.mesh, _is_split(segment, span), span.place
    shard_axes = segment.row.master.shard_axes
    axes = mesh.named((*shard_axes, *TENSOR_AXES) if is_split else shard_axes)
    own, pieces = Slices.of(segment, span), dict[int, tuple[Place, int, int]]()
    for position, (tensor_rank, shard) in enumerate(_positions(mesh, axes, shard_axes)):
        slices = of_tensor_ranks[tensor_rank][span.fqn] if of_tensor_ranks and is_split else own
        if bounds := slices.ranges.get(shard):
            pieces[position] = slices.place if is_split else Place(slices.place.sizes), *bounds
    cost = work.costs[span.fqn]
    if is_split:
        yield Owned(segment, span, place.shape, 0, cost, axes, pieces)
        return
    cost /= math.prod(place.shape)
    num_matrices, matrix = math.prod(place.sizes[:-2]), place.sizes[-2:]
    num = work.stacks.get(span.fqn, num_matrices)
    if num >= num_matrices:
        yield Owned(segment, span, place.sizes, 0, cost * place.num_elements, axes, pieces)
        return
    for at in range(0, num_matrices, num):
        shape = min(num, num_matrices - at), *matrix
        first, size = at * math.prod(matrix), math.prod(shape)
        ranges = {key: (max(start - first, 0), min(stop - first, size)) for key, (_, start, stop) in pieces.items()}
        some = {key: (Place(shape), start, stop) for key, (start, stop) in ranges.items() if start < stop}
        yield Owned(segment, span, shape, first, cost * size, axes, some)


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
