"""Settings shown as a small table: the resolved value of each, and where it came from."""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.config.plain import shown
from partita.config.schema import Config, Section
from partita.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """One setting: its dotted key, its value, and ``config``, ``default``, ``derived: ...`` or ``number of ranks``."""

    key: str
    value: object
    source: str

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else shown(self.value)


def row(config: Config, key: str) -> Row:
    """The row of a dotted key, as the user gave it or as the default has it."""
    *sections, name = key.split(".")
    section: Section = config
    for part in sections:
        section = getattr(section, part)
    return Row(key, getattr(section, name), "config" if name in section.model_fields_set else "default")


def conflict(problem: str, rows: Sequence[Row], fix: str) -> ConfigError:
    """The error for settings that do not go together."""
    key_width = max(len(r.key) for r in rows)
    value_width = max(len(r.text) for r in rows)
    lines = [f"  {r.key:<{key_width}}  {r.text:>{value_width}}  {r.source}" for r in rows]
    return ConfigError("\n".join([problem, *lines, f"Fix: {fix}."]))
