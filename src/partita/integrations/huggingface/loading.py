"""Models that one rank reads: elsewhere their parameters stay on ``meta`` until an engine takes rank 0's values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.utils.loading_report import LoadStateDictInfo

from partita.comm import world
from partita.config.launchers import launch_environment
from partita.inspection.modules import persistent_buffers


@contextmanager
def rank_0_reads() -> Iterator[None]:
    """Inside, ``from_pretrained`` reads weights on rank 0 of the job alone; on the other ranks parameters and saved
    buffers stay on ``meta``. Quantized models are read on every rank.
    """
    reads = PreTrainedModel._load_pretrained_model
    PreTrainedModel._load_pretrained_model = staticmethod(_reading_on_rank_0(reads))
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(reads)


def read_on_rank_0() -> None:
    """From now on ``from_pretrained`` does as inside :func:`rank_0_reads`."""
    PreTrainedModel._load_pretrained_model = staticmethod(_reading_on_rank_0(PreTrainedModel._load_pretrained_model))


def _reading_on_rank_0(reads: Any) -> Any:
    def load(model: PreTrainedModel, state_dict: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        rank = launch_environment(running=world.running()).rank
        if rank == 0 or load_config.is_quantized or load_config.device_map is not None:
            return reads(model, state_dict, files, load_config, *args, **kwargs)
        for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
            for module, dtype in load_config.dtype_plan.items():  # what rank 0 keeps in fp32
                if module in name:
                    tensor.data = tensor.data.to(dtype)
            tensor._is_hf_initialized = True  # transformers would make values otherwise
        tied = set(model.all_tied_weights_keys)  # what is said to be missing is tied again
        return LoadStateDictInfo(tied, set(), set(), [], {}, set()), None

    return load
