"""Plain data: nested dicts with text keys, lists and scalars, from YAML, JSON or the user's mapping.

Depth and number of values are limited, because a few bytes of YAML aliases can describe cyclic and exponentially large
structures. Reading is strict: a duplicate key, an unknown tag or a second document is an error. YAML is read from its
composed nodes, which have the line of each key.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import yaml
from pydantic import BaseModel

from partita.config.messages import KeyPath, dotted, shown
from partita.errors import ConfigError

MAX_DEPTH = 16
MAX_VALUES = 10_000
_Loader: type[yaml.SafeLoader] | type[yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_CONVERTED = {_TAG + kind for kind in ("null", "bool", "int", "float")}
_TEXT = {_TAG + kind for kind in ("str", "timestamp", "value")}
_MERGE = _TAG + "merge"

# Data, and the line (from 1) of each path whose line is known.
Parsed = tuple[object, dict[KeyPath, int]]


class Budget:
    """Limits on the number and depth of a configuration's values."""

    def __init__(self, name: str, most: int = MAX_VALUES) -> None:
        self._name = name
        self._remaining = most

    def spend(self, depth: int) -> None:
        """Count one more value.

        Raises:
            ConfigError: there are too many values, or this one is deeper than :data:`MAX_DEPTH`.
        """
        self._remaining -= 1
        if depth > MAX_DEPTH:
            raise _too_deep(self._name)
        if self._remaining < 0:
            raise ConfigError(f"{self._name}: more than {MAX_VALUES} values, the most that a configuration may have")


def _too_deep(name: str) -> ConfigError:
    return ConfigError(f"{name}: nested deeper than {MAX_DEPTH} levels, or containing itself")


def plain(data: Mapping[Any, object], name: str) -> dict[str, object]:
    """Return a copy of ``data`` in which every mapping and model is a dict with text keys.

    ``name`` is its name in errors.

    Raises:
        ConfigError: a key is not printable text, or the data is too large or too deep.
    """
    return cast("dict[str, object]", _plain(data, (), name, Budget(name)))


def _plain(value: object, path: KeyPath, name: str, budget: Budget) -> object:
    budget.spend(len(path))
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        copy: dict[str, object] = {}
        for key, item in value.items():
            _check_key(key, path, name)
            copy[str(key)] = _plain(item, (*path, str(key)), name, budget)
        return copy
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*path, str(i)), name, budget) for i, item in enumerate(value)]
    return value


def _check_key(key: object, path: KeyPath, where: str) -> None:
    """Check that a key is printable text; ``path`` is the section that holds it."""
    if not isinstance(key, str) or not key.isprintable():
        section = f"in '{dotted(path)}'" if path else "at the top level"
        fix = "remove these characters" if isinstance(key, str) else "put quotes around it"
        raise ConfigError(f"{where}: keys must be printable text; got the key {shown(key)} {section}; {fix}")


def parse_json(text: str, name: str) -> Parsed:
    """Parse JSON text; ``name`` is its source in errors. Empty text is None.

    Raises:
        ConfigError: the text is not valid; the message names the line if there is one.
    """
    return _parse_json(text, name, json.loads)


def parse_hjson(text: str, name: str) -> Parsed:
    """Parse JSON text with comments (``//``, ``#``, ``/* */``) and trailing commas, which is Hjson.

    Raises:
        ConfigError: the text is not valid; the message names the line if there is one.
    """
    return _parse_json(text, name, partial(_load_hjson, name))


def _load_hjson(name: str, text: str, **options: Any) -> object:
    """Load Hjson, with a better message for an error at the end of the text.

    In Hjson, a value without quotes extends to the end of its line, including any brackets. An error in a line may
    therefore be found only at the end of the text. In this case the message names the line where JSON parsing fails.
    """
    import hjson  # only DeepSpeed's files need it

    try:
        return hjson.loads(text, **options)
    except IndexError:  # an unterminated comment
        pass
    except hjson.HjsonDecodeError as error:
        if text[error.pos :].strip():
            raise _invalid(name, error.lineno, error.msg) from None
    try:
        return json.loads(text, **options)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}: not valid JSON: a section, list or comment is not closed at the end; look for a missing comma, "
            f"bracket or double quote from line {error.lineno} on, where it is not plain JSON ({error.msg})"
        ) from None


