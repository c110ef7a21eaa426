"""Rules for src/: layers, size limits, and operations that only one file or package may use.

Each check is also tested on code that breaks it.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest

from partita.cli.main import Commands

SOURCE = Path(__file__).parents[1] / "src" / "partita"

# A file imports only from its own layer and from earlier layers. "" is the package root, which re-exports names.
LAYERS = (
    *("errors", "table", "config", "layout", "memory", "comm", "kernels", "transforms", "sharding", "parallel"),
    *(
        "activation",
        "attention",
        "optim",
        "inspection",
        "checkpoint",
        "compression",
        "huggingface",
        "observe",
        "engine",
    ),
    *("train", "prediction", "integrations", "", "cli"),
)
# The core works without these packages: tests/test_hidden.py.
OPTIONAL = ("compression", "attention", "prediction", "integrations")
MAX_PARAMETERS = 8
COMMANDS = {command.place for command in Commands.known.values()}
# Limits for classes in these layers. A class that exceeds them should be split.
CORE = ("table", "layout", "memory", "comm", "sharding", "optim")
MAX_ATTRIBUTES, MAX_PROPERTIES = 20, 15

COLLECTIVES = ("comm/transport.py",)
ENVIRONMENT = ("config/launchers.py", "cli/launch*.py")
STAGE = ("config/*.py", "compression/settings.py", "table/state_plan.py")
ACCELERATOR = ("memory/accelerator.py",)
TRANSFORMS = ("transforms/*.py",)

COLLECTIVE_NAME = re.compile(
    r"_?(all_?gather|reduce|all_?reduce|all_?to_?all|broadcast|barrier|monitored_barrier|gather|scatter"
    r"|i?send|i?recv|batch_isend_irecv|P2POp)(_\w+)?"
)
COLLECTIVE_MODULES = ("torch.distributed._functional_collectives", "torch.distributed.nn")
ENVIRONMENT_NAMES = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
DEVICE_KINDS = ("cuda", "xpu", "mps", "hpu", "npu", "privateuseone", "nccl", "xccl")
DEVICE_NAMES = re.compile(
    rf"torch\.({'|'.join(DEVICE_KINDS)}|accelerator|Stream|Event|get_device_module|backends\.(cuda|mps))(\..*)?"
)
DEVICE_ATTRIBUTES = ("is_cpu", *(f"is_{kind}" for kind in DEVICE_KINDS))
FLOATING_FACTORIES = {f"torch.{name}" for name in ("zeros", "ones", "empty", "rand", "randn")}
FACTORIES = FLOATING_FACTORIES | {
    f"torch.{name}" for name in ("tensor", "full", "arange", "randint", "randperm", "eye")
}
CALLS_OF_MODULES = ("forward", "__call__", "_call_impl", "_compiled_call_impl")
STAGE_CLASS = re.compile(r"(zero|stage)_?([0-3]|one|two|three)", re.IGNORECASE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A file of the package; `path` is relative to src/partita."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"

    def is_one_of(self, patterns: tuple[str, ...]) -> bool:
        return any(PurePosixPath(self.path).match(pattern) for pattern in patterns)

    @property
    def module(self) -> tuple[str, ...]:
        """The module's name below partita, as a tuple of parts, without a package's `__init__`."""
        names = PurePosixPath(self.path).with_suffix("").parts
        return names[:-1] if names[-1] == "__init__" else names

    @property
    def package(self) -> tuple[str, ...]:
        return PurePosixPath(self.path).parts[:-1]

    def imports(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, str, str | None, str]]:
        """Yield (statement, module, imported name or None, local name) for each import; relative ones are resolved."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node, alias.name, None, alias.asname or alias.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom):
                base = ("partita", *self.package)[: len(self.package) + 2 - node.level] if node.level else ()
                module = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield node, module, alias.name, alias.asname or alias.name

    @cached_property
    def names(self) -> dict[str, str]:
        """The full dotted name of each imported local name."""
        bound: dict[str, str] = {}
        for node, module, name, local in self.imports():
            if name is not None:
                bound[local] = f"{module}.{name}"
            else:
                is_renamed = isinstance(node, ast.Import) and any(alias.asname == local for alias in node.names)
                bound[local] = module if is_renamed else module.partition(".")[0]
        return bound

    def full_name(self, node: ast.expr) -> str | None:
        """Return `torch.distributed.all_reduce` for `dist.all_reduce`; None if the first name is not imported."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute) and (start := self.full_name(node.value)):
            return f"{start}.{node.attr}"
        match node:
            case ast.Call(ast.Name("getattr"), [owner, ast.Constant(str(attribute)), *_]):
                start = self.full_name(owner)
                return start and f"{start}.{attribute}"
        return None

    def references(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield every full dotted name that is imported or used, with its node."""
        for statement, module, name, _ in self.imports():
            yield statement, module if name is None else f"{module}.{name}"
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Attribute, ast.Call)) and (full := self.full_name(node)):
                yield node, full


