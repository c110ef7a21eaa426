"""Owners: each parameter has one rank that works on all of it, although ranks store slices.

An all-to-all brings the slices of each parameter to its owner, which works on the full parameter, and a second one
brings the results back. With N ranks and P elements in these parameters, a rank sends about ``2 P (N - 1) / N**2``
elements, or less where owners hold much of their parameters. Slices of tensor ranks take the same routes.

Owners are assigned by the cost of their work, the largest first, always to the rank with the least work so far (longest
processing time first: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.comm.group import Group
from partita.errors import ConfigError
from partita.layout.blueprint import Blueprint
from partita.optim.states import View, Views
from partita.sharding.runtime import Runtime
from partita.table.mesh_shape import TENSOR_AXES, MeshShape
from partita.table.place import Place
from partita.table.planned import PlannedSegment
from partita.table.purposes import Needs

# The most elements that a rank exchanges at once: the working memory of an exchange is about four times as many bytes,
# for each of sent and received values.
ROUND_ELEMENTS = 2**26
PURPOSE, CONNECTIONS = "updates", "gradients"

# Places of a parameter's slices, by its name: that of a tensor rank's local tensor, and the range of its elements that
# each of the ranks with shards has.
_Slices = dict[str, tuple[Place, tuple[tuple[int, int], ...]]]


def groups_of(blueprint: Blueprint) -> Needs:
    """Return the groups of the exchanges, with the purpose of their connections."""
    mesh, segments = blueprint.resolved.mesh, [segment for unit in blueprint.units for segment in unit.segments]
    axes = dict.fromkeys(mesh.named(each) for s in segments for each in (_axes(s), (*_axes(s), *TENSOR_AXES)))
    return {each: frozenset({CONNECTIONS}) for each in axes if each}


def assign(costs: Sequence[float], held: Sequence[Sequence[int]], loads: list[float]) -> list[int]:
    """Return the owner of each of the parameters with these costs, and add the costs to the ranks' ``loads``.

    Among parameters of equal cost, owners are exchanged so that ranks own what they hold most of.

    Args:
        held: the elements of each parameter that each rank has.
    """
    owners, alike = [0] * len(costs), dict[float, list[int]]()
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        owners[number] = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        loads[owners[number]] += costs[number]
        alike.setdefault(costs[number], []).append(number)
    for numbers in alike.values():
        places = Counter(owners[number] for number in numbers)
        pairs = [(-held[number][rank], number, rank) for number in numbers for rank in places]
        waiting = set(numbers)
        for _, number, rank in sorted(pairs):
            if number in waiting and places[rank]:
                waiting.remove(number)
                places[rank] -= 1
                owners[number] = rank
    return owners


@dataclass(frozen=True)
class _Route:
    """The way of one parameter's slices to its owner.

    Attributes:
        view: this rank's slice, which may be empty.
        axes: of the ranks that have slices.
        shape: of the full parameter.
        slices: for each rank of the group, the place of its local tensor, the strides of that tensor, and the range
            of its elements that the rank has.
        owner: the owner's position in the group.
    """

    view: View
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    slices: tuple[tuple[Place, tuple[int, ...], int, int], ...]
    owner: int = -1

    def assembled(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the full parameter, of the ranks' flat slices."""
        local = dict[Place, Tensor]()
        for (place, _, start, stop), part in zip(self.slices, parts, strict=True):
            if place not in local:
                local[place] = part.new_empty(place.num_elements)
            local[place][start:stop] = part
        strides = {place: stride for place, stride, _, _ in self.slices}
        (first, values), *others = local.items()
        if not others and not first.is_part:
            return values.as_strided(self.shape, strides[first])
        full = values.new_empty(self.shape)
        for place, values in local.items():
            place.put(values.as_strided(place.sizes, strides[place]), full)
        return full

    def cut(self, full: Tensor) -> Iterator[Tensor]:
        """Yield each rank's flat slice of a full parameter."""
        local = dict[Place, Tensor]()
        for place, stride, start, stop in self.slices:
            if place not in local:
                own = torch.empty_strided(place.sizes, stride, dtype=full.dtype, device=full.device)
                for here, there in place.pieces():
                    own[here.slices] = full[there.slices]
                local[place] = own.as_strided((own.numel(),), (1,))
            yield local[place][start:stop]


