"""Generate the reference from the sources: sections of configs, commands, Python names, keys of DeepSpeed, messages."""

import ast
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import griffe
import typer.main
from pydantic import BaseModel

from partita.cli.main import app
from partita.config.deepspeed_keys import RULES
from partita.config.messages import expectation, section_of, shown
from partita.config.schema import Config
from partita.table.mesh_shape import expand
from partita.table.residence import Residence
from partita.table.state_plan import PRESETS, preset
from partita.train.job import Job

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "partita"

# The page that explains a section of the config. A section without an entry has no such link.
GUIDES = {
    "parallel": "parallel.md",
    "zero": "stages.md",
    "precision": "precision.md",
    "batch": "models.md",
    "optimizer": "howto/optimizers.md",
    "schedule": "howto/optimizers.md",
    "activations": "activations.md",
    "attention": "attention.md",
    "loss": "activations.md",
    "tiled": "activations.md",
    "communication": "wires.md",
    "checkpoint": "checkpoints.md",
    "compile": "models.md",
    "metrics": "start.md",
}

# Python names by group; each has a page of its own. A page may also show what its name returns or takes.
PYTHON: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Training": {
        "partita.initialize": (),
        "partita.Engine": (
            "partita.checkpoint.load.Restored",
            "partita.engine.profile.Profile",
            "partita.memory.ledger.MemoryReport",
            "partita.table.traffic.TrafficReport",
        ),
        "partita.comm.mesh.Mesh": (),
        "partita.StepResult": (),
        "partita.engine.averages.Ema": (),
        "partita.checkpoint.settings.apply_rates": (),
        "partita.Config": (),
        "partita.elementwise": (),
        "partita.PartitaError": (),
        "partita.ConfigError": (),
    },
    "Planning": {
        "partita.plan": (
            "partita.prediction.plan.Plan",
            "partita.prediction.machine.machine_named",
            "partita.prediction.model_source.read_source",
            "partita.prediction.given_config.estimate_config",
        ),
        "partita.tune": (
            "partita.prediction.tune.tune.Tuned",
            "partita.prediction.tune.tune.Trial",
            "partita.prediction.tune.tune.Effort",
        ),
        "partita.prediction.simulate.cluster.simulate": (
            "partita.prediction.simulate.cluster.Cluster",
            "partita.prediction.simulate.rank.SimulatedModel",
        ),
    },
    "Metrics": {
        "partita.observe.sinks.MetricsSink": ("partita.observe.sinks.Run",),
        "partita.observe.utilization.Utilization": (
            "partita.observe.utilization.training_flops",
            "partita.observe.utilization.peak_flops",
        ),
    },
    "Extending": {
        "partita.attention.Layout": ("partita.attention.block_sparse",),
        "partita.kernels.codecs.TorchCodec": (),
        "partita.optim.extension.CollectiveOptimizer": (),
    },
    "Other libraries": {
        "partita.integrations.huggingface.Accelerator": (),
        "partita.integrations.huggingface.Trainer": ("partita.integrations.huggingface.on_partita",),
        "partita.integrations.huggingface.activate": (),
        "partita.integrations.lightning.PartitaStrategy": ("partita.integrations.lightning.fabric.PartitaStrategy",),
        "partita.integrations.ray.PartitaTorchConfig": (
            "partita.integrations.ray.report",
            "partita.integrations.ray.resume",
        ),
    },
}

# The members of a class that scripts use, if it has others.
MEMBERS = {"partita.comm.mesh.Mesh": ("size", "coordinate", "num_ranks", "device_mesh")}

