"""The optimizer's side of the parameters: one view of this rank's master weights for each parameter.

Where the optimizer sees parameters whole, a view has the parameter's shape; else it is the flat slice that this rank
owns (nothing, where it owns none). Views take the place of the user's parameters in the optimizer's groups, so
per-group rates, schedulers and hooks stay as they are.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.memory.ledger import Ledger
from partita.sharding.unit import Member, Segment, Unit


class View:
    """This rank's master weights of one parameter, as the optimizer sees them; ``start`` is its first element's
    place.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        segment = member.segment
        span = next((s for s in segment.master_spans if s.fqn == member.fqn), None)
        self.start = span.start if span else 0
        self.num_elements = span.num_elements if span else 0
        self._offset = span.offset if span else 0
        self.tensor = nn.Parameter(torch.empty(0, device=segment.full.device), requires_grad=True)
        if segment.master is not None:
            self.connect()

    def connect(self) -> None:
        """Point the view at the segment's master weights."""
        segment = self.member.segment
        assert segment.master is not None
        flat = segment.master[self._offset : self._offset + self.num_elements]
        whole = segment.holds_whole_master
        with torch.no_grad():
            self.tensor.data = self.member.shaped(flat) if whole else flat

    @property
    def connected(self) -> bool:
        return self.tensor.numel() == self.num_elements

    def slice_of(self, flat: Tensor) -> Tensor:
        """This view's elements of a parameter's flat values ``[numel]``, in the view's shape."""
        part = flat[self.start : self.start + self.num_elements]
        return self.member.shaped(part) if self.member.segment.holds_whole_master else part


class Views:
    """All views, by parameter."""

    def __init__(self, units: Sequence[Unit], ledger: Ledger) -> None:
        self._ledger = ledger
        self._known = {id(member.param) for unit in units for member in unit.members}
        self._views = {id(m.param): View(m) for unit in units for m in unit.members if m.param.is_floating_point()}
        self._grouped = set[
            int
        ]()  # views of parameters that a group holds, also of those that this rank has no part of
        self._by_tensor = {id(view.tensor): view for view in self._views.values()}

    def __iter__(self) -> Iterator[View]:
        return iter(self._views.values())

    def of(self, param: Tensor) -> View | None:
        return self._views.get(id(param))

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
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

    def _cut(self, state: dict[str, object], view: View) -> dict[str, object]:
        numel = view.member.span.num_elements
        return {
            key: view.slice_of(view.member.flat(value)).clone()
            if isinstance(value, Tensor) and value.numel() == numel and value.dim() == len(view.member.shape) > 0
            else value
            for key, value in state.items()
        }

    def unfreeze(self, segment: Segment) -> None:
        """Give a segment that begins to train master weights, where it has none, and connect its views."""
        if segment.master is not None:
            return
        segment.make_master(self._ledger)
        for view in self:
            if view.member.segment is segment:
                view.connect()


def check_groups(optimizer: torch.optim.Optimizer, known: AbstractSet[int]) -> None:
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


def moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state tensors (the step counters left out)."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step"
    )
