"""Error messages for a wrong configuration: the key, the expected and the given value, its source, the remedy.

Expected values come from the JSON schema that also documents the key, so the two always agree.
"""

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import getitem
from typing import Any

from pydantic import BaseModel, ValidationError

from partita.errors import ConfigError

KeyPath = tuple[str, ...]
Where = Callable[[KeyPath], str]

_MAX_SHOWN = 20
_LONGEST_KEY = 64
_SIMPLE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,79}")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel = 3


def dotted(path: KeyPath) -> str:
    """Return a path as text, such as ``zero.offload.path``; names that are not simple words are quoted."""
    return ".".join(part if _SIMPLE_KEY.fullmatch(part) else shown(part) for part in path)


def shown(value: object) -> str:
    """Return a value as a short text for messages, with None and booleans in YAML's spelling."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        return _short.repr(list(value) if isinstance(value, tuple) else value)
    except Exception:  # a user's repr may raise anything, and Python's raises for very long integers
        return f"<{type(value).__name__}>"


# ------------------------------------------------------------------------------------------------------- wrong values


@dataclass(frozen=True)
class Problem:
    """One wrong key: its path, a text that begins with the key, and a remedy."""

    path: KeyPath
    text: str
    fix: str = ""


def report(problems: Sequence[Problem], where: Where) -> ConfigError:
    """Return one error for all problems. ``where`` returns the source of a path (empty text: not known)."""
    lines = []
    for problem in problems[:_MAX_SHOWN]:
        place = where(problem.path)
        lines.append(problem.text + (f" (from {place})" if place else ""))
        lines += [f"    fix: {problem.fix}"] if problem.fix else []
    if len(problems) > _MAX_SHOWN:
        lines.append(f"... and {len(problems) - _MAX_SHOWN} more")
    if len(problems) > 1:
        lines = [f"{len(problems)} problems in the configuration:", *(f"  {line}" for line in lines)]
    return ConfigError("\n".join(lines))


def validation_problems(error: ValidationError, model: type[BaseModel], data: Mapping[str, object]) -> list[Problem]:
    """Return the problems that pydantic found in ``data``, one per key, in the order of the schema."""
    keys = set(key_paths(model))
    problems: dict[KeyPath, Problem] = {}
    for entry in error.errors(include_url=False, include_context=False, include_input=False):
        path = tuple(str(part) for part in entry["loc"])
        if entry["type"] == "extra_forbidden":
            problem = _unknown_key(model, path)
        else:
            path = next(path[:depth] for depth in range(len(path), 0, -1) if path[:depth] in keys)
            problem = _wrong_value(model, path, reduce(getitem, path, data))  # type: ignore[arg-type]
        problems.setdefault(path, problem)
    return list(problems.values())


def _unknown_key(model: type[BaseModel], path: KeyPath) -> Problem:
    section = path[:-1]
    near = suggest_keys(model, section, path[-1])
    if near:
        return Problem(path, f"{dotted(path)}: unknown key; did you mean {' or '.join(near)}?")
    of = f"of {dotted(section)}" if section else "at the top level"
    keys = ", ".join(_section_at(model, section).model_fields)
    return Problem(path, f"{dotted(path)}: unknown key; the keys {of} are {keys}", "remove it")


def _wrong_value(model: type[BaseModel], path: KeyPath, value: object) -> Problem:
    owner = _section_at(model, path[:-1])
    section = section_of(owner, path[-1])
    if section is not None:
        expected = f"a section with the keys {', '.join(section.model_fields)}"
        fix = "write its keys below it"
    else:
        schema = _key_schemas(owner)[path[-1]]
        expected = expectation(schema)
        fix = f"write such a value, or leave the key out for its default {shown(schema['default'])}"
    return Problem(path, f"{dotted(path)}: expected {expected}; got {shown(value)}", fix)


@cache
def _key_schemas(section: type[BaseModel]) -> dict[str, dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = section.model_json_schema(mode="serialization")["properties"]
    return schemas


def expectation(schema: Mapping[str, Any]) -> str:
    """Return a description of the values that a JSON schema (of the kinds used here) accepts."""
    if "anyOf" in schema:
        return " or ".join(expectation(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(str(choice) for choice in schema["enum"])
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "integer" | "number":
            return _number_expectation(schema)
        case "array" if "prefixItems" in schema:
            return f"a list of {len(schema['prefixItems'])} values, each {expectation(schema['prefixItems'][0])}"
        case "array" if "enum" in schema["items"]:
            return f"a list out of {', '.join(schema['items']['enum'])}"
        case "array":
            return f"a list of {'one or more ' if 'minItems' in schema else ''}{expectation(schema['items'])}s"
        case "object" if isinstance(values := schema.get("additionalProperties"), dict):
            return f"a section of names, each with {expectation(values)}"
        case "null":
            return "null"
        case _ if "examples" in schema:
            return f"text such as {schema['examples'][0]}"
        case _:
            return "non-empty text"


def _number_expectation(schema: Mapping[str, Any]) -> str:
    noun = "a whole number" if schema["type"] == "integer" else "a number"
    bounds = {"minimum": "of at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
    limits = [f"{words} {schema[key]}" for key, words in bounds.items() if key in schema]
    examples = f" (such as {schema['examples'][0]})" if "examples" in schema else ""
    return f"{noun} {' and '.join(limits)}{examples}"


# ---------------------------------------------------------------------------------------------------------- known keys


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the model of the section ``name``; None if ``name`` is a value."""
    annotation = model.model_fields[name].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _section_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    return reduce(lambda section, name: section_of(section, name) or section, path, model)