# The headings under which the messages of packages are listed.
AREAS = {
    "config": "Configuration",
    "engine": "Engine and training loop",
    "sharding": "Sharding",
    "layout": "Units and memory layout",
    "memory": "Memory tiers and devices",
    "comm": "Communication between ranks",
    "parallel": "Tensor, pipeline and sequence parallelism",
    "activation": "Activations and tiled loss",
    "attention": "Block-sparse attention",
    "optim": "Optimizers",
    "compression": "Compressed communication",
    "kernels": "Kernels and codecs",
    "inspection": "Reading parameters and gradients",
    "checkpoint": "Checkpoints",
    "huggingface": "Weights of Hugging Face models",
    "train": "Jobs of partita train",
    "observe": "Metrics",
    "prediction": "Planning, tuning and simulation",
    "cli": "Commands",
    "integrations": "Integrations",
}
# The settings that choose each row of the state table.
ROWS = {
    "ddp": "`stage: 0`",
    "zero1": "`stage: 1`",
    "zero2": "`stage: 2`",
    "zero3": "`stage: 3`",
    "zero3-kept": "`stage: 3`, `keep_gathered: true`",
    "zero3-once": "the same, `keep_gradients: true`",
    "hierarchical": "`stage: 3`, `hierarchical: true`",
    "hierarchical-changes": "the same, with encoded parameters",
    "hsdp": "`stage: 3`, `replicate: nodes`",
}
_ERRORS = ("PartitaError", "ConfigError")
_LARGEST = f" and at most {2**63 - 1}"  # the largest integer of torch, which limits no one


def pages() -> dict[str, str]:
    """Return the generated pages: their paths, and their Markdown."""
    return {**_config_pages(Config), **_python_pages()}


def children() -> dict[str, list[dict[str, str]]]:
    """Return the entries of the navigation below a written page: titles and generated pages."""
    return {
        "configuration.md": [{name: _config_page(name)} for name in _sections(Config)],
        "python.md": [
            {group: [{_last(name): python_page(name)} for name in names]}  # type: ignore[dict-item]
            for group, names in PYTHON.items()
        ],
    }


# -------------------------------------------------------------------------------------------------------------- config


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found = {name: section_of(model, name) for name in model.model_fields}
    return {name: section for name, section in found.items() if section is not None}


def _config_page(name: str) -> str:
    return f"reference/config/{name}.md"


def _config_pages(model: type[BaseModel]) -> dict[str, str]:
    return {_config_page(name): "\n".join(_section_page(name, section)) for name, section in _sections(model).items()}


def _section_page(name: str, section: type[BaseModel]) -> Iterator[str]:
    yield from (f"# Config section `{name}`", "", inspect.cleandoc(section.__doc__ or ""), "")
    if name in GUIDES:
        guide = GUIDES[name]
        yield from (f"Guide: [{_title(guide)}](../../{guide}).", "")
    yield from keys(section, f"{name}.")


def _title(page: str) -> str:
    return (DOCS / page).read_text().partition("\n")[0].removeprefix("# ")


def keys(model: type[BaseModel], prefix: str, level: int = 2) -> Iterator[str]:
    """Yield Markdown: a heading, the meaning, the accepted values and the default of every key below ``model``."""
    schemas: dict[str, Any] = model.model_json_schema(mode="serialization")["properties"]
    for name, field in model.model_fields.items():
        yield from (f"{'#' * level} `{prefix}{name}`", "")
        section = section_of(model, name)
        if section is not None:
            yield from (f"A section: {field.description}.", "")
            yield from keys(section, f"{prefix}{name}.", level + 1)
        else:
            schema = schemas[name]
            yield from (f"{_sentence(str(field.description))}", "")
            yield from (_values(schema), "")


def _values(schema: Mapping[str, Any]) -> str:
    """Return a sentence about the values that a key accepts, and its default in YAML's spelling."""
    default = shown(schema["default"]).strip("'")
    return f"Accepts {expectation(schema).replace(_LARGEST, '')}. Default: `{default}`."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def top_level_keys() -> Iterator[str]:
    """Yield Markdown: a table of the sections of the config, then the keys that are in no section."""
    sections = _sections(Config)
    yield from ("| section | meaning | keys |", "|---|---|---|")
    for name, section in sections.items():
        listed = ", ".join(f"`{key}`" for key in section.model_fields)
        yield f"| [`{name}`]({_config_page(name)}) | {Config.model_fields[name].description} | {listed} |"
    schemas: dict[str, Any] = Config.model_json_schema(mode="serialization")["properties"]
    for name, field in Config.model_fields.items():
        if name not in sections:
            yield from ("", f"## `{name}`", "", _sentence(str(field.description)), "")
            yield _values(schemas[name])


