"""Autocast on every device, including a simulated one: torch has none for the ``meta`` device."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from partita.memory.accelerator import (
    HOST,
    SIMULATED,
    USUAL_KIND,
    WITHOUT_AUTOCAST,
    is_host,
    is_simulated,
    kind_of,
)

# Functions that autocast runs in 16 bits, by name.
PRODUCTS = frozenset(
    """
    linear matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addr addbmm baddbmm einsum chain_matmul multi_dot vecdot
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution prelu
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell lstm gru rnn_tanh rnn_relu multi_head_attention_forward
    scaled_dot_product_attention _grouped_mm grouped_mm
    """.split()
)
# Operators of these functions whose names differ.
_PRODUCT_OPERATORS = frozenset("_addmm_activation _native_multi_head_attention linalg_multi_dot linalg_vecdot".split())
# Operators that autocast runs in the widest dtype of their arguments. It runs all others that it handles in fp32.
_PROMOTED = frozenset(
    "cat stack index_copy addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add".split()
)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def autocast(device: torch.device, dtype: torch.dtype, caches: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which operators on ``device`` are cast to ``dtype`` as ``torch.autocast`` does.

    Args:
        caches: keep 16-bit copies of fp32 weights until the context ends. This would include weights that are resharded
            after use.
    """
    if is_simulated(device):
        return _simulated(True, dtype)
    return torch.autocast(device.type, dtype, cache_enabled=caches)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast on ``device``."""
    return _simulated(False) if is_simulated(device) else torch.autocast(device.type, enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that operators on ``device`` are cast to, or None outside autocast."""
    if is_simulated(device):
        return torch.get_autocast_dtype(HOST.type) if _simulated_is_enabled() else None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextmanager
def simulated_autocast() -> Iterator[None]:
    """Make :func:`autocast` work for operators on ``meta``, whose tensors have no autocast dispatch key."""
    kind = HOST.type if is_host(SIMULATED) else USUAL_KIND
    device, key = WITHOUT_AUTOCAST[kind], _key(kind)
    _register_kernels(kind)
    torch.set_autocast_enabled(device, True)
    try:
        with torch._C._IncludeDispatchKeyGuard(key):
            yield
    finally:
        torch.set_autocast_enabled(device, False)


def _key(kind: str) -> torch._C.DispatchKey:
    found: torch._C.DispatchKey = getattr(torch._C.DispatchKey, f"Autocast{WITHOUT_AUTOCAST[kind].upper()}")
    return found


@contextmanager
def _simulated(is_enabled: bool, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Set torch's autocast state of the represented device type, which the model may query, and of the host, which
    :func:`_simulated_is_enabled` queries.
    """
    kinds = {HOST.type, kind_of(SIMULATED)}
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    for kind, _, dtype_before in before:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype or dtype_before)
    try:
        yield
    finally:
        for kind, was_enabled, dtype_before in before:
            torch.set_autocast_enabled(kind, was_enabled)
            torch.set_autocast_dtype(kind, dtype_before)


def _simulated_is_enabled() -> bool:
    """Return whether autocast is enabled for the simulated device. torch.utils.checkpoint restores only the host's
    autocast state when it recomputes a forward in backward.
    """
    in_backward = torch._C._current_graph_task_id() != -1
    return torch.is_autocast_enabled(HOST.type) and (in_backward or torch.is_autocast_enabled(kind_of(SIMULATED)))


@cache
def _register_kernels(kind: str) -> list[torch.library.Library]:
    """Register a kernel for every operator that autocast handles on this device type."""
    key, library, others = _key(kind), torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, key.name)
    for name in torch._C._dispatch_get_all_op_names():
        of_kind = torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{kind.upper()}")
        if name.startswith("aten::") and of_kind:
            packet, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(operator, _kernel(key, packet, operator), key.name)
    return [library, others]


def _kernel(key: torch._C.DispatchKey, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            if _simulated_is_enabled():
                dtype = _dtype_of(name, torch.get_autocast_dtype(HOST.type), (args, kwargs))
                args, kwargs = tree_map_only(Tensor, lambda x: x.to(dtype) if x.dtype in _FLOATS else x, (args, kwargs))
            return operator(*args, **kwargs)

    return run


def _dtype_of(name: str, narrow: torch.dtype, given: Any) -> torch.dtype:
    if name in PRODUCTS or name in _PRODUCT_OPERATORS:
        return narrow
    if name not in _PROMOTED:
        return torch.float32
    found = {x.dtype for x in tree_iter(given) if isinstance(x, Tensor) and x.dtype in _FLOATS}
    return found.pop() if len(found) == 1 else torch.float32
