"""Training state saved in addition to the model states: buffers, modules' extra states, the optimizer's settings,
scheduler, loss scale, counters, random states, and the caller's ``extra`` values.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from partita.checkpoint.backend import Stored, Value, saved_boxes
from partita.checkpoint.names import GROUPS, MODEL, some_of
from partita.checkpoint.serializable import digest, to_serializable
from partita.checkpoint.settings import Change, Settings, apply, apply_rates, changes, configured
from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.errors import PartitaError
from partita.inspection.modules import extra_states, persistent_buffers
from partita.memory.generators import random_states, set_random_states
from partita.optim.fused import rule_of
from partita.optim.updater import Updater
from partita.table.box import Box
from partita.table.flat_range import FlatRange

SCHEDULER, ENGINE, RANDOM, EXTRA = "scheduler", "partita.engine", "partita.random.", "partita.extra"
CONFIGURED = "partita.configured"


@dataclass
class TrainingState:
    """An engine's state except parameters and their optimizer states.

    The first rank saves what all ranks share. ``owning_rank`` returns the rank that saves a buffer or an extra state.
    """

    model: nn.Module
    updater: Updater
    scheduler: LRScheduler
    mesh: Mesh
    extra: dict[str, Any] = field(default_factory=dict)
    owning_rank: Callable[[str], int] = field(default=lambda name: 0)
    _has_own_extra: bool = field(init=False, default=False)
    _configured: list[Settings] = field(init=False)

    def __post_init__(self) -> None:
        self._configured = configured(self.updater.optimizer.param_groups)

    def compare_extra(self, all_ranks: Group) -> None:
        """Compare this rank's ``extra`` with rank 0's; if they differ, both are saved. A collective."""
        every = all_ranks.exchange_objects(_digest(self.extra), "engine.save")
        self._has_own_extra = every[all_ranks.index] != every[0]

    def _buffer_boxes(self) -> Iterator[tuple[str, Tensor, Box]]:
        """Yield the boxes of buffers that this rank saves, each with the name and the buffer."""
        for name, buffer in persistent_buffers(self.model):
            if self.owning_rank(name) != self.mesh.rank:
                continue
            for box, _ in saved_boxes(FlatRange.row_major(buffer.shape), buffer.dtype):
                yield name, buffer.detach(), box

    def boxes(self) -> list[Value]:
        """Return the boxes of buffers that this rank saves, in the order of :meth:`batches`."""
        return [
            Value(MODEL + name, tuple(buffer.shape), buffer.dtype, box) for name, buffer, box in self._buffer_boxes()
        ]

    def batches(self) -> Iterator[list[Tensor]]:
        """Yield the flat values of the buffers' boxes, one at a time."""
        for _, buffer, box in self._buffer_boxes():
            yield [buffer[box.slices].contiguous().view(-1)]

    def values(self) -> list[Value]:
        """Return the plain values that this rank saves.

        Raises:
            PartitaError: one of them contains a value that could not be loaded again.
        """
        values = [Value(f"{RANDOM}{self.mesh.rank}", value=random_states(self.mesh.device))]

        def add(key: str, value: Any, where: str) -> None:
            values.append(Value(key, value=to_serializable(value, where)))

        for name, module in extra_states(self.model):
            if self.owning_rank(name) == self.mesh.rank:
                add(MODEL + name, module.get_extra_state(), f"the model's '{name}'")
        if self._has_own_extra:
            add(f"{EXTRA}.{self.mesh.rank}", self.extra, "engine.extra")
        if self.mesh.is_first_replica():
            for number, group in enumerate(self.updater.groups_by_name()):
                for key, value in group.items():
                    add(f"{GROUPS}{number}.{key}", value, f"'{key}' of the optimizer's group {number}")
            add(SCHEDULER, self.scheduler.state_dict(), "the scheduler's state")
            add(CONFIGURED, self._configured, "the configured settings of the optimizer's groups")
            values.append(Value(ENGINE, value=self.updater.counters()))
            add(EXTRA, self.extra, "engine.extra")
        return values

    def restore(self, stored: Stored, *, strict: bool) -> tuple[list[str], list[Change]]:
        """Restore everything except buffers and extra states.

        Return the keys that the checkpoint lacks, and the settings that are configured differently now.

        Raises:
            PartitaError: (with ``strict``) the optimizer's groups have other parameters.
        """
        saved, own = stored.manifest.get("optimizer"), rule_of(self.updater.optimizer)
        if saved not in (None, own) and not self.mesh.rank:
            warnings.warn(
                f"engine.load: '{stored.folder}' was saved with the optimizer {saved}, and this one is {own}: the "
                "states that both have are loaded; only_model=True loads only the weights",
                stacklevel=2,
            )
        missing = [key for key in (SCHEDULER, ENGINE) if key not in stored.values]
        if SCHEDULER in stored.values:
            self.scheduler.load_state_dict(stored.value(SCHEDULER))
        if ENGINE in stored.values:
            self.updater.restore_counters(stored.value(ENGINE))
        lacking, changed = self._restore_groups(stored, strict=strict)
        missing += lacking
        if EXTRA in stored.values:
            found = self._extra_of(stored)
            self.extra.clear()
            self.extra.update(found)
        else:
            missing.append(EXTRA)
        key = f"{RANDOM}{self.mesh.rank}"
        if key in stored.values:  # a rank that the saved run did not have has none
            set_random_states(stored.value(key), self.mesh.device)
        return missing, changed

    def _extra_of(self, stored: Stored) -> dict[str, Any]:
        """Return the ``extra`` that this rank saved.

        It is rank 0's if both were the same, or if the number of ranks has changed.
        """
        own = [key for key in stored.values if key.startswith(f"{EXTRA}.")]
        if own and stored.manifest.get("ranks") == self.mesh.num_ranks:
            key = f"{EXTRA}.{self.mesh.rank}"
            own_or_first: dict[str, Any] = stored.value(key if key in own else EXTRA)
            return own_or_first
        first: dict[str, Any] = stored.value(EXTRA)
        if own and not self.mesh.rank:
            differing = set[str]().union(*(_differing(stored.value(key), first) for key in own))
            warnings.warn(
                f"engine.load: engine.extra differed between the {stored.manifest.get('ranks')} ranks that saved "
                f"'{stored.folder}' ({some_of(sorted(map(repr, differing)))}); as {self.mesh.num_ranks} ranks load it, "
                "all of them get rank 0's values",
                stacklevel=2,
            )
        return first

    def _restore_groups(self, stored: Stored, *, strict: bool) -> tuple[list[str], list[Change]]:
        """Restore each group's settings, except those that are configured differently now.

        Return the keys that the checkpoint lacks, and the changed settings.
        """
        before = stored.value(CONFIGURED) if CONFIGURED in stored.values else []
        trained = {view.member.fqn for view in self.updater.views if view.member.segment.trains}
        changed, missing = list[Change](), list[str]()
        for number, group in enumerate(self.updater.groups_by_name()):
            prefix = f"{GROUPS}{number}."
            found = {key.removeprefix(prefix): stored.value(key) for key in stored.values if key.startswith(prefix)}
            differ = trained.intersection(found.pop("params", [])) != trained.intersection(group["params"])
            if not found or (differ and not strict):
                missing.append(prefix + "*")
            elif differ:
                raise PartitaError(
                    f"checkpoint: the optimizer's group {number} has other parameters than in '{stored.folder}': build "
                    "the optimizer with the same groups, or load with strict=False, which keeps the configured settings"
                )
            else:
                self.updater.optimizer.param_groups[number].update(found)
                if number < len(self._configured):
                    began = before[number] if number < len(before) else configured([found])[0]
                    changed += changes(number, self._configured[number], began, found)
        apply(changed, self.updater.optimizer)
        apply_rates(changed, self.updater.optimizer, self.scheduler)
        if changed and not self.mesh.rank:
            warnings.warn(
                f"engine.load: the optimizer is configured differently from the run that saved '{stored.folder}': "
                f"{'; '.join(map(str, changed))}. To keep the checkpoint's settings, configure the values that the "
                "saved run was configured with",
                stacklevel=2,
            )
        return missing, changed


def _digest(extra: dict[str, Any]) -> str | None:
    """Return a digest of ``extra``; None if it is nested too deeply. Saving it then raises an error."""
    try:
        return digest(extra)
    except RecursionError:
        return None


def _differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return the keys whose values differ between two dictionaries."""
    same = {key for key in one.keys() & other.keys() if digest(one[key]) == digest(other[key])}
    return (one.keys() | other.keys()) - same
