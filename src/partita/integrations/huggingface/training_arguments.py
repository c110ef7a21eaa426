"""``TrainingArguments(deepspeed=..., fsdp=...)``, read as partita's configuration."""

import logging
from typing import Any

from transformers import TrainingArguments

from partita.comm import world
from partita.config import accelerate, deepspeed
from partita.config.launchers import launch_environment
from partita.errors import ConfigError

# What was read is kept as, in the arguments.
SETTINGS = "partita_settings"
_log = logging.getLogger("partita")


def read_sharding_arguments() -> None:
    """From now on ``TrainingArguments`` take ``deepspeed=`` (a file, or a mapping), in which ``"auto"`` is what the
    other arguments say, or ``fsdp=`` with ``fsdp_config=``, as a configuration of partita's.
    """
    make = TrainingArguments.__post_init__

    def read_and_make(self: TrainingArguments) -> None:
        settings = _read(self) if self.deepspeed or self.fsdp else None
        make(self)
        setattr(self, SETTINGS, settings)

    TrainingArguments.__post_init__ = read_and_make


def _read(args: Any) -> dict[str, object]:
    """The settings that the arguments ask for, which are then empty."""
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
