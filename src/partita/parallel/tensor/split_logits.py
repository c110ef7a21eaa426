"""Logits of which each tensor rank has a part of the vocabulary, in the shape of the whole.

To Python the tensor has the whole shape; its memory, and what autograd sees, is the rank's own slice of the last dim.
What works on each logit by itself goes on with slices, the cross-entropy is computed from them, and whatever else reads
the values gathers them first, on all ranks.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from partita.comm.attendance import attend
from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.errors import PartitaError
from partita.parallel.tensor.functions import cross_entropy, gathered

_log = logging.getLogger("partita")
_CALL = "a read of split logits"

# By name, of torch.Tensor and of torch: they give, of slices, slices of what they give of the whole. A second tensor
# must be a number.
_BY_ELEMENT = frozenset(
    {
        *("float", "double", "half", "bfloat16", "to", "type", "contiguous", "clone", "detach", "neg", "tanh"),
        *("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "add", "__add__", "__radd__"),
        *("sub", "__sub__", "mul_", "div_", "__imul__", "__itruediv__"),
    }
)
# About the tensor, not its values: answered by the slice.
_ABOUT = frozenset(
    {
        *("dim", "is_floating_point", "is_complex", "element_size", "register_hook", "retain_grad", "requires_grad_"),
        *(
            "untyped_storage",
            "data_ptr",
            "is_contiguous",
            "get_device",
            "__hash__",
            "register_post_accumulate_grad_hook",
        ),
    }
)
# Attributes that are values in another order, or of another kind.
_VALUES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag", "grad"})


@dataclass
class Vocabulary:
    """The vocabulary over the ranks: ``sizes`` by rank; ``mesh`` for who waits where. ``said``: what has read whole
    logits.
    """

    group: Group
    mesh: Mesh
    sizes: tuple[int, ...]
    said: set[str] = field(default_factory=set)

    @property
    def num(self) -> int:
        return sum(self.sizes)

    @property
    def low(self) -> int:
        """The first that this rank has."""
        return sum(self.sizes[: self.group.index])

    def whole(self, local: Tensor, reader: str) -> Tensor:
        """All logits, on every rank.

        Raises:
            PartitaError: not every rank reads them.
        """
        try:
            attend(self.group, self.mesh.watchdog, _CALL)
        except PartitaError as error:
            raise PartitaError(
                f"rank {self.mesh.rank}: '{reader}' reads logits that are split over {self.group.size} tensor ranks, "
                "and not all of them do: read logits on every rank (then use them on one), or use the loss alone. "
                f"{error}"
            ) from error
        if reader not in self.said and self.group.index == 0:
            self.said.add(reader)
            _log.info("logits are gathered for '%s': each rank holds all %d of them for a while", reader, self.num)
        return gathered(local, self.group, self.sizes)


class SplitLogits(Tensor):
    """``[..., vocabulary]``, of which this rank has a slice. Made by :func:`split_logits`."""

    vocabulary: Vocabulary

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SplitLogits)]
        name, first = getattr(func, "__name__", str(func)), found[0]
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ABOUT or name in ("__get__", "__set__"):
                attribute = getattr(getattr(func, "__self__", None), "__name__", "")
                if attribute == "shape":
                    return _whole_shape(first)
                if attribute not in _VALUES:
                    return func(*args, **kwargs)
                name = attribute
            if name == "size":
                shape = _whole_shape(first)
                return shape[args[1] if len(args) > 1 else kwargs["dim"]] if len(args) + len(kwargs) > 1 else shape
            if name in ("numel", "nelement"):
                return _whole_shape(first).numel()
            local = _local(first)
            if len(found) == 1 and (on_slice := _ON_SLICES.get(name)) is not None:
                result = on_slice(_Call(func, args, kwargs, first, local))
                if result is not NotImplemented:
                    return result
            wholes = {id(x): x.vocabulary.whole(_local(x), name) for x in found}
            args, kwargs = tree_map(lambda x: wholes.get(id(x), x), (args, kwargs))
            return func(*args, **kwargs)


def split_logits(local: Tensor, vocabulary: Vocabulary) -> SplitLogits:
    """``local`` ``[..., sizes[rank]]`` in the shape of the whole."""
    with torch._C.DisableTorchFunctionSubclass():
        made = local.as_subclass(SplitLogits)
    made.vocabulary = vocabulary
    return made


def _local(logits: SplitLogits) -> Tensor:
    return logits.as_subclass(Tensor)


def _whole_shape(logits: SplitLogits) -> torch.Size:
    shape: torch.Size = Tensor.shape.__get__(logits)  # type: ignore[attr-defined]
    return torch.Size((*shape[:-1], logits.vocabulary.num))


@dataclass(frozen=True)
class _Call:
    """A torch function called with one tensor of logits."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    logits: SplitLogits
    local: Tensor

    @property
    def others(self) -> list[Tensor]:
        leaves = tree_leaves((self.args, self.kwargs))
        return [x for x in leaves if isinstance(x, Tensor) and x is not self.logits]

    def split(self, local: Tensor) -> SplitLogits:
        return split_logits(local, self.logits.vocabulary)