def key_paths(model: type[BaseModel]) -> list[KeyPath]:
    """Return every key below ``model``, including sections, in the order of the schema."""
    paths: list[KeyPath] = []
    for name in model.model_fields:
        section = section_of(model, name)
        paths.append((name,))
        paths += [(name, *path) for path in key_paths(section)] if section else []
    return paths


def suggest_keys(root: type[BaseModel], section: KeyPath, key: str) -> list[str]:
    """Return dotted keys that are similar to ``key`` in ``section``, best first; empty if none is.

    Siblings come first, then the same key in another section, then a similar one.
    """
    paths = key_paths(root)
    sibling = nearest(key, [path[-1] for path in paths if path[:-1] == section])
    if sibling:
        return [".".join((*section, sibling))]
    leaf = nearest(key, [path[-1] for path in paths])
    return [".".join(path) for path in paths if path[-1] == leaf]


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to ``name``, regardless of case and dashes; None if none is similar."""
    by_folded = {_folded(candidate): candidate for candidate in candidates}
    found = difflib.get_close_matches(_folded(name[:_LONGEST_KEY]), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


# ------------------------------------------------------------------------------------------------ conflicting settings

# Settings that contradict each other: the keys to show, the problem, and one fix.
Contradiction = tuple[tuple[str, ...], str, str]


@dataclass(frozen=True)
class Row:
    """One setting: its dotted key, its value, and ``config``, ``default``, ``derived: ...`` or ``number of ranks``."""

    key: str
    value: object
    source: str

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else shown(self.value)


def setting(config: BaseModel, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def row(config: BaseModel, key: str) -> Row:
    """Return the row of a dotted key, with the user's value or the default."""
    section, _, name = key.rpartition(".")
    owner = setting(config, section) if section else config
    return Row(key, getattr(owner, name), "config" if name in owner.model_fields_set else "default")


def conflict(problem: str, rows: Sequence[Row], fix: str) -> ConfigError:
    """Return the error for settings that contradict each other."""
    key_width = max(len(r.key) for r in rows)
    value_width = max(len(r.text) for r in rows)
    lines = [f"  {r.key:<{key_width}}  {r.text:>{value_width}}  {r.source}" for r in rows]
    return ConfigError("\n".join([problem, *lines, f"Fix: {fix}."]))


def format_bytes(num_bytes: float) -> str:
    """Format bytes in decimal units with three digits: 812 MB, 1.57 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
