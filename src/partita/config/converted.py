"""Conversion of another library's configuration into partita's, with a notice about each of its keys."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

import yaml

from partita.config.messages import KeyPath, Problem, nearest, report, shown
from partita.config.plain_values import plain
from partita.config.schema import Config
from partita.config.values import as_number
from partita.errors import ConfigError

# The section of a job (``partita train``) that holds the configuration.
_JOB_SECTION = "engine"


class KeyClass(StrEnum):
    """Outcome of the conversion of a key."""

    MAPPED = "mapped"
    IGNORED = "ignored"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Rule:
    """Outcome of the conversion of one key, or of a section with all its keys.

    ``text`` is the reason why the key is ignored, the difference, or the remedy. ``harmless`` are values that request
    nothing; they and disabled sections get no notice. If one of them is a number or true, 0 and false get one.
    """

    kind: KeyClass
    text: str = ""
    harmless: tuple[object, ...] = ()

    def is_harmless(self, value: object) -> bool:
        """Return True if a value of the key requests nothing."""
        needs_value = any(isinstance(known, int) for known in self.harmless)
        return value in self.harmless or (is_off(value) and not needs_value)


@dataclass(frozen=True)
class Notice:
    """Outcome for ``key`` (dotted, as in the file): its class, and a sentence."""

    key: str
    kind: KeyClass
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.key}: {self.text}"


@dataclass(frozen=True)
class Converted:
    """Settings for ``partita.initialize(config=)``, and notices of their conversion.

    ``name`` is the source's name in messages; ``processes`` is the number of processes that the source requests, or
    None.
    """

    name: str
    settings: dict[str, object]
    notices: tuple[Notice, ...]
    processes: int | None = None

    def of(self, kind: KeyClass) -> list[Notice]:
        return [notice for notice in self.notices if notice.kind is kind]

    def summary(self) -> Iterator[str]:
        """Yield the lines to show at the start: one for each warning, and one for all ignored keys."""
        for notice in self.of(KeyClass.WARNING):
            yield f"{self.name}: {notice.key}: {notice.text}"
        if ignored := self.of(KeyClass.IGNORED):
            yield f"{self.name}: ignored, because partita does not need: {', '.join(notice.key for notice in ignored)}"

    def as_yaml(self) -> str:
        """Return the settings as YAML, with every notice as a comment above them."""
        lines = [f"# Converted from {self.name}."]
        for kind in KeyClass:
            lines += [f"# {notice}" for notice in self.of(kind)]
        return "\n".join([*lines, yaml.safe_dump(self.settings, sort_keys=False, default_flow_style=None)])


class Conversion:
    """Conversion of one configuration: reads its keys, sets partita's settings, and records one notice for each key.

    Args:
        name: the source's name in messages.
        data: its content. In this class, keys of sections are joined by dots: ``zero_optimization.stage``.
        rules: the rule of every key of the library.
        meant: the intended keys for common misspellings.

    Raises:
        ConfigError: the source is a configuration of partita, or has no key of the library.
    """

    def __init__(
        self, name: str, data: Mapping[str, object], rules: Mapping[str, Rule], meant: Mapping[str, str] | None = None
    ) -> None:
        self.settings: dict[str, object] = {}
        self.unresolved: list[str] = []
        self._name = name
        self._rules = rules
        self._meant = meant or {}
        self._values = dict(_values(plain(data, name), "", _sections(rules)))
        _check_library(name, data, rules, self._meant)
        self._notices: dict[str, Notice] = {}
        self._origins: dict[KeyPath, str] = {}
        self._problems: list[Problem] = []

    # ------------------------------------------------------------------------------------------------------ reading

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def keys(self, section: str) -> list[str]:
        """Return the dotted keys below a section that the source gives."""
        return [key for key in self._values if key.startswith(section)]

    def value(self, key: str, default: object = None) -> object:
        found = self._values.get(key)
        return default if found is None else found

    def number(self, key: str, default: float) -> float:
        """Return a number, which may be written as text."""
        value = self.value(key, default)
        try:
            number = as_number(value)
        except ValueError:
            number = None
        if isinstance(number, int | float) and isfinite(number):
            return number
        self.refuse(key, f"expected a number; got {shown(value)}", "write one")
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a truth value, which may be written as text or as 0 or 1."""
        value = self.value(key, default)
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        self.refuse(key, f"expected true or false; got {shown(value)}", "write one of them")
        return default

    def text(self, key: str) -> str:
        """Return a text; empty if there is none."""
        value = self.value(key, "")
        if isinstance(value, str):
            return value
        self.refuse(key, f"expected text; got {shown(value)}", "write it as text")
        return ""

    def fill(self, known: Mapping[str, object], *, refuse: bool) -> None:
        """Replace the values ``"auto"``.

        ``known`` has the keys that a trainer's arguments fill in, with their values (None: not known yet). A key whose
        value is not known yet is added to :attr:`unresolved`, and with ``refuse`` it is an error. For other keys,
        ``"auto"`` means the default.
        """
        for key in [key for key, value in self._values.items() if value == "auto"]:
            self._values[key] = known.get(key)
            if key not in known or self._values[key] is not None:
                continue
            self.unresolved.append(key)
            if refuse:
                fix = "write a value, or start a script that uses transformers' Trainer with partita run"
                self.refuse(key, '"auto" takes the value of transformers\' TrainingArguments, which is not known', fix)

    # ----------------------------------------------------------------------------------------------------- deciding

    def set(self, target: str, value: object, key: str, text: str = "") -> None:
        """Set a setting of partita (``zero.stage``) to the value that ``key`` requests."""
        *sections, name = path = tuple(target.split("."))
        inner = self.settings
        for section in sections:
            inner = inner.setdefault(section, {})  # type: ignore[assignment]
        inner[name] = value
        self._origins[path] = key
        text = text or ("" if key in self else "its default")
        becomes = f"{target}: {shown(value)}{f' ({text})' if text else ''}"
        before = self._notices.get(key)
        self.add_notice(KeyClass.MAPPED, key, f"{before.text}, {becomes}" if before else f"becomes {becomes}")

    def add_notice(self, kind: KeyClass, key: str, text: str) -> None:
        self._notices[key] = Notice(key, kind, text)

    def refuse(self, key: str, problem: str, fix: str) -> None:
        self._notices[key] = Notice(key, KeyClass.ERROR, problem)
        self._problems.append(Problem(tuple(key.split(".")), f"{key}: {problem}", fix))

    def ignore_section(self, section: str, text: str) -> None:
        """Record one notice for every key of a section that has none yet."""
        for key in self.keys(section):
            if key in self:
                self._notices.setdefault(key, Notice(key, KeyClass.IGNORED, text))

    def finish(self, processes: int | None = None) -> Converted:
        """Apply the rules to the remaining keys, and return the result.

        Raises:
            ConfigError: keys are not available (the message lists each with its remedy), or partita refuses a setting
                (the message names the key that requested it).
        """
        for key in self.unresolved:
            self._notices.setdefault(key, Notice(key, KeyClass.MAPPED, "set by the trainer's arguments (auto)"))
        for key, value in self._values.items():
            self._apply_rule(key, value)
        if self._problems:
            raise report(self._problems, lambda path: self._name)
        config = Config.located(self.settings, self._where)
        settings = config.model_dump(mode="json", exclude_unset=True)
        return Converted(self._name, settings, tuple(self._notices.values()), processes)

    def _apply_rule(self, key: str, value: object) -> None:
        """Record the notice of a key's rule, if the key has no notice yet."""
        if key in self._notices or value is None:
            return
        rule = self._rules.get(key)
        if rule is None and key in _sections(self._rules):
            if not is_off(value):
                self.refuse(key, f"expected a section; got {shown(value)}", "write its keys below it")
        elif rule is None:
            known = self._known(key)
            near = nearest(key.rpartition(".")[2], known)
            hint = f"; did you mean {known[near]}?" if near else ""
            self.add_notice(KeyClass.WARNING, key, f"unknown key, without effect{hint}")
        elif rule.kind is KeyClass.MAPPED:
            self.add_notice(KeyClass.IGNORED, key, "it has no effect in combination with the other keys")
        elif rule.kind is KeyClass.IGNORED:
            self.add_notice(rule.kind, key, rule.text)
        elif rule.is_harmless(value):
            return
        elif rule.kind is KeyClass.WARNING:
            self.add_notice(rule.kind, key, rule.text)
        else:
            self.refuse(key, f"{shown(value)} is not available", rule.text)

    def _known(self, key: str) -> dict[str, str]:
        """Return names of keys and sections that an unknown key may mean, those of its own section first."""
        section = key.rpartition(".")[0]
        known = [other for other, rule in self._rules.items() if rule.kind is not KeyClass.ERROR]
        known += sorted(_sections(self._rules))
        known.sort(key=lambda other: other.rpartition(".")[0] != section)
        names = dict(self._meant)
        for other in known:
            names.setdefault(other.rpartition(".")[2], other)
        return names

    def _where(self, path: KeyPath) -> str:
        key = next((self._origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._origins), "")
        return f"{self._name}, {key}" if key else self._name


