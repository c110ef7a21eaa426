"""Deferred weight gradients, for schedules that compute them separately from the backward.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2. If a module only multiplies its input with its
parameters, its forward is recorded in a separate autograd graph. The backward of the stage runs through that graph only
for the gradient of the input. The graph is kept, with the gradient of its output, and the weight gradients are computed
later. Autograd computes both, so the gradients have the same bits as in one backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from partita.layout.off_stage import is_off_stage
from partita.parallel.pipeline.off_stage import is_missing, received_value
from partita.parallel.tensor.linear import LinearForward, is_linear
from partita.sharding.compiler import eager
from partita.transforms.modules import Level, find


@dataclass
class DeferredGradients:
    """Deferred weight gradients of one backward: graphs that end in parameters, and the gradients of their outputs."""

    roots: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    params: dict[int, nn.Parameter] = field(default_factory=dict)

    def add(self, root: GradientEdge, gradient: Tensor, params: Sequence[nn.Parameter]) -> None:
        """Add a graph with the output ``root`` and the leaves ``params``, whose gradients are deferred."""
        self.roots.append(root)
        self.gradients.append(gradient)
        self.params.update((id(param), param) for param in params)

    def add_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that is already computed."""
        with torch._C.DisableTorchFunctionSubclass():  # its data, which may be sharded, is not needed
            self.add(get_gradient_edge(param), gradient, [param])

    def run(self) -> None:
        """Compute the gradients, and accumulate them in the parameters."""
        params = list(self.params.values())
        if params:
            with torch._C.DisableTorchFunctionSubclass():
                torch.autograd.backward(self.roots, self.gradients, inputs=params)


Product = Callable[[Tensor], Tensor]


class WeightGradients:
    """The deferred weight gradients of all micro-batches whose backward has run."""

    def __init__(self) -> None:
        self._current: DeferredGradients | None = None
        self._of_micro = dict[int, DeferredGradients]()

    @contextmanager
    def deferring(self, micro: int) -> Iterator[DeferredGradients]:
        """Defer the weight gradients of a micro-batch's backward, which runs in the ``with`` block."""
        self._current = self._of_micro[micro] = DeferredGradients()
        try:
            yield self._current
        finally:
            self._current = None

    def take(self, micro: int) -> DeferredGradients:
        """Remove and return the deferred gradients of a micro-batch."""
        return self._of_micro.pop(micro)

    def forget(self) -> None:
        """Drop all deferred gradients, after a batch has failed."""
        self._of_micro.clear()

    def defer(self, root: GradientEdge, gradient: Tensor, params: Sequence[nn.Parameter]) -> None:
        """Defer a graph, as :meth:`DeferredGradients.add`. Outside of :meth:`apart`, run its backward now."""
        if self._current is None:
            torch.autograd.backward([root], [gradient], inputs=list(params))
        else:
            self._current.add(root, gradient, params)


class _SeparateGraph:
    """A separate graph from a module's input to its output.

    It does not reference the input. In backward it uses the input that the surrounding graph has saved, which is
    another tensor if the forward is recomputed.
    """

    def __init__(self, weights: WeightGradients, params: Sequence[nn.Parameter], product: Product, x: Tensor) -> None:
        self._weights = weights
        self._params = params
        self._x = x
        inner, self._input_edge = x.detach(), None
        if x.requires_grad:
            inner = _Leaf.apply(_anchor(), [inner])  # type: ignore[no-untyped-call]
            self._input_edge = get_gradient_edge(inner)
        with saved_tensors_hooks(self._pack, self._unpack):
            self.output = product(inner)
        self._root = get_gradient_edge(self.output)
        del self._x

    def _pack(self, tensor: Tensor) -> Tensor | tuple[Sequence[int], Sequence[int], int]:
        """Return the sizes, strides and offset of a view of the input; return other tensors unchanged."""
        if tensor.untyped_storage().data_ptr() != self._x.untyped_storage().data_ptr():
            return tensor
        return tensor.shape, tensor.stride(), int(tensor.storage_offset() - self._x.storage_offset())

    def _unpack(self, packed: Tensor | tuple[Sequence[int], Sequence[int], int]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, stride, offset = packed
        return self._x.as_strided(shape, stride, self._x.storage_offset() + offset)

    def back(self, x: Tensor, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the input ``x`` (None if it requires none), and defer the weight gradients."""
        self._x, found = x, None
        if self._input_edge is not None:
            (found,) = torch.autograd.grad([self._root], [self._input_edge], [gradient], retain_graph=True)
        self._weights.defer(self._root, gradient, self._params)
        return found


def _anchor() -> Tensor:
    """Return an input that makes a function's output require a gradient."""
    return torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")


class _Leaf(torch.autograd.Function):
    """Graph node whose output is the passed tensor. The node does not reference the tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, passed: list[Tensor]) -> Tensor:
        return passed.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class _Output(torch.autograd.Function):
    """Graph node of the output that a module has computed from ``x`` in a separate graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, output: list[Tensor], graph: _SeparateGraph) -> Tensor:
        ctx.graph = graph
        ctx.save_for_backward(x)
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        return None, ctx.graph.back(*ctx.saved_tensors, gradient), None, None


class DeferredWeightGradients:
    """Wrapper of a module's product with its parameters that defers the parameters' gradients."""

    def __init__(self, module: nn.Module, weights: WeightGradients) -> None:
        self._module = module
        self._weights = weights

    def __call__(self, product: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        params = [param for param in self._module.parameters(recurse=False) if param.requires_grad]
        x = received_value(args[0]) if len(args) == 1 and not kwargs else None
        if not params or not isinstance(x, Tensor) or is_missing(x) or not torch.is_grad_enabled():
            return product(*args, **kwargs)
        return self._run_separately(product, x, params)

    @eager
    def _run_separately(self, product: Product, x: Tensor, params: Sequence[nn.Parameter]) -> Any:
        graph = _SeparateGraph(self._weights, params, product, x)
        output = [graph.output.detach()]
        del graph.output
        return _Output.apply(_anchor(), x, output, graph)  # type: ignore[no-untyped-call]


def defer_weight_gradients(model: nn.Module, changes: Level) -> WeightGradients:
    """Make the modules that this rank runs defer their weight gradients.

    These are linear layers (also split ones) and embeddings that do not share parameters with modules of other kinds.
    """
    weights = WeightGradients()
    chosen = {id(module): module for module in model.modules() if _is_product(module)}
    others = {id(param) for module in model.modules() if id(module) not in chosen for param in _own_params(module)}
    for module in chosen.values():
        if any(id(param) in others or is_off_stage(param) for param in _own_params(module)):
            continue
        wrapper = DeferredWeightGradients(module, weights)
        if (linear := find(module, LinearForward)) is not None:
            changes.on_undo(partial(setattr, linear, "product", linear.product))
            linear.product = partial(wrapper, linear.product)
        else:
            changes.wrap_forward(module, wrapper)
    return weights


def _own_params(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _is_product(module: nn.Module) -> bool:
    """Return whether a module computes a product with its weight, so that the weight's gradient does not depend on the
    weight.
    """
    if "forward" in vars(module):
        return find(module, LinearForward) is not None
    if isinstance(module, nn.Embedding):
        return type(module).forward is nn.Embedding.forward and module.max_norm is None and not module.sparse
    return is_linear(module)
