"""Attention split by heads, with separate or fused query, key and value projections.

Each rank computes complete heads: it has their outputs of the projections, and their inputs of the output projection.
If several ranks need a key head (there are fewer key heads than ranks, or they do not divide evenly), every rank has a
copy of the key and value projections, and the ranks' partial gradients are summed.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from partita.parallel.tensor.dropout import SplitDropout
from partita.parallel.tensor.heads import Heads
from partita.parallel.tensor.linear import Ranges, is_linear, num_inputs, num_outputs
from partita.parallel.tensor.splitter import Splitter, length, scaled

# Names of the query, key, value and output projections.
SEPARATE = (
    *(("q_proj", "k_proj", "v_proj", out) for out in ("o_proj", "out_proj", "dense")),
    ("q", "k", "v", "o"),
)
# Attributes for the number of heads, and for the number of elements of one head.
_QUERIES = ("num_heads", "n_heads", "num_attention_heads", "heads")
_KEYS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_WIDTH = ("head_dim", "head_size", "key_value_proj_dim", "attention_head_size")
BIAS_BY_HEAD = "relative_attention_bias"


@dataclass(frozen=True)
class NotSplit:
    """The reason why an attention is not split by heads."""

    reason: str


SplitRule = Callable[[Splitter, nn.Module, str], NotSplit | None]


def separate_projections(module: nn.Module) -> tuple[str, str, str, str] | None:
    """Return the names of a module's query, key, value and output projections; None if it lacks one."""
    for names in SEPARATE:
        if all(is_linear(getattr(module, name, None)) for name in names):
            return names
    return None


def head_width(module: nn.Module) -> int | None:
    """Return the number of elements of one head; None if the module has no attribute for it."""
    return _number(module, _WIDTH)


