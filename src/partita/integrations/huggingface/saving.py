"""What ``save_pretrained`` is given of a model, and what it cannot know of one that computes in another dtype."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from partita.inspection.modules import persistent_buffers
from partita.integrations.huggingface.engines import Prepared

# In the names of what PEFT saves of LoRA.
_OF_ADAPTERS = ("lora_", "modules_to_save")


def saved_weights(prepared: Prepared) -> dict[str, Any]:
    """The weights that ``save_pretrained`` takes its own from, whole, on rank 0; empty on the others.

    Of LoRA these are what trains, and the embeddings, which PEFT saves where they were resized or have adapters: the
    frozen model is not gathered.
    """
    model: Any = prepared.engine.module
    if not _has_adapters_alone(model):
        return prepared.state_dict()
    values = prepared.state_dict(trainable=True)
    modules = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    wanted = {id(parameter) for module in modules for parameter in module.parameters()}
    with prepared.engine.gathered(*modules):
        for name, parameter in model.named_parameters(remove_duplicate=False) if values else ():
            if id(parameter) in wanted and name not in values:
                values[name] = parameter.detach().to("cpu", prepared.dtypes[name], copy=True)
    return values


def _has_adapters_alone(model: Any) -> bool:
    """Whether all that PEFT saves of a model trains, but for embeddings."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return False
    for config in model.peft_config.values():
        tokens = getattr(config, "trainable_token_indices", None)
        if config.peft_type != "LORA" or config.bias != "none" or tokens is not None:
            return False
    tensors = (*model.named_parameters(remove_duplicate=False), *persistent_buffers(model))
    return all(tensor.requires_grad for name, tensor in tensors if any(part in name for part in _OF_ADAPTERS))


def keep_dtype(folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    """Let the ``config.json`` in a folder name the dtype of the first floating-point parameter, as transformers does,
    from ``dtypes`` by name.
    """
    path = folder / "config.json"
    dtype = next((str(dtype).removeprefix("torch.") for dtype in dtypes.values() if dtype.is_floating_point), None)
    if dtype is None or not path.is_file():
        return
    content = json.loads(path.read_text())
    if content.get("dtype", dtype) != dtype:
        path.write_text(json.dumps(content | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")
