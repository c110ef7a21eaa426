"""Conversion between the tensors in files and a model's parameters, where names differ: experts that are one parameter
in the model and separate tensors in files, or layers that were renamed.

Since version 5, transformers has a list of such conversions for each of its models. ``from_pretrained`` and
``save_pretrained`` apply them to a full model; here they are applied tensor by tensor. For other models, the names in
files are those of the parameters.
"""

import re
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.huggingface.weights import Weights
from partita.table.box import Box


def is_of_transformers(model: nn.Module) -> bool:
    """Return True if a model is a ``PreTrainedModel``. This does not import transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def _library(model: nn.Module) -> tuple[Any, Any] | None:
    """Return transformers' modules that list and run conversions; None for another model or an earlier version."""
    if not is_of_transformers(model):
        return None
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # before version 5
        return None
    return conversion_mapping, core_model_loading


@dataclass
class _Conversion:
    """One of transformers' conversions, and its input tensors.

    ``title``: the name of the first resulting tensor; ``inputs``: (pattern that matched, name) of each input tensor.
    """

    title: str
    transform: Any
    model: nn.Module
    inputs: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_by_row(self) -> bool:
        """True if tensors are stacked, so that each row of the result comes from one tensor per pattern."""
        first, *others = self.transform.operations
        return (
            type(first).__name__ == "MergeModulelist"
            and first.dim == 0
            and all(type(op).__name__ == "Concatenate" and op.dim > 0 for op in others)
        )

    def rows(self, start: int, stop: int) -> list[tuple[str, str]]:
        """Return the tensors from which rows ``[start, stop)`` of the result come."""
        by_pattern = dict[str, list[tuple[str, str]]]()
        for pattern, name in self.inputs:
            by_pattern.setdefault(pattern, []).append((pattern, name))
        return [tensor for tensors in by_pattern.values() for tensor in tensors[start:stop]]

    def run(self, tensors: Iterable[tuple[tuple[str, str], Tensor]]) -> dict[str, Tensor]:
        """Convert the tensors; return the results by name."""
        transform = deepcopy(self.transform)
        for (pattern, name), tensor in tensors:
            transform.add_tensor(self.title, name, pattern, tensor)
        found = transform.convert(self.title, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def _conversions(
    matched: Iterable[tuple[str, str, str]], converters: Sequence[Any], model: nn.Module
) -> list[_Conversion]:
    """Return the conversions of ``matched`` tensors: (name of the first result, matching pattern, tensor name)."""
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    found = dict[str, _Conversion]()
    for target, pattern, name in matched:
        conversion = found.setdefault(target, _Conversion(target, by_pattern[pattern], model))
        conversion.inputs.append((pattern, name))
    return list(found.values())


class ConvertedWeights:
    """The tensors of files, converted to the parameters of a transformers model, with the names of the parameters.

    If a parameter is made of several tensors row by row, reading a box of it reads only the tensors of the box's rows.

    Raises:
        ConfigError: tensors cannot be converted.
    """

    def __init__(self, weights: Weights, model: nn.Module, library: tuple[Any, Any]) -> None:
        self.title = weights.title
        self.folder = weights.folder
        self._weights = weights
        mapping, loading = library
        known: dict[str, Tensor] = {**dict(model.named_parameters(remove_duplicate=False))}
        known.update(model.named_buffers(remove_duplicate=False))
        transforms = mapping.get_model_conversion_mapping(model)
        converters = [entry for entry in transforms if isinstance(entry, loading.WeightConverter)]
        renamings = [entry for entry in transforms if not isinstance(entry, loading.WeightConverter)]
        self._renamed = dict[str, str]()
        self._unused = list[str]()
        matched, prefix = list[tuple[str, str, str]](), str(getattr(model, "base_model_prefix", ""))
        for name in sorted(weights.names, key=loading.dot_natural_key):
            target, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
            if target not in known and name in known:
                target, pattern = name, None
            if target not in known:
                self._unused.append(name)
            elif pattern is None:
                self._renamed[target] = name
            else:
                matched.append((target, pattern, name))
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._unused = [name for name in self._unused if not any(re.search(pattern, name) for pattern in ignored)]
        self._converted = {
            name: (conversion, shape)
            for conversion in _conversions(matched, converters, model)
            for name, shape in self._shapes(conversion)
        }
        self._last: tuple[object, dict[str, Tensor]] = (None, {})
        # The conversions that save_pretrained and export reverse, as after from_pretrained.
        model._weight_conversions = [entry for entry in transforms if entry.was_used()]  # type: ignore[assignment]

    def _shapes(self, conversion: _Conversion) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the resulting tensors, without computing values."""
        empty = ((each, torch.empty(self._weights.shape(each[1]), device="meta")) for each in conversion.inputs)
        try:
            found = conversion.run(empty)
        except Exception as error:  # transformers' operations raise what torch does
            first, last = conversion.inputs[0][1], conversion.inputs[-1][1]
            raise ConfigError(
                f"{self.title}: the tensors '{first}' to '{last}' cannot be converted to '{conversion.title}': {error}"
            ) from error
        for name, value in found.items():
            yield name, tuple(value.shape)

    def find(self, names: Sequence[str]) -> str | None:
        """Return the first of the names for which there is a tensor; None if there is none."""
        return next((name for name in names if name in self._renamed or name in self._converted), None)

    def unused(self, names: Container[str]) -> list[str]:
        """Return the tensors in the files that belong to no parameter or buffer with one of these names."""
        return self._unused + [file for name, file in self._renamed.items() if name not in names]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(self._renamed[name]) if name in self._renamed else self._converted[name][1]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or the ``box`` of it."""
        if name in self._renamed:
            return self._weights.read(self._renamed[name], box)
        conversion, shape = self._converted[name]
        box = Box.whole(shape) if box is None else box
        inputs, start = conversion.inputs, 0
        if box.sizes and conversion.is_by_row:
            start = box.offsets[0]
            inputs = conversion.rows(start, start + box.sizes[0])
        if self._last[0] != (conversion.title, inputs):
            self._last = (None, {})  # freed before the next tensors are read
            read = [(tensor, self._weights.read(tensor[1])) for tensor in inputs]
            self._last = ((conversion.title, inputs), conversion.run(read))
        first = Box((start, *(0 for _ in shape[1:])), shape) if shape else box
        return self._last[1][name][box.within(first).slices]


def open_weights(weights: Weights, model: nn.Module) -> Weights | ConvertedWeights:
    """Return the tensors of files under the names of a model's parameters."""
    library = _library(model)
    return weights if library is None else ConvertedWeights(weights, model, library)


class FileTensors:
    """A model's tensors in the form of its files. For a transformers model, these are what ``save_pretrained`` writes.

    Args:
        names: the names of all tensors that :meth:`of` will be called with.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._renamings = list[Any]()
        self._groups = dict[str, tuple[_Conversion, dict[tuple[str, str], Tensor]]]()
        self._ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        library = _library(model)
        if library is None:
            return
        mapping, self._loading = library
        transforms = getattr(model, "_weight_conversions", None)
        if transforms is None:  # not loaded from files: omit prefixes that only some files have
            known = mapping.get_model_conversion_mapping(model, add_legacy=False)
            transforms = [entry for entry in known if not isinstance(entry, self._loading.PrefixChange)]
        back = [entry.reverse_transform() for entry in reversed(transforms)]
        converters = [entry for entry in back if isinstance(entry, self._loading.WeightConverter)]
        self._renamings = [entry for entry in back if not isinstance(entry, self._loading.WeightConverter)]
        found = ((*self._loading.apply_converters(name, converters), name) for name in names)
        matched = [(target, pattern, name) for target, pattern, name in found if pattern is not None]
        for conversion in _conversions(matched, converters, model):
            pending = dict[tuple[str, str], Tensor]()
            self._groups.update((name, (conversion, pending)) for _, name in conversion.inputs)

    def of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors for files that ``tensor`` completes.

        These are the tensor itself, or the results of its conversion, or none while the conversion still lacks tensors.
        """
        if name in self._ignored:
            return
        if name not in self._groups:
            yield self._renamed(name), tensor
            return
        conversion, pending = self._groups[name]
        key = next(each for each in conversion.inputs if each[1] == name)
        pending[key] = tensor if len(conversion.inputs) == 1 else tensor.detach().clone()
        if len(pending) == len(conversion.inputs):
            found = conversion.run((each, pending[each]) for each in conversion.inputs)
            pending.clear()
            yield from ((self._renamed(result), value) for result, value in found.items())

    def _renamed(self, name: str) -> str:
        return str(self._loading.apply_renamings(name, self._renamings)) if self._renamings else name
