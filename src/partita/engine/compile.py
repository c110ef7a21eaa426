"""Compilation of the model's modules by torch.compile, each as a region of its own, in place."""

from collections.abc import Iterable

from torch import nn

from partita.config.schema import Compile
from partita.errors import ConfigError
from partita.layout.units import modules_like
from partita.transforms.modules import is_compiled

KEY = "compile.modules"


def modules_to_compile(model: nn.Module, section: Compile, units: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules that ``compile.modules`` selects, by name.

    Args:
        units: names of the model's units. ``units`` compiles those that contain other modules.

    Raises:
        ConfigError: there are none, or one of them is compiled already.
    """
    choice = section.modules
    if choice == "none":
        return {}
    if choice == "model":
        chosen = {"": model}
    elif choice == "units":
        chosen = {name: module for name in units if name and _has_children(module := model.get_submodule(name))}
        if not chosen:
            raise ConfigError(
                f"{KEY}: 'units' compiles units, and {type(model).__name__} has no unit except the model itself; name "
                "modules to compile by class or pattern, or set compile.modules to model"
            )
    else:
        found = {id(module) for text in choice for module in modules_like(model, text, KEY)}
        chosen = {name: module for name, module in model.named_modules() if id(module) in found}
    for name, module in chosen.items():
        if is_compiled(module):
            where = f"'{name}'" if name else type(model).__name__
            raise ConfigError(f"{KEY}: {where} is compiled already: leave {KEY} out, or remove your own torch.compile")
    return chosen


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())
