"""The ``generate`` of an engine's model: whole where that fits, so that no token waits for a gather."""

from collections.abc import Callable
from typing import Any

from torch import nn

from partita.comm import world
from partita.config.launchers import launch_environment
from partita.engine.engine import Engine
from partita.memory.capacity import free_budget


def hook_generation(engine: Engine) -> None:
    """Have the model's ``generate`` gather the parameters that are not whole; a collective from then on."""
    model = engine.module
    shard_bytes = sum(unit.num_bytes for unit in engine.units if not unit.rests_whole)
    if shard_bytes and callable(getattr(model, "generate", None)):
        model.generate = Generation(engine, model.generate, shard_bytes)  # type: ignore[assignment, arg-type]


def unhook_generation(model: nn.Module) -> None:
    """``generate`` is the class's own again."""
    model.__dict__.pop("generate", None)


class Generation:
    """Generates with the parameters held whole; where a rank has no room for them, in step with the other ranks, unit
    by unit.

    Args:
        num_bytes: of the parameters that are not whole.
    """

    def __init__(self, engine: Engine, generate: Callable[..., Any], num_bytes: int) -> None:
        self._engine = engine
        self._generate = generate
        self._num_bytes = num_bytes

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the model has its own
        return getattr, (self._engine.module, "generate")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        engine.attend("generate")
        if engine.any(self._num_bytes > self._room()):
            return self._generate(*args, **kwargs | {"synced_gpus": engine.mesh.num_ranks > 1})
        with engine.gathered():
            return self._generate(*args, **kwargs | {"synced_gpus": False})

    def _room(self) -> int:
        """Bytes that this rank may still use of its device."""
        budget = free_budget(self._engine.mesh.device, self._engine.config.zero.offload)
        return budget.shared(launch_environment(running=world.running()).local_world_size).device
