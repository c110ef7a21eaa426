"""Replacement of accelerate's Accelerator and transformers' Trainer, for scripts that stay unchanged."""

import sys
from collections.abc import Iterator

import accelerate
import accelerate.accelerator
import transformers
import transformers.trainer

from partita.config.launchers import set_torch_variables
from partita.config.load import load_config
from partita.errors import ConfigError
from partita.integrations.huggingface.accelerator import Accelerator, Source
from partita.integrations.huggingface.loading import read_on_rank_0
from partita.integrations.huggingface.trainer import Trainer, on_partita
from partita.integrations.huggingface.training_arguments import read_sharding_arguments


def activate(config: Source = None) -> None:
    """Replace ``accelerate.Accelerator`` and ``transformers.Trainer``, and so every trainer that is derived from it
    later.

    In addition, ``from_pretrained`` reads weights on rank 0 only, and ``TrainingArguments(deepspeed=..., fsdp=...)``
    are read as a configuration. Call this in the first line of a script, once per process.

    Args:
        config: a YAML or JSON file, a mapping, or a :class:`partita.Config`; None: the configuration in these
            arguments, or all defaults. Leave out of it what the script's own arguments say (batch, clipping, precision,
            optimizer, schedule).

    Raises:
        ConfigError: the configuration is wrong, or one of the two classes is in use already.
    """
    settings = load_config(config) if config is not None else None
    taken = list(_taken())
    if taken:
        raise ConfigError(
            f"activate: {taken[0]} before it could be replaced; call activate() as the first line of the script, "
            "before transformers, accelerate and trl are imported, or start the script with 'partita run'"
        )
    set_torch_variables()  # accelerate reads only these
    trainer = on_partita(transformers.Trainer, settings)
    accelerator = type("Accelerator", (Accelerator,), {"default_config": settings, "__doc__": Accelerator.__doc__})
    trainer.accelerator_class = accelerator
    for module in (transformers, transformers.trainer):
        module.Trainer = trainer
    for module in (accelerate, accelerate.accelerator):
        module.Accelerator = accelerator
    read_on_rank_0()
    read_sharding_arguments()


def _taken() -> Iterator[str]:
    """Yield a description of each use of the classes that are to be replaced."""
    trainer, accelerator = transformers.trainer.Trainer, accelerate.accelerator.Accelerator
    if issubclass(trainer, Trainer):
        yield "it was called already,"
        return
    for derived in trainer.__subclasses__():
        if not issubclass(derived, Trainer):
            yield f"{derived.__module__}.{derived.__name__} was derived from Trainer"
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("transformers", "accelerate", "partita"):
            continue
        held = list(getattr(module, "__dict__", {}).values())
        for kind in (trainer, accelerator):
            if any(value is kind for value in held):
                yield f"{name} imported {kind.__name__}"
