"""accelerate's operations over all processes, restricted to one process per data-parallel position."""

from types import SimpleNamespace
from typing import Any

import accelerate.accelerator
import accelerate.scheduler
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor

from partita.errors import ConfigError
from partita.integrations.data_rank import DataRank
from partita.integrations.huggingface.patched import patched


class SharedScheduler(AcceleratedScheduler):
    """A scheduler that accelerate steps once per data-parallel position, not once per process.

    Args:
        prepared: the scheduler that accelerate prepared.
    """

    def __init__(self, prepared: AcceleratedScheduler, data_rank: DataRank) -> None:
        super().__init__(
            prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, split_batches=prepared.split_batches
        )
        self._state = SimpleNamespace(num_processes=data_rank.num)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once for each data-parallel position, after a step of the optimizer."""
        with patched(accelerate.scheduler, "AcceleratorState", lambda: self._state):
            super().step(*args, **kwargs)


class Sharing:
    """Loaders and gathered values if several ranks receive the same samples."""

    def __init__(self, data_rank: DataRank) -> None:
        self._data_rank = data_rank

    def loaders(self, dispatches: bool | None) -> Any:
        """Return a context in which accelerate splits a loader over the data-parallel positions.

        Raises:
            ConfigError: rank 0 reads for all ranks (``dispatches``).
        """
        if dispatches:
            raise ConfigError(
                "dispatch_batches=True gives every rank different samples, but ranks that share a model "
                "(parallel.tensor, parallel.sequence) need the same samples: set dispatch_batches=False"
            )
        own = {"num_processes": self._data_rank.num, "process_index": self._data_rank.index, "dispatch_batches": False}
        return patched(
            accelerate.accelerator,
            "prepare_data_loader",
            lambda *args, **kwargs: prepare_data_loader(*args, **{**kwargs, **own}),
        )

    def one_per_data_rank(self, gathered: Any) -> Any:
        """Select the values of one rank per data-parallel position from the gathered values of all ranks."""

        def first(rows: Tensor) -> Tensor:
            by_rank = rows.chunk(self._data_rank.num * self._data_rank.copies)
            return torch.cat([by_rank[rank] for rank in self._data_rank.first])

        return gathered if self._data_rank.copies == 1 else recursively_apply(first, gathered)

    def objects_one_per_data_rank(self) -> Any:
        """Return a context in which objects are gathered from one rank per data-parallel position."""
        is_first = self._data_rank.is_first
        return patched(
            accelerate.accelerator, "gather_object", lambda values: gather_object(values if is_first else values[:0])
        )

    def term_of_sum(self, tensors: Any) -> Any:
        """Return this rank's term of a sum that counts each data-parallel position once: zeros except on its first
        rank.
        """
        return tensors if self._data_rank.is_first else recursively_apply(torch.zeros_like, tensors)
