"""Deferred logits: a tiled head returns them without computing them, so that their loss is computed in tiles."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from partita.errors import PartitaError
from partita.sharding.deferred import Deferred

_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_NO_VALUES = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "storage_offset", "element_size"),
        *("is_contiguous", "is_floating_point", "is_complex", "get_device", "untyped_storage", "__hash__"),
    }
)
_PROPERTIES_WITH_VALUES = ("T", "H", "mT", "mH", "data", "real", "imag")


class HeadCall(Protocol):
    """A deferred call of a layer that computes logits from hidden states."""

    def logits(self, origin: "Origin", asked_by: str) -> Tensor:
        """Return the layer's output for ``origin.hidden``: [..., classes]."""

    def full_logits(self, origin: "Origin", asked_by: str) -> Tensor:
        """Return the same, all-gathered if it is sharded over ranks."""

    def summed_loss(self, origin: "Origin", target: Tensor, ignored: int, smoothing: float) -> Tensor:
        """Return the sum of the cross-entropies of the rows of logits; ``target`` [rows] contains class indices."""


@dataclass(frozen=True)
class Origin:
    """The computation of logits: the layer's output for ``hidden``, then the elementwise functions ``elementwise_ops``,
    in order.

    ``hidden`` [..., in] has the dims of the logits in the same order, except the dim of the classes, which is dim
    ``classes_dim`` of the logits.
    """

    call: HeadCall
    hidden: Tensor
    num_classes: int
    dtype: torch.dtype
    classes_dim: int
    elementwise_ops: tuple[Callable[[Tensor], Tensor], ...] = ()

    def apply_ops(self, logits: Tensor) -> Tensor:
        """Apply ``elementwise_ops`` to the layer's output."""
        for change in self.elementwise_ops:
            logits = change(logits)
        return logits

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        shape = list(self.hidden.shape[:-1])
        shape.insert(self.classes_dim, self.num_classes)
        return torch.Size(shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the logits: those of a contiguous tensor whose last dim is moved to ``classes_dim``."""
        strides, stride = list[int](), self.num_classes
        for size in reversed(self.hidden.shape[:-1]):
            strides.insert(0, stride)
            stride *= size
        strides.insert(self.classes_dim, 1)
        return tuple(strides)


class DeferredLogits(Deferred):
    """Logits that are computed on demand, from the layer and the hidden states on which they depend.

    Elementwise functions, reshapes that keep the classes, and selections of positions return deferred logits again.
    :func:`~torch.nn.functional.cross_entropy` is computed tile by tile. Any other function that reads values computes
    all logits.
    """

    origin: Origin
    _computed: Tensor | None
    _is_related: bool  # shares values with other deferred logits, which an in-place change would not reach

    @classmethod
    def of(cls, origin: Origin) -> Self:
        """Return deferred logits of this origin. They allocate no memory."""
        like = torch.empty(0, dtype=origin.dtype, device=origin.hidden.device)
        anchor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)  # the layer alone may train
        made = cls.place(origin.shape, origin.strides, like, partial(_backward, origin), origin.hidden, anchor)
        made.origin = origin
        made._computed = None
        made._is_related = False
        return made

    def compute(self, reader: str) -> Tensor:
        """Compute the logits, at most once with a graph and once without."""
        needs_graph = torch.is_grad_enabled() and self.requires_grad
        if self._computed is None or (needs_graph and not self._computed.requires_grad):
            logits = self.origin.apply_ops(self.origin.call.logits(self.origin, reader))
            self._computed = logits.movedim(-1, self.origin.classes_dim)
        return self._computed

    @property
    def setting(self) -> str:
        return "loss.tiled to none"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        origin = self.origin
        return f"{type(self).__name__}(shape={tuple(origin.shape)}, dtype={origin.dtype}, not computed)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read("a copy").__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if cls.asks_for_gradient(func, args, kwargs):
            return cls.answer_gradient(func, args, kwargs)
        if name in _NO_VALUES or (name == "__get__" and func.__self__.__name__ not in _PROPERTIES_WITH_VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        known = _cross_entropy(*args, **kwargs) if func is F.cross_entropy else _derived(func, args, kwargs)
        if known is not None:
            return known
        _check_in_place(name, args)
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits.read(name), (args, kwargs))
        return func(*args, **kwargs)


def _backward(origin: Origin, gradient: Tensor) -> tuple[Tensor | None, None]:
    """Backpropagate a gradient of the logits through the layer; return the gradient of the hidden states.

    Raises:
        PartitaError: the backward has create_graph=True.
    """
    if torch.is_grad_enabled():
        raise PartitaError(
            "create_graph=True: logits that are computed in tiles (loss.tiled) do not support gradients of gradients: "
            "set loss.tiled to none"
        )
    hidden = origin.hidden.detach().requires_grad_(origin.hidden.requires_grad)
    origin = replace(origin, hidden=hidden)
    with torch.enable_grad():
        logits = origin.apply_ops(origin.call.full_logits(origin, "a gradient")).movedim(-1, origin.classes_dim)
    torch.autograd.backward([logits], [gradient])
    return hidden.grad, None


def _check_in_place(name: str, args: Sequence[Any]) -> None:
    """Check that logits from which others were derived are not changed in place.

    Raises:
        PartitaError: they are.
    """
    changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if changes and args and isinstance(args[0], DeferredLogits) and args[0]._is_related:
        raise PartitaError(
            f"logits that are computed in tiles (loss.tiled) are changed in place by '{name}', and tensors derived "
            "from them would not change: change a copy (logits * 2 instead of logits.mul_(2)), or set loss.tiled to "
            "none"
        )


# ------------------------------------------------------------------------------- functions that keep logits deferred

Derive = Callable[[DeferredLogits, Any, Sequence[Any], Mapping[str, Any]], Origin | None]


def _elementwise(logits: DeferredLogits, func: Any, others: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin | None:
    """Return the origin of an elementwise function of logits; None if another argument is a tensor with dims."""
    for other in (*others, *kwargs.values()):
        if isinstance(other, torch.device | str) or (
            isinstance(other, Tensor) and (other.dim() or other.requires_grad)
        ):
            return None

    def change(tile: Tensor) -> Tensor:
        changed: Tensor = func(tile, *others, **kwargs)
        return changed

    origin = logits.origin
    dtype = change(torch.empty(0, dtype=origin.dtype, device=origin.hidden.device)).dtype
    return replace(origin, dtype=dtype, elementwise_ops=(*origin.elementwise_ops, change))


def _reshaped(logits: DeferredLogits, func: Any, others: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin | None:
    """Return the origin of reshaped logits; None if the dim of the classes changes."""
    origin = logits.origin
    if origin.classes_dim != origin.hidden.dim() - 1:
        return None
    # Expanded from a scalar, because a simulated device would count the bytes of a full tensor.
    shape = func(torch.empty((), device="meta").expand(origin.shape), *others, **kwargs).shape
    if shape[-1:] != origin.shape[-1:]:
        return None
    hidden = origin.hidden.reshape(*shape[:-1], origin.hidden.shape[-1])
    return replace(origin, hidden=hidden, classes_dim=len(shape) - 1)


def _selected(logits: DeferredLogits, func: Any, others: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin | None:
    """Return the origin of selected positions with all classes; None if the index selects classes."""
    origin, (index,) = logits.origin, others
    index = list(index) if isinstance(index, tuple) else [index]
    num_indexed = sum(
        item.dim() if isinstance(item, Tensor) and item.dtype is torch.bool else item is not None and item is not ...
        for item in index
    )
    if origin.classes_dim != origin.hidden.dim() - 1 or any(isinstance(item, bool | DeferredLogits) for item in index):
        return None
    reaches_classes = num_indexed == len(origin.shape) or (... in index and index[-1] is not ...)
    if reaches_classes and index[-1] != slice(None):
        return None
    hidden = origin.hidden[tuple(index)]
    return replace(origin, hidden=hidden, classes_dim=hidden.dim() - 1)


def _permuted(logits: DeferredLogits, func: Any, others: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin | None:
    """Return the origin of logits with permuted dims."""
    origin = logits.origin
    last = origin.hidden.dim() - 1
    if origin.classes_dim != last:
        return None
    numbered = torch.empty(tuple(range(last + 1)), device="meta")  # each dim's size is its number
    order = list(func(numbered, *others, **kwargs).shape)
    classes_dim = order.index(last)
    order.remove(last)
    return replace(origin, hidden=origin.hidden.permute(*order, last), classes_dim=classes_dim)


def _unchanged(logits: DeferredLogits, func: Any, others: Sequence[Any], kwargs: Mapping[str, Any]) -> Origin | None:
    return logits.origin


_DERIVED: dict[str, Derive] = {
    **dict.fromkeys(("float", "double", "half", "bfloat16", "to", "type", "tanh"), _elementwise),
    **dict.fromkeys(("mul", "multiply", "div", "divide", "true_divide"), _elementwise),
    **dict.fromkeys(("view", "reshape", "flatten", "squeeze", "unsqueeze"), _reshaped),
    **dict.fromkeys(("transpose", "permute", "movedim", "swapaxes"), _permuted),
    "__getitem__": _selected,
    "contiguous": _unchanged,
}
_COMMUTING = ("mul", "multiply")


def _derived(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeferredLogits | None:
    """Return the result of a function of logits as deferred logits; None if it needs their values."""
    name, others = func.__name__, args[1:]
    if name in _COMMUTING and not isinstance(args[0], DeferredLogits):
        args, others = args[1:], args[:1]
    derive = _DERIVED.get(name)
    if derive is None or not args or not isinstance(args[0], DeferredLogits) or args[0].is_watched:
        return None
    origin = derive(args[0], func, others, kwargs)
    if origin is None:
        return None
    made = DeferredLogits.of(origin)
    made._is_related = args[0]._is_related = args[0].is_used = True
    return made


# ----------------------------------------------------------------------------------------- the loss


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor | None:
    """Compute ``F.cross_entropy`` in tiles; None if its arguments are not supported."""
    call = _CROSS_ENTROPY.bind(*args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    logits, target = arguments["input"], arguments["target"]
    if not isinstance(logits, DeferredLogits) or isinstance(target, DeferredLogits) or logits.is_watched:
        return None
    origin = logits.origin
    plain = arguments["weight"] is arguments["size_average"] is arguments["reduce"] is None
    of_rows = len(origin.shape) > 1 and origin.classes_dim == 1 and target.shape == origin.hidden.shape[:-1]
    if not (plain and of_rows and arguments["reduction"] in ("mean", "sum")) or target.is_floating_point():
        return None
    ignored = arguments["ignore_index"]
    logits.is_used = True
    loss = origin.call.summed_loss(origin, target.flatten(), ignored, arguments["label_smoothing"])
    if arguments["reduction"] == "mean":
        loss = loss / (target != ignored).sum()
    return loss.to(origin.dtype)
