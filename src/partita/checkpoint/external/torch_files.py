"""Values in files that ``torch.save`` wrote, under partita's keys."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.checkpoint.backend import Chunk, Stored, StoredTensor
from partita.checkpoint.format.system import explain_os_errors
from partita.checkpoint.names import GROUPS, MODEL, STATE
from partita.errors import PartitaError
from partita.table.box import Box

# Limit on files that stay memory-mapped: a checkpoint may have more files than a process may map.
MOST_FILES = 8
# The file name of values that are in memory.
IN_MEMORY = ""
# Settings that select an implementation in torch.optim and do not change results. The new optimizer has its own.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass
class TorchFiles(Stored):
    """The values in files of one folder, and values that are ``in_memory``.

    ``within``: the path of each key's value in the nested containers of its file.
    """

    within: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    in_memory: dict[str, Any] = field(default_factory=dict, repr=False)
    content: Callable[[str], Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.content = lru_cache(MOST_FILES)(lambda file: load_mapped(self.folder / file))

    def add(self, key: str, value: Any, file: str, *within: Any, shape: Sequence[int] | None = None) -> None:
        """Register the value at the path ``within`` of a file. ``shape``: the shape of a tensor that is stored flat."""
        self.within[key] = within
        if isinstance(value, Tensor):
            sizes = tuple(value.shape if shape is None else shape)
            self.tensors[key] = StoredTensor(sizes, value.dtype, [Chunk(key, Box.whole(sizes), file, 0, value.nbytes)])
        else:
            self.values[key] = Chunk(key, None, file, 0, 0)

    def add_in_memory(self, key: str, value: Any) -> None:
        """Register a value that is in no file, and keep it in memory."""
        self.in_memory[key] = value
        self.add(key, value, IN_MEMORY, key)

    def add_weights(self, file: str) -> None:
        """Register the values of a file that is a model's state dict."""
        for name, value in self.mapping(file).items():
            self.add(f"{MODEL}{name}", value, file, name)

    def add_optimizer(self, file: str, names: Mapping[Any, str] | None = None) -> None:
        """Register the values of a file that is an optimizer's state dict.

        Args:
            names: parameter names, by the identifier of each parameter in the file; None: the identifiers are the
                names.

        Raises:
            PartitaError: the file is not an optimizer's state dict, or a parameter has no name.
        """
        found = self.mapping(file)
        if not {"state", "param_groups"} <= found.keys():
            raise PartitaError(
                f"checkpoint: '{self.folder / file}' holds {sorted(map(str, found))[:5]}: expected an optimizer's "
                "state dict, with 'state' and 'param_groups'"
            )
        for known, states in found["state"].items():
            name = self._name(file, known, names)
            for state, value in states.items():
                self.add(f"{STATE}{name}.{state}", value, file, "state", known, state)
        for number, group in enumerate(found["param_groups"]):
            for setting in group.keys() - {"params"}:
                self.add(f"{GROUPS}{number}.{setting}", group[setting], file, "param_groups", number, setting)
            grouped = [self._name(file, known, names) for known in group["params"]]
            self.add_in_memory(f"{GROUPS}{number}.params", grouped)

    def _name(self, file: str, known: Any, names: Mapping[Any, str] | None) -> str:
        name = known if names is None else names.get(known)
        if not isinstance(name, str):
            raise PartitaError(
                f"checkpoint: '{self.folder / file}' numbers the optimizer's parameters, and the name of number "
                f"{known} is unknown: convert it with the model's configuration next to it (partita convert checkpoint)"
            )
        return name

    def mapping(self, file: str) -> Mapping[Any, Any]:
        """Return the contents of a file, a dictionary.

        Raises:
            PartitaError: it is not a dictionary, or cannot be read.
        """
        found = self.content(file)
        if not isinstance(found, Mapping):
            raise PartitaError(
                f"checkpoint: '{self.folder / file}' holds a {type(found).__name__}: expected a state dict"
            )
        return found

    def value(self, key: str) -> Any:
        return self._at(self.values[key] if key in self.values else self.tensors[key].chunks[0])

    @contextmanager
    def read(self, chunks: Sequence[Chunk]) -> Iterator[Iterator[Tensor]]:
        yield (self._at(chunk) for chunk in chunks)

    def _at(self, chunk: Chunk) -> Any:
        found: Any = self.in_memory if chunk.file == IN_MEMORY else self.content(chunk.file)
        for key in self.within[chunk.key]:
            found = found[key]
        return found if chunk.box is None else found.reshape(chunk.box.sizes)


def load_mapped(path: Path) -> Any:
    """Load a file that ``torch.save`` wrote. Tensors are memory-mapped, so their values are read when they are used.

    Raises:
        PartitaError: the file cannot be read, is damaged, or names classes other than plain values, containers and
            tensors. Loading other classes could run any code.
    """
    try:
        with explain_os_errors(path):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except PartitaError:
        raise
    except Exception as error:  # invalid archives and refused classes raise exceptions of any type
        reason = next(iter(str(error).strip().splitlines()), "")
        raise PartitaError(
            f"checkpoint: '{path}' cannot be loaded: it is damaged, or contains other classes than numbers, text, "
            f"tensors and containers of them, which could run any code ({type(error).__name__}: {reason}); save it "
            "again as plain state dicts (torch.save(model.state_dict(), ...))"
        ) from error
