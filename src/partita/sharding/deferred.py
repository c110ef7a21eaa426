"""Deferred tensors: they have a shape, a dtype and an autograd node, but no values until something reads them."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves, tree_map_only

from partita.errors import PartitaError

# Returns the gradients of the inputs of a deferred tensor for its own gradient.
Back = Callable[[Tensor], tuple[Tensor | None, ...]]

_GRAD = inspect.signature(torch.autograd.grad)
_BACKWARDS = (Tensor.backward, torch.autograd.backward)
_WATCHING = frozenset({"register_hook", "retain_grad", "requires_grad_", "register_post_accumulate_grad_hook"})


class Deferred(Tensor):
    """A tensor without memory.

    A subclass implements the functions it knows in ``__torch_function__``, without values. Every other reader gets all
    values. That includes readers for which PyTorch does not call ``__torch_function__``, such as an
    ``autograd.Function``, a reentrant checkpoint or ``vmap``: the gradient that they return goes to ``back``.

    Attributes:
        sources: the tensors whose gradients show that a backward has reached this one.
        is_watched: True if the user needs this tensor's gradient (a hook, ``retain_grad``). All readers then get values
            that are computed from this tensor in the graph.
        is_used: True if the result of a function was computed without this tensor in the graph.
    """

    sources: tuple[Tensor, ...]
    is_watched: bool
    is_used: bool

    @classmethod
    def place(cls, shape: torch.Size, strides: Sequence[int], like: Tensor, back: Back, *inputs: Tensor) -> Self:
        """Create a tensor with the device and dtype of ``like``, computed from ``inputs`` in the graph."""

        def make() -> Tensor:
            made: Tensor = Tensor._make_wrapper_subclass(
                cls, shape, strides=strides, dtype=like.dtype, device=like.device
            )
            return made

        placed: Self = _Place.apply(make, back, *inputs)  # type: ignore[no-untyped-call]
        placed.sources = ()
        placed.is_watched = False
        placed.is_used = False
        return placed

    @abstractmethod
    def compute(self, reader: str) -> Tensor:
        """Return all values, for a function of this name. Their graph leads to the inputs, not to this tensor."""

    @property
    @abstractmethod
    def setting(self) -> str:
        """The config key that makes the tensor deferred, and the value that does not."""

    def read(self, reader: str) -> Tensor:
        """Return all values, for a function of this name, with a graph."""
        if self.is_watched:
            values: Tensor = _Values.apply(self, reader)  # type: ignore[no-untyped-call]
            return values
        self.is_used |= torch.is_grad_enabled()
        return self.compute(reader)

    def watch(self, asked_by: str) -> None:
        """Keep this tensor in the graph of all later readers: its gradient is needed.

        Raises:
            PartitaError: an earlier reader was computed without it.
        """
        if self.is_used and not self.is_watched:
            raise PartitaError(
                f"'{asked_by}' needs the gradient of deferred logits, but a loss or another function has already been "
                "computed without them in its graph: call logits.retain_grad() as soon as the model has returned them, "
                f"or set {self.setting}"
            )
        self.is_watched = True

    @classmethod
    def asks_for_gradient(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether :meth:`answer_gradient` handles the function."""
        if func in _BACKWARDS:
            return any(isinstance(tensor, Deferred) for tensor in tree_leaves(kwargs.get("inputs")))
        is_set = func.__name__ == "__set__" and func.__self__.__name__ == "requires_grad"
        return func is torch.autograd.grad or is_set or (func.__name__ in _WATCHING and isinstance(args[0], Deferred))

    @classmethod
    def answer_gradient(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that needs a deferred tensor's gradient."""
        if func in _BACKWARDS:
            raise PartitaError(
                "backward(inputs=[logits]): backward cannot accumulate the gradient of deferred logits alone; call "
                "logits.retain_grad() as soon as the model has returned them, and later "
                "torch.autograd.grad(loss, logits)"
            )
        if func is not torch.autograd.grad:
            tensor: Deferred = args[0]
            if not (tensor.requires_grad and func.__name__ in ("__set__", "requires_grad_")):
                tensor.watch("requires_grad" if func.__name__ == "__set__" else func.__name__)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        call = _GRAD.bind(*args, **kwargs)
        asked = call.arguments
        asked["inputs"] = tree_map_only(Deferred, _edge, asked["inputs"])
        others = {name: value for name, value in asked.items() if name != "inputs"}
        asked.update(tree_map_only(Deferred, lambda tensor: tensor.read("grad"), others))
        return func(*call.args, **call.kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch.no_grad():  # below autograd
            args, kwargs = tree_map_only(
                Deferred, lambda tensor: tensor.compute(str(func)).detach(), (tuple(args), dict(kwargs or {}))
            )
        return func(*args, **kwargs)


def _edge(tensor: Deferred) -> GradientEdge:
    """Return a tensor's position in the graph."""
    if tensor.is_used:
        tensor.watch("torch.autograd.grad")
    assert tensor.grad_fn is not None
    return GradientEdge(tensor.grad_fn, tensor.output_nr)


class _Place(torch.autograd.Function):
    """The autograd node of a deferred tensor."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], back: Back, *inputs: Tensor) -> Tensor:
        ctx.back = back
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.back(gradients[0])


class _Values(torch.autograd.Function):
    """The values of a deferred tensor, computed from it in the graph: it gets their gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Deferred, reader: str) -> Tensor:
        return tensor.compute(reader).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None
