"""The ``generate`` of an engine's model. If all parameters fit, it gathers them once, not for each token."""

from collections.abc import Callable
from typing import Any

from torch import nn

from partita.comm import world
from partita.config.launchers import launch_environment
from partita.engine.engine import Engine
from partita.memory.capacity import free_budget


def hook_generation(engine: Engine) -> None:
    """Make the model's ``generate`` run on full parameters and full sequences. It becomes a collective."""
    model = engine.module
    shard_bytes = sum(unit.num_bytes for unit in engine.units if not unit.always_unsharded)
    if (shard_bytes or _must_gather(engine)) and callable(getattr(model, "generate", None)):
        model.generate = Generation(engine, model.generate, shard_bytes)  # type: ignore[assignment, arg-type]


def unhook_generation(model: nn.Module) -> None:
    """Restore the class's own ``generate``."""
    model.__dict__.pop("generate", None)


def _must_gather(engine: Engine) -> bool:
    """Return whether text can only be generated inside ``engine.gathered()``: in a pipeline no rank has all units, and
    on slices of the sequence a cache of keys and values has this rank's positions only.
    """
    return engine.mesh.size("pipeline") > 1 or engine.mesh.size("sequence") > 1


class Generation:
    """A ``generate`` that first gathers all parameters.

    If they do not fit on some rank, all ranks generate in lockstep and gather unit by unit, except with pipeline or
    sequence parallelism.

    Args:
        num_bytes: bytes of the sharded parameters.
    """

    def __init__(self, engine: Engine, generate: Callable[..., Any], num_bytes: int) -> None:
        self._engine = engine
        self._generate = generate
        self._num_bytes = num_bytes

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the model gets its own ``generate``
        return getattr, (self._engine.module, "generate")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        engine.check_synchronized("generate")
        if not _must_gather(engine) and engine.any(self._num_bytes > self._free_bytes()):
            return self._generate(*args, **kwargs | {"synced_gpus": engine.mesh.num_ranks > 1})
        with engine.gathered():
            return self._generate(*args, **kwargs | {"synced_gpus": False})

    def _free_bytes(self) -> int:
        """Return the bytes of device memory that this rank may still use."""
        budget = free_budget(self._engine.mesh.device, self._engine.config.zero.offload)
        return budget.shared(launch_environment(running=world.running()).local_world_size).device