def layering(source: Source) -> Iterator[str]:
    own = _layer(source.module)
    if own is None:
        yield f"{source.path}: belongs to no layer; name it in LAYERS"
        return
    for node, module, name, _ in source.imports():
        if module.partition(".")[0] != "partita":
            continue
        parts = module.split(".")[1:]
        if not parts and name is not None and name in LAYERS:
            parts = [name]
        imported = _layer(tuple(parts))
        if imported is None:
            yield source.at(node, f"imports partita.{parts[0]}, which belongs to no layer")
        elif imported > own:
            yield source.at(node, f"{LAYERS[own]} imports from {LAYERS[imported] or 'the package root'}, a later layer")


def optional_packages(source: Source) -> Iterator[str]:
    """Only the optional packages themselves, the package root and the command line import optional packages."""
    own = source.module[0] if source.module else ""
    if own in (*OPTIONAL, "", "cli"):
        return
    for node, module, _, _ in source.imports():
        parts = module.split(".")
        if parts[0] == "partita" and len(parts) > 1 and parts[1] in OPTIONAL:
            yield source.at(node, f"imports from partita.{parts[1]}, an optional package")


def _layer(module: tuple[str, ...]) -> int | None:
    name = module[0] if module else ""
    return LAYERS.index(name) if name in LAYERS else None


def parameter_budget(source: Source) -> Iterator[str]:
    for node, in_class in _functions(source.tree):
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        if in_class and named and named[0].arg in ("self", "cls"):
            named = named[1:]
        count = len(named) + sum(rest is not None for rest in (arguments.vararg, arguments.kwarg))
        # Triton kernels take pointers and sizes one by one; parameters of commands are their options.
        is_kernel = any(ast.unparse(each) == "triton.jit" for each in node.decorator_list)
        is_command = f"partita.{'.'.join(source.module)}:{node.name}" in COMMANDS
        if count > MAX_PARAMETERS and not is_kernel and not is_command:
            yield source.at(node, f"{node.name} has {count} parameters, at most {MAX_PARAMETERS}")


def one_attribute_a_line(source: Source) -> Iterator[str]:
    """One statement assigns at most one attribute. Swaps, whose values read the targets, are allowed."""
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        targets = [each for target in node.targets if isinstance(target, ast.Tuple) for each in target.elts]
        attributes = {ast.unparse(each) for each in targets if isinstance(each, ast.Attribute)}
        read = {ast.unparse(each) for each in ast.walk(node.value) if isinstance(each, ast.Attribute)}
        if len(attributes) > 1 and not attributes & read:
            yield source.at(node, f"packs {', '.join(sorted(attributes))} into one line")


