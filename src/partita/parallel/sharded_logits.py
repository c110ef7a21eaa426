"""Sharded logits: each rank stores a shard, in a tensor subclass with the shape of the full logits.

Tensor ranks have slices of the vocabulary, sequence ranks have slices of the positions. Elementwise functions and the
cross-entropy are computed on the shard. (A model shifts targets before the loss, so they are full and sliced here.) Any
other function that reads the values all-gathers the full logits first, on all ranks; in backward this rank's shard of
the gradient is used.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.comm.synchronization_check import check_synchronized
from partita.errors import PartitaError
from partita.parallel.sequence.exchange import gather, gradient_of_slice, sum_over_slices
from partita.parallel.sequence.slices import Slices
from partita.parallel.tensor.functions import copy_to_ranks, cross_entropy, gather_from_ranks, scatter_to_ranks
from partita.sharding.compiler import eager
from partita.sharding.deferred import Deferred

_log = logging.getLogger("partita")
_CALL = "a read of split logits"

_CONVERSIONS = frozenset({"to", "type", "type_as"})
_IN_PLACE = frozenset({"mul_", "div_", "__imul__", "__itruediv__"})
# Elementwise functions of torch.Tensor and of torch, by name: applied to a shard they return the shard of the full
# result. A second tensor must have no dims, except in conversions.
_ELEMENTWISE = _CONVERSIONS | {
    *("float", "double", "half", "bfloat16", "contiguous", "clone", "detach", "neg", "__neg__", "tanh"),
    *("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "add", "__add__", "__radd__"),
    *("multiply", "divide", "sub", "__sub__"),
    *_IN_PLACE,
}
# Functions that do not read values.
_NO_VALUES = frozenset(
    {
        *("dim", "ndimension", "size", "__len__", "numel", "nelement", "stride", "storage_offset", "element_size"),
        *("is_floating_point", "is_complex", "untyped_storage", "is_contiguous", "get_device", "__hash__"),
    }
)
# Attributes that return the values in another order, or as another kind of tensor.
_VALUES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


@dataclass
class Vocabulary:
    """The split of the vocabulary over the ranks of ``group``.

    Attributes:
        mesh: the source of this rank's number and of the watchdog.
        sizes: the number of classes of each rank.
        logged_readers: the names of functions for which a gather of the full logits has been logged.
    """

    group: Group
    mesh: Mesh
    sizes: tuple[int, ...]
    logged_readers: set[str] = field(default_factory=set)

    @property
    def num(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class LogitsSharding:
    """The sharding of logits over the ranks.

    Logits are ``[..., classes]``. If positions are sliced, they are ``[samples, positions, classes]`` or ``[samples *
    positions, classes]``.

    Attributes:
        vocabulary: the split of the last dim; None: the rank has all classes.
        slices: the split of the positions; None: the rank has all positions.
        num_samples: the number of samples; only used with ``slices``.
    """

    vocabulary: Vocabulary | None = None
    slices: Slices | None = None
    num_samples: int = 0

    def full_shape(self, local: torch.Size) -> torch.Size:
        """Return the shape of the full logits, given the shape ``local`` of a shard."""
        *rows, classes = local
        if self.slices is not None:
            positions = self.slices.length
            rows = [self.num_samples, positions] if len(rows) == 2 else [self.num_samples * positions]
        return torch.Size((*rows, classes if self.vocabulary is None else self.vocabulary.num))

    def whole(self, local: Tensor, reader: str) -> Tensor:
        """All-gather the full logits. All ranks must call this.

        Raises:
            PartitaError: a rank does not.
        """
        for axis in (self.vocabulary, self.slices):
            if axis is not None:
                _check_all_read(axis.group, axis.mesh, reader)
        if (vocabulary := self.vocabulary) is not None:
            if reader not in vocabulary.logged_readers and vocabulary.group.index == 0:
                vocabulary.logged_readers.add(reader)
                _log.info("logits are gathered for '%s': each rank holds all %d for a while", reader, vocabulary.num)
            local = gather_from_ranks(local, vocabulary.group, vocabulary.sizes)
        if self.slices is None:
            return local
        whole = gather(self.own_rows(local), 1, self.slices)
        return whole if local.dim() == 3 else whole.flatten(0, 1)

    def own_rows(self, local: Tensor) -> Tensor:
        """Return a shard as ``[samples, own positions, classes]``."""
        assert self.slices is not None
        return local.reshape(self.num_samples, self.slices.num_own, local.shape[-1])


def _check_all_read(group: Group, mesh: Mesh, reader: str) -> None:
    """Check that all ranks of the group read the logits.

    Raises:
        PartitaError: a rank does not.
    """
    try:
        check_synchronized(group, mesh.watchdog, _CALL)
    except PartitaError as error:
        raise PartitaError(
            f"rank {mesh.rank}: '{reader}' reads logits that are split over {group.size} {' x '.join(group.axes)} "
            "ranks, and not all of them do: read logits on every rank (then use them on one), or use the loss alone. "
            f"{error}"
        ) from error


class ShardedLogits(Deferred):
    """Logits of which this rank stores a shard. Created by :func:`as_sharded_logits`.

    Attributes:
        sharding: the sharding.
        shard: this rank's shard.
        changed_by: the in-place functions that have changed the shard's memory; tensors that share memory share the
            list.
    """

    sharding: LogitsSharding
    shard: Tensor
    changed_by: list[str]
    _memory: Tensor | None  # the full logits, kept alive after `data_ptr` has returned their address

    def compute(self, reader: str) -> Tensor:
        """All-gather the full logits."""
        return self.sharding.whole(self.shard, reader)

    @property
    def setting(self) -> str:
        return " and ".join(
            text
            for axis, text in (
                (self.sharding.vocabulary, "parallel.tensor_rules of the output layer to 'whole'"),
                (self.sharding.slices, "parallel.sequence to 1"),
            )
            if axis is not None
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedLogits)]
        name, first = getattr(func, "__name__", str(func)), found[0]
        if cls.asks_for_gradient(func, args, kwargs):
            return cls.answer_gradient(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if name in _NO_VALUES or name in ("__get__", "__set__"):
                attribute = getattr(getattr(func, "__self__", None), "__name__", "")
                if attribute not in _VALUES:
                    return func(*args, **kwargs)
                name = attribute
            if len(found) == 1 and not first.is_watched and (on_shard := _ON_SHARDS.get(name)) is not None:
                result = on_shard(_Call(func, args, kwargs, first, first.shard))
                if result is not NotImplemented:
                    first.is_used |= torch.is_grad_enabled()
                    return result
            wholes = {id(x): x.read(name) for x in found}
        if name == "data_ptr":
            first._memory = wholes[id(first)]
        args, kwargs = tree_map(lambda x: wholes.get(id(x), x), (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape {tuple(self.shape)}, shard {tuple(self.shard.shape)}; functions that read "
            "all values, such as clone().sum(), all-gather them on all ranks)"
        )


@eager
def as_sharded_logits(local: Tensor, sharding: LogitsSharding, changed_by: list[str] | None = None) -> ShardedLogits:
    """Return the shard ``local`` as a tensor with the shape of the full logits.

    Args:
        sharding: the sharding.
        changed_by: see :class:`ShardedLogits`; None: ``local`` shares memory with no other sharded logits.
    """
    changed_by = [] if changed_by is None else changed_by
    shape = sharding.full_shape(local.shape)
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    made = ShardedLogits.place(
        shape, strides, local, partial(_gradient_of_shard, sharding, local.shape[:-1], changed_by), local
    )
    made.sharding = sharding
    made.shard = local
    made.sources = (local,)
    made.changed_by = changed_by
    made._memory = None
    return made


def _gradient_of_shard(
    sharding: LogitsSharding, rows: Sequence[int], changed_by: list[str], gradient: Tensor
) -> tuple[Tensor]:
    """Return the gradient of this rank's shard, given the gradient of the full logits.

    Args:
        rows: the sizes of the shard's dims except the last one.

    Raises:
        PartitaError: the shard was changed in place.
    """
    if changed_by:
        raise PartitaError(
            f"logits that are split over ranks were changed in place by '{changed_by[0]}', and their gradient is "
            "computed in a way that partita cannot intercept (an autograd.Function, a reentrant checkpoint, vmap): "
            "change a copy (logits * 2 instead of logits.mul_(2))"
        )
    if (slices := sharding.slices) is not None:
        own_rows = gradient.reshape(sharding.num_samples, slices.length, gradient.shape[-1])
        gradient = gradient_of_slice(own_rows, 1, slices).reshape(*rows, gradient.shape[-1])
    if (vocabulary := sharding.vocabulary) is not None:
        gradient = scatter_to_ranks(gradient, vocabulary.group, vocabulary.sizes)
    return (gradient,)


def as_sequence_slice(logits: Tensor, slices: Slices) -> ShardedLogits:
    """Return logits ``[samples, own positions, classes]`` as this rank's slice of the logits of all positions. The
    vocabulary may also be split.
    """
    sharding, local = LogitsSharding(), logits
    if isinstance(logits, ShardedLogits):
        sharding, local = logits.sharding, logits.shard
    return as_sharded_logits(local, replace(sharding, slices=slices, num_samples=local.shape[0]))


@dataclass(frozen=True)
class _Call:
    """A call of a torch function with sharded logits as one argument. ``local`` is their shard."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    logits: ShardedLogits
    local: Tensor

    @property
    def sharding(self) -> LogitsSharding:
        return self.logits.sharding

    def on(self, tensor: Tensor, group: Group | None = None) -> Any:
        """Call the function with ``tensor`` in place of the logits. Gradients of other tensors are summed over the
        ranks of ``group``, if it is given.
        """

        def replaced(x: Any) -> Any:
            if x is self.logits:
                return tensor
            return x if group is None or not isinstance(x, Tensor) else copy_to_ranks(x, group)

        args, kwargs = tree_map(replaced, (tuple(self.args), dict(self.kwargs)))
        return self.func(*args, **kwargs)

    def sharded(self, local: Tensor, **changed: Any) -> ShardedLogits:
        """Return sharded logits with the shard ``local``; ``changed`` are the fields of the sharding that differ."""
        is_shared = local.untyped_storage()._cdata == self.local.untyped_storage()._cdata
        return as_sharded_logits(
            local, replace(self.sharding, **changed), self.logits.changed_by if is_shared else None
        )


