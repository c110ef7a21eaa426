"""Gradients of weights apart from the backward that goes through them, for orders of work that compute them later.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2. Where a module does no more than multiply its input with
its parameters, its forward makes a graph of its own. Backward goes through that for the gradient of the input alone,
and leaves the rest of it, with the gradient that came, for later: autograd computes both, so they have the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from partita.parallel.applied import OwnForward, Parallel
from partita.parallel.pipeline.absent import arrived, is_missing
from partita.parallel.tensor.linear import LinearForward, is_linear
from partita.planner.elsewhere import is_elsewhere


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


@dataclass
class _OwnGraph:
    """A module's output by ``root``, computed from ``inner``, which is its input."""

    inner: Tensor
    root: GradientEdge
    params: Sequence[nn.Parameter]
    weights: WeightGradients


class _Through(torch.autograd.Function):
    """A module's output, as computed from its input ``x`` in a graph of its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, output: list[Tensor], graph: _OwnGraph) -> Tensor:
        ctx.graph = graph
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        graph, back = ctx.graph, None
        if graph.inner.requires_grad:
            (back,) = torch.autograd.grad([graph.root], [graph.inner], [gradient], retain_graph=True)
        graph.weights.leave(graph.root, gradient, graph.params)
        return None, back, None, None


class Apart(OwnForward):
    """What multiplies a module's input with its parameters (its forward, unless given), whose gradients are computed
    apart.
    """

    def __init__(
        self, module: nn.Module, weights: WeightGradients, product: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__(module)
        self._weights, self._product = weights, self.own if product is None else product
        self._anchor = torch.zeros((), requires_grad=True)  # an input may have no gradient

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        params = [param for param in self.module.parameters(recurse=False) if param.requires_grad]
        x = arrived(args[0]) if len(args) == 1 and not kwargs else None
        if not params or not isinstance(x, Tensor) or is_missing(x) or not torch.is_grad_enabled():
            return self._product(*args, **kwargs)
        return self._through(x, params)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _through(self, x: Tensor, params: Sequence[nn.Parameter]) -> Any:
        inner = x.detach().requires_grad_(x.requires_grad)
        output = self._product(inner)
        graph = _OwnGraph(inner, get_gradient_edge(output), params, self._weights)
        return _Through.apply(self._anchor, x, [output.detach()], graph)  # type: ignore[no-untyped-call]


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
        forward = vars(module).get("forward")
        if isinstance(forward, LinearForward):
            forward.product = Apart(module, weights, forward.product)
        else:
            parallel.changes.set(module, "forward", Apart(module, weights))
    return weights


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _is_product(module: nn.Module) -> bool:
    """Whether a module's output is a product with its weight, for the gradient of which the weight is not needed."""
    if "forward" in vars(module):
        return isinstance(module.forward, LinearForward)
    if isinstance(module, nn.Embedding):
        return type(module).forward is nn.Embedding.forward and module.max_norm is None and not module.sparse
    return is_linear(module)
