"""The exchanges with owners of parameters, as :mod:`partita.layout.owners` plans them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from partita.comm.group import Group
from partita.layout.blueprint import Blueprint
from partita.layout.owners import FullWork, Owned, Slices, exchanges, find_owners
from partita.layout.traffic import UPDATES
from partita.optim.states import View, Views
from partita.sharding.runtime import Runtime
from partita.table.mesh_shape import TENSOR_AXES
from partita.table.place import Place
from partita.table.purposes import Needs

CONNECTIONS = "gradients"
_MOST_KNOWN = 64


def groups_of(blueprint: Blueprint) -> Needs:
    """Return the groups of the exchanges, with the purpose of their connections."""
    mesh, segments = blueprint.resolved.mesh, [segment for unit in blueprint.units for segment in unit.segments]
    every = dict.fromkeys(segment.row.master.shard_axes for segment in segments)
    axes = dict.fromkeys(mesh.named(each) for own in every for each in (own, (*own, *TENSOR_AXES)))
    return {each: frozenset({CONNECTIONS}) for each in axes if each}


@dataclass(frozen=True)
class _Route:
    """A parameter, or part of it, as it is sent to its owner.

    Attributes:
        view: this rank's slice, which may be empty.
    """

    view: View
    owned: Owned

    @property
    def name(self) -> str:
        return self.view.member.fqn

    def stride(self, place: Place) -> tuple[int, ...]:
        """Return the strides of the local tensor at ``place``."""
        return place.stride if place.is_part or self.owned.is_some else self.view.member.stride

    def in_view(self, position: int) -> slice:
        """Return the range of the view's flat elements on the rank at this position that are worked on."""
        start = self.owned.first - self.view.start + self.owned.pieces[position][1]
        return slice(start, start + self.owned.num_elements(position))

    def assembled(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the flat slices of all ranks of the group into the full parameter."""
        local = dict[Place, Tensor]()
        for position, (place, start, stop) in self.owned.pieces.items():
            if place not in local:
                local[place] = parts[position].new_empty(place.num_elements)
            local[place][start:stop] = parts[position]
        (first, values), *others = local.items()
        if not others and not first.is_part:
            return values.as_strided(self.owned.shape, self.stride(first))
        full = values.new_empty(self.owned.shape)
        for place, values in local.items():
            place.put(values.as_strided(place.sizes, self.stride(place)), full)
        return full

    def cut(self, full: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the flat slices of a full parameter, each with the position of its rank in the group."""
        local = dict[Place, Tensor]()
        for position, (place, start, stop) in self.owned.pieces.items():
            if place not in local:
                own = torch.empty_strided(place.sizes, self.stride(place), dtype=full.dtype, device=full.device)
                for here, there in place.pieces():
                    own[here.slices] = full[there.slices]
                local[place] = own.as_strided((own.numel(),), (1,))
            yield position, local[place][start:stop]


_Rounds = Sequence[tuple[Group, Sequence[_Route]]]


@dataclass
class _Waiting:
    """The flat tensors of a view, of which ``num_parts`` are still to be sent."""

    flat: Sequence[Tensor]
    num_parts: int


class Owners:
    """The owners of parameters, and the exchanges with them. Creating it is a collective.

    Args:
        work: the work of the owners, and what they need for it.

    Raises:
        ConfigError: a parameter is split over ranks in a way that no exchange can join.
    """

    def __init__(self, runtime: Runtime, views: Views, work: FullWork) -> None:
        self._collectives = runtime.collectives
        self._device = runtime.device
        self._num_sent = work.num_sent
        mine = {view.member.fqn: view for view in views if view.member.fqn in work.costs}
        of_tensor_ranks = runtime.collectives.group(TENSOR_AXES).exchange_objects(
            {name: Slices.of(view.member.segment.planned, view.member.span) for name, view in mine.items()},
            "partita.initialize",
        )
        found = find_owners([unit.planned for unit in runtime.units], work, of_tensor_ranks)
        self._routes: dict[str, list[_Route]] = {name: [] for name in mine}
        for owned in chain.from_iterable(found.values()):
            self._routes[owned.span.fqn].append(_Route(mine[owned.span.fqn], owned))
        self._known_rounds = dict[tuple[str, ...], _Rounds]()
        self._names = {id(view.tensor): name for name, view in mine.items()}

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter that the optimizer's ``tensor`` is a slice of; None if it has no owner."""
        return self._names.get(id(tensor))

    def is_owner(self, name: str) -> bool:
        """Return whether this rank is the owner of a parameter."""
        routes = self._routes[name]
        return any(each.owned.owner == self._collectives.group(each.owned.axes).index for each in routes)

    def run(
        self,
        names: Sequence[str],
        send: Callable[[View], Sequence[Tensor]],
        work: Callable[..., Tensor],
        receive: Callable[[View, Tensor, Tensor], None],
    ) -> None:
        """Run ``work`` on full parameters at their owners. A collective: all ranks pass the same names.

        Args:
            send: returns the tensors of this rank's slice of a parameter that its owner needs, in the view's shape.
            work: called at the owner with the parameter's name and the full tensors, of the parameter or of some of its
                matrices; returns one of the same shape.
            receive: called with the results for this rank's slice or a part of it, after the view and its values there,
                of the same shape.
        """
        waiting = dict[str, _Waiting]()
        for group, routes in self._rounds(tuple(names)):
            self._exchange(group, routes, send, work, receive, waiting)
        assert not waiting

    def _rounds(self, names: tuple[str, ...]) -> _Rounds:
        """Return the exchanges for these parameters; most steps have the same ones."""
        if names not in self._known_rounds:
            if len(self._known_rounds) == _MOST_KNOWN:
                self._known_rounds.clear()
            of_owned = {id(route.owned): route for name in names for route in self._routes[name]}
            self._known_rounds[names] = [
                (self._collectives.group(axes), [of_owned[id(each)] for each in owned])
                for axes, owned in exchanges(route.owned for route in of_owned.values())
            ]
        return self._known_rounds[names]

    def _exchange(
        self,
        group: Group,
        routes: Sequence[_Route],
        send: Callable[[View], Sequence[Tensor]],
        work: Callable[..., Tensor],
        receive: Callable[[View, Tensor, Tensor], None],
        waiting: dict[str, _Waiting],
    ) -> None:
        owned = [route for route in routes if route.owned.owner == group.index]
        by_owner = [[route for route in routes if route.owned.owner == owner] for owner in range(group.size)]
        num_sent = self._num_sent
        lengths = [[r.owned.num_elements(rank) for r in owned for _ in range(num_sent)] for rank in range(group.size)]
        own = [[r for r in mine if r.owned.num_elements(group.index)] for mine in by_owner]
        leaving = [
            self._joined([flat[r.in_view(group.index)] for r in mine for flat in self._sent(r, send, waiting)])
            for mine in own
        ]
        arrived = group.all_to_all(leaving, [(sum(each),) for each in lengths], UPDATES, CONNECTIONS)
        parts = [part.split(each) for part, each in zip(arrived, lengths, strict=True)]
        results: list[list[Tensor]] = [[] for _ in range(group.size)]
        for number, route in enumerate(owned):
            places = range(number * num_sent, (number + 1) * num_sent)
            full = [route.assembled([each[place] for each in parts]) for place in places]
            for position, part in route.cut(work(route.name, *full)):
                results[position].append(part)
        returned = group.all_to_all(
            [self._joined(result) for result in results],
            [(sum(r.owned.num_elements(group.index) for r in mine),) for mine in own],
            UPDATES,
            CONNECTIONS,
        )
        for mine, values in zip(own, returned, strict=True):
            for route, part in zip(mine, values.split([r.owned.num_elements(group.index) for r in mine]), strict=True):
                _receive(route, route.in_view(group.index), part.to(route.view.tensor.device), receive)

    def _sent(
        self, route: _Route, send: Callable[[View], Sequence[Tensor]], waiting: dict[str, _Waiting]
    ) -> Sequence[Tensor]:
        """Return the flat tensors of a view; they are kept until the last of its parts has left."""
        index = self._collectives.group(route.owned.axes).index
        if (kept := waiting.get(route.name)) is None:
            num_parts = sum(each.owned.num_elements(index) > 0 for each in self._routes[route.name])
            kept = waiting[route.name] = _Waiting([_flat(route.view, values) for values in send(route.view)], num_parts)
        kept.num_parts -= 1
        if not kept.num_parts:
            del waiting[route.name]
        return kept.flat

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the flat parts one after the other, on the device."""
        if not parts:
            return torch.empty(0, dtype=torch.float32, device=self._device)
        return torch.cat([part.to(self._device) for part in parts])


def _flat(view: View, values: Tensor) -> Tensor:
    return view.member.flat(values) if view.member.segment.has_full_master else values


def _receive(route: _Route, where: slice, values: Tensor, receive: Callable[[View, Tensor, Tensor], None]) -> None:
    view = route.view
    if not view.member.segment.has_full_master:
        receive(view, view.tensor.detach()[where], values)
    elif route.owned.is_some:
        receive(view, _flat(view, view.tensor.detach())[where], values)
    else:
        receive(view, view.tensor.detach(), view.member.shaped(values))
