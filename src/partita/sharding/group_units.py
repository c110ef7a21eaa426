"""Which parameters are gathered and released together: a model's units.

With ``units: auto`` every repeated block is a unit (a child of a ``ModuleList`` or ``Sequential`` that has a sibling of its
class), and so is a large embedding or linear layer outside the blocks; the root unit takes the rest. A tied parameter
lives in the deepest unit that contains all modules that hold it.
"""

import fnmatch
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from partita.errors import ConfigError

# A layer outside the blocks is a unit of its own from this share of the largest block's bytes.
LEAF_SHARE = 0.5


@dataclass
class Holding:
    """One parameter: the object, every name it has, and every module (with the attribute) that holds it."""

    param: nn.Parameter
    fqns: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass
class UnitSpec:
    """A unit to be: its module and its parameters in the model's order. The root unit is called ``""``."""

    name: str
    module: nn.Module
    holdings: list[Holding] = field(default_factory=list)


def group_units(model: nn.Module, choice: str | Sequence[str] = "auto") -> list[UnitSpec]:
    """The units of a model, in the order of its modules, the root unit first.

    Args:
        choice: ``"auto"``, or module class names and patterns of fully qualified names (``layers.*``).

    Raises:
        ConfigError: a given name or pattern matches no module.
    """
    roots = dict(_auto(model) if isinstance(choice, str) else _chosen(model, choice))
    roots.pop("", None)
    units = {"": UnitSpec("", model)} | {name: UnitSpec(name, module) for name, module in roots.items()}
    for holding in find_holdings(model):
        paths = [fqn.rpartition(".")[0] for fqn in holding.fqns]
        inside = [name for name in units if all(_contains(name, path) for path in paths)]
        units[max(inside, key=len)].holdings.append(holding)
    return [unit for unit in units.values() if unit.holdings]


def find_holdings(model: nn.Module) -> list[Holding]:
    """Every parameter once, with all its names and owners, in the order of ``named_parameters``."""
    found: dict[int, Holding] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            holding = found.setdefault(id(param), Holding(param))
            holding.fqns.append(f"{path}.{attribute}" if path else attribute)
            if all(owner is not module or name != attribute for owner, name in holding.owners):
                holding.owners.append((module, attribute))
    return list(found.values())


def _contains(outer: str, path: str) -> bool:
    return not outer or path == outer or path.startswith(outer + ".")


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _auto(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    blocks = dict(_blocks(model, ""))
    yield from blocks.items()
    least = LEAF_SHARE * max((_bytes(block) for block in blocks.values()), default=float("inf"))
    holders = Counter(id(h.param) for h in find_holdings(model) for _ in h.fqns)
    attention = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    for name, module in model.named_modules():
        alone = all(holders[id(p)] == 1 for p in module.parameters())
        if (
            isinstance(module, nn.Embedding | nn.Linear)
            and alone
            and _bytes(module) >= least
            and not any(_contains(outer, name) for outer in (*blocks, *attention))
        ):
            yield name, module


def _blocks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost repeated children of module containers."""
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    classes = Counter(type(child) for _, child in children)
    repeated = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for name, child in children:
        full = f"{path}.{name}" if path else name
        container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if repeated and classes[type(child)] > 1 and not container and not isinstance(child, nn.Sequential):
            yield full, child
        else:
            yield from _blocks(child, full)


def _chosen(model: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    for pattern in patterns:
        matches = [
            (name, module)
            for name, module in model.named_modules()
            if type(module).__name__ == pattern or (name and fnmatch.fnmatchcase(name, pattern))
        ]
        if not matches:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigError(
                f"zero.units: '{pattern}' matches no module of {type(model).__name__} by class or name; "
                f"its module classes are {', '.join(classes[:20])}"
            )
        yield from matches
