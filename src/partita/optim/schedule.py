"""The config's learning-rate schedule, and the engine's use of any scheduler."""

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from partita.config import schema
from partita.errors import PartitaError


class EngineSchedule:
    """The engine's scheduler, which only the engine steps, after each update.

    Args:
        scheduler: the user's scheduler, or the config's.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self.note()

    def note(self) -> None:
        """Record the scheduler's position, after it was loaded or stepped by the engine."""
        self._position = self._current()

    def check(self) -> None:
        """Check that the user has not stepped the scheduler.

        Raises:
            PartitaError: the scheduler was stepped.
        """
        if any(now == before + 1 for before, now in zip(self._position, self._current(), strict=False)):
            raise PartitaError(
                "scheduler.step() was called in addition to engine.step(), which steps the scheduler after each "
                "update: the learning rate would follow its schedule twice as fast. Remove the call; to step a "
                "scheduler yourself, create it on engine.optimizer and do not pass it to partita.initialize"
            )

    def step(self) -> None:
        """Step after an update."""
        self._scheduler.step()

    def _current(self) -> list[int]:
        """Return the step counts of the scheduler and of those inside it."""
        parts = (self._scheduler, *getattr(self._scheduler, "_schedulers", ()))
        return [int(getattr(part, "last_epoch", 0)) for part in parts]


class Schedule(LRScheduler):
    """A schedule over optimizer steps: warm-up, then constant, or linear or cosine decay.

    Every group's peak is its own rate, or ``max_lr`` if that is set. A group whose peak is below ``min_lr`` keeps its
    peak. After the warm-up a constant schedule does not change rates, so that the user or another scheduler may.
    """

    def __init__(self, optimizer: Optimizer, section: schema.Schedule) -> None:
        self._section = section
        self._peak_step = section.initial_steps + section.warmup_steps
        self._begin = self._peak_step
        self._decay_steps = max(1, (section.total_steps or 0) - self._peak_step)
        if section.total_steps and section.decay_steps:
            self._begin = section.total_steps - section.decay_steps
            self._decay_steps = section.decay_steps
        # Another scheduler may already have lowered the group's own rate.
        self._keeps_first = self._peak_step == 0 and section.max_lr is None
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the curve is the config's."""
        return {key: self.__dict__[key] for key in ("last_epoch", "_step_count", "_last_lr", "base_lrs")}

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group in the next step; groups may have been added."""
        step, groups = self.last_epoch, self.optimizer.param_groups
        if self._section.name == "constant" and (step > self._peak_step or self._keeps_first):
            return [group["lr"] for group in groups]
        own = [float(group.setdefault("initial_lr", group["lr"])) for group in groups]
        peaks = own if self._section.max_lr is None else [self._section.max_lr] * len(own)
        return [peak * self._factor(peak, step) if peak else peak for peak in peaks]

    def _factor(self, peak: float, step: int) -> float:
        """Return the factor of a group's ``peak`` rate in ``step``."""
        section = self._section
        if step < self._peak_step:
            start = min(1.0, (section.initial_lr or 0.0) / peak)
            return start + (1.0 - start) * self._risen(step - section.initial_steps)
        if section.name == "constant":
            return 1.0
        least = min(1.0, max(section.min_lr / peak, section.min_ratio))
        done = min(1.0, max(0.0, (step - self._begin) / self._decay_steps))
        left = 1.0 - done if section.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return least + (1.0 - least) * left

    def _risen(self, step: int) -> float:
        """The share of the warm-up's rise in its ``step``. Without ``initial_lr`` it rises from 0, a step earlier."""
        steps = self._section.warmup_steps
        if self._section.initial_lr is None:
            step, steps = step + 1, steps + 1
        if step <= 0:
            return 0.0
        return math.log(step + 1) / math.log(max(2, steps)) if self._section.warmup == "log" else step / steps
