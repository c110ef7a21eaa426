"""Conversion of ``TrainingArguments(deepspeed=..., fsdp=...)`` to partita's configuration."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers import TrainingArguments

from partita.comm import world
from partita.config import accelerate, deepspeed
from partita.config.launchers import launch_environment
from partita.config.plain_values import parse_json
from partita.errors import ConfigError

# The attribute of the arguments that stores the settings.
SETTINGS = "partita_settings"
_FIELDS = ("deepspeed", "fsdp", "fsdp_config")
_log = logging.getLogger("partita")


def read_sharding_arguments() -> None:
    """Make ``TrainingArguments`` convert ``deepspeed=`` and ``fsdp=`` to a partita configuration from now on.

    ``deepspeed=`` is a file, a mapping, or its JSON text; in it ``"auto"`` takes the value of the other arguments.
    ``fsdp=`` is converted together with ``fsdp_config=``. The arguments keep all three, so that a copy
    (``dataclasses.replace``, or another class made from ``to_dict()``) converts them again.
    """
    make = TrainingArguments.__post_init__

    def read_and_make(self: TrainingArguments) -> None:
        settings = _read(self) if self.deepspeed or self.fsdp else None
        with without_sharding(self) if settings is not None else nullcontext():
            make(self)
        setattr(self, SETTINGS, settings)

    TrainingArguments.__post_init__ = read_and_make


@contextmanager
def without_sharding(args: Any) -> Iterator[None]:
    """Clear ``deepspeed``, ``fsdp`` and ``fsdp_config`` inside a block: transformers would start these libraries."""
    given = {name: getattr(args, name) for name in _FIELDS}
    for name in _FIELDS:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in given.items():
            setattr(args, name, value)


def _read(args: Any) -> dict[str, object]:
    """Return the settings that ``deepspeed`` or ``fsdp`` request."""
    launch = launch_environment(running=world.running())
    if args.deepspeed and args.fsdp:
        raise ConfigError("TrainingArguments(deepspeed=..., fsdp=...): leave one of the two out")
    if args.deepspeed:
        source = _source(args, "deepspeed")
        converted = deepspeed.read(source, launch.world_size, launch.local_world_size, vars(args))
    else:
        source = _source(args, "fsdp_config")
        converted = accelerate.read_fsdp(args.fsdp, source, launch.world_size, launch.local_world_size)
    if launch.rank == 0:
        for line in converted.summary():
            _log.warning("%s", line)
    return converted.settings


def _source(args: Any, name: str) -> Any:
    """Return an argument that is a file, a mapping or its JSON text: the file or the mapping.

    Raises:
        ConfigError: the text is not valid JSON.
    """
    value = getattr(args, name)
    if isinstance(value, str) and value.startswith("{"):
        value, _ = parse_json(value, f"TrainingArguments({name}=...)")
    return value
