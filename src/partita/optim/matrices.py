"""The matrices of a model: the parameters that Muon orthogonalizes, and the matrices that each of them consists of.

By default these are the weights of linear layers and of stacked experts. Embeddings, output layers, routers, biases and
all other parameters are not among them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.optim.newton_schulz import operations
from partita.parallel.tensor.attention import BY_CLASS, Fused
from partita.parallel.tensor.feed_forward import fused_layers

KEY = "optimizer.muon.rules"
# Classes other than nn.Linear, by name, whose `weight` is that of a linear layer; of the latter [inputs, outputs].
_LINEAR, _TRANSPOSED = ("FalconLinear",), ("Conv1D",)
# Names of linear layers whose outputs are the logits of experts.
_ROUTERS = ("gate", "router", "wg")


@dataclass(frozen=True)
class MatrixForm:
    """The matrices in a parameter ``[..., outputs, inputs]``, of which each index of the leading dims has its own.

    Attributes:
        transposed: the parameter is ``[..., inputs, outputs]``.
        outputs: the ranges ``(start, stop, step)`` of outputs of each matrix; empty: one matrix has all of them.
    """

    transposed: bool = False
    outputs: tuple[tuple[tuple[int, int, int], ...], ...] = ()

    def split(self, param: Tensor) -> list[Tensor]:
        """Return the matrices of a parameter, each ``[..., outputs, inputs]``: copies, or views of it."""
        values = param.mT if self.transposed else param
        if not self.outputs:
            return [values]
        return [torch.cat([values[..., slice(*each), :] for each in ranges], -2) for ranges in self.outputs]

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return the parameter of these matrices: the inverse of :meth:`split`."""
        if not self.outputs:
            return matrices[0].mT if self.transposed else matrices[0]
        rows = sum(matrix.shape[-2] for matrix in matrices)
        joined = matrices[0].new_empty((*matrices[0].shape[:-2], rows, matrices[0].shape[-1]))
        for ranges, matrix in zip(self.outputs, matrices, strict=True):
            at = 0
            for each in ranges:
                place = joined[..., slice(*each), :]
                place.copy_(matrix[..., at : at + place.shape[-2], :])
                at += place.shape[-2]
        return joined.mT if self.transposed else joined

    def operations(self, shape: Sequence[int], steps: int) -> int:
        """Return the floating-point operations of orthogonalizing a parameter of this shape."""
        *leading, outputs, inputs = shape
        if self.transposed:
            outputs, inputs = inputs, outputs
        sizes = [sum(len(range(*each)) for each in ranges) for ranges in self.outputs] or [outputs]
        return math.prod(leading) * sum(operations(size, inputs, steps) for size in sizes)