def job_keys() -> Iterator[str]:
    """Yield Markdown: every key of a job file except those of its section ``engine``."""
    for name, section in _sections(Job).items():
        if section is not Config:
            yield from (f"## `{name}`", "", inspect.cleandoc(section.__doc__ or ""), "")
            yield from keys(section, f"{name}.", 3)


def deepspeed_keys() -> Iterator[str]:
    """Yield Markdown: a table of DeepSpeed's keys and how each is converted."""
    yield from ("| key | here | |", "|---|---|---|")
    for key, rule in RULES.items():
        yield f"| `{key}` | {rule.kind} | {rule.text} |"


def state_table() -> Iterator[str]:
    """Yield Markdown: where each row of the state table stores each state, phase by phase."""
    phases = ("parameters, stored", "between forward and backward", "gradients, between micro-batches", "at the step")
    yield f"| row | {' | '.join(phases)} | master weights, moments |"
    yield "|---|---|---|---|---|---|"
    for name in PRESETS:
        row = preset(name)
        entries = (row.param_stored, row.param_between, row.grad_between, row.grad_step, row.master)
        yield f"| {ROWS[name]} | {' | '.join(map(_residence, entries))} |"


def _residence(residence: Residence) -> str:
    if residence.partial_axes:
        return "local sums"
    if not residence.shard_axes:
        return "full"
    return "shard" if "node" in expand(residence.shard_axes) else "shard within the node"


# ------------------------------------------------------------------------------------------------------------ commands


def commands() -> Iterator[str]:
    """Yield Markdown: usage, arguments and options of every command, from the program's help."""
    yield from _command(typer.main.get_command(app), "partita")


def command_names() -> list[str]:
    """Return the names of all commands, such as ``partita checkpoint diff``."""
    return [line.removeprefix("### `").removesuffix("`") for line in commands() if line.startswith("### `")]


def _command(command: Any, name: str) -> Iterator[str]:
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        yield from (f"### `{name}`", "", _marked(command.help or ""), "", "```", _usage(command, name), "```", "")
        yield from ("| argument or option | meaning |", "|---|---|")
        for param in command.params:
            yield f"| {_param(param)} | {_marked(getattr(param, 'help', None) or '')}{_default(param)} |"
        yield "| `-h`<br>`--help` | Show the help of the command. |"
        yield ""
    for subname, subcommand in subcommands.items():
        yield from _command(subcommand, f"{name} {subname}")


def _usage(command: Any, name: str) -> str:
    words = [f"{name} [OPTIONS]"]
    for param in command.params:
        if param.param_type_name == "argument":
            shape = param.metavar or param.name.upper()
            words.append(shape if param.required else f"[{shape}]")
    return " ".join(words)