class Owners:
    """The owners of parameters, and the exchanges with them.

    Args:
        costs: the cost of the work on each parameter, by name, in any unit.

    Raises:
        ConfigError: a parameter is split over ranks in a way that no exchange can join.
    """

    def __init__(self, runtime: Runtime, views: Views, costs: Mapping[str, float]) -> None:
        self._collectives = runtime.collectives
        self._device = runtime.device
        mesh, rank = runtime.collectives.mesh.shape, runtime.collectives.mesh.rank
        mine = {view.member.fqn: view for view in views if view.member.fqn in costs}
        of_tensor_ranks: list[_Slices] = runtime.collectives.group(TENSOR_AXES).exchange_objects(
            {name: _slices(view, mesh) for name, view in mine.items()}, "partita.initialize"
        )
        loads = dict[tuple[str, ...], list[float]]()
        self._routes = dict[str, _Route]()
        for names in _rounds(mine, mesh):
            by_axes = dict[tuple[str, ...], list[str]]()
            for name in names:
                by_axes.setdefault(_group_axes(mine[name], mesh), []).append(name)
            for axes, chosen in by_axes.items():
                routes = [_route(mine[name], axes, of_tensor_ranks, mesh, rank) for name in chosen]
                held = [[stop - start for _, _, start, stop in route.slices] for route in routes]
                owners = assign(
                    [costs[name] for name in chosen], held, loads.setdefault(axes, [0.0] * mesh.group_size(axes))
                )
                for name, route, owner in zip(chosen, routes, owners, strict=True):
                    self._routes[name] = replace(route, owner=owner)
        self.loads = loads
        self._mesh = mesh
        self._names = {id(view.tensor): name for name, view in mine.items()}
        self.names = tuple(mine)

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter that the optimizer's ``tensor`` is a slice of; None if it has no owner."""
        return self._names.get(id(tensor))

    def is_owner(self, name: str) -> bool:
        """Return whether this rank is the owner of a parameter."""
        route = self._routes[name]
        return route.owner == self._collectives.group(route.axes).index

    def sent_elements(self, names: Sequence[str], num_sent: int = 1) -> int:
        """Return the number of elements that this rank sends to owners, and returns as one, in a :meth:`run`."""
        total = 0
        for route in (self._routes[name] for name in names):
            own = route.view.num_elements
            is_owner = route.owner == self._collectives.group(route.axes).index
            total += sum(stop - start for _, _, start, stop in route.slices) - own if is_owner else num_sent * own
        return total

    def run(
        self,
        names: Sequence[str],
        send: Callable[[View], Sequence[Tensor]],
        work: Callable[..., Tensor],
        receive: Callable[[View, Tensor], None],
        num_sent: int = 1,
    ) -> None:
        """Run ``work`` on full parameters at their owners. A collective: all ranks pass the same names.

        Args:
            send: returns ``num_sent`` tensors of this rank's slice of a parameter, in the view's shape.
            work: called at the owner with the parameter's name and the full tensors; returns one of the same shape.
            receive: called with the results for this rank's slice, in the view's shape and on its device.
        """
        for chosen in _rounds({name: self._routes[name].view for name in names}, self._mesh):
            by_axes = dict[tuple[str, ...], list[_Route]]()
            for name in chosen:
                by_axes.setdefault(self._routes[name].axes, []).append(self._routes[name])
            for axes, routes in by_axes.items():
                self._exchange(self._collectives.group(axes), routes, send, work, receive, num_sent)

    def _exchange(
        self,
        group: Group,
        routes: Sequence[_Route],
        send: Callable[[View], Sequence[Tensor]],
        work: Callable[..., Tensor],
        receive: Callable[[View, Tensor], None],
        num_sent: int,
    ) -> None:
        owned = [route for route in routes if route.owner == group.index]
        by_owner = [[route for route in routes if route.owner == owner] for owner in range(group.size)]
        lengths = [[_length(route, rank) for route in owned for _ in range(num_sent)] for rank in range(group.size)]
        leaving = [
            self._joined([_flat(r.view, values) for r in mine if r.view.num_elements for values in send(r.view)])
            for mine in by_owner
        ]
        arrived = group.all_to_all(leaving, [(sum(each),) for each in lengths], PURPOSE, CONNECTIONS)
        parts = [part.split(each) for part, each in zip(arrived, lengths, strict=True)]
        results: list[list[Tensor]] = [[] for _ in range(group.size)]
        for number, route in enumerate(owned):
            places = range(number * num_sent, (number + 1) * num_sent)
            full = [route.assembled([each[place] for each in parts]) for place in places]
            for result, part in zip(results, route.cut(work(route.view.member.fqn, *full)), strict=True):
                result.append(part)
        returned = group.all_to_all(
            [self._joined(result) for result in results],
            [(sum(route.view.num_elements for route in mine),) for mine in by_owner],
            PURPOSE,
            CONNECTIONS,
        )
        for mine, values in zip(by_owner, returned, strict=True):
            for route, part in zip(mine, values.split([r.view.num_elements for r in mine]), strict=True):
                if part.numel():
                    receive(route.view, _shaped(route.view, part.to(route.view.tensor.device)))

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the flat parts one after the other, on the device."""
        if not parts:
            return torch.empty(0, dtype=torch.float32, device=self._device)
        return torch.cat([part.to(self._device) for part in parts])


def _axes(segment: PlannedSegment) -> tuple[str, ...]:
    """Return the axes of the ranks with different shards of a segment's master weights."""
    return segment.row.master.shard_axes