def class_budget(source: Source) -> Iterator[str]:
    if source.module[:1] and source.module[0] not in CORE:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            properties = [each for each in node.body if isinstance(each, Function) and _is_property(each)]
            declared = {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
            stores = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
            assigned = {each.attr for each in stores if isinstance(each.ctx, ast.Store) and _is_self(each.value)}
            for what, count, most in (
                ("attributes", len(declared | assigned), MAX_ATTRIBUTES),
                ("properties", len(properties), MAX_PROPERTIES),
            ):
                if count > most:
                    yield source.at(node, f"{node.name} has {count} {what}, at most {most}")


def _is_property(function: Function) -> bool:
    return any(ast.unparse(each).endswith("property") for each in function.decorator_list)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _functions(tree: ast.Module) -> Iterator[tuple[Function, bool]]:
    """Yield each function, and True if it is defined directly in a class."""
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Function):
                yield node, isinstance(parent, ast.ClassDef)


def collectives_in_one_file(source: Source) -> Iterator[str]:
    if source.is_one_of(COLLECTIVES):
        return
    for node, full in source.references():
        module, _, name = full.rpartition(".")
        in_torch = module == "torch.distributed" or module.startswith("torch.distributed.")
        if full.startswith(COLLECTIVE_MODULES) or (in_torch and COLLECTIVE_NAME.fullmatch(name)):
            yield source.at(node, f"uses {full}; collectives are called in {COLLECTIVES[0]} only")


def environment_read_in_few_places(source: Source) -> Iterator[str]:
    if source.is_one_of(ENVIRONMENT):
        return
    for node, full in source.references():
        if full in ENVIRONMENT_NAMES:
            yield source.at(node, f"uses {full}; the environment is read in {' and '.join(ENVIRONMENT)} only")


def stage_compared_in_few_places(source: Source) -> Iterator[str]:
    if source.is_one_of(STAGE):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            operands = [node.subject]
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            operands = [node.test]
        else:
            continue
        if any(_is_stage(operand) for operand in operands):
            yield source.at(node, f"decides by the stage; that is for {' and '.join(STAGE)}")


def _is_stage(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "stage") or (
        isinstance(node, ast.Attribute) and node.attr == "stage"
    )


def no_class_of_a_stage(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and STAGE_CLASS.search(node.name):
            yield source.at(node, f"class {node.name} is named after a stage")


def devices_known_in_one_file(source: Source) -> Iterator[str]:
    if source.is_one_of(ACCELERATOR):
        return
    uses = [(node, f"uses {full}") for node, full in source.references() if DEVICE_NAMES.fullmatch(full)]
    for node in ast.walk(source.tree):
        match node:
            case ast.Compare(left, [ast.Eq() | ast.NotEq()], [right]) if not (_is_meta(left) or _is_meta(right)):
                if _is_device_type(left) or _is_device_type(right):
                    uses.append((node, "asks for a device's type"))
            case ast.Constant(str(text)) if text in DEVICE_KINDS:
                uses.append((node, f"names {text}"))
            case ast.Attribute(_, attribute) if attribute in DEVICE_ATTRIBUTES:
                uses.append((node, f"uses {attribute}"))
    for node, use in uses:
        yield source.at(node, f"{use}; devices are known in {ACCELERATOR[0]} only")


def _is_device_type(node: ast.expr) -> bool:
    """Return True for `X.type` and `Y.X.type` if the name X ends with "device"."""
    match node:
        case ast.Attribute(ast.Name(name), "type") | ast.Attribute(ast.Attribute(_, name), "type"):
            return name.endswith("device")
    return False


def _is_meta(node: ast.expr) -> bool:
    """Return True for the constant "meta", which is not a device of a machine."""
    return isinstance(node, ast.Constant) and node.value == "meta"


def tensors_are_no_default_s(source: Source) -> Iterator[str]:
    """New tensors name a device and a dtype: torch.set_default_device and set_default_dtype belong to the user."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or (full := source.full_name(node.func)) not in FACTORIES:
            continue
        said = {keyword.arg for keyword in node.keywords}
        if not said & {"device", None}:
            yield source.at(node, f"{full} names no device")
        if full in FLOATING_FACTORIES and not said & {"dtype", None} and "device='meta'" not in ast.unparse(node):
            yield source.at(node, f"{full} names no dtype")


def modules_changed_in_one_package(source: Source) -> Iterator[str]:
    """Only the transforms package replaces a module's forward or call, so that one mechanism can undo all wrappers."""
    if source.is_one_of(TRANSFORMS):
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(_, name, ast.Store() | ast.Del()):
                pass
            case ast.Subscript(_, ast.Constant(name), ast.Store() | ast.Del()):
                pass
            case ast.Call(ast.Name("setattr" | "delattr"), [_, ast.Constant(name), *_]):
                pass
            case ast.Call(ast.Attribute(_, "__setattr__"), [_, ast.Constant(name), *_]):
                pass
            case ast.Call(ast.Attribute(_, "pop" | "setdefault"), [ast.Constant(name), *_]):
                pass
            case _:
                continue
        if name in CALLS_OF_MODULES:
            yield source.at(node, f"replaces {name}; that is for {' and '.join(TRANSFORMS)}")


def docstring(source: Source) -> Iterator[str]:
    if not ast.get_docstring(source.tree):
        yield f"{source.path}: has no docstring"


OPENERS = re.compile(r"(What|Whether|Of|Where|That|Who|Whose|Which|How|Until)\b")


def docstring_opener(source: Source) -> Iterator[str]:
    """Docstrings open with a noun phrase or an imperative, not with a question word."""
    for node in ast.walk(source.tree):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | Function)
        if has_docstring and (found := OPENERS.match(ast.get_docstring(node) or "")):
            yield source.at(node, f"a docstring opens with '{found.group()}'")


