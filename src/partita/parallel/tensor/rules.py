"""Rules that decide how each module is split over the tensor ranks. The first rule that matches a module decides.

1. ``parallel.tensor_rules`` of the config. 2. A table of classes. 3. The model's own plan (``tp_plan`` of
transformers). 4. Layers that are found by their shapes and pass a check (:mod:`partita.parallel.tensor.split_check`).
5. Any other linear layer: its outputs are split and then gathered, which shards its parameters and optimizer
states, whatever the surrounding code does.
"""

import inspect
import re
from collections.abc import Container, Iterable, Iterator, Mapping

from torch import nn

from partita.comm.mesh import Mesh
from partita.config.schema import TensorRule
from partita.errors import ConfigError
from partita.layout.units import modules_like
from partita.parallel.tensor.attention import BY_CLASS, SplitRule, head_width, separate_projections, split_separate
from partita.parallel.tensor.experts import are_experts, split_experts
from partita.parallel.tensor.feed_forward import feed_forward_by_class, feed_forwards_by_shape, split_dropout
from partita.parallel.tensor.linear import is_linear, num_inputs, num_outputs
from partita.parallel.tensor.split_check import is_equivalent
from partita.parallel.tensor.splitter import Splitter
from partita.parallel.tensor.vocabulary import find_vocabulary, is_embedding, split_vocabulary

KEY = "parallel.tensor_rules"

# Modules that read the weights of their submodules without calling their forwards.
_READ_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# Classes, by name, whose forward writes to the weights of their submodules (it clamps `weight.data`).
_WRITE_INSIDE = ("Gemma3nTextAltUp",)
# Classes, by name, whose layers may stay split although the module has other parameters: they apply these to full
# features.
_FULL_FEATURES = ("InklingMLP", "DogeCDMoE")
# Activation functions, by name, that apply the same learned parameters to every feature.
_LEARNED_ACTIVATIONS = ("PReLU", "XIELUActivation")


def split_model(splitter: Splitter, mesh: Mesh, tensor_rules: Iterable[tuple[str, TensorRule]]) -> None:
    """Split the model: record a decision about every module that has parameters.

    Raises:
        ConfigError: a rule of the config fits no module, or a module that it cannot split.
    """
    for pattern, rule in tensor_rules:
        _by_config(splitter, mesh, pattern, rule)
    for module in splitter.model.modules():
        if isinstance(module, _READ_INSIDE):
            _keep_copies(splitter, module, f"{type(module).__name__} reads the weights inside it")
        elif type(module).__name__ in _WRITE_INSIDE:
            _keep_copies(splitter, module, f"{type(module).__name__} writes to the weights inside it")
    _by_class(splitter, mesh)
    _by_metadata(splitter)
    _by_check(splitter)
    for module in splitter.model.modules():
        if is_linear(module) and splitter.is_free(module) and num_outputs(module) >= splitter.size:
            splitter.column(module, "any linear layer", gathers=True)
    for module in splitter.model.modules():
        if any(True for _ in module.parameters(recurse=False)) and splitter.name(module) not in splitter.decisions:
            splitter.record(module, "copies", "no rule splits it")


def _keep_copies(splitter: Splitter, module: nn.Module, rule_name: str) -> None:
    for inner in module.modules():
        if splitter.name(inner) not in splitter.decisions:
            splitter.record(inner, "copies", rule_name)


def _by_config(splitter: Splitter, mesh: Mesh, pattern: str, rule: TensorRule) -> None:
    rule_name = f"{KEY}: '{pattern}'"
    for module in modules_like(splitter.model, pattern, KEY):
        if rule == "whole":
            _keep_copies(splitter, module, rule_name)
            continue
        if splitter.name(module) in splitter.decisions:
            continue  # an earlier rule decided
        problem = _problem(splitter, module, rule)
        if problem is not None:
            raise ConfigError(
                f"{KEY}: '{pattern}': '{rule}' cannot split '{splitter.name(module)}' ({type(module).__name__}), "
                + problem
            )
        if rule == "vocabulary":
            weight = module.get_parameter("weight")
            owners = [m for m in splitter.model.modules() if m._parameters.get("weight") is weight]
            split_vocabulary(splitter, mesh, owners, rule_name)
        elif rule in ("column", "column_gathered"):
            splitter.column(module, rule_name, gathers=rule == "column_gathered")
            if rule == "column":
                _notify_of_copies(splitter, module, rule_name)
        else:
            splitter.row(module, rule_name, splits=rule == "row_split")


