"""What accelerate does with all processes, among those that are fed different samples."""

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
from partita.integrations.fed import Fed
from partita.integrations.huggingface.replaced import replaced


class SharedScheduler(AcceleratedScheduler):
    """A scheduler that accelerate steps as many times as ranks are fed different samples.

    Args:
        prepared: accelerate's own.
    """

    def __init__(self, prepared: AcceleratedScheduler, fed: Fed) -> None:
        super().__init__(
            prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, split_batches=prepared.split_batches
        )
        self._state = SimpleNamespace(num_processes=fed.num)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Once for each of those ranks, after a step of the optimizer's."""
        with replaced(accelerate.scheduler, "AcceleratorState", lambda: self._state):
            super().step(*args, **kwargs)


class Sharing:
    """Loaders, and what is gathered of their samples, where ranks are ``fed`` so."""

    def __init__(self, fed: Fed) -> None:
        self._fed = fed

    def loaders(self, dispatches: bool | None) -> Any:
        """A block in which accelerate deals a loader out to the groups, each rank reading its own.

        Raises:
            ConfigError: rank 0 is to read for all (``dispatches``).
        """
        if dispatches:
            raise ConfigError(
                "dispatch_batches=True deals the samples that rank 0 reads to all ranks, of which those that share a "
                "model (parallel.tensor, parallel.sequence) have to get the same: set dispatch_batches=False"
            )
        own = {"num_processes": self._fed.num, "process_index": self._fed.index, "dispatch_batches": False}
        return replaced(
            accelerate.accelerator,
            "prepare_data_loader",
            lambda *args, **kwargs: prepare_data_loader(*args, **{**kwargs, **own}),
        )

    def once(self, gathered: Any) -> Any:
        """Of what was gathered of all ranks, that of each group once."""

        def first(rows: Tensor) -> Tensor:
            return torch.cat(rows.chunk(self._fed.num * self._fed.copies)[:: self._fed.copies])

        return gathered if self._fed.copies == 1 else recursively_apply(first, gathered)

    def objects_once(self) -> Any:
        """A block in which objects are gathered of each group once."""
        is_first = self._fed.is_first
        return replaced(
            accelerate.accelerator, "gather_object", lambda values: gather_object(values if is_first else values[:0])
        )

    def part_of_sum(self, tensors: Any) -> Any:
        """What a rank adds to a sum over all of them, in which each group is to count once."""
        return tensors if self._fed.is_first else recursively_apply(torch.zeros_like, tensors)
