"""The optimizer's settings after a load: the checkpoint's, except those that are configured differently now.

A schedule changes settings during a run. So a checkpoint holds both the settings that the run was configured with and
those at the time of saving. If the configuration of a setting is the same now, training continues with the saved value,
bit by bit. If it is different, the new configuration applies; a rate keeps its place on the schedule's curve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Settings = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A setting of a group that was configured as ``before`` when the saved run began, and is configured as ``now``."""

    number: int
    key: str
    before: Any
    now: Any
    saved: Any

    def __str__(self) -> str:
        return (
            f"group {self.number}: {self.key} is {self.now} as configured now (the saved run was configured with "
            f"{self.before}, and had {self.saved} when it was saved)"
        )


def configured(groups: Sequence[Mapping[str, Any]]) -> list[Settings]:
    """Return the groups' initial settings. For a scheduled rate, that is the value at which the schedule starts."""
    starts = []
    for group in groups:
        start = {key: _copied(value) for key, value in group.items() if key not in ("params", "initial_lr")}
        if "initial_lr" in group:
            start["lr"] = _copied(group["initial_lr"])
        starts.append(start)
    return starts


def changes(number: int, now: Settings, before: Settings, saved: Settings) -> list[Change]:
    """Return the settings configured differently than in the saved run.

    A setting that only one of the two optimizers has is not a change.
    """
    return [
        Change(number, key, before[key], value, saved.get(key))
        for key, value in now.items()
        if key in before and _number(value) != _number(before[key])
    ]


def apply(changed: Sequence[Change], optimizer: Optimizer) -> None:
    """Apply changed settings to the optimizer's groups, whose settings are the checkpoint's."""
    for change in changed:
        group = optimizer.param_groups[change.number]
        if change.key != "lr":
            group[change.key] = _copied(change.now)
            continue
        group["lr"] = change.now * (change.saved / change.before) if change.before else change.now
        if "initial_lr" in group:
            group["initial_lr"] = change.now


def apply_rates(changed: Sequence[Change], optimizer: Optimizer, scheduler: LRScheduler | dict[str, Any]) -> None:
    """Apply changed learning rates to a scheduler whose state is the checkpoint's, after :func:`apply`.

    A training loop that steps a scheduler of its own calls this after it has loaded the scheduler.

    Args:
        optimizer: the scheduler's optimizer.
        scheduler: the scheduler, or its state dict.
    """
    rates = {change.number: change.now for change in changed if change.key == "lr"}
    if not rates:
        return
    state = scheduler if isinstance(scheduler, dict) else vars(scheduler)
    for inner in state.get("_schedulers", ()):
        apply_rates(changed, optimizer, inner)
    base_rates = state.get("base_lrs", [])
    for number, rate in rates.items():
        if number < len(base_rates):
            base_rates[number] = rate
    state["_last_lr"] = [float(group["lr"]) for group in optimizer.param_groups]


def _copied(value: Any) -> Any:
    """Return a copy of a tensor or list, because it may change in place. Return any other value itself.

    Other values, such as process groups, may not be copyable.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
