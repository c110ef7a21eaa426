"""``block_sparse``: attention whose pairs of blocks are chosen by a layout, on any device."""

import math
import warnings
import weakref
from collections import OrderedDict
from functools import cache

import torch
from torch import Tensor

from partita.attention import flex
from partita.attention.blocks import Visits, visits
from partita.attention.gathered import Dropout, Gathered, Gathering, Job, jobs_of
from partita.attention.layout import Layout
from partita.attention.segments import Sizes, documents_of, whole_samples
from partita.errors import PartitaError
from partita.memory import accelerator


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    """softmax(q k^T scale) v over the keys that each query sees; a query that sees none gets zeros.

    Where there are more keys than queries, the queries are the last positions.

    On the CPU key blocks are gathered into torch's flash kernel, on a GPU it is FlexAttention.

    Args:
        q: [samples, heads, queries, width].
        k: [samples, key heads, keys, width]; the heads are a multiple of the key heads, and neighbours share one.
        v: [samples, key heads, keys, width of the result].
        layout: which keys each query sees.
        seen: bool [samples, keys], False for padding. The pattern begins at a sample's first key that is seen.
        documents: [samples, positions], equal numbers side by side for each document packed into a sample; the
            pattern holds in each by itself, and nobody sees another one. Queries and keys are then the same positions.
        dropout: share of the weights that become 0, drawn from torch's generator for the CPU.
        scale: None: 1 / sqrt(width).

    Returns:
        [samples, heads, queries, width of the result], of q's dtype.

    Raises:
        PartitaError: the tensors do not fit together.
        ConfigError: a user's layout is smaller than the sequence.
    """
    _check(q, k, v, seen, documents, dropout)
    alike = seen is None and documents is None
    sizes = Sizes(1 if alike else q.shape[0], q.shape[2], k.shape[2])
    found = _recent.found(layout, sizes, seen, documents)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if flex.runs_on(q.device) and not dropout:
        return flex.attend(q, k, v, found.visits, scale)
    groups = q.shape[1] // k.shape[1]
    samples, heads = (1, q.shape[0] * k.shape[1]) if alike else (q.shape[0], k.shape[1])
    queries = q.reshape(samples, heads, groups, *q.shape[2:])
    keys, values = (x.reshape(samples, heads, *x.shape[2:]) for x in (k, v))
    drop = Dropout(dropout, int(torch.randint(2**62, ()))) if dropout else None
    on_host = accelerator.is_host(q.device)
    if not on_host and not flex.runs_on(q.device):
        _warn_of_products(q.device)
    flash = on_host and drop is None and q.shape[-1] == v.shape[-1]
    how = Gathering(found.jobs_on(q.device), (sizes.queries, sizes.keys, layout.block), scale, drop, flash)
    out: Tensor = Gathered.apply(queries, keys, values, how)  # type: ignore[no-untyped-call]
    return out.reshape(*q.shape[:-1], v.shape[-1])


def _check(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, documents: Tensor | None, dropout: float) -> None:
    shapes = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v)))
    if not q.ndim == k.ndim == v.ndim == 4:
        raise PartitaError(f"block_sparse: expected [samples, heads, positions, width] each; got {shapes}")
    together = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not together or q.dtype != k.dtype or q.dtype != v.dtype or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise PartitaError(
            "block_sparse: expected q, k and v of one dtype, with equal samples, keys and values of equal heads and "
            f"positions, q and k of equal width, and heads that are a multiple of the key heads; got {shapes}"
        )
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
    if not 0 <= dropout < 1:
        raise PartitaError(f"block_sparse: dropout: expected a share of at least 0 and below 1; got {dropout}")


@cache
def _warn_of_products(device: torch.device) -> None:
    warnings.warn(
        f"block-sparse attention on {device} is computed by matrix products over gathered blocks: FlexAttention takes "
        "Triton, which is not there for it",
        stacklevel=3,
    )


class _Found:
    """The visits of a batch, and what is made of them once, for all layers and for the backward."""

    def __init__(self, made: Visits) -> None:
        self.visits = made
        self._jobs: dict[torch.device, list[Job]] = {}

    def jobs_on(self, device: torch.device) -> list[Job]:
        if device not in self._jobs:
            jobs = jobs_of(self.visits)
            self._jobs[device] = [
                Job(job.rows.to(device), job.cols.to(device), None if job.mask is None else job.mask.to(device))
                for job in jobs
            ]
        return self._jobs[device]


class _Recent:
    """The visits of the last few kinds of batch. Layers that are given the same tensors share them."""

    LIMIT = 8

    def __init__(self) -> None:
        self._kept: OrderedDict[object, tuple[_Found, list[weakref.ref[Tensor]]]] = OrderedDict()

    def found(self, layout: Layout, sizes: Sizes, seen: Tensor | None, documents: Tensor | None) -> _Found:
        given = [tensor for tensor in (seen, documents) if tensor is not None]
        versions = tuple((id(tensor), tensor._version) for tensor in given)
        key = (layout, sizes, seen is None, documents is None, versions)
        if key in self._kept:
            found, owners = self._kept[key]
            if all(owner() is tensor for owner, tensor in zip(owners, given, strict=True)):
                self._kept.move_to_end(key)
                return found
        host_seen = None if seen is None else seen.cpu()
        if documents is None:
            segments = whole_samples(sizes, host_seen)
        else:
            segments = documents_of(sizes, documents.cpu())
        found = _Found(visits(layout, sizes, segments, host_seen))
        self._kept[key] = found, [weakref.ref(tensor) for tensor in given]
        while len(self._kept) > self.LIMIT:
            self._kept.popitem(last=False)
        return found


_recent = _Recent()
