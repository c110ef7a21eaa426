"""What is wrong with a configuration's values, said by key: expected, got, where it was written, and the remedy.

What a key expects is read from the schema (the same JSON schema that documents it), so the two cannot disagree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from partita.config.plain import dotted, shown
from partita.config.suggest import section_of, suggest_keys
from partita.errors import ConfigError

_MAX_SHOWN = 20


@dataclass(frozen=True)
class Problem:
    """One wrong key: its path, and a text that begins with the key and may end with a remedy."""

    path: tuple[str, ...]
    text: str
    fix: str = ""


def report(problems: Sequence[Problem], where: Callable[[tuple[str, ...]], str]) -> ConfigError:
    """All problems in one error. ``where`` says where a path was written (empty text: not known)."""
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
    """What pydantic found in ``data``, one problem a key, in the order of the schema."""
    problems: dict[tuple[str, ...], Problem] = {}
    for entry in error.errors(include_url=False, include_context=False, include_input=False):
        path, owner = _known_path(model, tuple(str(part) for part in entry["loc"]))
        if entry["type"] == "extra_forbidden":
            path = (*path, str(entry["loc"][-1]))
            problems.setdefault(path, _unknown_key(model, path))
        else:
            problems.setdefault(path, _wrong_value(owner, path, _value_at(data, path)))
    return list(problems.values())


def expectation(schema: Mapping[str, Any]) -> str:
    """What a JSON schema of the kinds used here accepts, in words."""
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
        case "array":
            return f"a list of {'one or more ' if 'minItems' in schema else ''}{expectation(schema['items'])}s"
        case "null":
            return "null"
        case _:
            return "non-empty text"


def _number_expectation(schema: Mapping[str, Any]) -> str:
    noun = "a whole number" if schema["type"] == "integer" else "a number"
    bounds = {"minimum": "of at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
    limits = [f"{words} {schema[key]}" for key, words in bounds.items() if key in schema]
    examples = f" (such as {schema['examples'][0]})" if "examples" in schema else ""
    return f"{noun} {' and '.join(limits)}{examples}"


def _known_path(model: type[BaseModel], location: tuple[str, ...]) -> tuple[tuple[str, ...], type[BaseModel]]:
    """The longest beginning of ``location`` that is a path of keys, and the section that holds its last key."""
    path: tuple[str, ...] = ()
    owner, section = model, model
    for part in location:
        if part not in section.model_fields:
            break
        path, owner = (*path, part), section
        inner = section_of(section, part)
        if inner is None:
            break
        section = inner
    return path, owner


def _unknown_key(model: type[BaseModel], path: tuple[str, ...]) -> Problem:
    section = path[:-1]
    near = suggest_keys(model, section, path[-1])
    if near:
        return Problem(path, f"{dotted(path)}: unknown key; did you mean {' or '.join(near)}?")
    owner = model
    for part in section:
        owner = section_of(owner, part) or owner
    keys = f"the keys {f'of {dotted(section)}' if section else 'at the top level'} are {', '.join(owner.model_fields)}"
    return Problem(path, f"{dotted(path)}: unknown key; {keys}", "remove it")


def _wrong_value(owner: type[BaseModel], path: tuple[str, ...], value: object) -> Problem:
    section = section_of(owner, path[-1])
    if section is not None:
        expected, fix = f"a section with the keys {', '.join(section.model_fields)}", "write its keys below it"
    else:
        expected = expectation(_key_schemas(owner)[path[-1]])
        default = shown(owner.model_fields[path[-1]].default)
        fix = f"write such a value, or leave the key out for its default {default}"
    return Problem(path, f"{dotted(path)}: expected {expected}; got {shown(value)}", fix)


@cache
def _key_schemas(section: type[BaseModel]) -> dict[str, dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = section.model_json_schema()["properties"]
    return schemas


def _value_at(data: object, path: tuple[str, ...]) -> object:
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else getattr(data, part, None)
    return data
