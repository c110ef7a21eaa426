"""The configuration: its schema, where it is read from, and what it means on a number of ranks."""

from partita.config.batch import ResolvedBatch
from partita.config.launchers import LaunchEnvironment
from partita.config.load import launch_environment, load_config
from partita.config.resolve import Resolved, describe, resolve
from partita.config.schema import Config

__all__ = [
    "Config",
    "LaunchEnvironment",
    "Resolved",
    "ResolvedBatch",
    "describe",
    "launch_environment",
    "load_config",
    "resolve",
]
