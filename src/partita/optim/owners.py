"""The exchanges with owners of parameters, as :mod:`partita.layout.owners` plans them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

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
_KNOWN_ROUNDS = 64


def groups_of(blueprint: Blueprint) -> Needs:
    """Return the groups of the exchanges, with the purpose of their connections."""
    mesh, segments = blueprint.resolved.mesh, [segment for unit in blueprint.units for segment in unit.segments]
    every = dict.fromkeys(segment.row.master.shard_axes for segment in segments)
    axes = dict.fromkeys(mesh.named(each) for own in every for each in (own, (*own, *TENSOR_AXES)))
    return {each: frozenset({CONNECTIONS}) for each in axes if each}


@dataclass(frozen=True)
class _Route:
    """The way of one parameter's slices to its owner.

    Attributes:
        view: this rank's slice, which may be empty.
    """

    view: View
    owned: Owned

    @property
    def name(self) -> str:
        return self.view.member.fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """The full parameter's shape."""
        place = self.view.member.span.place
        return place.shape if self.owned.is_split else place.sizes

    def stride(self, place: Place) -> tuple[int, ...]:
        """Return the strides of the local tensor at ``place``."""
        return place.stride if place.is_part else self.view.member.stride

    def assembled(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the full parameter, of the flat slices of all ranks of the group."""
        local = dict[Place, Tensor]()
        for position, (place, start, stop) in self.owned.pieces.items():
            if place not in local:
                local[place] = parts[position].new_empty(place.num_elements)
            local[place][start:stop] = parts[position]
        (first, values), *others = local.items()
        if not others and not first.is_part:
            return values.as_strided(self.shape, self.stride(first))
        full = values.new_empty(self.shape)
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
        found = find_owners([unit.planned for unit in runtime.units], work.costs, of_tensor_ranks)
        every = {owned.span.fqn: owned for of_segment in found.values() for owned in of_segment}
        self._routes = {name: _Route(view, every[name]) for name, view in mine.items()}
        self._rounds = lru_cache(_KNOWN_ROUNDS)(self._find_rounds)  # most steps have the same parameters
        self._names = {id(view.tensor): name for name, view in mine.items()}

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter that the optimizer's ``tensor`` is a slice of; None if it has no owner."""
        return self._names.get(id(tensor))

    def is_owner(self, name: str) -> bool:
        """Return whether this rank is the owner of a parameter."""
        owned = self._routes[name].owned
        return owned.owner == self._collectives.group(owned.axes).index

    def run(
        self,
        names: Sequence[str],
        send: Callable[[View], Sequence[Tensor]],
        work: Callable[..., Tensor],
        receive: Callable[[View, Tensor], None],
    ) -> None:
        """Run ``work`` on full parameters at their owners. A collective: all ranks pass the same names.

        Args:
            send: returns the tensors of this rank's slice of a parameter that its owner needs, in the view's shape.
            work: called at the owner with the parameter's name and the full tensors; returns one of the same shape.
            receive: called with the results for this rank's slice, in the view's shape and on its device.
        """
        for group, routes in self._rounds(tuple(names)):
            self._exchange(group, routes, send, work, receive)

    def _find_rounds(self, names: tuple[str, ...]) -> list[tuple[Group, list[_Route]]]:
        """Return the exchanges for these parameters."""
        of_owned = {id(route.owned): route for route in map(self._routes.__getitem__, names)}
        rounds = exchanges(route.owned for route in of_owned.values())
        return [(self._collectives.group(axes), [of_owned[id(each)] for each in owned]) for axes, owned in rounds]

    def _exchange(
        self,
        group: Group,
        routes: Sequence[_Route],
        send: Callable[[View], Sequence[Tensor]],
        work: Callable[..., Tensor],
        receive: Callable[[View, Tensor], None],
    ) -> None:
        owned = [route for route in routes if route.owned.owner == group.index]
        by_owner = [[route for route in routes if route.owned.owner == owner] for owner in range(group.size)]
        num_sent = self._num_sent
        lengths = [[r.owned.num_elements(rank) for r in owned for _ in range(num_sent)] for rank in range(group.size)]
        leaving = [
            self._joined([_flat(r.view, values) for r in mine if r.view.num_elements for values in send(r.view)])
            for mine in by_owner
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
            [(sum(route.view.num_elements for route in mine),) for mine in by_owner],
            UPDATES,
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


def _flat(view: View, values: Tensor) -> Tensor:
    return view.member.flat(values) if view.member.segment.has_full_master else values


def _shaped(view: View, values: Tensor) -> Tensor:
    return view.member.shaped(values) if view.member.segment.has_full_master else values