def _elementwise(call: _Call) -> Any:
    converts = call.func.__name__ in _CONVERSIONS
    if converts and call.args[0] is not call.logits:
        return call.on(call.local)  # converts another tensor to the logits' dtype
    others = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor) and x is not call.logits]
    if any(other.dim() for other in others) and not converts:
        return NotImplemented
    if call.func.__name__ in _IN_PLACE:
        call.logits.changed_by.append(call.func.__name__)
    vocabulary = call.sharding.vocabulary
    # The gradient of a scalar is a sum over all classes, and each rank computes that of its own.
    return call.sharded(call.on(call.local, None if converts or vocabulary is None else vocabulary.group))


def _select(call: _Call) -> Any:
    """Return ``logits[...]`` for an index that keeps the full last dim. If positions are sliced, the index may only
    select a range of positions.
    """
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if any(
        isinstance(place, bool) or not (place is None or place is Ellipsis or isinstance(place, slice | int))
        for place in index
    ):
        return NotImplemented
    if call.sharding.slices is not None:
        return _range_of_positions(call, call.sharding.slices, list(index))
    num_used = sum(place is not None and place is not Ellipsis for place in index)
    reaches_last = num_used == call.local.dim() or (Ellipsis in index and index[-1] is not Ellipsis)
    if reaches_last and index[-1] != slice(None):
        return NotImplemented
    return call.sharded(call.local[call.args[1]])


