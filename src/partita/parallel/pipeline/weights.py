"""Deferred weight gradients, for schedules that compute them separately from the backward.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2. If a module only multiplies its input with its
parameters, its forward makes a graph of its own. Backward goes through that graph for the gradient of the input alone.
The rest of the graph is kept for later, with the gradient of its output. Autograd computes both, so the gradients have
the same bits as in one backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from partita.parallel.pipeline.off_stage import arrived, is_missing
from partita.parallel.tensor.linear import LinearForward, is_linear
from partita.planner.off_stage import is_elsewhere
from partita.sharding.compiler import eager
from partita.transforms.modules import Level, find


@dataclass
class Left:
    """Deferred work of one backward: graphs that lead to parameters, and the gradients of the graphs' outputs."""

    roots: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    params: dict[int, nn.Parameter] = field(default_factory=dict)

    def add(self, root: GradientEdge, gradient: Tensor, params: Sequence[nn.Parameter]) -> None:
        """Add a graph that ends in ``root``; its leaves ``params`` are to get their gradients."""
        self.roots.append(root)
        self.gradients.append(gradient)
        self.params.update((id(param), param) for param in params)

    def add_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that is already computed."""
        with torch._C.DisableTorchFunctionSubclass():  # its data may be sharded, and is not needed
            self.add(get_gradient_edge(param), gradient, [param])

    def run(self) -> None:
        """Compute the gradients, and accumulate them in the parameters as any backward does."""
        params = list(self.params.values())
        if params:
            with torch._C.DisableTorchFunctionSubclass():
                torch.autograd.backward(self.roots, self.gradients, inputs=params)


Product = Callable[[Tensor], Tensor]


class WeightGradients:
    """The deferred weight gradients of all micro-batches whose backward has run."""

    def __init__(self) -> None:
        self._left: Left | None = None
        self._of_micro = dict[int, Left]()

    @contextmanager
    def apart(self, micro: int) -> Iterator[Left]:
        """Defer the weight gradients of a micro-batch's backward, which runs inside the block."""
        self._left = self._of_micro[micro] = Left()
        try:
            yield self._left
        finally:
            self._left = None

    def take(self, micro: int) -> Left:
        """Remove and return what the backward of a micro-batch has deferred."""
        return self._of_micro.pop(micro)

    def forget(self) -> None:
        """Drop all deferred work, after a batch has failed."""
        self._of_micro.clear()

    def leave(self, root: GradientEdge, gradient: Tensor, params: Sequence[nn.Parameter]) -> None:
        """Defer a graph, as :meth:`Left.add`. Outside the block of :meth:`apart`, run its backward at once."""
        if self._left is None:
            torch.autograd.backward([root], [gradient], inputs=list(params))
        else:
            self._left.add(root, gradient, params)


class _OwnGraph:
    """The graph from a module's input to its output.

    It does not hold the input. In backward it uses the input that the surrounding graph has saved, which is another
    tensor if the forward is recomputed.
    """

    def __init__(self, weights: WeightGradients, params: Sequence[nn.Parameter], product: Product, x: Tensor) -> None:
        self._weights = weights
        self._params = params
        self._x = x
        inner, self._entrance = x.detach(), None
        if x.requires_grad:
            inner = _Enter.apply(_anchor(), [inner])  # type: ignore[no-untyped-call]
            self._entrance = get_gradient_edge(inner)
        with saved_tensors_hooks(self._pack, self._unpack):
            self.output = product(inner)
        self._root = get_gradient_edge(self.output)
        del self._x

    def _pack(self, tensor: Tensor) -> Tensor | tuple[Sequence[int], Sequence[int], int]:
        """Return a view of the input as its sizes, strides, and offset in the input; other tensors as they are."""
        if tensor.untyped_storage().data_ptr() != self._x.untyped_storage().data_ptr():
            return tensor
        return tensor.shape, tensor.stride(), int(tensor.storage_offset() - self._x.storage_offset())

    def _unpack(self, packed: Tensor | tuple[Sequence[int], Sequence[int], int]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, stride, offset = packed
        return self._x.as_strided(shape, stride, self._x.storage_offset() + offset)

    def back(self, x: Tensor, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the input ``x``, if it has one, and defer the rest."""
        self._x, found = x, None
        if self._entrance is not None:
            (found,) = torch.autograd.grad([self._root], [self._entrance], [gradient], retain_graph=True)
        self._weights.leave(self._root, gradient, self._params)
        return found


def _anchor() -> Tensor:
    """Return a tensor that, as an input, makes a function's output require a gradient."""
    return torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")


class _Enter(torch.autograd.Function):
    """Graph node whose output is the passed tensor. The node does not hold the tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, passed: list[Tensor]) -> Tensor:
        return passed.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class _Through(torch.autograd.Function):
    """Graph node of the output that a module computed from ``x`` in a graph of its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, output: list[Tensor], graph: _OwnGraph) -> Tensor:
        ctx.graph = graph
        ctx.save_for_backward(x)
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        return None, ctx.graph.back(*ctx.saved_tensors, gradient), None, None


class Apart:
    """Wrapper of a module's product with its parameters, which defers their gradients."""

    def __init__(self, module: nn.Module, weights: WeightGradients) -> None:
        self._module = module
        self._weights = weights

    def __call__(self, product: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        params = [param for param in self._module.parameters(recurse=False) if param.requires_grad]
        x = arrived(args[0]) if len(args) == 1 and not kwargs else None
        if not params or not isinstance(x, Tensor) or is_missing(x) or not torch.is_grad_enabled():
            return product(*args, **kwargs)
        return self._through(product, x, params)

    @eager
    def _through(self, product: Product, x: Tensor, params: Sequence[nn.Parameter]) -> Any:
        graph = _OwnGraph(self._weights, params, product, x)
        output = [graph.output.detach()]
        del graph.output
        return _Through.apply(_anchor(), x, output, graph)  # type: ignore[no-untyped-call]


def keep_apart(model: nn.Module, changes: Level) -> WeightGradients:
    """Have the modules that this rank runs defer their weight gradients.

    These are linear layers (also those of which it has a part) and embeddings whose parameters no other kind of module
    owns.
    """
    weights = WeightGradients()
    chosen = {id(module): module for module in model.modules() if _is_product(module)}
    others = {id(param) for module in model.modules() if id(module) not in chosen for param in _own(module)}
    for module in chosen.values():
        if any(id(param) in others or is_elsewhere(param) for param in _own(module)):
            continue
        apart = Apart(module, weights)
        if (linear := find(module, LinearForward)) is not None:
            changes.on_undo(partial(setattr, linear, "product", linear.product))
            linear.product = partial(apart, linear.product)
        else:
            changes.wrap_forward(module, apart)
    return weights


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _is_product(module: nn.Module) -> bool:
    """Return whether a module's output is a product with its weight, whose gradient does not depend on the weight."""
    if "forward" in vars(module):
        return find(module, LinearForward) is not None
    if isinstance(module, nn.Embedding):
        return type(module).forward is nn.Embedding.forward and module.max_norm is None and not module.sparse
    return is_linear(module)
