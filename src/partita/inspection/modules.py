"""The names in a model's state dict, and the entries that are not parameters."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from partita.comm.group import Group
from partita.layout.off_stage import modules_on_stage

EXTRA_STATE = "_extra_state"


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that belong to a state dict, by name."""
    for path, module in model.named_modules():
        for name, buffer in persistent_buffers_of(module):
            yield (f"{path}.{name}" if path else name), buffer


def persistent_buffers_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the persistent buffers of a module without those of its submodules, by their names in the module."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def buffers_on_stage(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a state dict that belong to modules which run on this rank, by name."""
    here = modules_on_stage(model)
    yield from ((name, buffer) for name, buffer in persistent_buffers(model) if _module_of(name) in here)


def extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with extra state (``get_extra_state``), by the name of that state in a state dict."""
    for path, module in model.named_modules():
        if has_extra_state(module):
            yield (f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE), module


def has_extra_state(module: nn.Module) -> bool:
    """Return True if a module itself has extra state (``get_extra_state``)."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def owning_ranks(model: nn.Module, all_ranks: Group, *, shared: bool) -> Callable[[str], int]:
    """Return a function that maps the name of a buffer or an extra state to the rank whose values are used.

    That is the first rank that runs the module. A collective, unless every rank runs all modules (``shared``).
    """
    if shared:
        return lambda name: 0
    here = modules_on_stage(model)
    every = all_ranks.exchange_objects(
        [name for name in _buffers_and_extra_states(model) if _module_of(name) in here], "buffers"
    )
    first = dict[str, int]()
    for rank, names in enumerate(every):
        for name in names:
            first.setdefault(name, rank)
    return lambda name: first.get(name, 0)


def _buffers_and_extra_states(model: nn.Module) -> Iterator[str]:
    """Yield the names of buffers and extra states."""
    yield from (name for name, _ in persistent_buffers(model))
    yield from (name for name, _ in extra_states(model))


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def further_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (further name, first name) for buffers and extra states of modules that occur more than once.

    The names are those in a state dict.
    """
    first = dict[tuple[int, str], str]()
    for path, module in model.named_modules(remove_duplicate=False):
        for name in _buffers_and_extra_state_of(module):
            full = f"{path}.{name}" if path else name
            known = first.setdefault((id(module), name), full)
            if full != known:
                yield full, known


def _buffers_and_extra_state_of(module: nn.Module) -> list[str]:
    return [name for name, _ in persistent_buffers_of(module)] + [EXTRA_STATE] * has_extra_state(module)


def state_dict_names(model: nn.Module) -> Iterator[str]:
    """Yield the names in a state dict, in order, with every name of a tied parameter."""
    for path, module in model.named_modules(remove_duplicate=False):
        names = [name for name, param in module._parameters.items() if param is not None]
        names += _buffers_and_extra_state_of(module)
        yield from (f"{path}.{name}" if path else name for name in names)


def is_extra_state(name: str) -> bool:
    """Return True if a name in a state dict is that of an extra state (``get_extra_state``)."""
    return name.rpartition(".")[2] == EXTRA_STATE
