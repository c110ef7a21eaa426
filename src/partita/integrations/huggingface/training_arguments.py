"""Conversion of ``TrainingArguments(deepspeed=..., fsdp=...)`` to partita's configuration."""

import logging
from typing import Any

from transformers import TrainingArguments

from partita.comm import world
from partita.config import accelerate, deepspeed
from partita.config.launchers import launch_environment
from partita.errors import ConfigError

# The attribute of the arguments that stores the settings.
SETTINGS = "partita_settings"
_log = logging.getLogger("partita")


def read_sharding_arguments() -> None:
    """Make ``TrainingArguments`` convert ``deepspeed=`` and ``fsdp=`` to a partita configuration from now on.

    ``deepspeed=`` is a file or a mapping, in which ``"auto"`` takes the value of the other arguments. ``fsdp=`` is
    converted together with ``fsdp_config=``.
    """
    make = TrainingArguments.__post_init__

    def read_and_make(self: TrainingArguments) -> None:
        settings = _read(self) if self.deepspeed or self.fsdp else None
        make(self)
        setattr(self, SETTINGS, settings)

    TrainingArguments.__post_init__ = read_and_make


def _read(args: Any) -> dict[str, object]:
    """Return the settings that ``deepspeed`` or ``fsdp`` request, and clear these arguments."""
    launch = launch_environment(running=world.running())
    if args.deepspeed and args.fsdp:
        raise ConfigError("TrainingArguments(deepspeed=..., fsdp=...): leave one of the two out")
    if args.deepspeed:
        converted = deepspeed.read(args.deepspeed, launch.world_size, launch.local_world_size, vars(args))
    else:
        converted = accelerate.read_fsdp(args.fsdp, args.fsdp_config, launch.world_size, launch.local_world_size)
    args.deepspeed = args.fsdp = args.fsdp_config = None
    if launch.rank == 0:
        for line in converted.summary():
            _log.warning("%s", line)
    return converted.settings
