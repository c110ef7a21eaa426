"""The compiled kernels, if they were built: their instruction sets, and conversion of arguments."""

import functools
import importlib
import warnings
from types import ModuleType

import torch  # before the kernels, so that they share its OpenMP threads
from torch import Tensor

from partita.errors import PartitaError
from partita.kernels.state import Weights
from partita.memory.accelerator import is_host, is_simulated

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

Launch = tuple[int, int, int]


@functools.cache
def module() -> ModuleType | None:
    """Return the extension module; None, with one warning, if it was not built."""
    try:
        return importlib.import_module("partita.kernels._native")
    except ImportError as error:
        warnings.warn(
            "partita was installed without its compiled kernels, so updates on the CPU run on plain torch: the same "
            "results in 10 to 50 times the time. Install a C++ compiler with OpenMP, then partita again "
            f"(PARTITA_REQUIRE_KERNELS=1 shows what is missing): {error}",
            stacklevel=4,
        )
        return None


def levels() -> tuple[str, ...]:
    """Return the instruction sets that the kernels can use on this machine, from the narrowest to the widest."""
    native = module()
    return () if native is None else tuple(native.levels())


def kernels_for(like: Tensor) -> ModuleType | None:
    """Return the extension module if it was built and the tensor is on the CPU; None otherwise."""
    return module() if is_host(like.device) and not is_simulated(like.device) else None


def launch(num_elements: int, threads: int, level: str | None) -> Launch:
    """Return a kernel's launch arguments: the number of elements, of threads, and the index of the instruction set.

    Raises:
        PartitaError: ``threads`` is below 1, or the machine does not have the instruction set.
    """
    if threads < 1:
        raise PartitaError(f"threads must be at least 1, got {threads}")
    known = levels()
    if level is not None and level not in known:
        raise PartitaError(f"this machine's instruction sets are {', '.join(known)}; got {level!r}")
    return num_elements, threads, len(known) - 1 if level is None else known.index(level)


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's values; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def typed(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), DTYPES[tensor.dtype]


def weights_of(weights: Weights) -> tuple[int, int, int, int]:
    param = weights.param
    dtype = 0 if param is None else DTYPES[param.dtype]
    return address(weights.master), address(param), dtype, address(weights.low)