def _param(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name.upper()}`"
    value = "" if param.is_flag else f" {param.metavar or param.name.upper()}"
    return "<br>".join(f"`{option}{value}`" for option in (*param.opts, *param.secondary_opts))


def _default(param: Any) -> str:
    hidden = param.required or getattr(param, "is_flag", False) or param.default in (None, (), [], "")
    return "" if hidden else f" Default: `{param.default}`."


def _marked(text: str) -> str:
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*")


# -------------------------------------------------------------------------------------------------------------- Python


@cache
def _package() -> Any:
    return griffe.load("partita", search_paths=[str(SOURCE.parent)])


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def python_page(name: str) -> str:
    return f"reference/python/{_last(name).lower()}.md"


def _python_pages() -> dict[str, str]:
    return {
        python_page(name): "\n".join(_python_page(name, others))
        for names in PYTHON.values()
        for name, others in names.items()
    }


def _python_page(name: str, others: tuple[str, ...]) -> Iterator[str]:
    yield from (f"# {_last(name)}", "")
    for shown_name in (name, *others):
        yield f"::: {shown_name}"
        yield "    options:"
        yield "      heading_level: 2"
        if shown_name == "partita.Config":  # its sections have pages of their own
            yield from ("      members: false", "")
            yield "The keys are in the [reference of the configuration](../../configuration.md)."
        elif shown_name in MEMBERS:
            yield f"      members: [{', '.join(MEMBERS[shown_name])}]"
        elif _package()[shown_name.removeprefix("partita.")].is_class:
            yield "      summary: {attributes: false, functions: true}"
        yield ""


def python_names() -> Iterator[str]:
    """Yield Markdown: a table per group of the Python names that scripts use, with links to their pages."""
    for group, names in PYTHON.items():
        yield from (f"## {group}", "", "| name | |", "|---|---|")
        for name, others in names.items():
            page = python_page(name)
            for shown_name in (name, *others):
                text = _package()[shown_name.removeprefix("partita.")].docstring
                summary = text.value.split("\n\n")[0] if text else ""
                yield f"| [`{shown_name}`]({page}#{shown_name}) | {_plain(summary)} |"
        yield ""


def _plain(docstring: str) -> str:
    return " ".join(docstring.replace("``", "`").split())


# -------------------------------------------------------------------------------------------------------------- errors


def errors() -> Iterator[str]:
    """Yield Markdown: the messages of the package's errors, by area, with names of what is filled in."""
    by_area = defaultdict[str, list[str]](list)
    for path in sorted(SOURCE.rglob("*.py")):
        area = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for message in messages(path.read_text()):
            by_area[area].append(message)
    for area, title in AREAS.items():
        if found := by_area.pop(area, []):
            yield from (f"## {title}", "")
            yield from (f"- {message}" for message in dict.fromkeys(sorted(found, key=str.lower)))
            yield ""
    assert set(by_area) <= {"table", "transforms"}, f"AREAS has no title for messages of {', '.join(by_area)}"


def messages(source: str) -> Iterator[str]:
    """Yield the messages of errors that a source file raises, as HTML. Filled-in values are in angle brackets."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ERRORS and node.args:
            text = "".join(_parts(node.args[0]))
            if sum(character.isalpha() for character in _without_values(text)) > 12:
                yield text


def _parts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield escape(" ".join(text.split("\n")), quote=False).replace("*", "&#42;").replace("_", "&#95;")
        case ast.JoinedStr(values=values):
            for value in values:
                yield from _parts(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _parts(left)
            yield from _parts(right)
        case ast.FormattedValue(value=value):
            yield f"<var>{_value_name(value)}</var>"
        case _:
            yield f"<var>{_value_name(node)}</var>"


def _value_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").replace("_", " ").lower()
        case ast.Call(func=ast.Attribute(attr="join"), args=[argument]):
            return _value_name(argument)
        case ast.Call(args=[argument, *_]):
            return _value_name(argument)
        case ast.Call(func=function):
            return _value_name(function)
        case ast.Subscript(value=value):
            return _value_name(value)
        case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
            return _value_name(element)
        case _:
            return "..."


def _without_values(text: str) -> str:
    parts = text.split("<var>")
    return "".join(part.rpartition("</var>")[2] for part in parts)


# Marks in pages, and the Markdown that replaces them.
TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "<!-- every section -->": top_level_keys,
    "<!-- every key of a job -->": job_keys,
    "<!-- every key of DeepSpeed -->": deepspeed_keys,
    "<!-- state table -->": state_table,
    "<!-- every command -->": commands,
    "<!-- every Python name -->": python_names,
    "<!-- every error -->": errors,
}
