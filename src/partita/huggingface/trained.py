"""The model in a folder of ``transformers.Trainer``. It provides the names of the optimizer's parameters."""

from collections import defaultdict
from pathlib import Path
from typing import Any, cast

from partita.checkpoint.external.trainer import Model
from partita.errors import PartitaError
from partita.inspection.modules import persistent_buffers

CONFIG, ADAPTER = "config.json", "adapter_config.json"


def read_model(folder: Path) -> Model:
    """Load the weights into memory; return them with the possible optimizer groups of the Trainer.

    These are one group with and one without weight decay, or a single group of all parameters.

    Raises:
        PartitaError: transformers is not installed, or the folder holds no complete transformers model or cannot be
        read.
    """
    try:
        import transformers
        from transformers.trainer import Trainer
    except ImportError as error:
        raise PartitaError(
            f"convert: reading '{folder}' needs transformers ({error}): pip install 'partita[hf]'"
        ) from None
    if not (folder / CONFIG).is_file() or (folder / ADAPTER).is_file():
        raise PartitaError(
            f"convert: '{folder}' holds an optimizer that numbers its parameters, and no {CONFIG} of a full model to "
            f"name them: put the model's {CONFIG} next to its weights; for adapters, load the optimizer in the run's "
            "own script, and call engine.save there"
        )
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model: Any = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype="auto")
    except Exception as error:  # transformers raises exceptions of any type
        raise PartitaError(f"convert: transformers cannot load the model in '{folder}': {error}") from error
    names = defaultdict[int, list[str]](list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
    params = dict(model.named_parameters())
    decayed = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
    by_decay = [[name for name in params if name in decayed], [name for name in params if name not in decayed]]
    weights = {name: value.detach() for name, value in (*params.items(), *persistent_buffers(model))}
    aliases = {first: others for first, *others in names.values() if others}
    return Model(weights, aliases, [by_decay, [list(params)]])
