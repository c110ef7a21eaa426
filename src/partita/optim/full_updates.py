"""Updates of full parameters, for optimizers that cannot run on slices: Adafactor, SOAP, LAMB, torch's Muon.

Each parameter has an owner (:mod:`partita.optim.owners`), and the optimizer's groups have, on each rank, the parameters
that the rank owns. These have memory only during their update: an all-to-all brings weights and gradients, the user's
optimizer steps, and a second all-to-all returns the weights. The optimizer's states stay at the owner. With N ranks and
P elements, a rank sends about ``3 P (N - 1) / N**2`` elements.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.layout.owners import FullWork
from partita.optim.owners import Owners
from partita.optim.states import View, Views
from partita.sharding.parameter import Member
from partita.sharding.runtime import Runtime
from partita.table.residence import Tier

# Weights and gradients.
NUM_SENT = 2

CopyCounters = Callable[[], None]


class FullUpdates:
    """Runs an optimizer on full parameters at their owners. Creating it is a collective.

    Args:
        name: the optimizer's class, for errors.

    Raises:
        ConfigError: a parameter cannot be joined, or its states are on disk.
    """

    def __init__(self, runtime: Runtime, views: Views, name: str) -> None:
        for view in views:
            _check(view, name)
        sizes = {view.member.fqn: view.member.span.place.num_elements for view in views}
        self._views = {view.member.fqn: view for view in views if sizes[view.member.fqn]}
        costs = {fqn: float(sizes[fqn]) for fqn in self._views}
        self.work = FullWork(costs, NUM_SENT)
        self.owners = Owners(runtime, views, self.work)
        for fqn, view in self._views.items():
            view.is_full_at_owner = True
            view.in_groups = _empty(view) if self.owners.is_owner(fqn) else None

    def run(self, members: Sequence[Member], step: Callable[[AbstractSet[int]], CopyCounters]) -> CopyCounters:
        """Run the optimizer on full parameters, each at its owner. A collective.

        Args:
            members: the parameters to update, the same on all ranks.
            step: runs the optimizer on those of its parameters that have one of these ids.

        Returns: the last result of ``step``, which takes up what it counted.
        """
        copy_counters = step(frozenset())  # counts also on ranks without parameters

        def work(name: str, weights: Tensor, grad: Tensor) -> Tensor:
            nonlocal copy_counters
            param = self._views[name].in_groups
            assert param is not None
            param.data = weights.to(param.device)
            param.grad = grad.to(param.device)
            try:
                copy_counters = step({id(param)})
                return param.data
            finally:
                param.grad = None
                param.data = param.new_empty(0)

        self.owners.run(
            [member.fqn for member in members if member.fqn in self._views], _weights_and_grad, work, _store
        )
        return copy_counters


def _check(view: View, name: str) -> None:
    place, distinct = view.member.span.place, view.member.segment.layout.copies.distinct
    needs = f"optimizer {name} needs full parameters"
    if place.is_part and distinct:
        raise ConfigError(
            f"{needs}, and '{view.member.fqn}' is split over {', '.join(distinct)}: use an elementwise optimizer such "
            "as AdamW"
        )
    if view.member.segment.plan.moments.tier is Tier.DISK:
        raise ConfigError(
            f"{needs}, whose states cannot be on disk: set zero.offload.optimizer to host, or use an elementwise "
            "optimizer such as AdamW"
        )


def _empty(view: View) -> nn.Parameter:
    return nn.Parameter(view.tensor.new_empty(0), requires_grad=True)


def _weights_and_grad(view: View) -> tuple[Tensor, Tensor]:
    weights, grad = view.tensor.detach(), view.tensor.grad
    return weights, torch.zeros_like(weights) if grad is None else grad


@torch.no_grad()
def _store(view: View, stored: Tensor, weights: Tensor) -> None:
    stored.copy_(weights)