# Project-specific words for which the field has established names.
PRIVATE_WORDS = frozenset(
    """
    absent admission adopt adopts agreement alike apart aside attend attendance away beside bring coded collected
    course cover elsewhere fed foreign held_back holding holdings in_full lay lays lend lends lent nested otherwise
    outer passage rest resting rests room rooms said shortage shortages sight spread squares stand_in stow tell tells
    together told wake wave waves
    """.split()
)
ALLOWED_NAMES = {
    "attend": "computes attention: queries attend to keys",
    "outer": "a box around another one",
    "outer_lr": "a config key, in the words of the DiLoCo paper",
    "outer_momentum": "a config key, in the words of the DiLoCo paper",
    "outer_nesterov": "a config key, in the words of the DiLoCo paper",
}
WORDS_OF_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def private_words(source: Source) -> Iterator[str]:
    """Names of modules, classes, functions and parameters use the words of PyTorch and of the papers."""
    names: list[tuple[ast.AST, str]] = [(source.tree, name) for name in source.module]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef | Function):
            names.append((node, node.name))
        elif isinstance(node, ast.arg):
            names.append((node, node.arg))
    for node, name in names:
        words = [word.lower() for word in WORDS_OF_NAME.findall(name)]
        pairs = {"_".join(pair) for pair in pairwise(words)}
        if name not in ALLOWED_NAMES and (found := PRIVATE_WORDS & {*words, *pairs}):
            yield source.at(node, f"the name {name} has the private word {min(found)}")


Check = Callable[[Source], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    layering,
    optional_packages,
    parameter_budget,
    one_attribute_a_line,
    class_budget,
    collectives_in_one_file,
    environment_read_in_few_places,
    stage_compared_in_few_places,
    no_class_of_a_stage,
    devices_known_in_one_file,
    tensors_are_no_default_s,
    modules_changed_in_one_package,
    docstring,
    docstring_opener,
    private_words,
)


@cache
def sources() -> list[Source]:
    """Return all files of the package; the cache lets each be parsed once."""
    paths = sorted(SOURCE.rglob("*.py"))
    assert paths, f"no sources in {SOURCE}"
    return [Source(path.relative_to(SOURCE).as_posix(), path.read_text()) for path in paths]