def equal_parts(num_outputs: int, num: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return the ranges of ``num`` matrices with equal numbers of consecutive outputs."""
    size = num_outputs // num
    return tuple(((at * size, (at + 1) * size, 1),) for at in range(num))


def find_matrices(model: nn.Module, rules: Sequence[tuple[str, str | int]] = ()) -> dict[int, MatrixForm]:
    """Return the form of each parameter that consists of matrices, by the parameter's id.

    Args:
        rules: pairs of a pattern of parameter names, and ``muon``, ``adamw``, or the number of matrices with equal
            numbers of outputs that the parameter consists of. The first pattern that matches a name decides.

    Raises:
        ConfigError: a rule matches no parameter, or a parameter that it cannot apply to.
    """
    found, vocabulary, unused = dict[int, MatrixForm](), _vocabulary(model), dict(rules)
    fused = _fused(model)
    seen = set[int]()
    for prefix, module in model.named_modules():
        for key, param in module.named_parameters(prefix, recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            matching = [(pattern, rule) for pattern, rule in rules if fnmatchcase(key, pattern)]
            for pattern, _ in matching:
                unused.pop(pattern, None)
            form = _form(module, key.rpartition(".")[2], param, fused.get(id(param)))
            if matching:
                form = _by_rule(matching[0], key, param, form)
            elif id(param) in vocabulary or _is_router(module, prefix):
                form = None
            if form is not None:
                found[id(param)] = form
    if unused:
        names = ", ".join(name for name, _ in list(model.named_parameters())[:3])
        raise ConfigError(f"{KEY}: '{next(iter(unused))}' matches no parameter; names are {names}, ...")
    return found


def describe(model: nn.Module, matrices: Mapping[int, MatrixForm]) -> tuple[str, str]:
    """Return two lines: the parameters that are orthogonalized, and the others."""
    lines = []
    everything = list(model.named_parameters())
    total = max(1, sum(param.numel() for _, param in everything))
    for title, chosen in (("muon", True), ("adamw", False)):
        mine = [(name, param) for name, param in everything if (id(param) in matrices) == chosen]
        kinds = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name, _ in mine)
        share = sum(param.numel() for _, param in mine) / total
        names = ", ".join(f"{kind} ({num})" if num > 1 else kind for kind, num in kinds.items())
        lines.append(f"{title}: {len(mine)} parameters, {share:.1%} of the elements: {names or 'none'}")
    return lines[0], lines[1]


def _form(module: nn.Module, key: str, param: Tensor, fused: MatrixForm | None) -> MatrixForm | None:
    """Return the form of a parameter of a linear layer or of stacked experts; None for all others."""
    if fused is not None:
        return fused
    kind = type(module).__name__
    if param.dim() == 2 and key == "weight":
        is_transposed = kind in _TRANSPOSED
        return MatrixForm(is_transposed) if isinstance(module, nn.Linear) or kind in _LINEAR or is_transposed else None
    if param.dim() == 3 and "Experts" in kind:
        is_transposed = bool(getattr(module, "is_transposed", False))
        num_outputs = param.shape[-1 if is_transposed else -2]
        if key != "gate_up_proj":
            return MatrixForm(is_transposed)
        if getattr(module, "is_concatenated", True):
            return MatrixForm(is_transposed, equal_parts(num_outputs, 2))
        return MatrixForm(is_transposed, (((0, num_outputs, 2),), ((1, num_outputs, 2),)))
    return None


def _by_rule(rule: tuple[str, str | int], key: str, param: Tensor, form: MatrixForm | None) -> MatrixForm | None:
    """Return the form that a rule of the config gives to a parameter.

    Raises:
        ConfigError: the parameter has fewer than two dims, or its outputs cannot be divided.
    """
    pattern, value = rule
    if value == "adamw":
        return None
    if param.dim() < 2:
        raise ConfigError(
            f"{KEY}: '{pattern}' matches '{key}', which has the shape {tuple(param.shape)} and is no matrix: set it to "
            "adamw, or use a narrower pattern"
        )
    form = form or MatrixForm()
    if value == "muon":
        return form
    assert isinstance(value, int)
    num_outputs = param.shape[-1 if form.transposed else -2]
    if num_outputs % value:
        raise ConfigError(f"{KEY}: '{pattern}': {value} matrices cannot share the {num_outputs} outputs of '{key}'")
    return MatrixForm(form.transposed, equal_parts(num_outputs, value) if value > 1 else ())


def _fused(model: nn.Module) -> dict[int, MatrixForm]:
    """Return the forms of weights that several projections share, by the weight's id."""
    found = dict[int, MatrixForm]()
    for module in model.modules():
        kind = type(module)
        rule = BY_CLASS.get(kind.__name__) or BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")
        parts = [(layer, equal_parts(_num_outputs(layer), num)) for layer, num in fused_layers(module)]
        if isinstance(rule, Fused) and (ranges := rule.projections(module)) is not None:
            layer = module.get_submodule(rule.qkv)
            parts.append((layer, tuple(tuple((start, stop, 1) for start, stop in each) for each in ranges)))
        for layer, outputs in parts:
            found[id(layer.get_parameter("weight"))] = MatrixForm(type(layer).__name__ in _TRANSPOSED, outputs)
    return found


def _num_outputs(layer: nn.Module) -> int:
    return int(layer.get_parameter("weight").shape[1 if type(layer).__name__ in _TRANSPOSED else 0])


def _is_router(module: nn.Module, name: str) -> bool:
    return "Router" in type(module).__name__ or name.rpartition(".")[2] in _ROUTERS


def _vocabulary(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings and of output layers."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return {id(weight) for weight in (*embeddings, *_output_weights(model, embeddings))}


def _output_weights(model: nn.Module, embeddings: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the weights of output layers: those that a transformers model names, and linear children of the model with
    the shape of an embedding.
    """
    for module in model.modules():
        try:
            output = module.get_output_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(output, nn.Module) and isinstance(output._parameters.get("weight"), Tensor):
            yield output.get_parameter("weight")
    shapes = {tuple(weight.shape) for weight in embeddings}
    for child in model.children():
        if isinstance(child, nn.Linear) and tuple(child.weight.shape) in shapes:
            yield child.weight