def _range_of_positions(call: _Call, slices: Slices, index: list[Any]) -> Any:
    """Return a range of the positions, such as ``logits[:, :-1]``."""
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (4 - len(index))
    index += [slice(None)] * (3 - len(index))
    if call.local.dim() != 3 or len(index) != 3 or index[0] != slice(None) or index[2] != slice(None):
        return NotImplemented
    if not isinstance(index[1], slice):
        return NotImplemented
    start, stop, step = index[1].indices(slices.length)
    if step != 1 or stop <= start:
        return NotImplemented
    shown = slices.within(start, stop)
    first = shown.own.start + start - slices.own.start if shown.num_own else 0
    return call.sharded(call.local.narrow(1, first, shown.num_own), slices=shown)


def _reshape(call: _Call) -> Any:
    """Return the logits with another shape that keeps the last dim.

    If positions are sliced, samples and positions must be either two dims or one.
    """
    # Expanded from a scalar, because a simulated device would count the bytes of a full tensor.
    whole = torch.empty((), dtype=call.local.dtype, device="meta").expand(call.logits.shape)
    found = call.on(whole)
    *rows, classes = found.shape
    if classes != whole.shape[-1] or found.dtype is not whole.dtype or not rows:
        return NotImplemented
    if (slices := call.sharding.slices) is not None:
        samples, own = call.sharding.num_samples, slices.num_own
        shard_shapes = {(samples, slices.length): [samples, own], (samples * slices.length,): [samples * own]}
        if tuple(rows) not in shard_shapes:
            return NotImplemented
        rows = shard_shapes[tuple(rows)]
    return call.sharded(call.local.reshape(*rows, call.local.shape[-1]))


