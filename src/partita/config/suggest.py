"""The nearest valid key to one that does not exist."""

import difflib
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

_LONGEST_KEY = 64


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``name``, or None where none is near."""
    by_folded = {_folded(candidate): candidate for candidate in candidates}
    found = difflib.get_close_matches(_folded(name[:_LONGEST_KEY]), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of the section that the key ``name`` holds, or None where it holds a value."""
    annotation = model.model_fields[name].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def key_paths(model: type[BaseModel]) -> list[tuple[str, ...]]:
    """Every key below ``model``, sections included, in the order of the schema."""
    paths: list[tuple[str, ...]] = []
    for name in model.model_fields:
        section = section_of(model, name)
        paths.append((name,))
        paths += [(name, *path) for path in key_paths(section)] if section else []
    return paths


def suggest_keys(root: type[BaseModel], section: Sequence[str], key: str) -> list[str]:
    """Dotted keys the user may have meant by ``key`` inside ``section``, best first; empty where none is near.

    Siblings come first, then the same key in another section, then a similar one.
    """
    paths = key_paths(root)
    siblings = {path[-1]: path for path in paths if path[:-1] == tuple(section)}
    sibling = nearest(key, siblings)
    if sibling:
        return [".".join(siblings[sibling])]
    leaf = nearest(key, [path[-1] for path in paths])
    return [".".join(path) for path in paths if path[-1] == leaf]


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")
