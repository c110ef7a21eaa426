"""What of a model's state dict is no parameter."""

from collections.abc import Iterator

from torch import Tensor, nn

EXTRA_STATE = "_extra_state"


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to a state dict, by name."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with states that are no parameters and no buffers (``get_extra_state``), by the name of these in a
    state dict.
    """
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield (f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE), module


def is_extra_state(name: str) -> bool:
    """Whether a name is that of what a module's ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == EXTRA_STATE