def _by_element(call: _Call) -> Any:
    if any(other.dim() for other in call.others) and call.func.__name__ not in ("to", "type"):
        return NotImplemented
    args, kwargs = tree_map(lambda x: call.local if x is call.logits else x, (tuple(call.args), dict(call.kwargs)))
    return call.split(call.func(*args, **kwargs))


def _select(call: _Call) -> Any:
    """``logits[...]`` that leaves the last dim as it is."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if any(
        isinstance(place, bool) or not (place is None or place is Ellipsis or isinstance(place, slice | int))
        for place in index
    ):
        return NotImplemented
    num_used = sum(place is not None and place is not Ellipsis for place in index)
    reaches_last = num_used == call.local.dim() or (Ellipsis in index and index[-1] is not Ellipsis)
    if reaches_last and index[-1] != slice(None):
        return NotImplemented
    return call.split(call.local[call.args[1]])


def _reshape(call: _Call) -> Any:
    """``view`` and ``reshape`` that leave the last dim as it is."""
    shape = call.args[1:] if len(call.args) != 2 or isinstance(call.args[1], int) else call.args[1]
    if call.kwargs or not isinstance(shape, list | tuple) or not shape or not all(isinstance(x, int) for x in shape):
        return NotImplemented
    num_rows = call.local.shape[:-1].numel()
    known = -1 not in shape[:-1]
    if shape[-1] != call.logits.vocabulary.num and not (
        shape[-1] == -1 and known and torch.Size(shape[:-1]).numel() == num_rows
    ):
        return NotImplemented
    rows = list(shape[:-1])
    if not known:  # a slice may be empty, of which nothing follows
        rest = torch.Size(x for x in rows if x != -1).numel()
        rows[rows.index(-1)] = num_rows // max(rest, 1)
    return call.split(call.local.reshape(*rows, call.local.shape[-1]))


def _flatten(call: _Call) -> Any:
    given = {**dict(zip(("start_dim", "end_dim"), call.args[1:], strict=False)), **call.kwargs}
    start, end = given.get("start_dim", 0), given.get("end_dim", -1)
    if end % call.local.dim() == call.local.dim() - 1:
        return NotImplemented
    return call.split(call.local.flatten(start, end))


_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_DEFAULTS = {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None, "reduction": "mean"}


def _cross_entropy(call: _Call) -> Any:
    given = {**_DEFAULTS, **dict(zip(_CROSS_ENTROPY, call.args, strict=False)), **call.kwargs}
    target, reduction = given["target"], given["reduction"]
    plain = given["weight"] is None and given["size_average"] is None and given["reduce"] is None
    if not plain or given.get("label_smoothing") or given["input"] is not call.logits:
        return NotImplemented
    if call.local.dim() != 2 or target.is_floating_point() or reduction not in ("none", "sum", "mean"):
        return NotImplemented
    vocabulary, ignored = call.logits.vocabulary, given["ignore_index"]
    losses = cross_entropy(call.local.float(), target, vocabulary.low, ignored, vocabulary.group).to(call.local.dtype)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignored).sum()


_ON_SLICES: dict[str, Callable[[_Call], Any]] = {
    **dict.fromkeys(_BY_ELEMENT, _by_element),
    "__getitem__": _select,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    F.cross_entropy.__name__: _cross_entropy,
}
