"""Loading of models on rank 0: on other ranks, parameters stay on ``meta`` until an engine copies rank 0's values."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict

from partita.comm import world
from partita.config.launchers import launch_environment


@contextmanager
def rank_0_reads() -> Iterator[None]:
    """Make ``from_pretrained`` read weights on rank 0 of the job only, inside a block.

    The other ranks read names and shapes. Parameters and buffers in the files stay on ``meta``; the others are
    initialized as on rank 0, so that all ranks draw the same random numbers. Every rank reads quantized models.
    """
    reads = PreTrainedModel._load_pretrained_model
    PreTrainedModel._load_pretrained_model = staticmethod(_reading_on_rank_0(reads))
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(reads)


def read_on_rank_0() -> None:
    """Make ``from_pretrained`` behave as inside :func:`rank_0_reads` from now on."""
    PreTrainedModel._load_pretrained_model = staticmethod(_reading_on_rank_0(PreTrainedModel._load_pretrained_model))


def _reading_on_rank_0(reads: Any) -> Any:
    def load(model: PreTrainedModel, state_dict: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        rank = launch_environment(running=world.running()).rank
        nothing = state_dict is None and files is None  # an error of transformers'
        if rank == 0 or nothing or load_config.is_quantized or load_config.device_map is not None:
            return reads(model, state_dict, files, load_config, *args, **kwargs)
        shapes = {name: _WithoutValues(tensor) for name, tensor in _on_meta(state_dict, files, load_config).items()}
        on_meta = replace(load_config, device_map={"": "meta"})
        return reads(model, shapes, files, on_meta, *args, **kwargs)

    return load


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
