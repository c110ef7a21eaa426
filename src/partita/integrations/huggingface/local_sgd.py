"""accelerate's LocalSGD, which an engine replaces by the same algorithm in its configuration."""

from typing import Any

import accelerate.local_sgd

from partita.errors import ConfigError


class LocalSGD(accelerate.local_sgd.LocalSGD):
    """A LocalSGD that is refused for the model of an engine.

    Raises:
        ConfigError: the model has an engine, which synchronizes the ranks itself.
    """

    def __init__(self, accelerator: Any, model: Any, local_sgd_steps: int, enabled: bool = True) -> None:
        super().__init__(accelerator, model, local_sgd_steps, enabled)
        engines = getattr(accelerator, "engines", None)
        if self.enabled and engines is not None and engines.of(model) is not None:
            raise ConfigError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps}): the engine of the {type(model).__name__} synchronizes "
                f"the ranks itself; pass enabled=False, and set communication: {{every: {local_sgd_steps}, replicas: "
                f"{accelerator.data_rank.num}, outer_lr: 1, outer_momentum: 0, outer_nesterov: false}} in the "
                "configuration, which averages the same weights"
            )
