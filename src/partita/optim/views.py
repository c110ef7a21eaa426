"""The optimizer's side of the parameters: one view of this rank's master weights for each parameter.

Where the optimizer sees parameters whole, a view has the parameter's shape; else it is the flat slice that this rank
owns (nothing, where it owns none). Views take the place of the user's parameters in the optimizer's groups, so
per-group rates, schedulers and hooks stay as they are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.errors import ConfigError
from partita.memory.accelerator import host_of
from partita.memory.tiers import StateMemory
from partita.plan.residence import BLOCK, SPLIT, Tier
from partita.plan.span import Span
from partita.planner.elsewhere import is_elsewhere
from partita.planner.parameters import Holding
from partita.sharding.unit import Member, Segment, Unit


class View:
    """This rank's master weights of one parameter, as the optimizer sees them; ``start`` is its first element's
    place.

    Args:
        span: the parameter's, among the segment's ``master_spans``; None where this rank has no part of it.
    """

    def __init__(self, member: Member, span: Span | None) -> None:
        self.member = member
        self.start = span.start if span else 0
        self.num_elements = span.num_elements if span else 0
        self._offset = span.offset if span else 0
        segment = member.segment
        master = segment.plan.master
        self.lent = master.tier is Tier.DISK or master.encoding == SPLIT  # connected while it is updated
        device = segment.full.device
        where = device if master.tier is Tier.DEVICE else host_of(device)
        self.tensor = nn.Parameter(torch.empty(0, dtype=torch.float32, device=where), requires_grad=True)
        if segment.master is not None and not self.lent:
            self.connect(segment.master.lend().tensor)

    def over(self, flat: Tensor) -> Tensor:
        """This view's elements of a flat state of its segment, as this rank holds it, in the view's shape."""
        return self._shaped(flat, self._offset)

    def slice_of(self, flat: Tensor) -> Tensor:
        """This view's elements of a parameter's flat values ``[numel]``, in the view's shape."""
        return self._shaped(flat, self.start)

    def _shaped(self, flat: Tensor, start: int) -> Tensor:
        part = flat[start : start + self.num_elements]
        return self.member.shaped(part) if self.member.segment.holds_whole_master else part

    def blocks_over(self, flat: Tensor) -> Tensor:
        """As :meth:`over`, of a state with one value per block."""
        first = self._offset // BLOCK
        return flat[first : first + -(-self.num_elements // BLOCK)]

    def connect(self, master: Tensor) -> None:
        """Point the view at the segment's master weights."""
        with torch.no_grad():
            self.tensor.data = self.over(master)

    def disconnect(self) -> None:
        """The master weights are at rest again: the view is as it was made, whatever it was connected to."""
        with torch.no_grad():
            self.tensor.data = self.tensor.new_empty(0, dtype=torch.float32)


class Views:
    """All views, by parameter. ``others`` are those that no unit of this rank holds: they leave the optimizer's groups,
    but for the names of those that another stage holds.
    """

    def __init__(self, units: Sequence[Unit], memory: StateMemory, others: Iterable[Holding] = ()) -> None:
        self._memory = memory
        self._known = {id(member.param) for unit in units for member in unit.members}
        self._known |= {id(holding.param) for holding in others}
        self._elsewhere = {id(h.param): h.fqns[0] for h in others if is_elsewhere(h.param)}
        spans = {span.fqn: span for unit in units for segment in unit.segments for span in segment.master_spans}
        members = [member for unit in units for member in unit.members if member.param.is_floating_point()]
        self._views = {id(member.param): View(member, spans.get(member.fqn)) for member in members}
        # The parameters of each group, also those that this rank has no part of.
        self.names_in_groups = defaultdict[int, list[str]](list)
        self._grouped = set[int]()
        self._by_segment = defaultdict[int, list[View]](list)
        for view in self:
            self._by_segment[id(view.member.segment)].append(view)
        self._by_tensor = {id(view.tensor): view for view in self}

    def __iter__(self) -> Iterator[View]:
        return iter(self._views.values())

    def of_segment(self, segment: Segment) -> list[View]:
        """The views of a segment's parameters."""
        return self._by_segment.get(id(segment), [])

    def is_grouped(self, view: View) -> bool:
        """True if the view's parameter belongs to one of the optimizer's groups."""
        return id(view) in self._grouped

    def of(self, param: Tensor) -> View | None:
        """The view of a parameter, or None if no unit of this rank holds it."""
        return self._views.get(id(param))

    def attach(self, optimizer: Optimizer) -> None:
        """Put views in place of the user's parameters in every group, and cut the state that the optimizer already has.

        A parameter of which this rank owns nothing leaves the group. Called again, it takes up groups added since.

        Raises:
            ConfigError: a group holds a tensor that is no parameter of the model, or one that another group holds.
        """
        if all(id(param) in self._by_tensor for group in optimizer.param_groups for param in group["params"]):
            return
        check_groups(optimizer, self._known | self._by_tensor.keys())
        for number, group in enumerate(optimizer.param_groups):
            params = []
            for param in group["params"]:
                view = self._by_tensor.get(id(param)) or self.of(param)
                if view is None:
                    if (name := self._elsewhere.get(id(param))) is not None:
                        self.names_in_groups[number].append(name)
                    optimizer.state.pop(param, None)
                    continue
                if param is not view.tensor:
                    self._take(number, view)
                    state = optimizer.state.pop(param, None)
                    if state and view.num_elements:
                        optimizer.state[view.tensor] = self._cut(state, view)
                if view.num_elements:
                    params.append(view.tensor)
            group["params"] = params

    def _take(self, number: int, view: View) -> None:
        if id(view) in self._grouped:
            raise ConfigError(f"optimizer group {number} holds '{view.member.fqn}', as an earlier group does")
        self._grouped.add(id(view))
        self.names_in_groups[number].append(view.member.fqn)

    def _cut(self, state: dict[str, object], view: View) -> dict[str, object]:
        """What the view keeps of a state that was made before the engine, of the global parameter or of what this rank
        has of it.
        """
        member, place = view.member, view.member.span.place

        def cut(value: object) -> object:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            if place.is_part and tuple(value.shape) == place.shape:
                value = place.take(value)
            if tuple(value.shape) != tuple(member.shape):
                return value
            return view.slice_of(member.flat(value)).to(view.tensor.device, copy=True)

        return {key: cut(value) for key, value in state.items()}

    def unfreeze(self, segment: Segment) -> None:
        """Give a segment that begins to train master weights, where it has none, and connect its views."""
        if segment.master is not None:
            return
        master = segment.make_master(self._memory)
        for view in self.of_segment(segment):
            if not view.lent:
                view.connect(master.lend().tensor)


def check_groups(optimizer: Optimizer, known: AbstractSet[int]) -> None:
    """Refuse an optimizer on other tensors than those with the ``known`` ids.

    Raises:
        ConfigError: a group holds a tensor that is no parameter of the model.
    """
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise ConfigError(
                    f"optimizer group {number} holds a tensor of shape {tuple(param.shape)} that is no parameter of "
                    "the model; build the optimizer on model.parameters()"
                )