@pytest.mark.parametrize("check", CHECKS)
def test_source_holds(check: Check) -> None:
    problems = [problem for source in sources() for problem in check(source)]
    assert not problems, "\n" + "\n".join(problems)


def test_every_package_is_one() -> None:
    packages = {path.parent for path in SOURCE.rglob("*.py")}
    assert [str(package) for package in packages if not (package / "__init__.py").exists()] == []


MANY_ATTRIBUTES = "class A:\n    def f(self):\n" + "\n".join(f"        self.a{n} = {n}" for n in range(21))
MANY_PROPERTIES = "class A:" + "".join(f"\n    @property\n    def p{n}(self): ..." for n in range(16))
MANY_PARAMETERS = "a, b, c, d, /, e, f, *g, h"

BAD = [
    (private_words, "sharding/holdings.py", ""),
    (private_words, "engine.py", "class LentSlot: ..."),
    (private_words, "engine.py", "def f(stand_in): ..."),
    (private_words, "engine.py", "def keep_apart(): ..."),
    (docstring_opener, "engine.py", '"""What a step takes."""'),
    (docstring_opener, "engine.py", 'def f():\n    """Whether it is finite."""'),
    (layering, "table/span.py", "from partita.comm import mesh"),
    (layering, "table/span.py", "import partita.comm.mesh"),
    (layering, "table/span.py", "from partita import comm"),
    (layering, "table/span.py", "from ..comm import mesh"),
    (layering, "table/span.py", "from .. import comm"),
    (layering, "table/span.py", "def late():\n    from partita.engine.engine import Engine"),
    (layering, "table/span.py", "if TYPE_CHECKING:\n    from partita.config.schema import Config"),
    (layering, "engine.py", "from partita import initialize"),
    (layering, "errors.py", "import partita"),
    (layering, "__init__.py", "from partita.cli.main import app"),
    (layering, "helpers/a.py", ""),
    (layering, "engine.py", "from partita.helpers import a"),
    (optional_packages, "sharding/a.py", "from partita.compression.quantized import Quantized"),
    (optional_packages, "engine/a.py", "def late():\n    import partita.attention.apply"),
    (parameter_budget, "engine.py", f"def f({MANY_PARAMETERS}, i): ..."),
    (parameter_budget, "cli/plan.py", f"def show({MANY_PARAMETERS}, i): ..."),
    (parameter_budget, "engine.py", f"def f({MANY_PARAMETERS}, **i): ..."),
    (parameter_budget, "engine.py", f"def f(self, {MANY_PARAMETERS}): ..."),
    (parameter_budget, "engine.py", f"class A:\n    def f(self, {MANY_PARAMETERS}, i): ..."),
    (one_attribute_a_line, "engine.py", "a.b, a.c = 1, 2"),
    (class_budget, "sharding/a.py", MANY_ATTRIBUTES),
    (class_budget, "table/a.py", MANY_PROPERTIES),
    (collectives_in_one_file, "engine.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (collectives_in_one_file, "engine.py", "import torch\ntorch.distributed.all_gather_into_tensor(x, y)"),
    (collectives_in_one_file, "engine.py", "import torch.distributed\ntorch.distributed.barrier()"),
    (collectives_in_one_file, "engine.py", "from torch import distributed as d\nd.reduce_scatter_tensor(x, y)"),
    (collectives_in_one_file, "engine.py", "import torch.distributed as dist\ngetattr(dist, 'barrier', None)()"),
    (collectives_in_one_file, "engine.py", "from torch.distributed import all_to_all_single"),
    (collectives_in_one_file, "engine.py", "from torch.distributed import broadcast_object_list as b"),
    (collectives_in_one_file, "engine.py", "from torch.distributed.distributed_c10d import isend"),
    (collectives_in_one_file, "engine.py", "import torch.distributed as dist\nrun = dist._all_gather_base"),
    (collectives_in_one_file, "engine.py", "from torch.distributed import _functional_collectives as fc"),
    (collectives_in_one_file, "engine.py", "import torch.distributed.nn.functional"),
    (collectives_in_one_file, "comm/mesh.py", "import torch.distributed as dist\ndist.recv(x)"),
    (environment_read_in_few_places, "engine.py", "import os\nos.environ['RANK']"),
    (environment_read_in_few_places, "engine.py", "import os as system\nsystem.getenv('RANK')"),
    (environment_read_in_few_places, "cli/main.py", "from os import environ"),
    (environment_read_in_few_places, "config/resolve.py", "from os import getenv as g"),
    (stage_compared_in_few_places, "engine.py", "if stage == 3: ..."),
    (stage_compared_in_few_places, "engine.py", "x = 1 <= config.zero.stage"),
    (stage_compared_in_few_places, "engine.py", "y = 1 if config.zero.stage else 2"),
    (stage_compared_in_few_places, "table/steps.py", "match zero.stage:\n    case 3: ..."),
    (no_class_of_a_stage, "engine.py", "class Zero1Optimizer: ..."),
    (no_class_of_a_stage, "engine.py", "class _Stage_3: ..."),
    (no_class_of_a_stage, "engine.py", "class ShardedZeROThree: ..."),
    (devices_known_in_one_file, "engine.py", "if mesh.device.type == 'cpu': ..."),
    (devices_known_in_one_file, "engine.py", "x = 'a' if tensor.device.type in ('cuda', 'xpu') else 'b'"),
    (devices_known_in_one_file, "engine.py", "import torch\ntorch.cuda.is_available()"),
    (devices_known_in_one_file, "engine.py", "from torch import xpu"),
    (devices_known_in_one_file, "engine.py", "import torch\ntorch.accelerator.current_stream()"),
    (devices_known_in_one_file, "engine.py", "import torch\nevent = torch.Event()"),
    (devices_known_in_one_file, "engine.py", "backend = 'nccl'"),
    (devices_known_in_one_file, "engine.py", "assert tensor.is_cuda"),
    (tensors_are_no_default_s, "engine.py", "import torch\nx = torch.arange(3)"),
    (tensors_are_no_default_s, "engine.py", "from torch import randn as draw\nx = draw(3, device='cpu')"),
    (modules_changed_in_one_package, "engine.py", "module.forward = run"),
    (modules_changed_in_one_package, "engine.py", "a, module.forward = b, run"),
    (modules_changed_in_one_package, "engine.py", "module._compiled_call_impl: object = run"),
    (modules_changed_in_one_package, "engine.py", "with opened() as module._call_impl: ..."),
    (modules_changed_in_one_package, "engine.py", "del module.forward"),
    (modules_changed_in_one_package, "engine.py", "setattr(module, 'forward', run)"),
    (modules_changed_in_one_package, "engine.py", "delattr(module, '_compiled_call_impl')"),
    (modules_changed_in_one_package, "engine.py", "object.__setattr__(module, 'forward', run)"),
    (modules_changed_in_one_package, "engine.py", "vars(module)['forward'] = run"),
    (modules_changed_in_one_package, "engine.py", "module.__dict__.pop('forward')"),
    (modules_changed_in_one_package, "sharding/a.py", "type(module).__call__ = run"),
    (docstring, "engine.py", "# only a comment\nx = 1"),
    (docstring, "table/__init__.py", ""),
]

GOOD = [
    (private_words, "sharding/placeholder.py", "class Slot:\n    def acquire(self, unit, other_parts, restart): ..."),
    (docstring_opener, "engine.py", '"""Time of a step."""\ndef f():\n    """Return whether it is finite."""'),
    (layering, "table/span.py", "import os\nfrom partita.errors import PartitaError\nfrom partita.table import steps"),
    (layering, "table/span.py", "from . import steps\nfrom .steps import Step\nfrom ..errors import PartitaError"),
    (layering, "engine.py", "from partita.sharding.unit import Unit\nimport partita.comm.mesh"),
    (layering, "__init__.py", "from partita.engine.engine import Engine"),
    (layering, "cli/main.py", "import partita\nfrom partita import initialize"),
    (optional_packages, "compression/a.py", "from partita.compression.quantized import Quantized"),
    (optional_packages, "cli/a.py", "from partita.prediction.plan import plan"),
    (parameter_budget, "engine.py", f"def f({MANY_PARAMETERS}): ..."),
    (parameter_budget, "cli/plan.py", f"def plan({MANY_PARAMETERS}, i): ..."),
    (parameter_budget, "engine.py", f"class A:\n    def f(self, {MANY_PARAMETERS}): ..."),
    (one_attribute_a_line, "engine.py", "a.b, a.c = a.c, a.b"),
    (class_budget, "prediction/a.py", MANY_ATTRIBUTES),
    (class_budget, "sharding/a.py", MANY_ATTRIBUTES.replace("self.a20", "other.a20")),
    (one_attribute_a_line, "engine.py", "a, b.c = 1, 2"),
    (collectives_in_one_file, "comm/transport.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (collectives_in_one_file, "engine.py", "import torch.distributed as dist\ndist.get_rank()\ndist.ReduceOp.SUM"),
    (collectives_in_one_file, "engine.py", "from partita.comm import collectives\ncollectives.all_reduce(x)"),
    (collectives_in_one_file, "engine.py", "import torch\ntorch.gather(x, 0, y)\nx.scatter_(0, y)"),
    (environment_read_in_few_places, "config/launchers.py", "import os\nos.environ['RANK']"),
    (environment_read_in_few_places, "cli/launch_local.py", "from os import environ"),
    (environment_read_in_few_places, "engine.py", "import os\nos.getpid()\nother.environ"),
    (stage_compared_in_few_places, "table/state_plan.py", "if stage == 3: ..."),
    (stage_compared_in_few_places, "config/checks.py", "if zero.stage == 3: ..."),
    (stage_compared_in_few_places, "engine.py", "plan = preset(config.zero.stage)\nif stages == 3: ..."),
    (no_class_of_a_stage, "engine.py", "class ZeroSection: ...\nclass StagePlan: ..."),
    (devices_known_in_one_file, "memory/accelerator.py", "import torch\nif device.type == 'cuda': torch.cuda.init()"),
    (devices_known_in_one_file, "engine.py", "import torch\nx = saved[torch.empty(2, device='cpu').device.type]"),
    (devices_known_in_one_file, "engine.py", "if param.device.type != 'meta' and kind.type == 'row': ..."),
    (tensors_are_no_default_s, "engine.py", "import torch\nx = torch.zeros(3, dtype=dtype, device='cpu')"),
    (tensors_are_no_default_s, "engine.py", "import torch\nx = torch.empty(3, device='meta') + torch.zeros_like(y)"),
    (tensors_are_no_default_s, "engine.py", "import torch\nx = torch.tensor(3, device='cpu') + torch.ones(**like)"),
    (modules_changed_in_one_package, "transforms/a.py", "module.forward = run\nsetattr(module, 'forward', run)"),
    (
        modules_changed_in_one_package,
        "engine.py",
        "class A:\n    def forward(self, x): ...\n    def __call__(self): ...",
    ),
    (modules_changed_in_one_package, "engine.py", "run = module.forward\nis_own = 'forward' not in vars(module)"),
    (docstring, "engine.py", '"""An engine."""'),
]


@pytest.mark.parametrize(("check", "path", "text"), BAD)
def test_check_can_fail(check: Check, path: str, text: str) -> None:
    assert len(list(check(Source(path, text)))) >= 1


@pytest.mark.parametrize(("check", "path", "text"), GOOD)
def test_check_can_hold(check: Check, path: str, text: str) -> None:
    assert list(check(Source(path, text))) == []


def test_every_check_is_shown_both() -> None:
    assert {check for check, _, _ in BAD} == {check for check, _, _ in GOOD} == set(CHECKS)