_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_DEFAULTS: dict[str, Any] = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
_DEFAULTS |= {"ignore_index": -100, "reduction": "mean"}


def _cross_entropy(call: _Call) -> Any:
    given = {**_DEFAULTS, **dict(zip(_CROSS_ENTROPY, call.args, strict=False)), **call.kwargs}
    target, weight, ignored, reduction = (given[key] for key in ("target", "weight", "ignore_index", "reduction"))
    if given["size_average"] is not None or given["reduce"] is not None or given["input"] is not call.logits:
        return NotImplemented
    if call.local.dim() != 2 or target.is_floating_point() or reduction not in ("none", "sum", "mean"):
        return NotImplemented
    slices, vocabulary, local = call.sharding.slices, call.sharding.vocabulary, call.local
    if (slices is not None and reduction == "none") or (vocabulary is not None and _needs_full_vocabulary(given)):
        return NotImplemented
    own = target
    if slices is not None:
        own = slices.take(target.view(call.sharding.num_samples, slices.length), 1).flatten()
    sums = torch.promote_types(local.dtype, torch.float32)  # sums of many losses are out of fp16's range
    if vocabulary is None:
        kind, smoothing = "sum" if local.dtype == sums else "none", given["label_smoothing"]
        losses = F.cross_entropy(local, own, weight, ignore_index=ignored, reduction=kind, label_smoothing=smoothing)
        dtype = losses.dtype
    else:
        losses = cross_entropy(local.float(), own, vocabulary.sizes, ignored, vocabulary.group)
        dtype = local.dtype
        if reduction == "none":
            return losses.to(dtype)
    partial_loss = losses.sum(dtype=sums)
    total = partial_loss if slices is None else sum_over_slices(partial_loss, slices)
    if reduction == "sum":
        return total.to(dtype)
    counted = target != ignored
    return (total / (counted.sum() if weight is None else weight[target[counted]].sum(dtype=sums))).to(dtype)


def _needs_full_vocabulary(given: Mapping[str, Any]) -> bool:
    """Return whether a loss has class weights or label smoothing; both need the full vocabulary."""
    return given["weight"] is not None or bool(given["label_smoothing"])


_ON_SHARDS: dict[str, Callable[[_Call], Any]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    "__getitem__": _select,
    **dict.fromkeys(("view", "reshape", "flatten"), _reshape),
    F.cross_entropy.__name__: _cross_entropy,
}
