"""Embedding and output layer split over the vocabulary (Shoeybi et al., section 3)."""

from typing import Any

from torch import Tensor, nn

from partita.comm.mesh import Mesh
from partita.parallel.sharded_logits import LogitsSharding, ShardedLogits, Vocabulary, as_sharded_logits
from partita.parallel.tensor.functions import CopyToTensorRanks, sum_over_ranks
from partita.parallel.tensor.linear import Forward, LinearForward, Product, is_linear, num_inputs, num_outputs
from partita.parallel.tensor.parameter import UseLocalShards
from partita.parallel.tensor.splitter import Splitter
from partita.table.place import even


def is_embedding(module: nn.Module | None) -> bool:
    """Return whether a module is an embedding that can be split by rows.

    It must not change rows (``max_norm``) or scale gradients by the frequency of a token: each rank would use only its
    own rows for this.
    """
    if not isinstance(module, nn.Embedding) or module.sparse:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq


def find_vocabulary(model: nn.Module) -> list[nn.Module]:
    """Return the embeddings and output layers of the vocabulary, and all other modules that share their weights.

    A transformers model names them. For other models they are an embedding and a linear child of the model with
    weights of the same shape, if there is only one such pair.
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
    # `_parameters`, because reading `module.weight` of a parametrized module computes it and may change its buffers
    weights = {id(m.get_parameter("weight")) for m in found if is_embedding(m) or is_linear(m)}
    return [m for m in model.modules() if id(m._parameters.get("weight")) in weights]


def _shape(linear: nn.Module) -> tuple[int, int]:
    return num_outputs(linear), num_inputs(linear)


def _named(model: nn.Module) -> list[nn.Module | None]:
    """Return the input and the output embeddings that a transformers model names; None for each that it lacks."""
    found = list[nn.Module | None]()
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, name)())
        except (AttributeError, NotImplementedError):
            found.append(None)
    return found


def split_vocabulary(splitter: Splitter, mesh: Mesh, modules: list[nn.Module], rule_name: str) -> None:
    """Split the vocabulary of these modules, which may share one weight, over the ranks."""
    for module in modules:
        num = len(module.get_parameter("weight"))
        cuts = even(num, splitter.size)
        start, stop = cuts[splitter.rank]
        ranges = [(cut,) for cut in cuts]
        splitter.shard(module.get_parameter("weight"), 0, ranges)
        sizes = tuple(stop - start for start, stop in cuts)
        split = f"vocabulary {'+'.join(map(str, sizes))} of {num}"
        if isinstance(module, nn.Embedding):
            padding = module.padding_idx
            if padding is not None:
                here = start <= padding < stop
                splitter.changes.set_attribute(module, "padding_idx", padding - start if here else None)
            forward: EmbeddingSplit | OutputLayerSplit = EmbeddingSplit(
                splitter.copy_input, splitter.use_local_shards(module), (start, stop), num
            )
            split += ", outputs summed"
        else:
            if (bias := module._parameters.get("bias")) is not None:
                splitter.shard(bias, 0, ranges)
            forward = OutputLayerSplit(
                module,
                splitter.copy_input,
                splitter.use_local_shards(module),
                Vocabulary(splitter.copy_input.group, mesh, sizes),
            )
            split += ", loss computed from slices"
        splitter.changes.wrap_forward(module, forward)
        splitter.record(module, split, rule_name)


class EmbeddingSplit:
    """Forward of a split embedding: each rank looks up the tokens ``[start, stop)`` of ``num``.

    Tokens of other ranks give zeros, and the ranks' results are summed. A token outside the vocabulary is an error on
    every rank.
    """

    def __init__(self, copy_input: CopyToTensorRanks, own: UseLocalShards, rows: tuple[int, int], num: int) -> None:
        self._group = copy_input.group
        self._own = own
        (self._start, self._stop) = rows
        self._num = num

    def __call__(self, forward: Forward, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before = (tokens >= 0) & (tokens < self._start)
        of_others = before | ((tokens >= self._stop) & (tokens < self._num))
        found = self._own(forward, (tokens - self._start).masked_fill(of_others, 0), *args, **kwargs)
        return sum_over_ranks(found.masked_fill(of_others[..., None], 0.0), self._group)


class OutputLayerSplit(LinearForward):
    """Forward of a split output layer: each rank computes the logits of its part of the vocabulary."""

    def __init__(
        self, module: nn.Module, copy_input: CopyToTensorRanks, own: UseLocalShards, vocabulary: Vocabulary
    ) -> None:
        super().__init__(module, own, Product(module, own))
        self._copy_input = copy_input
        self.split = LogitsSharding(vocabulary)

    def __call__(self, forward: Forward, x: Tensor) -> ShardedLogits:
        return as_sharded_logits(self.product(self._copy_input(x)), self.split)
