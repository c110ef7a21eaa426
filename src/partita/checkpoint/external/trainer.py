"""Folders of ``transformers.Trainer`` without DeepSpeed or FSDP: weights, and an optimizer state dict with numbered
parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from partita.checkpoint.external.companion_files import with_training_state
from partita.checkpoint.external.source import ExternalCheckpoint
from partita.checkpoint.external.torch_files import TorchFiles
from partita.checkpoint.names import MODEL
from partita.errors import PartitaError

LIBRARY = "transformers"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


@dataclass(frozen=True)
class Model:
    """A model's weights, and the possible groups of its parameters in an optimizer.

    ``weights``: its state dict, with each tied parameter once; ``aliases``: the further names of tied parameters.
    ``groupings``: each possible grouping, as the parameters' names per group, in the order in which an optimizer
    numbers them.
    """

    weights: Mapping[str, Tensor]
    aliases: Mapping[str, list[str]]
    groupings: Sequence[Sequence[Sequence[str]]]


def find_optimizer(folder: Path) -> str | None:
    """Return the name of the file with an unsharded optimizer state dict; None if there is none."""
    return next((name for name in OPTIMIZERS if (folder / name).is_file()), None)


def open_trainer(folder: Path, optimizer: str, read_model: Callable[[Path], Model]) -> ExternalCheckpoint:
    """Open a Trainer's checkpoint. Its weights are kept in memory.

    Raises:
        PartitaError: a file is damaged, the optimizer is of another model, or it groups the parameters in an unknown
            way.
    """
    model = read_model(folder)
    stored = TorchFiles(folder)
    for name, value in model.weights.items():
        stored.add_in_memory(f"{MODEL}{name}", value)
    found = stored.mapping(optimizer)
    groups = _groups(folder / optimizer, found, model)
    stored.add_optimizer(optimizer, dict(enumerate(name for group in groups for name in group)))
    external = with_training_state(LIBRARY, stored, folder)
    external.aliases = {f"{MODEL}{name}": [MODEL + other for other in others] for name, others in model.aliases.items()}
    return external


def _groups(path: Path, optimizer: Mapping[str, Any], model: Model) -> Sequence[Sequence[str]]:
    """Return the names of the parameters in each of the optimizer's groups."""
    sizes = [len(group["params"]) for group in optimizer["param_groups"]]
    for groups in model.groupings:
        if [len(group) for group in groups] == sizes and _fits(groups, optimizer["state"], model.weights):
            return groups
    known = " or ".join(str([len(group) for group in groups]) for groups in model.groupings)
    raise PartitaError(
        f"checkpoint: '{path}' has groups of {sizes} parameters, but the Trainer would make other groups for this "
        f"model ({known}, with other shapes or sizes): in the run's own script, load it into the model and optimizer "
        "that the script builds, pass both to partita.initialize, and call engine.save"
    )


def _fits(groups: Sequence[Sequence[str]], states: Mapping[int, Any], weights: Mapping[str, Tensor]) -> bool:
    """Return whether each state tensor has the shape of its parameter, or is a scalar."""
    names = [name for group in groups for name in group]
    return all(
        value.shape in (weights[names[number]].shape, ())
        for number, kept in states.items()
        for value in kept.values()
        if isinstance(value, Tensor)
    )
