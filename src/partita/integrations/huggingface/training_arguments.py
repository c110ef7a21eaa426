"""``TrainingArguments(deepspeed=...)``, read as partita's configuration."""

import logging
from typing import Any

from transformers import TrainingArguments

from partita.comm import world
from partita.config import deepspeed
from partita.config.launchers import launch_environment

# What was read is kept as, in the arguments.
SETTINGS = "partita_settings"
_log = logging.getLogger("partita")


def read_deepspeed_argument() -> None:
    """From now on ``TrainingArguments`` take ``deepspeed=`` (a file, or a mapping) as a configuration of partita's, in
    which ``"auto"`` is what the other arguments say.
    """
    make = TrainingArguments.__post_init__

    def read_and_make(self: TrainingArguments) -> None:
        settings = _read(self) if self.deepspeed else None
        make(self)
        setattr(self, SETTINGS, settings)

    TrainingArguments.__post_init__ = read_and_make


def _read(args: Any) -> dict[str, object]:
    """The settings that the argument asks for, which is then empty."""
    launch = launch_environment(running=world.running())
    converted = deepspeed.read(args.deepspeed, launch.world_size, launch.local_world_size, vars(args))
    args.deepspeed = None
    if launch.rank == 0:
        for line in converted.summary():
            _log.warning("%s", line)
    return converted.settings
