"""A model that an accelerator has prepared, with its engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from partita.engine.engine import Engine


@dataclass(frozen=True)
class PreparedModel:
    """A prepared model: its engine, True if it trains, and the original dtypes of its parameters by name."""

    engine: Engine
    trains: bool
    dtypes: Mapping[str, torch.dtype]

    @property
    def has_original_dtypes(self) -> bool:
        """True if no parameter was cast to the compute dtype."""
        named = self.engine.module.named_parameters(remove_duplicate=False)
        return all(parameter.dtype == self.dtypes.get(name, parameter.dtype) for name, parameter in named)

    def state_dict(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the model's full state dict in the original dtypes on rank 0; empty on other ranks.

        A compiled model has the names of the model that it was compiled from.

        Args:
            names: names to include (None: all).
        """
        values = self.engine.state_dict(names=names)
        return {
            name.removeprefix("_orig_mod."): value.to(self.dtypes[name]) if name in self.dtypes else value
            for name, value in values.items()
        }