def _parse_json(text: str, name: str, loads: Callable[..., object]) -> Parsed:
    if not text.strip():
        return None, {}
    try:
        return loads(text, object_pairs_hook=lambda pairs: _without_duplicates(pairs, name)), {}
    except json.JSONDecodeError as error:
        raise _invalid(name, error.lineno, error.msg) from None
    except RecursionError:
        raise _too_deep(name) from None
    except ConfigError:
        raise
    except ValueError as error:  # an integer with more digits than Python converts
        raise ConfigError(f"{name}: not valid JSON: {error}") from None


def _invalid(name: str, line: int, problem: str) -> ConfigError:
    return ConfigError(f"{name}, line {line}: not valid JSON: {problem}; correct this line")


def _without_duplicates(pairs: list[tuple[str, object]], name: str) -> dict[str, object]:
    data: dict[str, object] = {}
    for key, value in pairs:
        if key in data:
            raise ConfigError(f"{name}: the key {shown(key)} is given twice in one section; keep one of them")
        data[key] = value
    return data


def parse_yaml(text: str, name: str) -> Parsed:
    """Parse YAML text; ``name`` is its source in errors. Empty text is None.

    Raises:
        ConfigError: the text is not valid; the message names the line if there is one.
    """
    try:
        _check_events(text, name)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            reader = _NodeReader(name, loader.construct_object)
            return (reader.read(root, ()) if root is not None else None), reader.lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        if "nesting depth" in (error.problem or ""):  # libyaml's own limit: its scanner reads ahead of events
            raise _too_deep(name) from None
        mark = error.problem_mark or error.context_mark
        place = f"{name}, line {mark.line + 1}" if mark and "\n" in text else name
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}; correct this line") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: not valid YAML: a character that is not valid Unicode") from None


def _check_events(text: str, name: str) -> None:
    """Check depth and size before recursive C code composes nodes: its stack overflow would end the process."""
    budget = Budget(name, 2 * MAX_VALUES)  # a section has two events
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        budget.spend(depth)


class _NodeReader:
    """A reader that converts YAML nodes into data, and records the line of each path."""

    def __init__(self, name: str, construct: Callable[[yaml.Node], object]) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._name = name
        self._construct = construct
        self._budget = Budget(name)

    def read(self, node: yaml.Node, path: KeyPath) -> object:
        self._budget.spend(len(path))
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.read(item, (*path, str(i))) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        raise self._error(node, f"the tag {shown(node.tag)} has no meaning here; remove it")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        keys: dict[str, object] = {}
        merged: dict[str, object] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    merged = self._merge_source(source, path) | merged
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "keys must be printable text; got a list or a section as a key")
            key = self._scalar(key_node)
            line = key_node.start_mark.line + 1
            _check_key(key, path, f"{self._name}, line {line}")
            inner = (*path, str(key))
            if key in keys:
                raise self._error(key_node, f"the key '{dotted(inner)}' is given twice; keep one of them")
            self.lines[inner] = line
            keys[str(key)] = self.read(value_node, inner)
        return merged | keys

    def _merge_source(self, node: yaml.Node, path: KeyPath) -> dict[str, object]:
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, "'<<' merges sections only")
        inner = (*path, "<<")  # the depth limit stops a merge that contains itself
        self._budget.spend(len(inner))
        return self._mapping(node, inner)

    def _scalar(self, node: yaml.ScalarNode) -> object:
        if node.tag in _TEXT:
            return node.value
        if node.tag not in _CONVERTED:
            raise self._error(node, f"the tag {shown(node.tag)} has no meaning here; remove it")
        try:
            return self._construct(node)
        except (ValueError, LookupError, ArithmeticError):
            raise self._error(node, f"{shown(node.value)} is not a value of the kind {node.tag[len(_TAG) :]}") from None

    def _error(self, node: yaml.Node, text: str) -> ConfigError:
        return ConfigError(f"{self._name}, line {node.start_mark.line + 1}: {text}")
