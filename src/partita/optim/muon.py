"""Muon: matrices are updated by their orthogonalized momentum, all other parameters by AdamW.

The momentum is updated on each rank's slices. Complete matrices are orthogonalized by their owners
(:mod:`partita.optim.owners`), so results do not depend on how parameters are sharded.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is Scalable
for LLM Training", 2025. Momentum and its Nesterov form are those of ``torch.optim.Muon``.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from partita.config.schema import Optimizer as OptimizerSection
from partita.errors import PartitaError
from partita.layout.blueprint import Blueprint
from partita.layout.owners import Exchanges, FullWork
from partita.memory.accelerator import is_host
from partita.optim.extension import CollectiveOptimizer
from partita.optim.matrices import MatrixForm, describe, find_matrices
from partita.optim.newton_schulz import STACK, orthogonalize, scale_of
from partita.optim.owners import Owners, groups_of
from partita.optim.states import View, Views
from partita.optim.traits import runs_on_slices
from partita.sharding.runtime import Runtime
from partita.table.purposes import Needs

MOMENTUM = "momentum_buffer"
_log = logging.getLogger("partita")
# The imbalance of work that is logged.
_UNEVEN = 1.5
NO_FORMS: Mapping[int, MatrixForm] = {}
_DEFAULTS = {"matrices": False, "lr": 1e-3, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@runs_on_slices
class Muon(CollectiveOptimizer):
    """Muon for groups with ``matrices``, AdamW for the others.

    Attributes:
        owners: the owners of matrices; None before :meth:`connect`.

    Args:
        groups: parameters, which AdamW updates, or groups of them; those with ``matrices`` have all settings of
            :class:`partita.config.schema.Muon`.
        forms: the form of each parameter that consists of matrices, by the parameter's id.
        settings: of groups that have none of their own.
    """

    def __init__(self, groups: Iterable[Any], forms: Mapping[int, MatrixForm] = NO_FORMS, **settings: Any) -> None:
        super().__init__(list(groups), {**_DEFAULTS, **settings})
        self._forms = {id(param): forms.get(id(param)) for group in self.param_groups for param in group["params"]}
        self._forms_by_name = dict[str, MatrixForm]()
        self._group_numbers = dict[str, int]()
        self.work = FullWork()
        self.owners: Owners | None = None

    @classmethod
    def of(cls, params: Iterable[Any], section: OptimizerSection, model: nn.Module | None = None) -> "Muon":
        """Return the optimizer of a config.

        Args:
            params: parameters, or groups of them with a learning rate or weight decay of their own.
            model: has the parameters. Without it, all of them are updated by AdamW.

        Raises:
            ConfigError: a rule of the config does not apply.
        """
        own = section.muon
        forms = {} if model is None else find_matrices(model, own.rules)
        shared: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay}
        of_matrices = {
            **shared,
            **{key: getattr(own, key) for key in ("momentum", "nesterov", "steps", "coefficients", "scale", "dtype")},
            "matrices": True,
        }
        adamw_lr = section.lr if own.adamw_lr is None else own.adamw_lr
        of_others = {**shared, "lr": adamw_lr, "betas": section.betas, "eps": section.eps, "matrices": False}
        params = list(params)
        given = params if params and isinstance(params[0], dict) else [{"params": params}]
        groups = []
        for group in given:
            for defaults in (of_matrices, of_others):
                chosen = [param for param in group["params"] if (id(param) in forms) == defaults["matrices"]]
                if chosen:
                    groups.append({**defaults, **group, "params": chosen})
        made = cls(groups, forms)
        made.notices = () if model is None else describe(model, forms)
        return made

    def groups(self, blueprint: Blueprint) -> Needs:
        return groups_of(blueprint)

    def connect(self, runtime: Runtime, views: Views) -> None:
        """Assign the owners of matrices. Collective.

        Raises:
            ConfigError: a matrix is split over ranks in a way that no exchange can join.
        """
        for number, group in enumerate(self.param_groups):
            if group["matrices"]:
                self._group_numbers |= dict.fromkeys(views.names_in_groups[number], number)
        mine = [v for v in views if v.member.fqn in self._group_numbers and v.member.span.place.num_elements]
        self._forms_by_name = {v.member.fqn: self._forms[id(v.member.param)] or MatrixForm() for v in mine}
        steps = {name: self.param_groups[number]["steps"] for name, number in self._group_numbers.items()}
        members = [view.member for view in mine]
        self.work = _full_work(
            (m.fqn, self._forms_by_name[m.fqn], m.span.place.shape, m.stride, steps[m.fqn]) for m in members
        )
        self.owners = Owners(runtime, views, self.work)
        exchanges = Exchanges([unit.planned for unit in runtime.units], self.work)
        if exchanges.cost > _UNEVEN * exchanges.mean_cost and runtime.collectives.all_ranks.index == 0:
            _log.info(
                "muon: an update takes %.1f times as long as with even work: only %d parameters are matrices",
                exchanges.cost / exchanges.mean_cost,
                len(self.work.costs),
            )

    def full_work(self, model: nn.Module) -> FullWork:
        of_matrices = [group for group in self.param_groups if group["matrices"]]
        steps = {id(param): group["steps"] for group in of_matrices for param in group["params"]}
        return _full_work(
            (name, self._forms[id(param)] or MatrixForm(), param.shape, param.stride(), steps[id(param)])
            for name, param in model.named_parameters()
            if id(param) in steps and param.numel()
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A collective if it is connected to a runtime."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        group_of = dict[int, dict[str, Any]]()
        for group in self.param_groups:
            if not group["matrices"]:
                self._update_elementwise(group)
                continue
            for param in group["params"]:
                group_of[id(param)] = group
                if param.grad is not None and (self.owners is None or self.owners.name_of(param) is None):
                    form = self._forms.get(id(param)) or MatrixForm()
                    self._apply(param, group, _update(self._input(param, group), form, group))
        if self.owners is not None:
            self._update_at_owners(self.owners, group_of)
        return loss

    def _update_at_owners(self, owned: Owners, group_of: Mapping[int, dict[str, Any]]) -> None:
        """Update the slices of complete matrices, of those parameters that this step changes on any rank."""
        owned.run(
            [member.fqn for member in self.coming if member.fqn in self.work.costs],
            lambda view: (self._input(view.tensor, self._group_of(view, group_of)),),
            lambda name, full: _update(
                full, self._forms_by_name[name], self.param_groups[self._group_numbers[name]]
            ).to(full.dtype),
            lambda view, values, update: self._apply(values, group_of[id(view.tensor)], update),
        )

    def _group_of(self, view: View, group_of: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """Return the group of this rank's slice of a parameter.

        Raises:
            PartitaError: the slice has left its group.
        """
        if (group := group_of.get(id(view.tensor))) is None:
            raise PartitaError(f"Muon: '{view.member.fqn}' was removed from its parameter group: freeze it instead")
        return group

    def _input(self, param: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Update the momentum of a parameter, or of a slice of it, and return the values to orthogonalize."""
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        state = self.state[param]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(param)
        momentum: Tensor = state[MOMENTUM]
        momentum.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _apply(self, param: Tensor, group: Mapping[str, Any], update: Tensor) -> None:
        lr = float(group["lr"])
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(update, alpha=-lr)

    def _update_elementwise(self, group: dict[str, Any]) -> None:
        """Run AdamW on a group, with torch's fused kernel, as the config's adamw does."""
        operands = defaultdict[str, list[Tensor]](list)
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            state["step"] = state["step"].to(param.device)  # a loaded state has it on the host
            operands["param"].append(param)
            operands["grad"].append(param.grad)
            for key in ("exp_avg", "exp_avg_sq", "step"):
                operands[key].append(state[key])
        if operands:
            beta1, beta2 = group["betas"]
            adamw(
                operands["param"],
                operands["grad"],
                operands["exp_avg"],
                operands["exp_avg_sq"],
                [],
                operands["step"],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _full_work(
    matrices: Iterable[tuple[str, MatrixForm, Sequence[int], Sequence[int], int]],
) -> FullWork:
    """Return the work on parameters of matrices.

    Args:
        matrices: name, form, shape, strides, and the number of Newton-Schulz steps of each parameter.
    """
    costs, stacks = dict[str, float](), dict[str, int]()
    for name, form, shape, strides, steps in matrices:
        costs[name] = float(form.operations(shape, steps))
        if list(strides) == sorted(strides, reverse=True):  # each matrix is contiguous
            stacks[name] = STACK
    return FullWork(costs, stacks=stacks)


def _update(values: Tensor, form: MatrixForm, group: Mapping[str, Any]) -> Tensor:
    """Return the update of a full parameter at a learning rate of 1."""
    default = "fp32" if is_host(values.device) else "bf16"
    dtype = _DTYPES[default if group["dtype"] == "auto" else group["dtype"]]
    updates = []
    for matrix in form.split(values):
        update = orthogonalize(matrix, group["coefficients"], group["steps"], dtype)
        updates.append(update * scale_of(matrix.shape[-2], matrix.shape[-1], group["scale"]))
    return form.join(updates)