def is_off(value: object) -> bool:
    """Return whether a value or section requests nothing: it is empty, false, or disabled."""
    return not value or _enabled(value) is False


def _enabled(value: object) -> bool | None:
    """Return whether a section is enabled, by its own switch or those of its subsections; None if there is none."""
    if not isinstance(value, Mapping):
        return None
    if "enabled" in value:
        return value["enabled"] not in (False, None, 0, "false")
    inner = [found for item in value.values() if (found := _enabled(item)) is not None]
    return any(inner) if inner else None


def _sections(rules: Collection[str]) -> set[str]:
    """Return the sections whose keys have separate rules."""
    return {key[:place] for key in rules for place, letter in enumerate(key) if letter == "."}


def _check_library(name: str, data: Mapping[str, object], rules: Collection[str], meant: Collection[str]) -> None:
    """Raise an error if a file has none of the library's keys, not even a misspelled one."""
    known = {key.partition(".")[0] for key in rules}
    sections = {*Config.model_fields, _JOB_SECTION}
    if any(key in known - sections or (key not in sections and nearest(key, {*known, *meant})) for key in data):
        return
    if foreign := [key for key in data if key not in known]:
        raise ConfigError(
            f"{name}: expected a configuration of DeepSpeed or accelerate; got the keys "
            f"{', '.join(map(shown, foreign))}, which neither has. A configuration of partita needs no conversion: "
            "pass it to partita.initialize, or a job to partita train"
        )


def _values(data: Mapping[str, object], prefix: str, sections: Collection[str]) -> Iterator[tuple[str, object]]:
    """Yield dotted keys with their values; a section without rules for its keys counts as a value."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in sections:
            yield from _values(value, f"{key}.", sections)
        else:
            yield key, value


def rules(kind: KeyClass, text: str, keys: str | Sequence[str], prefix: str = "") -> dict[str, Rule]:
    """Return the same rule for several keys, whose names are relative to ``prefix``."""
    return {f"{prefix}{key}": Rule(kind, text) for key in (keys.split() if isinstance(keys, str) else keys)}
