"""Loading a configuration from a YAML or JSON file or a mapping, with overrides."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from partita.config.messages import KeyPath, Where, dotted, shown
from partita.config.plain_values import Parsed, parse_json, parse_yaml, plain
from partita.config.schema import Config
from partita.errors import ConfigError

MAX_FILE_BYTES = 2**20
_PARSERS = {".yaml": parse_yaml, ".yml": parse_yaml, ".json": parse_json}


def load_config(source: str | Path | Mapping[str, object] | Config | None, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in ``source``, with ``overrides`` ("zero.stage=3", the value in YAML) applied in order.

    ``source`` is the path of a .yaml, .yml or .json file, a mapping, a :class:`Config` (returned unchanged without
    overrides), or None for all defaults.

    Raises:
        ConfigError: the source cannot be read, or has wrong values; the message names each key and where it was
            written.
    """
    if isinstance(source, Config) and not overrides:
        return source
    return Config.located(*read_sections(source, overrides))


def read_sections(source: object, overrides: Sequence[str] = ()) -> tuple[dict[str, object], Where]:
    """Return the sections of ``source`` with ``overrides``, and a function that locates a path in its source.

    The sections are not checked against a schema.

    Raises:
        ConfigError: the source or an override cannot be read.
    """
    name, (data, lines) = _read(source)
    if data is not None and not isinstance(data, Mapping):
        raise ConfigError(f"{name}: expected sections (key: value) at the top level; got {shown(data)}")
    sections = plain({} if data is None else data, name)
    places = {path: f"{name}, line {line}" for path, line in lines.items()} | {(): name}
    given: object = overrides
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ConfigError(f"overrides: expected a list of 'section.key=value' texts; got {shown(overrides)}")
    for override in overrides:
        _apply(sections, override, places)

    def where(path: KeyPath) -> str:
        below = [known for known in places if known[: len(path)] == path]
        above = [path[:depth] for depth in range(len(path) - 1, -1, -1)]
        return next(places[near] for near in (path, *below, *above) if near in places)

    return sections, where


def _read(source: object) -> tuple[str, Parsed]:
    """Return the source's name for messages, and its data."""
    if source is None:
        return "the defaults", (None, {})
    if isinstance(source, Config):
        return "the given partita.Config", (source.model_dump(exclude_unset=True), {})
    if isinstance(source, Mapping):
        return "the given mapping", (source, {})
    if isinstance(source, str | Path):
        return _read_file(Path(source))
    raise ConfigError(
        f"config: expected a path, a mapping, a partita.Config or None; got {shown(source)} ({type(source).__name__})"
    )


def _read_file(path: Path) -> tuple[str, Parsed]:
    parser = _PARSERS.get(path.suffix.lower())
    if parser is None:
        raise ConfigError(
            f"config file '{_shown(path)}': expected a path that ends in .yaml, .yml or .json; rename the file, or "
            "pass its content as a dict"
        )
    name, text = read_text(path)
    return name, parser(text, name)


def read_text(path: Path) -> tuple[str, str]:
    """Return a file's name for messages, and its text.

    Raises:
        ConfigError: the file does not exist, cannot be read, is larger than :data:`MAX_FILE_BYTES`, or is not UTF-8.
    """
    name = _shown(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"config file '{name}' does not exist; correct the path, or pass a dict") from None
    except (OSError, ValueError) as error:  # a ValueError: a zero byte or a surrogate in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"config file '{name}' cannot be read: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"config file '{name}' is larger than {MAX_FILE_BYTES} bytes; is it a configuration?")
    try:
        return name, content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file '{name}' is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _shown(path: Path) -> str:
    return str(path) if str(path).isprintable() else shown(str(path))


def _apply(sections: dict[str, object], override: object, places: dict[KeyPath, str]) -> None:
    """Set one key, and record this override as its source in ``places``."""
    name = f"override {shown(override)}"
    key, equals, text = override.partition("=") if isinstance(override, str) else ("", "", "")
    if not key.strip() or not equals:
        raise ConfigError(f"{name}: expected 'section.key=value', such as 'zero.stage=3'")
    path = tuple(part.strip() for part in key.split("."))
    section = sections
    for depth, part in enumerate(path[:-1], start=1):
        inner = section.get(part)
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}: '{dotted(path[:depth])}' is {shown(inner)}, not a section; set that key")
        section = inner
    section[path[-1]], _ = parse_yaml(text, name)
    for known in [known for known in places if known[: len(path)] == path]:
        del places[known]
    places[path] = name
