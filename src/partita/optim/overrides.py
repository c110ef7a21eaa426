"""Settings of single parameters that bitsandbytes keeps beside its optimizers, by the identity of the parameter.

transformers' Trainer keeps the moments of embeddings in 32 bits in this way. The engine's optimizer updates views in
place of the user's parameters, so it would not find them.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from partita.optim.views import View


def carry_overrides(optimizer: Optimizer, views: Iterable[View]) -> Callable[[], None]:
    """Register the overrides of the user's parameters for their views, too.

    Returns: what takes them back.
    """
    manager: Any = getattr(optimizer, "mng", None)
    library: Any = sys.modules.get("bitsandbytes.optim")
    if library is None or not isinstance(manager, library.GlobalOptimManager):
        return lambda: None
    configs = dict(manager.pid2config)
    configs |= {id(getattr(module, name)): config for module, name, config in manager.module_weight_config_triple}
    own = {id(view.tensor): configs[id(view.member.param)] for view in views if id(view.member.param) in configs}
    manager.pid2config.update(own)

    def take_back() -> None:
        for key in own:
            manager.pid2config.pop(key, None)

    return take_back
