"""partita trains PyTorch models that do not fit: one engine, a short config, unmodified model code."""

from importlib.util import find_spec

from partita.config.schema import Config
from partita.engine.engine import Engine
from partita.engine.start import initialize
from partita.errors import ConfigError, PartitaError
from partita.optim.step import StepResult
from partita.optim.traits import elementwise

if find_spec("partita.prediction") is not None:  # prediction is optional
    from partita.prediction.plan import plan
    from partita.prediction.tune.tune import tune

__version__ = "0.1.0"
__all__ = ["Config", "ConfigError", "Engine", "PartitaError", "StepResult", "elementwise", "initialize", "plan", "tune"]
