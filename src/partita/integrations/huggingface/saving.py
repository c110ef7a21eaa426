"""What ``save_pretrained`` is given of a model, and what it cannot know of one that computes in another dtype."""

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from partita.inspection.modules import further_names, persistent_buffers
from partita.integrations.huggingface.engines import Prepared


@contextmanager
def saved_weights(prepared: Prepared) -> Iterator[dict[str, Any]]:
    """The weights that ``save_pretrained`` takes its own from, whole, on rank 0; empty on the others.

    Where adapters are saved in place of the model these are what PEFT saves, so that the frozen model is not gathered.
    Inside this block the modules are whole that PEFT looks at as it saves: prompt encoders, which it runs, and copies
    that it trains.
    """
    model: Any = prepared.engine.module
    peft: Any = sys.modules.get("peft")
    adapters = _saved_adapters(model, peft) if peft is not None else []
    if not adapters:
        yield prepared.state_dict()
        return
    copies = [one.modules_to_save for one in model.modules() if isinstance(one, peft.utils.ModulesToSaveWrapper)]
    with prepared.engine.gathered(getattr(model, "prompt_encoder", nn.ModuleDict()), *copies):
        chosen = [_chosen_by_peft(model, adapters, peft) if prepared.engine.mesh.rank == 0 else None]
        yield prepared.state_dict(broadcast_object_list(chosen)[0])


def _saved_adapters(model: Any, peft: Any) -> list[str]:
    """The adapters that are saved in place of the model: all of a model of PEFT's, the active ones that
    ``add_adapter`` put into one of transformers'; none: the model itself is saved.
    """
    if isinstance(model, peft.PeftModel):
        return list(model.peft_config)
    return list(model.active_adapters()) if getattr(model, "_hf_peft_config_loaded", False) else []


def _chosen_by_peft(model: Any, adapters: list[str], peft: Any) -> set[str] | None:
    """The names of what PEFT saves of a model's state dict; None: it has to compute what it saves (AdaLoRA's ranks,
    VB-LoRA's best vectors), and may need any of it.
    """
    tensors = (*model.named_parameters(remove_duplicate=False), *persistent_buffers(model))
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors}
    shapes |= {name: torch.empty_like(shapes[first]) for name, first in further_names(model) if first in shapes}
    names = {id(value): name for name, value in shapes.items()}
    chosen = set[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns again as it saves
        for adapter in adapters:
            try:
                found = peft.get_peft_model_state_dict(model, dict(shapes), adapter)
            except (NotImplementedError, RuntimeError):  # there are no values to compute with
                return None
            taken = [value for value in found.values() if value.is_meta]
            if not all(id(value) in names for value in taken):
                return None
            chosen.update(names[id(value)] for value in taken)
    return chosen


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
