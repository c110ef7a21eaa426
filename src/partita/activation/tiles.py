"""Position-wise modules that run on a tile of positions at a time, which limits the memory of intermediate results.

S. Bekman et al., "Arctic Long Sequence Training", 2025 (TiledMLP).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import PartitaError
from partita.layout.units import modules_like

KEY = "tiled.mlp"


def tiled_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that ``tiled.mlp`` selects, by name.

    Raises:
        ConfigError: a pattern matches no module.
    """
    chosen = {id(module) for text in patterns for module in modules_like(model, text, KEY)}
    return {name: module for name, module in model.named_modules() if id(module) in chosen}


class TiledForward:
    """Wrapper that runs a module's forward on tiles of its input [..., positions, in], by ``run(forward, tile)``.

    A tile has about as many rows as a row has elements, so the memory of its intermediate results does not grow with
    the number of positions.
    """

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self._name = name
        self._run = run

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        inputs = [*args, *kwargs.values()]
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].dim() < 2:
            raise self._unsupported(f"it was called with {_described(inputs)}")
        (whole,) = inputs
        num_positions = max(1, whole.shape[-1] // max(1, math.prod(whole.shape[:-2])))
        outputs = []
        for piece in whole.split(num_positions, dim=-2):
            tile = piece.contiguous()  # like the full input: the module may use `view`
            output = self._run(forward, **dict.fromkeys(kwargs, tile)) if kwargs else self._run(forward, tile)
            if not isinstance(output, Tensor) or output.shape[:-1] != tile.shape[:-1]:
                raise self._unsupported(f"for a tensor of shape {tuple(tile.shape)} it returned {_described([output])}")
            outputs.append(output)
        return torch.cat(outputs, dim=-2)

    def _unsupported(self, problem: str) -> PartitaError:
        return PartitaError(
            f"{KEY}: '{self._name}' does not compute each position by itself: expected a forward from one tensor "
            f"[..., positions, in] to one tensor [..., positions, out]; {problem}; leave the module out of {KEY}"
        )


def _described(values: Sequence[Any]) -> str:
    texts = [
        f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        for value in values
    ]
    return ", ".join(texts) or "nothing"
