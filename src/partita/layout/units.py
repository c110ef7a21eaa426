"""Units: the groups of a model's parameters that are all-gathered and resharded together.

With ``units: auto`` every repeated block is a unit (a child of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` that
has a sibling of its class), and so is a large embedding or linear layer outside the blocks; the root unit takes the
remaining parameters. In a model without such blocks, the units are modules of a class that repeats anywhere in it;
those with more than an eighth of the model are split, if repeated modules in them have most of their parameters. A tied
parameter belongs to the deepest unit that contains every module that holds it. Units are in the order of the model's
modules, which is usually that of its forward; reductions go through them backwards.
"""

import fnmatch
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from partita.errors import ConfigError
from partita.layout.parameters import ParameterInfo, find_stage_parameters, is_quantized

# A layer outside the blocks with at least this share of the largest block's bytes is a separate unit.
LEAF_SHARE = 0.5
# Without blocks in containers: a module with a larger share of the model's bytes is split into its repeated modules.
REPEATED_SHARE = 1 / 8


@dataclass
class UnitSpec:
    """A unit before its layout: its module, its parameters in the model's order, and the names of the units around it.

    The root unit is called ``""``.
    """

    name: str
    module: nn.Module
    infos: list[ParameterInfo] = field(default_factory=list)
    enclosing_units: list[str] = field(default_factory=list)


def group_units(model: nn.Module, choice: str | Sequence[str] = "auto") -> list[UnitSpec]:
    """Return the units of a model, in the order of its modules, the root unit first.

    Args:
        choice: ``"auto"``, or module class names and patterns of names (see :func:`modules_like`).

    Raises:
        ConfigError: a given name or pattern matches no module.
    """
    modules = _auto(model) if isinstance(choice, str) else _selected(model, choice)
    selected = {id(model), *(id(module) for module in modules)}
    units = {id(module): UnitSpec(name, module) for name, module in model.named_modules() if id(module) in selected}
    at = {path: id(module) for path, module in model.named_modules(remove_duplicate=False) if id(module) in selected}
    for info in find_stage_parameters(model):
        around = [[at[path] for path in _enclosing_paths(fqn) if path in at] for fqn in info.fqns]
        shared = [unit for unit in around[0] if all(unit in others for others in around)]
        units[shared[-1]].infos.append(info)
    units = {key: unit for key, unit in units.items() if unit.infos}
    for enclosing in units.values():
        for module in enclosing.module.modules():
            if id(module) in units and module is not enclosing.module:
                units[id(module)].enclosing_units.append(enclosing.name)
    return list(units.values())


def modules_like(model: nn.Module, pattern: str, key: str) -> list[nn.Module]:
    """Return the modules of class ``pattern``, and those whose full name matches it (``layers.*``, ``*.norm``).

    A name match inside another match is not returned: ``layers.*`` returns the layers, not their submodules.

    Raises:
        ConfigError: no module matches; the message names ``key``, the key of the config.
    """
    found, enclosing = list[nn.Module](), ""
    for name, module in model.named_modules():
        is_inside = bool(enclosing) and _contains(enclosing, name)
        if name and not is_inside and fnmatch.fnmatchcase(name, pattern):
            enclosing = name
            found.append(module)
        elif type(module).__name__ == pattern:
            found.append(module)
    if not found:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"{key}: '{pattern}' matches no module of {type(model).__name__} by class or name; "
            f"its module classes are {', '.join(classes[:20])}"
        )
    return found


def _enclosing_paths(fqn: str) -> Iterator[str]:
    """Yield the names of the modules around a parameter, outermost first; the model's own name is empty."""
    yield ""
    names = fqn.split(".")
    for end in range(1, len(names)):
        yield ".".join(names[:end])


def _contains(enclosing: str, path: str) -> bool:
    return not enclosing or path == enclosing or path.startswith(enclosing + ".")


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if not is_quantized(p))


def _selected(model: nn.Module, patterns: Sequence[str]) -> Iterator[nn.Module]:
    for pattern in patterns:
        yield from modules_like(model, pattern, "zero.units")


def _auto(model: nn.Module) -> Iterator[nn.Module]:
    blocks = dict(find_blocks(model)) or dict(_find_repeated(model))
    yield from blocks.values()
    least = LEAF_SHARE * max((_bytes(block) for block in blocks.values()), default=float("inf"))
    names = {id(info.param): len(info.fqns) for info in find_stage_parameters(model)}
    attention = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.Linear)
            and all(names.get(id(param), 1) == 1 for param in module.parameters())
            and _bytes(module) >= least
            and not any(_contains(enclosing, name) for enclosing in (*blocks, *attention))
        ):
            yield module


def _find_repeated(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules of classes that repeat anywhere in the model, with their names: for models whose stages, or whose
    blocks in them, are attributes and not children of containers.
    """
    candidates = [module for module in model.modules() if _has_parts(module) and not _is_container(module)]
    classes = Counter(map(type, candidates))
    most = REPEATED_SHARE * _bytes(model)

    def repeated_in(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            inner = list(repeated_in(child, full))
            splits = _bytes(child) > most and 2 * sum(_bytes(module) for _, module in inner) > _bytes(child)
            yield from [(full, child)] if classes[type(child)] > 1 and not splits else inner

    return repeated_in(model, "")


def _has_parts(module: nn.Module) -> bool:
    """Return True for a module that calls modules with parameters: not for layers, nor for torch's attention, which
    reads its layers' parameters itself.
    """
    parts = any(any(True for _ in child.parameters()) for child in module.children())
    return parts and not isinstance(module, nn.MultiheadAttention)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def find_blocks(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost repeated children of module containers, with their names, in the order of the modules."""
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    classes = Counter(type(child) for _, child in children)
    repeated = _is_container(module)
    for name, child in children:
        full = f"{path}.{name}" if path else name
        container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if repeated and classes[type(child)] > 1 and not container and not isinstance(child, nn.Sequential):
            yield full, child
        else:
            yield from find_blocks(child, full)


def find_text_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a transformers model's part for text, or all blocks of a model without other parts.

    Blocks for images or audio run before those for text, on other positions. A value that passes them by (the text's
    embedding) would not be among their arguments.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name, block in find_blocks(model):
        if text is config or type(getattr(model_around(model, name), "config", None)) is type(text):
            yield name, block


def model_around(model: nn.Module, block: str) -> nn.Module | None:
    """Return the innermost transformers model around a block; None if there is none."""
    while block:
        block = block.rpartition(".")[0]
        module = model.get_submodule(block)
        if hasattr(module, "_can_record_outputs"):
            return module
    return None
