"""Application of sequence parallelism to an unmodified model, by hooks and wrappers that can be removed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.errors import ConfigError, PartitaError
from partita.layout.units import find_blocks, find_text_blocks
from partita.parallel.sequence.attention import IMPLEMENTATIONS, register_in_transformers
from partita.parallel.sequence.biases import use_full_biases
from partita.parallel.sequence.blocks import Blocks
from partita.parallel.sequence.exchange import forward_begins, forward_ends, slice_for_rank
from partita.parallel.sharded_logits import as_sequence_slice
from partita.sharding.compiler import eager
from partita.sharding.hooks import Hook
from partita.transforms.modules import Level

SEQUENCE = "sequence"
KEY = f"parallel.{SEQUENCE}"
# The attribute of routers that drop the tokens beyond an expert's capacity (Switch Transformers, NLLB-MoE).
_CAPACITY = "expert_capacity"


class SequenceParallel:
    """Sequence parallelism of a model: its blocks and its output layer run on slices of the sequence.

    Attributes:
        stacks: the blocks of each container.
        lines: one line for each module that runs on slices.

    Raises:
        ConfigError: the model has no blocks, a router with a capacity, or an attention implementation without a dense
            mask.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, group: Group, alone: Group, changes: Level) -> None:
        self.model = model
        self.group = group
        stacks = _stacks(model)
        if not stacks:
            raise ConfigError(
                f"{KEY}: {group.size}: {type(model).__name__} has no blocks (repeated modules in a ModuleList or "
                "Sequential) that could run on slices of the sequence; leave parallel.sequence out"
            )
        _check_routers(stacks, group.size)
        kinds = _offer_attention(model, changes)
        self.stacks = [Blocks(blocks, mesh, group, alone, changes, intercept=not kinds) for blocks in stacks]
        changes.on_undo(model.register_forward_pre_hook(Hook(self._refuse_attentions), with_kwargs=True).remove)
        changes.on_undo(model.register_forward_pre_hook(Hook(self._begin)).remove)
        changes.on_undo(model.register_forward_hook(Hook(self._end), always_call=True).remove)
        changes.on_undo(model.register_forward_hook(Hook(self._check_gathered)).remove)
        implementations = " and ".join(sorted(kinds)) or "scaled_dot_product_attention"
        self.lines = [
            f"{name}: a slice of the sequence, attention by {implementations}" for blocks in stacks for name in blocks
        ]
        split = {name for blocks in stacks for name in blocks}
        self.lines += [f"{name}: all positions on each rank" for name, _ in find_blocks(model) if name not in split]
        if (head := _output_layer(model, stacks)) is not None:
            changes.wrap_forward(head[1], SlicedOutputLayer(self.stacks[-1]))
            self.lines.append(f"{head[0]}: a slice of the sequence, logits up to the loss")

    @eager
    def _begin(self, module: nn.Module, args: Any) -> None:
        forward_begins(self.group)
        for stack in self.stacks:
            stack.drop_slices()

    @eager
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        forward_ends(self.group)

    @eager
    def _check_gathered(self, module: nn.Module, args: Any, output: Any) -> None:
        for stack in self.stacks:
            stack.check_gathered()

    def _refuse_attentions(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        flag = "output_attentions"
        if kwargs.get(flag, getattr(getattr(module, "config", None), flag, None)):
            raise PartitaError(
                f"{flag} returns the attention weights of each block, of which a rank has only its slice under {KEY}: "
                f"{self.group.size}; set {flag} to False"
            )


class SlicedOutputLayer:
    """Wrapper that runs the output layer, which computes the logits, on the positions of this rank."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden, slices = args[0] if args else None, self.blocks.slices
        if not self.blocks.enabled or slices is None or not isinstance(hidden, Tensor):
            return forward(*args, **kwargs)
        if hidden.dim() != 3 or hidden.shape[1] != slices.length:
            return forward(*args, **kwargs)
        return as_sequence_slice(forward(slice_for_rank(hidden, 1, slices), *args[1:], **kwargs), slices)


def _check_routers(stacks: Sequence[Mapping[str, nn.Module]], size: int) -> None:
    """Refuse routers with a capacity: on a slice, a rank counts the tokens of its own positions only. The check of the
    first batch cannot detect this, because few of its positions exceed a capacity.

    Raises:
        ConfigError: a block has such a router. The message names the router.
    """
    for blocks in stacks:
        for name, block in blocks.items():
            for inner, module in block.named_modules(prefix=name):
                if _CAPACITY in vars(module):
                    raise ConfigError(
                        f"{KEY}: {size}: '{inner}' ({type(module).__name__}) drops the tokens beyond an expert's "
                        "capacity, which it counts along the sequence, and a rank has only a slice of the sequence; "
                        f"set {KEY}: 1, and split the model in another way (parallel.tensor, parallel.pipeline)"
                    )


def _offer_attention(model: nn.Module, changes: Level) -> set[str]:
    """Make a transformers model compute attention on slices. Return the implementations that its configs name.

    Raises:
        ConfigError: an implementation has no dense mask that can be split by queries.
    """
    found = {id(config): config for module in model.modules() if (config := _attention_config(module)) is not None}
    kinds = {id(config): str(config._attn_implementation) for config in found.values()}
    for kind in kinds.values():
        if kind not in IMPLEMENTATIONS:
            raise ConfigError(
                f"{KEY}: expected an attention implementation with a dense mask "
                f"({', '.join(IMPLEMENTATIONS)}); got '{kind}': load the model with "
                f"attn_implementation='{IMPLEMENTATIONS[0]}'"
            )
    for key, config in found.items():
        config._attn_implementation = register_in_transformers(kinds[key])
        changes.on_undo(partial(setattr, config, "_attn_implementation", kinds[key]))
    if found:
        use_full_biases(model, changes)
    return set(kinds.values())


def _attention_config(module: nn.Module) -> Any:
    """Return a module's transformers config if it names an attention implementation, else None."""
    config = getattr(module, "config", None)
    return config if isinstance(getattr(config, "_attn_implementation", None), str) else None


def _stacks(model: nn.Module) -> list[dict[str, nn.Module]]:
    """Return the blocks of each container, by name."""
    found = dict[str, dict[str, nn.Module]]()
    for name, block in find_text_blocks(model):
        found.setdefault(name.rpartition(".")[0], {})[name] = block
    return list(found.values())


def _output_layer(model: nn.Module, stacks: Sequence[Mapping[str, nn.Module]]) -> tuple[str, nn.Module] | None:
    """Return the name of the output layer, and the layer: the output embeddings of a transformers model, or the last
    linear layer outside the blocks. None if there is none.
    """
    inside = {id(module) for blocks in stacks for block in blocks.values() for module in block.modules()}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    found = None
    for name, module in model.named_modules():
        is_last = isinstance(module, nn.Linear) and id(module) not in inside if output is None else module is output
        found = (name, module) if is_last else found
    return found
