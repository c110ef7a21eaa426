"""Position-wise modules that run on some positions at a time, so that their intermediate results never exist for all.

S. Bekman et al., "Arctic Long Sequence Training", 2025 (its tiled MLP).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import PartitaError
from partita.planner.group_units import modules_like

KEY = "tiled.mlp"


def tiled_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that ``tiled.mlp`` selects, by name.

    Raises:
        ConfigError: a pattern matches no module.
    """
    chosen = {id(module) for text in patterns for module in modules_like(model, text, KEY)}
    return {name: module for name, module in model.named_modules() if id(module) in chosen}


class InTiles:
    """Calls a module's forward with a part of [..., positions, in] at a time, by ``run(forward, part)``.

    A tile has as many rows as a row has elements, so the memory it needs inside does not grow with the number of
    positions.
    """

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self._name = name
        self._run = run

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        inputs = [*args, *kwargs.values()]
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].dim() < 2:
            raise self._refused(f"it was called with {_described(inputs)}")
        (whole,) = inputs
        num_positions = max(1, whole.shape[-1] // math.prod(whole.shape[:-2]))
        outputs = []
        for part in whole.split(num_positions, dim=-2):
            tile = part.contiguous()  # as the whole was: modules take other views of it
            output = self._run(forward, **dict.fromkeys(kwargs, tile)) if kwargs else self._run(forward, tile)
            if not isinstance(output, Tensor) or output.shape[:-1] != tile.shape[:-1]:
                raise self._refused(f"of a tensor of shape {tuple(tile.shape)} it made {_described([output])}")
            outputs.append(output)
        return torch.cat(outputs, dim=-2)

    def _refused(self, what: str) -> PartitaError:
        return PartitaError(
            f"{KEY}: '{self._name}' does not compute each position by itself: {what}, where one tensor "
            "[..., positions, in] is to become one [..., positions, out]; leave it out"
        )


def _described(values: Sequence[Any]) -> str:
    texts = [
        f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        for value in values
    ]
    return ", ".join(texts) or "nothing"