def _is_split(view: View) -> bool:
    """Return whether other tensor ranks have other parts of each matrix of the parameter.

    Ranks along ``distinct`` axes have matrices of their own (experts): these are complete.

    Raises:
        ConfigError: they have other parts of each matrix.
    """
    place, distinct = view.member.span.place, view.member.segment.layout.copies.distinct
    if place.is_part and distinct and (len(place.shape) < 3 or place.dim > 0):
        raise ConfigError(
            f"'{view.member.fqn}' is split along dim {place.dim} over {', '.join(distinct)}, and its optimizer needs "
            "full matrices: use an elementwise optimizer such as AdamW for it"
        )
    return place.is_part and not distinct


def _group_axes(view: View, mesh: MeshShape) -> tuple[str, ...]:
    axes = _axes(view.member.segment.planned)
    return mesh.named((*axes, *TENSOR_AXES) if _is_split(view) else axes)


def _slices(view: View, mesh: MeshShape) -> tuple[Place, tuple[tuple[int, int], ...]]:
    """Return the place of this rank's local tensor, and the range of its elements that each rank with a shard has."""
    segment, name = view.member.segment, view.member.fqn
    num_shards = segment.planned.num_shards(segment.plan.master)
    size = segment.layout.padded // num_shards
    found = list[tuple[int, int]]()
    for shard in range(num_shards):
        spans = segment.layout.cut(shard * size, size)
        found.append(next(((span.start, span.stop) for span in spans if span.fqn == name), (0, 0)))
    return view.member.span.place, tuple(found)


def _route(view: View, axes: tuple[str, ...], of_tensor_ranks: Sequence[_Slices], mesh: MeshShape, rank: int) -> _Route:
    """Return the route of a parameter that has no owner yet."""
    segment, member = view.member.segment, view.member
    ranks = next(group for group in mesh.groups(axes) if rank in group)
    slices, shape = list[tuple[Place, tuple[int, ...], int, int]](), member.span.place.shape
    for each in ranks:
        place, ranges = of_tensor_ranks[mesh.coordinate(each, "tensor")][member.fqn]
        start, stop = ranges[mesh.group_index(each, _axes(segment.planned))]
        if not _is_split(view):
            place, shape = Place(place.sizes), place.sizes
        slices.append((place, place.stride if place.is_part else member.stride, start, stop))
    return _Route(view, axes, tuple(shape), tuple(slices))


def _rounds(views: Mapping[str, View], mesh: MeshShape) -> Iterator[list[str]]:
    """Yield the names in rounds of a limited number of elements per rank: units in the model's order."""
    chosen, num_elements = list[str](), 0
    for name, view in views.items():
        size = mesh.group_size(_group_axes(view, mesh))
        num = view.member.span.place.num_elements // size
        if chosen and num_elements + num > ROUND_ELEMENTS:
            yield chosen
            chosen, num_elements = [], 0
        chosen.append(name)
        num_elements += num
    if chosen:
        yield chosen


def _length(route: _Route, rank: int) -> int:
    _, _, start, stop = route.slices[rank]
    return stop - start


def _flat(view: View, values: Tensor) -> Tensor:
    return view.member.flat(values) if view.member.segment.has_full_master else values


def _shaped(view: View, values: Tensor) -> Tensor:
    return view.member.shaped(values) if view.member.segment.has_full_master else values
