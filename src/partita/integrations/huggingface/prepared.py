"""A model that an accelerator has prepared, with its engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from partita.engine.engine import Engine


@dataclass(frozen=True)
class Prepared:
    """A model's engine; whether the model trains, and the dtypes in which its parameters came, by name."""

    engine: Engine
    trains: bool
    dtypes: Mapping[str, torch.dtype]

    def state_dict(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """The model's state dict in the dtypes in which it came, whole, on rank 0; empty on the others.

        Args:
            names: only what these stand for (None: all).
        """
        values = self.engine.state_dict(names=names)
        return {name: value.to(self.dtypes[name]) if name in self.dtypes else value for name, value in values.items()}
