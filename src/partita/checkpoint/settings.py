"""Which settings the optimizer goes on with after a load: the checkpoint's, but for those that are configured anew.

A schedule changes settings while a run goes on, so the checkpoint's are what the run had come to, not what it was
configured with; it holds both. Where the same is configured now, training goes on with what the run had come to, bit by
bit. What is configured otherwise is what the user wants now, and holds; a rate keeps its place on the schedule's curve.
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
    """A setting of a group that was configured as ``before`` when the saved run began, and is ``now``."""

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
    """What the groups start from: of a rate that is scheduled, where the schedule starts."""
    starts = []
    for group in groups:
        start = {key: _copied(value) for key, value in group.items() if key not in ("params", "initial_lr")}
        if "initial_lr" in group:
            start["lr"] = _copied(group["initial_lr"])
        starts.append(start)
    return starts


def changes(number: int, now: Settings, before: Settings, saved: Settings) -> list[Change]:
    """What is configured otherwise than in the saved run; what only one of the two optimizers knows is no change."""
    return [
        Change(number, key, before[key], value, saved.get(key))
        for key, value in now.items()
        if key in before and _number(value) != _number(before[key])
    ]


def apply(change: Change, optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Give a group, whose settings are the checkpoint's, what is configured now."""
    group = optimizer.param_groups[change.number]
    if change.key != "lr":
        group[change.key] = _copied(change.now)
        return
    group["lr"] = change.now * (change.saved / change.before) if change.before else change.now
    if "initial_lr" in group:
        group["initial_lr"] = change.now
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if change.number < len(getattr(part, "base_lrs", ())):
            part.base_lrs[change.number] = change.now
    scheduler._last_lr = [float(each["lr"]) for each in optimizer.param_groups]


def _copied(value: Any) -> Any:
    """What changes in place, as a copy; anything else (a process group, say) may not be copied at all."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