def _notify_of_copies(splitter: Splitter, layer: nn.Module, rule_name: str) -> None:
    """Add a notice if the module that contains a layer, whose outputs stay split, has other parameters. If it applies
    them to the outputs, each rank has a partial gradient of them.
    """
    parent = splitter.model.get_submodule(splitter.name(layer).rpartition(".")[0])
    others = [
        f"{name}.{key}" if name else key
        for name, inner in parent.named_modules()
        for key, _ in inner.named_parameters(recurse=False)
        if not (is_linear(inner) or is_embedding(inner))
    ]
    if others:
        kind = type(parent).__name__
        notice = (
            f"{rule_name}: 'column' leaves outputs split over the ranks. If {kind} applies '{others[0]}' to them, the "
            "gradient of that parameter is wrong: set 'column_gathered', and 'row_split' for the next layer"
        )
        if notice not in splitter.parallel.notices:
            splitter.parallel.notices.append(notice)


def _problem(splitter: Splitter, module: nn.Module, rule: TensorRule) -> str | None:
    """Return the reason why a module cannot be split by this rule; None if it can."""
    if rule == "vocabulary":
        if not (is_linear(module) or is_embedding(module)):
            return "which is neither an embedding nor a linear layer; name one, or set 'whole'"
        num = len(module.get_parameter("weight"))
    elif not is_linear(module):
        return "which is no linear layer; name the linear layers inside it, or set 'whole'"
    elif splitter.is_tied(module):
        return "whose weight is shared with another module; set 'vocabulary' or 'whole'"
    else:
        num = num_inputs(module) if rule.startswith("row") else num_outputs(module)
    return f"whose {num} features are fewer than {splitter.size} ranks" if num < splitter.size else None


def _by_class(splitter: Splitter, mesh: Mesh) -> None:
    vocabulary = find_vocabulary(splitter.model)
    fits = all(is_embedding(m) or is_linear(m) for m in vocabulary)
    free = all(splitter.name(m) not in splitter.decisions for m in vocabulary)
    if vocabulary and fits and free and len(vocabulary[0].get_parameter("weight")) >= splitter.size:
        split_vocabulary(splitter, mesh, vocabulary, "vocabulary of the model")
    for module in splitter.model.modules():
        kind = type(module)
        split_rule = BY_CLASS.get(kind.__name__) or BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")
        if split_rule is not None:
            _by_heads(splitter, module, split_rule, f"class {kind.__name__}")
        elif (layer := feed_forward_by_class(module, splitter.size)) is not None:
            if all(map(splitter.is_free, module.children())) and splitter.is_free(module):
                layer.split(splitter, module, f"class {kind.__name__}")
        elif are_experts(module) and "Experts" in kind.__name__ and splitter.is_free(module):
            split_experts(splitter, module, f"class {kind.__name__}")


def _by_heads(splitter: Splitter, module: nn.Module, split_rule: SplitRule, rule_name: str) -> None:
    if splitter.name(module) in splitter.decisions:
        return
    not_split = split_rule(splitter, module, rule_name)
    if not_split is not None:
        _add_notice(splitter, type(module).__name__, not_split.reason)


def _add_notice(splitter: Splitter, kind: str, reason: str) -> None:
    """Add a notice, once per class, that attention is not split by heads: every rank computes all heads, but the
    parameters and states of the linear layers are sharded.
    """
    notice = f"{kind} is not split by heads: {reason}; its linear layers are split, and their outputs gathered"
    if notice not in splitter.parallel.notices:
        splitter.parallel.notices.append(notice)


def _by_metadata(splitter: Splitter) -> None:
    plan = getattr(splitter.model, "tp_plan", None) or {}
    rule_name = f"tp_plan of {type(splitter.model).__name__}"
    styles = {name: style for name in splitter.names.values() if (style := _style(plan, name)) is not None}
    for module in list(splitter.model.modules()):
        name = splitter.name(module)
        if styles.get(name) == "moe_tp_experts" and are_experts(module) and splitter.is_free(module):
            split_experts(splitter, module, rule_name)
        given = {child: styles.get(f"{name}.{key}" if name else key) for key, child in module.named_children()}
        layers = {
            child: style for child, style in given.items() if style in ("colwise", "rowwise") and is_linear(child)
        }
        if (names := separate_projections(module)) is not None and {
            module.get_submodule(each) for each in names
        } <= layers.keys():
            _by_heads(splitter, module, split_separate, rule_name)
        elif layers and not _mixes_features(splitter, module, layers) and all(map(splitter.is_free, layers)):
            _split_layers(splitter, module, layers, rule_name)


