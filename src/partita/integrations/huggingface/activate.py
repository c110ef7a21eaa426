"""Replacement of accelerate's Accelerator and transformers' Trainer, for unchanged scripts."""

import sys
from collections.abc import Iterator

import accelerate
import accelerate.accelerator
import accelerate.local_sgd
import transformers
import transformers.trainer

from partita.config.launchers import set_torch_variables, use_cpu_in_accelerate
from partita.config.load import load_config
from partita.errors import ConfigError
from partita.integrations.huggingface.accelerator import Accelerator, Source
from partita.integrations.huggingface.loading import read_on_rank_0
from partita.integrations.huggingface.local_sgd import LocalSGD
from partita.integrations.huggingface.trainer import Trainer, on_partita
from partita.integrations.huggingface.training_arguments import read_sharding_arguments
from partita.memory.accelerator import HOST, device_type


def activate(config: Source = None) -> None:
    """Replace ``accelerate.Accelerator`` and ``transformers.Trainer``, including trainers that are derived from it
    later.

    In addition, ``from_pretrained`` reads weights on rank 0 only, and ``TrainingArguments(deepspeed=..., fsdp=...)``
    are converted to a configuration. Call this in the first line of a script, once per process.

    Args:
        config: a YAML or JSON file, a mapping, or a :class:`partita.Config`; None: the configuration in these
            arguments, or all defaults. Omit keys that the script's own arguments set (batch, clipping, precision,
            optimizer, schedule).

    Raises:
        ConfigError: the configuration is wrong, or one of the two classes is already in use.
    """
    settings = load_config(config) if config is not None else None
    uses = list(_earlier_uses())
    if uses:
        raise ConfigError(
            f"activate: {uses[0]} before it could be replaced; call activate() in the first line of the script, "
            "before transformers, accelerate and trl are imported, or start the script with 'partita run'"
        )
    set_torch_variables()  # accelerate reads only these
    if device_type() == HOST.type:
        use_cpu_in_accelerate()  # without it, accelerate does not recognize several processes on the CPU
    trainer = on_partita(transformers.Trainer, settings)
    accelerator = type("Accelerator", (Accelerator,), {"default_config": settings, "__doc__": Accelerator.__doc__})
    trainer.accelerator_class = accelerator
    for module in (transformers, transformers.trainer):
        module.Trainer = trainer
    for module in (accelerate, accelerate.accelerator):
        module.Accelerator = accelerator
    accelerate.local_sgd.LocalSGD = LocalSGD
    read_on_rank_0()
    read_sharding_arguments()


def _earlier_uses() -> Iterator[str]:
    """Yield a description of each earlier use of the classes that will be replaced."""
    trainer, accelerator = transformers.trainer.Trainer, accelerate.accelerator.Accelerator
    if issubclass(trainer, Trainer):
        yield "it was already called,"
        return
    for derived in trainer.__subclasses__():
        if not issubclass(derived, Trainer):
            yield f"{derived.__module__}.{derived.__name__} was derived from Trainer"
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("transformers", "accelerate", "partita"):
            continue
        values = list(getattr(module, "__dict__", {}).values())
        for kind in (trainer, accelerator):
            if any(value is kind for value in values):
                yield f"{name} imported {kind.__name__}"
