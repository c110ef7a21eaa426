"""Replacements of operations that read values, for models that run on the ``meta`` device."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from partita.memory.autocast import simulated_autocast

PACKED = "find_packed_sequence_indices"


@contextmanager
def without_values() -> Iterator[None]:
    """Make attention save what fused kernels save, and treat every sample as one document, in all threads.

    In this thread, operators also follow autocast. Without values, PyTorch would use attention's mathematical
    definition, which keeps full matrices of scores; and transformers would search positions for the starts of
    documents.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _fused, "AutogradMeta")
    masks = sys.modules.get("transformers.masking_utils")
    unpacked: Any = nullcontext() if masks is None else mock.patch.object(masks, PACKED, _one_document)
    try:
        with unpacked, simulated_autocast():
            yield
    finally:
        library._destroy()


def _one_document(position_ids: Tensor) -> None:
    return None


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)  # as it is added to the scores
    attended: tuple[Tensor, ...]
    learned = mask is not None and mask.requires_grad  # a learned bias, whose gradient no fused kernel computes
    if query.dim() == 4 and query.shape[-1] == value.shape[-1] and not learned:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        attended = fused(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    else:
        defined = torch.ops.aten._scaled_dot_product_attention_math
        attended = defined(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return attended[0]
