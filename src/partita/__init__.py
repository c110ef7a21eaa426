"""partita trains PyTorch models that do not fit: one engine, a short config, unmodified model code.

Names are imported when they are first used: `import partita` alone does not import torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partita.config.schema import Config
    from partita.engine.engine import Engine
    from partita.engine.start import initialize
    from partita.errors import ConfigError, PartitaError
    from partita.optim.traits import elementwise
    from partita.optim.updater import StepResult
    from partita.prediction.plan import plan
    from partita.prediction.tune.tune import tune

__version__ = "0.1.0"
__all__ = ["Config", "ConfigError", "Engine", "PartitaError", "StepResult", "elementwise", "initialize", "plan", "tune"]

_MODULES = {
    "Config": "partita.config.schema",
    "ConfigError": "partita.errors",
    "Engine": "partita.engine.engine",
    "PartitaError": "partita.errors",
    "StepResult": "partita.optim.updater",
    "elementwise": "partita.optim.traits",
    "initialize": "partita.engine.start",
    "plan": "partita.prediction.plan",
    "tune": "partita.prediction.tune.tune",
}
if find_spec("partita.prediction") is None:  # prediction is optional
    for _name in ("plan", "tune"):
        __all__.remove(_name)
        del _MODULES[_name]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'partita' has no attribute '{name}'")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
