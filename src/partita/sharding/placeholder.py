"""What a parameter without data answers all the same, for the classes that stand in its place."""

from collections.abc import Callable
from typing import Any

# Attributes and methods, by name, that take no data.
METADATA = frozenset(
    """
    shape dtype device requires_grad grad is_leaf ndim layout is_cuda is_cpu is_meta grad_fn names _version
    is_sparse is_quantized size dim numel stride is_floating_point requires_grad_ is_contiguous element_size
    nelement is_complex __hash__ __len__ register_hook register_post_accumulate_grad_hook storage_offset
    retains_grad itemsize nbytes _backward_hooks _post_accumulate_grad_hooks is_sparse_csr is_mkldnn is_nested
    is_xla is_xpu is_mps
    """.split()
)
_ACCESS = ("__get__", "__set__")


def is_access(func: Callable[..., Any]) -> bool:
    """Whether what torch calls is the reading, or the writing, of an attribute."""
    return getattr(func, "__name__", "") in _ACCESS


def asked_for(func: Callable[..., Any]) -> str:
    """The name of what torch calls: of a function, or of the attribute that is read or written."""
    if is_access(func):
        return str(getattr(getattr(func, "__self__", None), "__name__", func.__name__))
    return str(getattr(func, "__name__", func))
