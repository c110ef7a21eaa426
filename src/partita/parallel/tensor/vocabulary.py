"""Embedding and output layer split over the vocabulary (Shoeybi et al., section 3)."""

from typing import Any

from torch import Tensor, nn

from partita.comm.mesh import Mesh
from partita.parallel.logits import Split, SplitLogits, Vocabulary, split_logits
from partita.parallel.tensor.functions import Entrance, leave
from partita.parallel.tensor.linear import Forward, LinearForward, Product, is_linear, num_inputs, num_outputs
from partita.parallel.tensor.splitter import Splitter
from partita.plan.place import even


def is_embedding(module: nn.Module | None) -> bool:
    """True if the module looks rows up and does nothing else: it changes no row, and scales no gradient by how often a
    row was looked up, for which each rank would count only its own rows.
    """
    if not isinstance(module, nn.Embedding) or module.sparse:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq


def find_vocabulary(model: nn.Module) -> list[nn.Module]:
    """The embeddings and output layers of the vocabulary: what the model names so, else the one embedding and the one
    linear layer behind the blocks of as many rows; and whoever has the same parameter.
    """
    found = [module for module in _named(model) if module is not None]
    if not found:
        embeddings = [m for m in model.modules() if is_embedding(m)]
        pairs = [
            [embedding, linear]
            for embedding in embeddings
            for linear in model.children()
            if is_linear(linear) and _shape(linear) == tuple(embedding.get_parameter("weight").shape)
        ]
        found = pairs[0] if len(pairs) == 1 else []
    # `module.weight` of a parametrized module computes it, and may change its buffers (a spectral norm's vectors)
    weights = {id(m.get_parameter("weight")) for m in found if is_embedding(m) or is_linear(m)}
    return [m for m in model.modules() if id(m._parameters.get("weight")) in weights]


def _shape(linear: nn.Module) -> tuple[int, int]:
    return num_outputs(linear), num_inputs(linear)


def _named(model: nn.Module) -> list[nn.Module | None]:
    """What a model of transformers says of itself."""
    found = list[nn.Module | None]()
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, name)())
        except (AttributeError, NotImplementedError):
            found.append(None)
    return found


def split_vocabulary(splitter: Splitter, mesh: Mesh, modules: list[nn.Module], by: str) -> None:
    """Give each rank a part of the rows of these modules, which may have one parameter together."""
    for module in modules:
        num = len(module.get_parameter("weight"))
        cuts = even(num, splitter.size)
        own = (cuts[splitter.rank],)
        splitter.cut(module.get_parameter("weight"), 0, own)
        sizes = tuple(stop - start for start, stop in cuts)
        split = f"vocabulary {'+'.join(map(str, sizes))} of {num}"
        if isinstance(module, nn.Embedding):
            padding = module.padding_idx
            if padding is not None:
                here = own[0][0] <= padding < own[0][1]
                splitter.parallel.changes.set_attribute(module, "padding_idx", padding - own[0][0] if here else None)
            forward: Embedding | Head = Embedding(splitter.entrance, own[0], num)
            split += ", outputs summed"
        else:
            if (bias := module._parameters.get("bias")) is not None:
                splitter.cut(bias, 0, own)
            forward = Head(module, splitter.entrance, Vocabulary(splitter.entrance.group, mesh, sizes))
            split += ", loss computed from slices"
        splitter.parallel.changes.wrap_forward(module, forward)
        splitter.decide(module, split, by)


class Embedding:
    """Each rank looks up the tokens ``[start, stop)`` of ``num``; those of others are zeros, and all are summed. A
    token that nobody has is an error, on every rank.
    """

    def __init__(self, entrance: Entrance, own: tuple[int, int], num: int) -> None:
        self._group, (self._start, self._stop), self._num = entrance.group, own, num

    def __call__(self, forward: Forward, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before = (tokens >= 0) & (tokens < self._start)
        of_others = before | ((tokens >= self._stop) & (tokens < self._num))
        found = forward((tokens - self._start).masked_fill(of_others, 0), *args, **kwargs)
        return leave(found.masked_fill(of_others[..., None], 0.0), self._group)


class Head(LinearForward):
    """Each rank computes the logits of its part of the vocabulary."""

    def __init__(self, module: nn.Module, entrance: Entrance, vocabulary: Vocabulary) -> None:
        super().__init__(module, Product(module))
        self._entrance, self.split = entrance, Split(vocabulary)

    def __call__(self, forward: Forward, x: Tensor) -> SplitLogits:
        return split_logits(self.product(self._entrance(x)), self.split)