def split_separate(splitter: Splitter, module: nn.Module, rule_name: str) -> NotSplit | None:
    """Split attention with separate query, key and value projections; return the reason if it cannot be split."""
    names, width = separate_projections(module), head_width(module)
    if names is None or width is None:
        return NotSplit("its projections are not known")
    alike = [other for other in splitter.model.modules() if type(other) is type(module)]
    if not all(hasattr(other, names[1]) and hasattr(other, names[2]) for other in alike):
        return NotSplit("layers without key and value projections use the keys and values of other layers")
    query, key, value, out = (module.get_submodule(name) for name in names)
    numbers = (num_outputs(query), num_outputs(key), num_outputs(value), num_inputs(out))
    if any(number % width for number in numbers) or numbers[0] != numbers[3] or numbers[1] != numbers[2]:
        return NotSplit(f"the sizes of its projections are not multiples of the head width {width}")
    heads = Heads(numbers[0] // width, numbers[1] // width, splitter.size)
    if not_split := _check(splitter, module, heads, [query, key, value, out], width):
        return not_split
    ranks = range(heads.size)
    splitter.column(query, rule_name, [scaled(heads.queries_of(rank), width) for rank in ranks], gathers=False)
    for each in (key, value):
        splitter.column(each, rule_name, [scaled(heads.keys_of(rank)[0], width) for rank in ranks], gathers=False)
    splitter.row(out, rule_name, [scaled(heads.queries_of(rank), width) for rank in ranks])
    _set_numbers(splitter, module, heads, rule_name, width)
    return None


@dataclass(frozen=True)
class Fused:
    """Rule for attention with a fused query, key and value projection, and an output projection.

    Attributes:
        qkv: the name of the fused projection.
        out: the name of the output projection.
        by_head: with several key heads, outputs are ordered by head (query, key and value of each). Otherwise all
            queries come first, then all keys, then all values.
        alibi: the forward may get the linear position biases (ALiBi) of all heads.
        reads_config: the forward reads the number of query heads from the module's config.
    """

    qkv: str
    out: str
    by_head: bool = False
    alibi: bool = False
    reads_config: bool = False

    def __call__(self, splitter: Splitter, module: nn.Module, rule_name: str) -> NotSplit | None:
        """Split the module, as :func:`split_separate` does."""
        qkv, out = getattr(module, self.qkv, None), getattr(module, self.out, None)
        width = head_width(module)
        if width is None or not is_linear(qkv) or not is_linear(out):
            return NotSplit("its projections are not known")
        if (numbers := self._numbers(qkv, out, width)) is None:
            return NotSplit(f"its fused projection of {num_outputs(qkv)} outputs has an unknown order of heads")
        heads = Heads(*numbers, splitter.size)
        if not_split := _check(splitter, module, heads, [qkv, out], width):
            return not_split
        ranks = range(heads.size)
        splitter.column(qkv, rule_name, [self._outputs(heads, rank, width) for rank in ranks], gathers=False)
        splitter.row(out, rule_name, [scaled(heads.queries_of(rank), width) for rank in ranks])
        _set_numbers(splitter, module, heads, rule_name, width)
        changes = splitter.changes
        if self.alibi:
            changes.wrap_forward(module, AlibiSlice(heads, splitter.rank))
        if self.reads_config:
            changes.set_attribute(module, "config", own := copy.copy(module.config))
            own.num_attention_heads = length(heads.queries_of(splitter.rank))  # type: ignore[union-attr]
        return None

    def _numbers(self, qkv: nn.Module, out: nn.Module, width: int) -> tuple[int, int] | None:
        """Return the numbers of query and of key heads; None if the order of heads is unknown."""
        queries = num_inputs(out) // width
        keys = (num_outputs(qkv) // width - queries) // 2
        is_known = num_outputs(qkv) == (queries + 2 * keys) * width and not (self.by_head and keys not in (1, queries))
        return (queries, keys) if is_known else None

    def projections(self, module: nn.Module) -> tuple[Ranges, Ranges, Ranges] | None:
        """Return the outputs of the fused projection that are queries, keys and values; None if they are not known.

        The module may already be split: sizes are those of its weights, which are still unsplit.
        """
        qkv, out, width = getattr(module, self.qkv, None), getattr(module, self.out, None), head_width(module)
        if width is None or not isinstance(qkv, nn.Module) or not isinstance(out, nn.Module):
            return None
        if (numbers := self._numbers(qkv, out, width)) is None:
            return None
        queries, keys = numbers
        if self.by_head and keys > 1:
            starts = [[(3 * head + place) * width for head in range(queries)] for place in range(3)]
            of_query, of_key, of_value = (tuple((start, start + width) for start in each) for each in starts)
            return of_query, of_key, of_value
        stops = (0, queries * width, (queries + keys) * width, (queries + 2 * keys) * width)
        of_query, of_key, of_value = (((start, stop),) for start, stop in pairwise(stops))
        return of_query, of_key, of_value

    def _outputs(self, heads: Heads, rank: int, width: int) -> Ranges:
        """Return the outputs of the fused projection that a rank computes."""
        queries, keys = heads.queries_of(rank), heads.keys_of(rank)[0]
        if self.by_head and heads.keys > 1:
            return scaled(queries, 3 * width)
        keys_at = heads.queries * width
        values_at = keys_at + heads.keys * width
        return (*scaled(queries, width), *scaled(keys, width, keys_at), *scaled(keys, width, values_at))


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes that is an integer."""
    for name in names:
        if isinstance(found := getattr(module, name, None), int):
            return found
    return None


def _check(
    splitter: Splitter, module: nn.Module, heads: Heads, projections: list[nn.Module], width: int
) -> NotSplit | None:
    """Return the reason if heads cannot be divided over the ranks, or the module has unknown parameters; else None."""
    if heads.queries < heads.size:
        return NotSplit(f"{heads.queries} query heads are fewer than {heads.size} tensor ranks")
    if heads.keys < 1 or heads.queries % heads.keys:
        return NotSplit(f"{heads.queries} query heads do not share {heads.keys} key heads evenly")
    if not all(map(splitter.is_free, projections)):
        return NotSplit("an earlier rule has already split one of its projections, or its weight is shared")
    for name, child in module.named_modules():
        if child in projections or not any(True for _ in child.parameters(recurse=False)):
            continue
        if name == BIAS_BY_HEAD or all(param.shape == (width,) for param in child.parameters(recurse=False)):
            continue
        return NotSplit(f"its '{name or 'own'}' parameters do not have the size of one head")
    return None


def _set_numbers(splitter: Splitter, module: nn.Module, heads: Heads, rule_name: str, width: int) -> None:
    """Set the module's numbers of heads to those of this rank, and split its other parameters and dropout by head."""
    changes, rank = splitter.changes, splitter.rank
    ranges, share = heads.keys_of(rank)
    queries, keys = length(heads.queries_of(rank)), length(ranges)
    numbers = dict.fromkeys(_QUERIES, queries) | dict.fromkeys(_KEYS, keys) | {"num_key_value_groups": share}
    numbers |= {"split_size": queries * width, "inner_dim": queries * width}
    for name, number in numbers.items():
        if isinstance(getattr(module, name, None), int):
            changes.set_attribute(module, name, number)
    for name, child in module.named_children():
        if name == BIAS_BY_HEAD:
            splitter.shard(child.get_parameter("weight"), 1, [heads.queries_of(each) for each in range(heads.size)])
            changes.wrap_forward(child, splitter.use_local_shards(child))
            splitter.record(child, f"heads {queries} of {heads.queries}", rule_name)
        elif splitter.name(child) not in splitter.decisions:
            for owner in child.modules():
                splitter.replicate_own(owner)
            if any(True for _ in child.parameters()):
                splitter.record(child, "copies, on own heads; gradients summed", rule_name)
    splitter.replicate_own(module)
    own = heads.queries_of(rank)
    changes.wrap_forward(module, SplitDropout(module, splitter.copy_input, own, heads.queries, heads=True))
    counts = "+".join(str(length(heads.queries_of(rank))) for rank in range(heads.size))
    splitter.record(module, f"{counts} of {heads.queries} query heads over {heads.keys} key heads", rule_name)


class AlibiSlice:
    """Wrapper of attention with linear position biases per head (ALiBi: Press et al., "Train Short, Test Long", section
    3). It passes only the biases of this rank's heads to the forward.

    They are in ``alibi`` ``[samples * heads, 1, keys]`` or ``[samples, heads, 1, keys]``, or in a mask ``[samples,
    heads, queries, keys]``.
    """

    def __init__(self, heads: Heads, rank: int) -> None:
        self._num, (self._own,) = heads.queries, heads.queries_of(rank)

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for name in ("alibi", "attention_mask"):
            given = kwargs.get(name)
            if isinstance(given, Tensor) and given.dim() == 4 and given.shape[1] == self._num > 1:
                kwargs[name] = given[:, slice(*self._own)]
            elif isinstance(given, Tensor) and name == "alibi":
                kwargs[name] = given.unflatten(0, (-1, self._num))[:, slice(*self._own)].flatten(0, 1)
        return forward(*args, **kwargs)


# The rule for each attention class. Ambiguous class names include the module.
BY_CLASS: dict[str, SplitRule] = {
    "GPT2Attention": Fused("c_attn", "c_proj"),
    "GPTNeoXAttention": Fused("query_key_value", "dense", by_head=True),
    "BloomAttention": Fused("query_key_value", "dense", by_head=True, alibi=True),
    "FalconAttention": Fused("query_key_value", "dense", by_head=True, alibi=True),
    "Phi3Attention": Fused("qkv_proj", "o_proj", reads_config=True),
    "partita.train.decoder.Attention": Fused("qkv", "out"),
    "partita.prediction.gpt.Attention": Fused("qkv", "out"),
    **dict.fromkeys(
        ("T5Attention", "ViTAttention", "OPTAttention", "LlamaAttention", "MistralAttention"), split_separate
    ),
    **dict.fromkeys(("MixtralAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention"), split_separate),
    **dict.fromkeys(("Starcoder2Attention", "PhiAttention", "GemmaAttention", "Gemma2Attention"), split_separate),
}
