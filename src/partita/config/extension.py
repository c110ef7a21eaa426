"""Extension of the configuration by the optional package ``partita.compression``."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from partita.config.messages import Contradiction, setting
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.table.mesh_shape import MeshShape
from partita.table.state_plan import StatePlan

_COMPRESSION = "partita.compression"
# Keys whose non-default values need the package.
_COMPRESSION_KEYS = (
    *("communication.gradients", "communication.parameters", "communication.warmup", "communication.low_rank"),
    *("communication.warmup_steps", "communication.every", "optimizer.sends"),
)


class Extension:
    """The extension without optional packages: it adds nothing, and refuses their keys."""

    def contradictions(self, config: Config, compute: str) -> Iterator[Contradiction]:
        """Yield a contradiction for each broken rule between settings."""
        keys = [key for key in _COMPRESSION_KEYS if setting(config, key) != setting(Config(), key)]
        if config.optimizer.name == "onebit_adam":
            keys.append("optimizer.name")
        for key in keys:
            yield (
                (key,),
                f"{key}: {setting(config, key)} needs the optional package {_COMPRESSION}, which is not installed",
                f"leave {key} out, or install partita with its package compression",
            )

    def idle_settings(self, config: Config) -> Iterator[str]:
        """Return a line for each setting of the package that has no effect."""
        return iter(())

    def row(self, config: Config, mesh: MeshShape, row: StatePlan) -> StatePlan:
        """Return the row of the state table with the strategies that the configuration requests."""
        return row

    def warmup_steps(self, config: Config) -> int:
        """Return the number of updates before a second strategy takes over; 0: there is one strategy."""
        return 0

    def stores_deltas(self, config: Config) -> bool:
        """Return whether ranks add parameter deltas to copies of parameters that all of them store."""
        return False

    def check_every(self, config: Config) -> int:
        """Return the steps between two comparisons of parameters that several ranks store; 0: never."""
        asked = config.communication.check_every
        return 0 if asked == "auto" else asked


CORE = Extension()


def installed() -> Extension:
    """Return the extension of the optional package ``partita.compression``, or :data:`CORE` without it."""
    if find_spec(_COMPRESSION) is None:
        return CORE
    extension = import_module(_COMPRESSION).EXTENSION
    assert isinstance(extension, Extension)
    return extension


def optional(module: str, key: str) -> ModuleType:
    """Import a module of an optional package of partita that the config key ``key`` needs.

    Raises:
        ConfigError: the package is not installed.
    """
    package = ".".join(module.split(".")[:2])
    if find_spec(package) is None:
        raise ConfigError(f"{key} needs the optional package {package}, which is not installed: leave {key} out")
    return import_module(module)
