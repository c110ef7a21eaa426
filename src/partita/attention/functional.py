"""``block_sparse``: attention over the pairs of blocks that a layout selects, on any device."""

import math

import torch
from torch import Tensor

from partita.attention import sliced
from partita.attention.batch_blocks import blocks_of_batch
from partita.attention.layout import Layout
from partita.attention.segments import Sizes
from partita.errors import PartitaError
from partita.parallel.sequence.attention import current_slices
from partita.sharding.compiler import eager


@eager
def block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    seen: Tensor | None = None,
    documents: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Compute softmax(q k^T scale) v over the keys that each query sees. The result of a query that sees no key is 0.

    If there are more keys than queries, the queries are the last positions.

    On the CPU, torch's flash kernel runs on gathered blocks of keys; on a GPU, FlexAttention runs. With
    ``parallel.sequence``, q, k and v inside a block of the model have this rank's positions, while ``seen`` and
    ``documents`` have all positions.

    Args:
        q: [samples, heads, queries, width].
        k: [samples, key heads, keys, width]; the number of heads is a multiple of the number of key heads, and adjacent
            heads share one.
        v: [samples, key heads, keys, width of the result].
        layout: the rule for the keys that each query sees.
        seen: bool [samples, keys], False for padding. The pattern begins at the first key that is not padding.
        documents: [samples, positions]: a number for each position; adjacent equal numbers are a packed document. The
            pattern applies to each document separately, and no query sees another document. Queries and keys must then
            have the same positions.
        dropout: the probability with which a weight becomes 0; its seed is drawn from torch's CPU generator.
        scale: the scale of the scores; None: 1 / sqrt(width).

    Returns:
        [samples, heads, queries, width of the result], in q's dtype.

    Raises:
        PartitaError: the tensors' shapes or dtypes do not match.
        ConfigError: a user's layout is smaller than the sequence.
    """
    slices = current_slices()
    _check(q, k, v, dropout)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if slices is not None:
        return sliced.sliced_attention(sliced.SlicedBatch(layout, slices, seen, documents), q, k, v, dropout, scale)
    _check_batch(q, k, seen, documents)
    is_same_for_all = seen is None and documents is None
    sizes = Sizes(1 if is_same_for_all else q.shape[0], q.shape[2], k.shape[2])
    return blocks_of_batch(layout, sizes, seen, documents).attention(q, k, v, dropout, scale)


def _check(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    shapes = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v)))
    if not q.ndim == k.ndim == v.ndim == 4:
        raise PartitaError(f"block_sparse: expected [samples, heads, positions, width] each; got {shapes}")
    same_shapes = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not same_shapes or q.dtype != k.dtype or q.dtype != v.dtype or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise PartitaError(
            "block_sparse: expected q, k and v of one dtype, with equal samples, keys and values of equal heads and "
            f"positions, q and k of equal width, and heads that are a multiple of the key heads; got {shapes}"
        )
    if not 0 <= dropout < 1:
        raise PartitaError(f"block_sparse: dropout: expected a share of at least 0 and below 1; got {dropout}")


def _check_batch(q: Tensor, k: Tensor, seen: Tensor | None, documents: Tensor | None) -> None:
    if seen is not None and (seen.dtype != torch.bool or seen.shape != (k.shape[0], k.shape[2])):
        raise PartitaError(
            f"block_sparse: seen: expected bool [{k.shape[0]}, {k.shape[2]}] (samples, keys); got "
            f"{list(seen.shape)} {seen.dtype}"
        )
    if documents is not None and (q.shape[2] != k.shape[2] or documents.shape != (q.shape[0], q.shape[2])):
        raise PartitaError(
            f"block_sparse: documents: expected [{q.shape[0]}, {q.shape[2]}] (samples, positions), as many keys; got "
            f"{list(documents.shape)} and {k.shape[2]} keys"
        )
