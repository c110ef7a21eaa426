"""Loading of models on rank 0: others leave values unread, until an engine copies rank 0's or a script needs them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict

from partita.comm import world
from partita.config.launchers import launch_environment
from partita.errors import ConfigError
from partita.sharding.unread import Read, copy_on_meta, leave_unread

_LOAD, _FINALIZE = PreTrainedModel._load_pretrained_model, PreTrainedModel._finalize_model_loading
# Fields of transformers' DistributedConfig, and the keys with which partita does the same.
_SIZES = {"tp_size": "parallel.tensor", "pp_size": "parallel.pipeline", "ep_size": "parallel.tensor"}
_sources = WeakKeyDictionary[PreTrainedModel, Read]()  # until their models are finalized


@contextmanager
def rank_0_reads() -> Iterator[None]:
    """Make ``from_pretrained`` read weights on rank 0 of the job only, inside a block.

    The other ranks read names and shapes. A rank reads the values from the files, too, once something needs them before
    an engine exists, such as a forward. Parameters and buffers that are not in the files are initialized as on rank 0,
    so that all ranks draw the same random numbers. Every rank reads quantized models.
    """
    names = ("_load_pretrained_model", "_finalize_model_loading", "prepare_distribute_model")
    before = {name: vars(PreTrainedModel)[name] for name in names if name in vars(PreTrainedModel)}
    read_on_rank_0()
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(PreTrainedModel, name, before[name])
            else:  # inherited
                delattr(PreTrainedModel, name)


def read_on_rank_0() -> None:
    """Make ``from_pretrained`` behave as inside :func:`rank_0_reads` from now on."""
    PreTrainedModel._load_pretrained_model = staticmethod(_load)
    PreTrainedModel._finalize_model_loading = staticmethod(_finalize)
    PreTrainedModel.prepare_distribute_model = staticmethod(_refuse_to_distribute)


def _refuse_to_distribute(distributed_config: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse a ``DistributedConfig``, and name the settings of partita that do the same.

    Raises:
        ConfigError: always.
    """
    asked = dict(distributed_config) if isinstance(distributed_config, dict) else vars(distributed_config)
    found: dict[str, object] = {key: asked[name] for name, key in _SIZES.items() if (asked.get(name) or 1) > 1}
    if (asked.get("fsdp_size") or 1) > 1:
        found["zero.stage"] = 3
    if (asked.get("dp_replicate_size") or 1) > 1:
        found["zero.replicate"] = "nodes"
    if asked.get("fsdp_cpu_offload"):
        found |= {"zero.offload.parameters": "host", "zero.offload.optimizer": "host"}
    settings = ", ".join(f"{key}: {value}" for key, value in found.items())
    raise ConfigError(
        "from_pretrained(distributed_config=...): transformers would shard the model while loading it, and partita "
        "shards it in prepare: leave distributed_config out"
        + (f", and set {settings} in partita's configuration" if settings else "")
    )


def _load(model: PreTrainedModel, state_dict: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Load weights into a model; on other ranks than rank 0 only their shapes."""
    rank = launch_environment(running=world.running()).rank
    nothing = state_dict is None and files is None  # an error of transformers'
    if rank == 0 or nothing or load_config.is_quantized or load_config.device_map is not None:
        return _LOAD(model, state_dict, files, load_config, *args, **kwargs)
    copied: Any = copy_on_meta(model)

    def read() -> dict[str, Tensor]:
        info, _ = _LOAD(copied, state_dict, files, load_config, *args, **kwargs)
        copied.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        values: dict[str, Tensor] = copied.state_dict(keep_vars=True)
        return values

    _sources[model] = read
    shapes = {name: _WithoutValues(tensor) for name, tensor in _on_meta(state_dict, files, load_config).items()}
    on_meta = replace(load_config, device_map={"": "meta"})
    return _LOAD(model, shapes, files, on_meta, *args, **kwargs)


def _finalize(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Initialize what the files do not have, and leave unread what they have."""
    info = _FINALIZE(model, *args, **kwargs)
    if (read := _sources.pop(model, None)) is not None:
        leave_unread({name: value for name, value in model.state_dict(keep_vars=True).items() if value.is_meta}, read)
    return info


def _on_meta(state_dict: Mapping[str, Tensor] | None, files: Any, load_config: Any) -> dict[str, Tensor]:
    """Return the tensors to load, on ``meta``; their values are not read."""
    if state_dict is not None:
        return {name: tensor.to("meta") for name, tensor in state_dict.items()}
    read: dict[str, Tensor] = {}
    for file in files:
        read |= load_state_dict(file, map_location="meta", weights_only=load_config.weights_only)
    return read


class _WithoutValues:
    """A tensor on ``meta`` with the interface of a file slice, which transformers reads and then moves to a device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> "_WithoutValues":
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return self._tensor.to(dtype=dtype)
