"""Checks that files, names, config keys and commands exist if documents, docstrings or messages mention them.

Each check is also tested on text that breaks it.
"""

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache, reduce
from pathlib import Path

import pytest
import typer.main
import yaml
from pydantic import BaseModel

from partita.cli.main import app
from partita.config.load import load_config
from partita.config.messages import key_paths
from partita.config.schema import Config
from partita.engine.engine import Engine
from partita.errors import ConfigError
from partita.train.job import Job, load_job
from tests.test_architecture import LAYERS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "partita"
DOCUMENTS = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
)

# Names that need not exist in the repository: files of a run or a build, placeholders in examples, the compiled
# extension, and names of other projects.
OF_A_RUN = re.compile(
    r"(runs|folder|model|build|zero|checkpoints|weights)/.*|\w+\.(safetensors|json|jsonl|yaml|png|txt|pt|bin)"
)
PLACEHOLDERS = {"benchmarks.name", "benchmarks/name.py", "derived", "ignored", "ErrorType"}
JOB_SECTIONS = Job.model_fields.keys() - Config.model_fields.keys()
BUILT = {"partita.kernels._native"}
FOREIGN = {
    *("PR_SET_PTRACER", "activation_checkpointing_enable", "SKBUILD_WHEEL_CMAKE", "xpu", "load_best_model_at_end"),
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "zero_to_fp32.py", "ds_to_universal.py"),
    *("checkpoint_wrapper", "loss_parallel", "reduce_dtype", "summon_full_params"),  # FSDP
    *("set_modules_to_forward_prefetch", "set_requires_gradient_sync"),
    "torch_compile",  # transformers
    *(f"parallelism.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context", "expert")),  # torchtitan
    *("parallelism.pipeline_parallel_schedule", "parallelism.data_parallel_shard_degree"),
    *("parallelism.data_parallel_replicate_degree", "training.local_batch_size", "training.global_batch_size"),
    *("activation_checkpoint.mode", "training.mixed_precision_reduce", "training.enable_cpu_offload"),
    "training.max_norm",
    *("--num-layers-per-virtual-pipeline-stage", "--num-distributed-optimizer-instances"),  # Megatron-LM
    *("--recompute-granularity", "--cross-entropy-loss-fusion", "--lr-warmup-iters", "--lr-decay-iters"),
    *("--save-interval", "--fp8-format"),
}

