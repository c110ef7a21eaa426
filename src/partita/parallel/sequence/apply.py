"""Application of sequence parallelism to an unmodified model: hooks and wrappers, which can be removed again."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from partita.comm.group import Group
from partita.comm.mesh import Mesh
from partita.errors import ConfigError, PartitaError
from partita.parallel.logits import slice_of
from partita.parallel.sequence.attention import KINDS, offer_to_transformers
from partita.parallel.sequence.biases import follow_biases
from partita.parallel.sequence.blocks import Blocks
from partita.parallel.sequence.exchange import enter, forward_begins, forward_ends
from partita.planner.group_units import find_blocks
from partita.sharding.compiler import eager
from partita.sharding.hooks import Hook
from partita.transforms.modules import Level

SEQUENCE = "sequence"
KEY = f"parallel.{SEQUENCE}"
# Outputs that transformers' models collect from their blocks, where each rank has only a slice.
_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


class SequenceParallel:
    """Sequence parallelism of a model: its blocks and its output layer run on slices of the sequence.

    Attributes:
        lines: one line for each module that runs on slices.

    Raises:
        ConfigError: the model has no blocks, or an attention that takes no mask of the keys that each query sees.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, group: Group, changes: Level) -> None:
        self.model = model
        self.group = group
        stacks = _stacks(model)
        if not stacks:
            raise ConfigError(
                f"{KEY}: {group.size}: {type(model).__name__} has no blocks (repeated modules in a ModuleList or "
                "Sequential) between which a sequence could be cut; leave parallel.sequence out"
            )
        kinds = _offer_attention(model, changes)
        self.stacks = [Blocks(blocks, mesh, group, changes, intercept=not kinds) for blocks in stacks]
        changes.on_undo(model.register_forward_pre_hook(Hook(self._refuse_collected), with_kwargs=True).remove)
        changes.on_undo(model.register_forward_pre_hook(Hook(self._begin)).remove)
        changes.on_undo(model.register_forward_hook(Hook(self._end), always_call=True).remove)
        seen = " and ".join(sorted(kinds)) or "scaled_dot_product_attention"
        self.lines = [f"{name}: a slice of the sequence, attention by {seen}" for blocks in stacks for name in blocks]
        if (head := _head(model, stacks)) is not None:
            changes.wrap_forward(head[1], HeadOfSlices(self.stacks[-1]))
            self.lines.append(f"{head[0]}: a slice of the sequence, logits up to the loss")

    @eager
    def _begin(self, module: nn.Module, args: Any) -> None:
        forward_begins(self.group)

    @eager
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        forward_ends(self.group)

    def _refuse_collected(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        config = getattr(module, "config", None)
        for name in _COLLECTED:
            if kwargs.get(name, getattr(config, name, None)):
                raise PartitaError(
                    f"{name} collects what each block computes, of which a rank has its slice under {KEY}: "
                    f"{self.group.size}; set {name} to False"
                )


class HeadOfSlices:
    """Wrapper that runs the output layer (which makes the logits) on the positions of this rank."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden, slices = args[0] if args else None, self.blocks.slices
        if not self.blocks.are_on or slices is None or not isinstance(hidden, Tensor):
            return forward(*args, **kwargs)
        if hidden.dim() != 3 or hidden.shape[1] != slices.length:
            return forward(*args, **kwargs)
        return slice_of(forward(enter(hidden, 1, slices), *args[1:], **kwargs), slices)


def _offer_attention(model: nn.Module, changes: Level) -> set[str]:
    """Have a transformers model compute attention on slices; return the implementations that its configs name.

    Raises:
        ConfigError: an implementation takes no mask that can be split by queries.
    """
    found = {id(config): config for module in model.modules() if (config := _attention_config(module)) is not None}
    kinds = {id(config): str(config._attn_implementation) for config in found.values()}
    for kind in kinds.values():
        if kind not in KINDS:
            raise ConfigError(
                f"{KEY}: attention by '{kind}' does not take a mask of which ranks could have the rows of their "
                f"queries; load the model with attn_implementation='{KINDS[0]}'"
            )
    for key, config in found.items():
        config._attn_implementation = offer_to_transformers(kinds[key])
        changes.on_undo(partial(setattr, config, "_attn_implementation", kinds[key]))
    if found:
        follow_biases(model, changes)
    return set(kinds.values())


def _attention_config(module: nn.Module) -> Any:
    """Return a module's config of transformers if it names the attention implementation, else None."""
    config = getattr(module, "config", None)
    return config if isinstance(getattr(config, "_attn_implementation", None), str) else None


def _stacks(model: nn.Module) -> list[dict[str, nn.Module]]:
    """Return the blocks of each container, by name."""
    found = dict[str, dict[str, nn.Module]]()
    for name, block in find_blocks(model):
        found.setdefault(name.rpartition(".")[0], {})[name] = block
    return list(found.values())


def _head(model: nn.Module, stacks: Sequence[Mapping[str, nn.Module]]) -> tuple[str, nn.Module] | None:
    """Return the module that makes the logits, and its name: what transformers names, or the last linear layer outside
    the blocks.
    """
    inside = {id(module) for blocks in stacks for block in blocks.values() for module in block.modules()}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    found = None
    for name, module in model.named_modules():
        is_last = isinstance(module, nn.Linear) and id(module) not in inside if output is None else module is output
        found = (name, module) if is_last else found
    return found