def _mixes_features(splitter: Splitter, module: nn.Module, layers: Container[nn.Module]) -> bool:
    """Return whether the code between a module's ``layers`` reads, or may read, more than this rank's features.

    Attention is split by heads only. The threshold of sparse activations (Gemma3n) is computed from the mean and
    deviation of all features. A second input (the attention output that NeoMME multiplies by gates) has all features.
    Other parameters may be applied to the split features; only those of learned activations are known to be the same
    for each feature.
    """
    kind = type(module).__name__
    if "ttention" in kind or bool(getattr(module, "activation_sparsity", 0.0)):
        return True
    arguments = inspect.signature(module.forward).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each for each in arguments if each.default is each.empty and each.kind not in variadic]
    others = (inner for inner in module.modules() if inner not in layers and [*inner.parameters(recurse=False)])
    are_known = kind in _FULL_FEATURES or all(_is_learned_activation(splitter, inner) for inner in others)
    return len(required) > 1 or not are_known


def _is_learned_activation(splitter: Splitter, module: nn.Module) -> bool:
    """Return whether a module is an activation function with parameters of one element each."""
    params = list(module.parameters(recurse=False))
    is_scalar = bool(params) and all(param.numel() == 1 for param in params)
    return is_scalar and type(module).__name__ in _LEARNED_ACTIVATIONS and not splitter.is_tied(module)


def _style(plan: dict[str, str], name: str) -> str | None:
    """Return the style that the plan has for a module's name; None if it has none."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _split_layers(splitter: Splitter, module: nn.Module, layers: Mapping[nn.Module, str], rule_name: str) -> None:
    """Split the linear layers of a module if their sizes match: the column-parallel layers have as many outputs as the
    row-parallel layers have inputs. Each rank applies a copy of the learned activations to its features.
    """
    columns = [layer for layer, style in layers.items() if style == "colwise"]
    rows = [layer for layer, style in layers.items() if style == "rowwise"]
    widths = {num_outputs(layer) for layer in columns} | {num_inputs(layer) for layer in rows}
    if not (columns and rows) or len(widths) != 1 or (width := widths.pop()) < splitter.size:
        return
    for layer in columns:
        splitter.column(layer, rule_name, gathers=False)
    for layer in rows:
        splitter.row(layer, rule_name)
    for inner in module.modules():
        if _is_learned_activation(splitter, inner):
            splitter.replicate_own(inner)
            splitter.record(inner, "copies, on own features; gradients summed", rule_name)
    split_dropout(splitter, module, width)


def _by_check(splitter: Splitter) -> None:
    checked = dict[object, SplitRule | None]()
    for module in list(splitter.model.modules()):
        layers = [child for child in module.children() if any(True for _ in child.parameters())]
        if splitter.name(module) in splitter.decisions or not layers or not all(map(splitter.is_free, layers)):
            continue
        kind = _key(module)
        if kind not in checked:
            checked[kind] = _checked_rule(module, splitter.size)
        split_rule = checked[kind]
        if split_rule is not None:
            split_rule(splitter, module, f"found in {type(module).__name__}, proven on its slices")


def _checked_rule(module: nn.Module, size: int) -> SplitRule | None:
    """Return a split, which has passed the check, of a module that no earlier rule matches; None if there is none.

    The module is split as attention with separate query, key and value projections, or as a feed-forward layer.
    """
    names, width = separate_projections(module), head_width(module)
    if names is not None and width is not None:
        hidden = num_inputs(module.get_submodule(names[0]))
        return split_separate if is_equivalent(module, split_separate, size, hidden, width) else None
    layers = feed_forwards_by_shape(module, size)
    return next((layer.split for layer in layers if is_equivalent(module, layer.split, size, layer.hidden)), None)


def _key(module: nn.Module) -> object:
    """Return the key of modules that one check covers: they have the same classes, shapes and settings."""
    return (
        *((name, type(inner)) for name, inner in module.named_modules()),
        *((name, tuple(param.shape)) for name, param in module.named_parameters()),
        *_settings(module),
    )


def _settings(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        if isinstance(value, int | float | str | bool) and name != "training":
            yield name, value