PATH = re.compile(r"\.?[\w*-]+(\.[\w*-]+)*(/[\w.*-]*)+|[\w*]+\.(py|md|hpp|cpp|toml)")
KEY_AND_VALUE = re.compile(r"([a-z_][\w.]*): (\S.*)")
VARIABLE = re.compile(r"([A-Z][A-Z0-9_]+)(=\S*)?")
SPAN = re.compile(r"(?<!`)(?::\w+:)?(`{1,2})(?!`)(.+?)\1(?!`)", re.DOTALL)
BLOCK = re.compile(r"^```(\w*)(?: [^\n]*)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WRITTEN = re.compile(r'^```\w+ title="([^"]+)"$', re.MULTILINE)  # files that the page tells its reader to write
LINK = re.compile(r"\]\(([^)\s]+)\)")


# ------------------------------------------------------------------------------------------------ names that exist


@cache
def keys(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(".".join(path) for path in key_paths(model))


@cache
def sections() -> frozenset[str]:
    return frozenset(key.partition(".")[0] for key in keys(Config) | keys(Job)) - {"engine"}


@cache
def engine_names() -> frozenset[str]:
    return frozenset(dir(Engine)) | frozenset(re.findall(r"self\.([a-z]\w*)", inspect.getsource(Engine)))


@cache
def known_words() -> frozenset[str]:
    """Return identifiers, file names, and the words of strings other than docstrings and strings in tests."""
    words = FOREIGN | PLACEHOLDERS
    for folder in ("src", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if path == Path(__file__):
                continue
            tree = ast.parse(path.read_text())
            words.add(path.stem)
            for node in ast.walk(tree):
                names = (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname", "module"))
                words.update(part for name in names if isinstance(name, str) for part in name.split("."))
            if folder != "tests":
                words.update(word for text in strings(tree) for word in re.findall(r"\w+", text))
    for name in ("Makefile", "CMakeLists.txt", "pyproject.toml", ".ci/run"):
        words.update(re.findall(r"\w+", (ROOT / name).read_text()))
    return frozenset(words)


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield string literals, except those that are statements of their own (docstrings)."""
    apart = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield node.value


# ------------------------------------------------------------------------------------------------------- the checks


def unknown_in(span: str, folder: Path = ROOT) -> Iterator[str]:
    """Yield the names in a code span that do not exist; ``folder`` is the folder of the text with the span."""
    if OF_A_RUN.fullmatch(span) or span in PLACEHOLDERS | FOREIGN:
        return
    first = span.split()[0] if span.split() else ""
    if first in ("make", "partita", "python"):
        yield from unknown_command(span)
    elif PATH.fullmatch(span):
        yield from unknown_path(span, folder)
    elif " -> " in span:
        for part in span.split(" -> "):
            yield from unknown_in(part, folder)
    elif match := KEY_AND_VALUE.fullmatch(span):
        yield from unknown_setting(match[1], match[2])
    elif match := VARIABLE.fullmatch(span):
        if match[1] not in known_words():
            yield f"{match[1]}: nothing has this name"
    else:
        yield from unknown_code(span)


def unknown_command(text: str) -> Iterator[str]:
    first, *words = shlex.split(text.replace(" | ", "|"))
    if first == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        variables = re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in words:
            if word.partition("=")[0] not in (variables if "=" in word else targets):
                yield f"{text}: the Makefile has no {word}"
    elif first == "python":
        module = words[1] if words[:1] == ["-m"] else ""
        if module not in PLACEHOLDERS and module.startswith(("partita", "benchmarks")):
            yield from unknown_import(module)
    else:
        yield from _unknown_cli(text, words)


def _unknown_cli(text: str, words: list[str]) -> Iterator[str]:
    command = typer.main.get_command(app)
    for word in words:
        if command.name == "run" and (word == "-m" or word.endswith(".py")):
            return  # the remaining words are the script's arguments
        subcommands = getattr(command, "commands", {})
        if word.strip("[").startswith("--"):
            if word.strip("[]") not in [option for param in command.params for option in param.opts]:
                yield f"{text}: there is no option {word}"
        elif subcommands:
            names = word.split("|")
            for name in names:
                if name not in subcommands:
                    yield f"{text}: there is no command {name}"
                    return
            command = subcommands[names[0]]


def unknown_path(text: str, folder: Path) -> Iterator[str]:
    pattern = text.rstrip("/")
    bases = (folder, ROOT, SOURCE)
    found = any(next(base.glob(name), None) for base in bases for name in (pattern, f"{pattern}.py"))
    if "/" not in text:
        found = found or any(
            next((ROOT / name).rglob(pattern), None) for name in ("src", "csrc", "tests", "benchmarks")
        )
    if not found:
        yield f"{text}: there is no such file or folder"


def unknown_setting(key: str, value: str) -> Iterator[str]:
    """Yield a problem if a key of the configuration or of a job does not exist or rejects this YAML value."""
    paths = [path for path in keys(Job) if f".{path}".endswith(f".{key}")]
    if not paths and key not in PLACEHOLDERS:
        yield f"{key}: there is no such key"
    elif paths and not any(_is_accepted(path, value) for path in paths):
        yield f"{key}: {value} is not accepted"


def _is_accepted(path: str, value: str) -> bool:
    sections: object = yaml.safe_load(value)
    for part in reversed(path.split(".")):
        sections = {part: sections}
    try:
        load_job(sections)  # type: ignore[arg-type]
    except ConfigError:
        return False
    return True


def unknown_code(text: str) -> Iterator[str]:
    """Yield the unknown names in a piece of Python.

    Dotted names of partita, torch, the engine and the configuration are checked as a unit, other names word by word.
    Positional arguments may have any name.
    """
    try:
        tree = ast.parse(f"{text} pass" if text.endswith(":") else text.removeprefix("."))
    except SyntaxError:
        return
    arguments = {id(argument) for node in ast.walk(tree) if isinstance(node, ast.Call) for argument in node.args}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg not in known_words():
            yield f"{text}: nothing has an argument {node.arg}"
        elif isinstance(node, ast.Attribute | ast.Name) and id(node) not in arguments | inner:
            yield from unknown_name(ast.unparse(node), is_called=id(node) in called)


def unknown_name(dotted: str, *, is_called: bool = False) -> Iterator[str]:
    root, _, rest = dotted.partition(".")
    if root in ("partita", "torch") and rest:
        yield from unknown_import(dotted)
    elif root == "engine" and rest:
        if rest.partition(".")[0] not in engine_names() and dotted not in keys(Job):
            yield f"{dotted}: the engine has no such attribute, and the configuration no such key"
    elif root in sections() and rest and not is_called:
        if dotted not in keys(Config) | keys(Job):
            yield f"{dotted}: there is no such key"
    else:
        for word in re.findall(r"[A-Za-z_]\w*", dotted):
            if word not in known_words():
                yield f"{dotted}: nothing is called {word}"


def unknown_import(dotted: str) -> Iterator[str]:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            reduce(getattr, parts[count:], importlib.import_module(".".join(parts[:count])))
        except (ModuleNotFoundError, AttributeError):
            continue
        return
    if dotted not in BUILT:
        yield f"{dotted}: cannot be imported"


def wrong_block(language: str, text: str) -> Iterator[str]:
    """Yield the problems of a code block.

    Python must parse and YAML must be a valid configuration; the names and commands in a block must exist.
    """
    if language == "python":
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            yield f"not Python: {error}"
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match(r"(partita|engine)\.\w+$", ast.unparse(node)):
                yield from unknown_name(ast.unparse(node))
    elif language == "yaml":
        try:
            sections = yaml.safe_load(text)
            is_job = isinstance(sections, dict) and not sections.keys().isdisjoint(JOB_SECTIONS)
            load_job(sections) if is_job else load_config(sections)
        except (ConfigError, yaml.YAMLError) as error:
            yield f"not a configuration: {error}"
    else:
        for line in text.splitlines():
            if line.startswith(("make ", "partita ")):
                yield from unknown_command(line.partition("#")[0])


def wrong_link(target: str, folder: Path) -> Iterator[str]:
    if re.match(r"\w+:", target):
        return
    name, _, heading = target.partition("#")
    path = folder / name
    if not path.exists():
        yield f"{target}: there is no such file"
    elif heading and heading not in _headings(path):
        yield f"{target}: there is no such heading"


def _headings(path: Path) -> list[str]:
    found = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in found]


def wrong_in_document(text: str, folder: Path) -> Iterator[str]:
    for language, block in BLOCK.findall(text):
        yield from wrong_block(language, block)
    prose, written = BLOCK.sub("", text), WRITTEN.findall(text)
    for _, span in SPAN.findall(prose):
        if span not in written:
            yield from unknown_in(" ".join(span.split()), folder)
    for target in LINK.findall(prose):
        yield from wrong_link(target, folder)


def wrong_in_docstrings(source: str) -> Iterator[str]:
    for docstring in docstrings(ast.parse(source)):
        for _, span in SPAN.findall(docstring):
            yield from unknown_in(" ".join(span.split()).removeprefix("~"))


def wrong_in_messages(source: str) -> Iterator[str]:
    """Yield unknown names of partita and of the engine, and unknown config keys, in string literals with spaces."""
    roots = "|".join(["partita", "engine", *sections()])
    dotted = re.compile(rf"(?<![\w./])((?:{roots})(?:\.[a-z_]+)+)\b(\(?)(?![*\[{{])")
    for text in strings(ast.parse(source)):
        for name, call in dotted.findall(text if " " in text else ""):
            if not OF_A_RUN.fullmatch(name):
                yield from unknown_name(name, is_called=bool(call))


# ---------------------------------------------------------------------------------------- the repository passes them


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_names_is_there(name: str) -> None:
    path = ROOT / name
    problems = list(wrong_in_document(path.read_text(), path.parent))
    assert not problems, "\n" + "\n".join(f"{name}: {problem}" for problem in problems)


@pytest.mark.parametrize("check", [wrong_in_docstrings, wrong_in_messages])
def test_what_the_sources_name_is_there(check: Callable[[str], Iterator[str]]) -> None:
    problems = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in sorted(SOURCE.rglob("*.py"))
        for problem in check(path.read_text())
    ]
    assert not problems, "\n" + "\n".join(problems)


def folders_listed(architecture: str) -> list[str]:
    return re.findall(r"^\| `(\w+)/` \|", architecture, re.MULTILINE)


def test_the_table_of_folders_is_whole_and_in_order() -> None:
    listed = folders_listed((ROOT / "ARCHITECTURE.md").read_text())
    there = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert sorted(listed, key=LAYERS.index) == sorted(there, key=LAYERS.index)


def layers_listed(contributing: str) -> list[str]:
    listed = re.search(r"from those listed before it: ([\w,\s]+)\.", contributing)
    assert listed
    return ["" if name == "the package root" else name for name in re.split(r",\s+", " ".join(listed[1].split()))]


def test_the_layers_listed_are_those_that_are_held() -> None:
    assert layers_listed((ROOT / "CONTRIBUTING.md").read_text()) == list(LAYERS)


# --------------------------------------------------------------------------------------------- tests of the checks

BAD = [
    "`tests/golden`",
    "`comm/nowhere`",
    "`plan/nowhere.py`",
    "`nowhere.hpp`",
    "`engine/`, `missing/`",
    "`zero.offload.parameter`",
    "`engine.checkpoint.folder`",
    "`zero.stage: 4`",
    "`precision.compute: int4`",
    "`keep_whole: true`",
    "`partita.load_config`",
    "`partita.initialise(model)`",
    "`partita.initialize(model, optimiser=...)`",
    "`torch.optim.Adamw`",
    "`engine.train_batches(iterator)`",
    "`with engine.gathering(module):`",
    "`Publisher.publicise`",
    "`hooks -> executer -> collectives`",
    "`PARTITA_REQUIRE_KERNEL=1`",
    "`make tests`",
    "`make test TORCHES=2`",
    "`partita trian`",
    "`partita trian JOB --processes 2`",
    "`partita train --process 2`",
    "`python -m benchmarks.speed`",
    "`partita run --process 2 train.py`",
    "`first.py`",
    "[how](NOWHERE.md)",
    "[how](CONTRIBUTING.md#to-add-z)",
    "```python\nengine = partita.initialize(\n```\n",
    "```python\nengine.trains()\n```\n",
    "```yaml\nzero: {stages: 3}\n```\n",
    "```yaml\nzero: {stage: 3\n```\n",
    '```yaml title="first.yaml"\nzero: {stages: 3}\n```\n',
    "```yaml\ntrain: {step: 3}\n```\n",
    "```\npartita checkpoint inspect | verfy DIR\n```\n",
    "```\nmake tests     # all of them\n```\n",
]
GOOD = [
    "`tests/kit`, `tests/kit/`, `table/span`, `table/span.py`, `csrc/level_*.cpp`, `level_*.cpp`, `.ci/run`",
    "`runs/train_stdlib`, `benchmarks/name.py`",
    "`zero.offload.parameters`, `engine.checkpoint.dir`, `train.steps`, `model.parameters()`",
    "`zero.stage: 3`, `keep_gathered: true`, `zero.units: [Block, head]`, `optimizer: host`",
    "`partita.initialize(model, config, optimizer=...)`, `partita.optim.step`, `torch.optim.Optimizer`",
    "`engine.train_batch(iterator)`, `with engine.gathered(module):`, `engine.plan`",
    "`hooks -> unit`, `StatePlan`, `PARTITA_REQUIRE_KERNELS=1`, `WORLD_SIZE`",
    "`make test`, `make clean test TORCH=torch==2.11.0`",
    "`partita train`, `partita train --processes N`, `python -m benchmarks.gpu.check`, `python -m timeit`",
    "[how](CONTRIBUTING.md#to-add-x-touch-y), [there](https://example.org/nowhere.md)",
    "```python\nengine = partita.initialize(model)\nengine.step()\n```\n",
    "```yaml\nzero: {stage: 3}\n```\n",
    "```yaml\ntrain: {steps: 3}\nengine: {zero: {stage: 3}}\n```\n",
    '`first.py`\n```python title="first.py"\npass\n```\n',
    "`partita run --processes 2 -m trl.scripts.sft --output_dir runs/sft`",
    "```\npartita checkpoint inspect | verify DIR ...\nmake test     # all of them\n```\n",
    "` `, 3 > 2, `a + b?`",
]


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_name_is_found(text: str) -> None:
    assert len(list(wrong_in_document(text, ROOT))) == 1


@pytest.mark.parametrize("text", GOOD)
def test_a_right_name_is_left_alone(text: str) -> None:
    assert list(wrong_in_document(text, ROOT)) == []


def test_docstrings_are_read() -> None:
    source = (
        '"""A module."""\n\nclass A:\n    """See :func:`~partita.nowhere` and ``zero.stages``; ``zero.stage`` is."""\n'
    )
    assert len(list(wrong_in_docstrings(source))) == 2


def test_messages_are_read() -> None:
    wrong = ["make one with partita.load_config", "set zero.stages to 3", "call engine.trains() first"]
    right = ["partita.random", "set zero.stage to 3", "call model.parameters() first", "in 'model.safetensors' or none"]
    assert [len(list(wrong_in_messages(repr(text)))) for text in wrong + right] == [0] * 7  # docstrings are skipped
    assert [len(list(wrong_in_messages(f"x = {text!r}"))) for text in wrong + right] == [1, 1, 1, 0, 0, 0, 0]


def test_lists_are_read() -> None:
    assert folders_listed("| folder | noun |\n|---|---|\n| `table/` | x |\n| `config/` | y |\n") == ["table", "config"]
    assert layers_listed("and from those listed before it: errors, plan,\n  the package root, cli.\n") == [
        "errors",
        "plan",
        "",
        "cli",
    ]
