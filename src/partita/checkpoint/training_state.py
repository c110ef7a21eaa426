"""Training state saved in addition to the model states: buffers, modules' extra states, the optimizer's settings,
scheduler, loss scale, counters, random states, and the caller's ``extra`` values.
"""

import warnings
from collections.abc import Callable, Container, Iterator
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
from partita.inspection.modules import buffers_on_stage, extra_states, persistent_buffers
from partita.memory.generators import random_states, set_random_states
from partita.optim.fused import rule_of
from partita.optim.updater import Updater
from partita.parallel.random import RandomStreams
from partita.table.box import Box
from partita.table.flat_range import FlatRange

SCHEDULER, ENGINE, RANDOM, EXTRA = "scheduler", "partita.engine", "partita.random.", "partita.extra"
CONFIGURED, BUFFERS = "partita.configured", "partita.buffers."


@dataclass
class TrainingState:
    """An engine's state except parameters and their optimizer states.

    The first rank saves what all ranks share. ``owning_rank`` returns the rank that saves a buffer or an extra state.
    ``streams``: the modules' streams of random numbers, if their seed was drawn, not configured. ``local_buffers``:
    True if each rank keeps its own buffers.
    """

    model: nn.Module
    updater: Updater
    scheduler: LRScheduler
    mesh: Mesh
    streams: RandomStreams | None = None
    local_buffers: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    owning_rank: Callable[[str], int] = field(default=lambda name: 0)
    _has_own_extra: bool = field(init=False, default=False)
    _own_buffers: set[str] = field(init=False, default_factory=set)
    _configured: list[Settings] = field(init=False)

    def __post_init__(self) -> None:
        self._configured = configured(self.updater.optimizer.param_groups)

    def compare_ranks(self, all_ranks: Group) -> None:
        """Compare this rank's ``extra`` with rank 0's, and its local buffers with those of the ranks that save them.

        Those that differ are saved for each rank. A collective.
        """
        buffers = buffers_on_stage(self.model) if self.local_buffers else ()
        own = {name: digest(buffer.detach()) for name, buffer in buffers}
        every = all_ranks.exchange_objects((_digest(self.extra), own), "engine.save")
        self._has_own_extra = every[all_ranks.index][0] != every[0][0]
        self._own_buffers = {name for name in own if every[self.owning_rank(name)][1].get(name) != own[name]}

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
        if self._own_buffers:
            buffers = {name: buffer for name, buffer in persistent_buffers(self.model) if name in self._own_buffers}
            own = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
            add(f"{BUFFERS}{self.mesh.rank}", own, "the model's buffers")
        if self.mesh.is_first_replica():
            for number, group in enumerate(self.updater.groups_by_name()):
                for key, value in group.items():
                    add(f"{GROUPS}{number}.{key}", value, f"'{key}' of the optimizer's group {number}")
            add(SCHEDULER, self.scheduler.state_dict(), "the scheduler's state")
            add(CONFIGURED, self._configured, "the configured settings of the optimizer's groups")
            seed = {} if self.streams is None else {"seed": self.streams.seed}
            values.append(Value(ENGINE, value=self.updater.counters() | seed))
            add(EXTRA, self.extra, "engine.extra")
        return values

    def own_buffers(self, stored: Stored) -> dict[str, Tensor]:
        """Return the local buffers that this rank saved, by name. Other buffers are those of the ranks that save them,
        and all are if the number of ranks has changed.
        """
        saved = [key for key in stored.values if key.startswith(BUFFERS)] if self.local_buffers else []
        if saved and stored.manifest.get("ranks") != self.mesh.num_ranks:
            if not self.mesh.rank:
                warnings.warn(
                    f"engine.load: buffers differed between the {stored.manifest.get('ranks')} ranks that saved "
                    f"'{stored.folder}' ({some_of(stored.value(saved[0]))}; communication.buffers: local); as "
                    f"{self.mesh.num_ranks} ranks load it, all of them get the first rank's values",
                    stacklevel=2,
                )
            return {}
        key = f"{BUFFERS}{self.mesh.rank}"
        found: dict[str, Tensor] = stored.value(key) if key in saved else {}
        return found

    def restore(self, stored: Stored, differing: Container[int]) -> tuple[list[str], list[Change]]:
        """Restore everything except buffers and extra states.

        Return the keys that the checkpoint lacks, and the settings that are configured differently now.

        Args:
            differing: the numbers of the groups that have other parameters, which keep the configured settings.
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
            counters = stored.value(ENGINE)
            self.updater.restore_counters(counters)
            if self.streams is not None:
                self.streams.seed = counters.get("seed", self.streams.seed)
        lacking, changed = self._restore_groups(stored, differing)
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

    def _restore_groups(self, stored: Stored, differing: Container[int]) -> tuple[list[str], list[Change]]:
        """Restore each group's settings, except those that are configured differently now.

        Return the keys that the checkpoint lacks, and the changed settings.
        """
        before = stored.value(CONFIGURED) if CONFIGURED in stored.values else []
        changed, missing = list[Change](), list[str]()
        for number, group in enumerate(self.updater.optimizer.param_groups):
            prefix = f"{GROUPS}{number}."
            found = {key.removeprefix(prefix): stored.value(key) for key in stored.values if key.startswith(prefix)}
            found.pop("params", None)
            if not found or number in differing:
                missing.append(prefix + "*")
            else:
                group.update(found)
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
