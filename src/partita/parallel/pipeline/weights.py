"""Gradients of weights apart from the backward that goes through them, for orders of work that compute them later.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2. Where a module does no more than multiply its input with
its parameters, its forward makes a graph of its own. Backward goes through that for the gradient of the input alone,
and leaves the rest of it, with the gradient that came, for later: autograd computes both, so they have the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from partita.parallel.applied import Parallel
from partita.parallel.pipeline.absent import arrived, is_missing
from partita.parallel.tensor.linear import LinearForward, is_linear
from partita.planner.elsewhere import is_elsewhere
from partita.sharding.compiler import eager
from partita.transforms.modules import forward_wrappers


@dataclass
class Left:
    """What a backward has left: graphs that lead to parameters, and the gradients that came to their outputs."""

    roots: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    params: dict[int, nn.Parameter] = field(default_factory=dict)

    def add(self, root: GradientEdge, gradient: Tensor, params: Sequence[nn.Parameter]) -> None:
        """One more graph, of whose leaves ``params`` are to have their gradients."""
        self.roots.append(root)
        self.gradients.append(gradient)
        self.params.update((id(param), param) for param in params)

    def add_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """A gradient that was computed already."""
        with torch._C.DisableTorchFunctionSubclass():  # its data may be at rest, and is not needed
            self.add(get_gradient_edge(param), gradient, [param])

    def run(self) -> None:
        """Compute the gradients, and add them to the parameters' as any backward does."""
        params = list(self.params.values())
        if params:
            with torch._C.DisableTorchFunctionSubclass():
                torch.autograd.backward(self.roots, self.gradients, inputs=params)


Product = Callable[[Tensor], Tensor]


class WeightGradients:
    """Where the backward under way leaves gradients of weights for later."""

    def __init__(self) -> None:
        self._left: Left | None = None
        self._of_micro = dict[int, Left]()

    @contextmanager
    def apart(self, micro: int) -> Iterator[Left]:
        """A block with the backward of a micro-batch, which leaves them."""
        self._left = self._of_micro[micro] = Left()
        try:
            yield self._left
        finally:
            self._left = None

    def take(self, micro: int) -> Left:
        """What the backward of a micro-batch has left."""
        return self._of_micro.pop(micro)

    def forget(self) -> None:
        """A batch has failed: what it left is void."""
        self._of_micro.clear()

    def leave(self, root: GradientEdge, gradient: Tensor, params: Sequence[nn.Parameter]) -> None:
        """See :meth:`Left.add`. A backward outside the block leaves nothing."""
        if self._left is None:
            torch.autograd.backward([root], [gradient], inputs=list(params))
        else:
            self._left.add(root, gradient, params)


class _OwnGraph:
    """The graph from a module's input to its output. It does not hold the input: what backward has of it (where the
    forward around is recomputed, that is another tensor) is put in its place.
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
        """A view of the input as its sizes, strides, and offset in it."""
        if tensor.untyped_storage().data_ptr() != self._x.untyped_storage().data_ptr():
            return tensor
        return tensor.shape, tensor.stride(), int(tensor.storage_offset() - self._x.storage_offset())

    def _unpack(self, packed: Tensor | tuple[Sequence[int], Sequence[int], int]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, stride, offset = packed
        return self._x.as_strided(shape, stride, self._x.storage_offset() + offset)

    def back(self, x: Tensor, gradient: Tensor) -> Tensor | None:
        """The gradient of the input ``x``, if it has one; the rest is left for later."""
        self._x, found = x, None
        if self._entrance is not None:
            (found,) = torch.autograd.grad([self._root], [self._entrance], [gradient], retain_graph=True)
        self._weights.leave(self._root, gradient, self._params)
        return found


def _anchor() -> Tensor:
    """What makes a function's output have a gradient, whether its inputs do or not."""
    return torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")


class _Enter(torch.autograd.Function):
    """A value as one that was computed: no graph holds it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, passed: list[Tensor]) -> Tensor:
        return passed.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class _Through(torch.autograd.Function):
    """The output that a module computed from ``x`` in a graph of its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, output: list[Tensor], graph: _OwnGraph) -> Tensor:
        ctx.graph = graph
        ctx.save_for_backward(x)
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        return None, ctx.graph.back(*ctx.saved_tensors, gradient), None, None


class Apart:
    """Runs the product of a module's input with its parameters, whose gradients are computed apart."""

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


def keep_apart(model: nn.Module, parallel: Parallel) -> WeightGradients:
    """Have the modules that this rank runs leave their weights' gradients for later: linear layers (those of which it
    has a part, too) and embeddings, the parameters of which no other kind of module owns.
    """
    weights = WeightGradients()
    chosen = {id(module): module for module in model.modules() if _is_product(module)}
    others = {id(param) for module in model.modules() if id(module) not in chosen for param in _own(module)}
    for module in chosen.values():
        if any(id(param) in others or is_elsewhere(param) for param in _own(module)):
            continue
        apart = Apart(module, weights)
        if (linear := _outermost_linear(module)) is not None:
            linear.product = partial(apart, linear.product)
        else:
            parallel.changes.wrap_forward(module, apart)
    return weights


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _is_product(module: nn.Module) -> bool:
    """Whether a module's output is a product with its weight, for the gradient of which the weight is not needed."""
    if "forward" in vars(module):
        return _outermost_linear(module) is not None
    if isinstance(module, nn.Embedding):
        return type(module).forward is nn.Embedding.forward and module.max_norm is None and not module.sparse
    return is_linear(module)


def _outermost_linear(module: nn.Module) -> LinearForward | None:
    """The outermost wrapper of a module's forward, if it is that of a split linear layer."""
    wrapper = next(iter(forward_wrappers(module)), None)
    return wrapper if isinstance(wrapper, LinearForward) else None
