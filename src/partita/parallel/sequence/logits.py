"""Logits of a cut sequence: they have the whole shape and hold this rank's positions, up to the loss.

Cross-entropy of them is computed of the own positions, and added up over the ranks: targets are shifted before they are
cut. What changes single elements works on what is held. Whatever else reads them gets all positions, gathered from all
ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from partita.comm.attendance import attend
from partita.errors import PartitaError
from partita.parallel.sequence.exchange import gather, sum_of_parts
from partita.parallel.sequence.slices import Slices

# Of one tensor's elements, and numbers: the result for what is held is what is held of the result.
_ELEMENTWISE = frozenset(
    {
        *(
            "float",
            "double",
            "half",
            "bfloat16",
            "to",
            "type",
            "type_as",
            "contiguous",
            "clone",
            "detach",
            "neg",
            "tanh",
        ),
        *("add", "sub", "mul", "div", "true_divide"),
        *("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__", "__neg__"),
    }
)
# Asked of what is held: a place in the graph, and memory.
_OF_OWN = frozenset(
    {getattr(Tensor, name).__get__ for name in ("grad_fn", "is_leaf")} | {Tensor.register_hook, Tensor.untyped_storage}
)
_OF_SHAPE = frozenset({"__get__", "size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "__len__"})
_CALL = "a read of sliced logits"
_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


class SlicedLogits(Tensor):
    """Logits ``[batch, positions, classes]`` (``flat``: ``[batch * positions, classes]``) of the positions of
    ``shown``, of which this rank has its own.

    Args:
        own: ``[batch, own positions, classes]``.
        shown: the range of the sequence's positions that the tensor has; None: all.
    """

    own: Tensor
    slices: Slices
    shown: tuple[int, int]
    flat: bool

    @staticmethod
    def __new__(
        cls, own: Tensor, slices: Slices, shown: tuple[int, int] | None = None, *, flat: bool = False
    ) -> "SlicedLogits":
        start, stop = shown or (0, slices.length)
        batch, _, classes = own.shape
        shape = (batch * (stop - start), classes) if flat else (batch, stop - start, classes)
        make: Callable[..., SlicedLogits] = Tensor._make_wrapper_subclass
        found = make(cls, shape, dtype=own.dtype, device=own.device, requires_grad=own.requires_grad)
        found.own, found.slices, found.shown, found.flat = own, slices, (start, stop), flat
        return found

    def like(self, own: Tensor) -> "SlicedLogits":
        """The same positions with other values."""
        return SlicedLogits(own, self.slices, self.shown, flat=self.flat)

    def whole(self, reader: str) -> Tensor:
        """All positions, gathered from all ranks.

        Raises:
            PartitaError: not every rank reads them.
        """
        start, stop = self.shown
        group, mesh = self.slices.group, self.slices.mesh
        try:
            attend(group, mesh.watchdog, _CALL)
        except PartitaError as error:
            raise PartitaError(
                f"rank {mesh.rank}: '{reader}' reads logits of which each of {group.size} ranks has a slice of the "
                "sequence, and not all of them do: read logits on every rank (then use them on one), or use the loss "
                f"alone. {error}"
            ) from error
        own = self.own.narrow(-1, 0, self.own.shape[-1])  # of every class, where ranks have slices of these, too
        gathered = gather(own, 1, self.slices)[:, start:stop]
        return gathered.flatten(0, 1) if self.flat else gathered

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        own = self.slices.own
        return (
            f"SlicedLogits(shape {tuple(self.shape)}, of which this rank has positions {own.start} to {own.stop - 1}; "
            "clone().sum() and other functions of all of them gather them, on all ranks)"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of logits that each rank has a slice of")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, cls) and func in _OF_OWN:
            return func(first.own, *args[1:], **kwargs)
        if name in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found: Tensor | None = None
        if isinstance(first, cls):
            found = _of_slices(first, name, func, args[1:], kwargs)
        if found is None and func is F.cross_entropy:
            given = {**dict(zip(_LOSS, args, strict=False)), **kwargs}
            found = _cross_entropy(given) if isinstance(given["input"], cls) else None
        if found is not None:
            return found
        args, kwargs = tree_map(lambda x: x.whole(name) if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)


def _of_slices(logits: SlicedLogits, name: str, func: Any, args: Any, kwargs: Any) -> SlicedLogits | None:
    """What a method gives that keeps the positions apart; None for any other."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if name in _ELEMENTWISE:
        plain = all(x.dim() == 0 and not isinstance(x, SlicedLogits) for x in tensors)
        return logits.like(func(logits.own, *args, **kwargs)) if plain or name == "type_as" else None
    batch, positions, classes = logits.own.shape[0], logits.shown[1] - logits.shown[0], logits.own.shape[2]
    if name in ("view", "reshape") and not kwargs:
        asked = tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else args
        shapes = {(-1, classes): True, (batch * positions, classes): True, (batch, positions, classes): False}
        shapes |= {(-1, positions, classes): False, (batch, -1, classes): False}
        flat = shapes.get(asked)
        return None if flat is None else SlicedLogits(logits.own, logits.slices, logits.shown, flat=flat)
    if name == "flatten" and not logits.flat and (*args, *kwargs.values()) in ((0, 1), (0, -2)):
        return SlicedLogits(logits.own, logits.slices, logits.shown, flat=True)
    if name == "__getitem__" and not logits.flat:
        return _indexed(logits, args[0])
    return None


def _indexed(logits: SlicedLogits, index: Any) -> SlicedLogits | None:
    """A range of the positions: ``logits[:, :-1]`` and the like."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (4 - len(parts))
    parts += [slice(None)] * (3 - len(parts))
    samples, positions, classes = parts
    start, stop = logits.shown
    first, last, step = positions.indices(stop - start)
    if (samples, classes) != (slice(None), slice(None)) or step != 1 or last <= first:
        return None
    return SlicedLogits(logits.own, logits.slices, (start + first, start + last))


def _cross_entropy(given: Mapping[str, Any]) -> Tensor | None:
    """The mean or sum over all positions; None where something else is asked for."""
    logits, target, weight = given["input"], given["target"], given.get("weight")
    reduction, ignored = given.get("reduction", "mean"), given.get("ignore_index", -100)
    old = any(given.get(name) is not None for name in ("size_average", "reduce"))
    if not logits.flat or target.is_floating_point() or reduction not in ("mean", "sum") or old:
        return None
    start, stop = logits.shown
    own = logits.slices.own
    begin = max(start, own.start)
    end = max(begin, min(stop, own.stop))
    mine = target.view(logits.own.shape[0], stop - start)[:, begin - start : end - start]
    held = logits.own[:, min(begin, own.stop) - own.start : end - own.start]
    smoothing = given.get("label_smoothing", 0.0)
    part = F.cross_entropy(
        held.flatten(0, 1),
        mine.flatten(),
        weight,
        ignore_index=ignored,
        reduction="sum",
        label_smoothing=smoothing,
    )
    total: Tensor = sum_of_parts(part, logits.slices)
    if reduction == "sum":
        return total
    counted = target != ignored
    mean: Tensor = total / (counted.sum() if weight is None else weight[target[counted]].sum())
    return mean
