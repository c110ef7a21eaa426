"""Results of trials in a file of JSON lines: the first line says what was tuned, each further line is one trial."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from partita.config.messages import shown
from partita.errors import ConfigError
from partita.planner.machine import Machine, machine_of, plain_machine
from partita.tune.space import key_of
from partita.tune.trial import Outcome

# Keys of the first line, and their names in messages.
_WHAT = {
    "model": "the model",
    "parameters": "its parameters",
    "tokens": "tokens of a sample",
    "samples": "samples of a step",
    "processes": "processes",
    "device": "the machine",
    "config": "the config",
}


@dataclass
class Results:
    """The outcomes so far, by config.

    ``path``: the file; None: outcomes are kept in memory only. ``machine``: the one that predictions were made for.
    """

    path: Path | None
    subject: dict[str, Any]
    machine: Machine | None = None
    _found: dict[str, Outcome] = field(default_factory=dict)

    @staticmethod
    def open(path: Path | None, subject: Mapping[str, Any]) -> "Results":
        """Read the results of an earlier run, if the file exists. A truncated last line is ignored.

        Raises:
            ConfigError: the file is of another ``subject``, or cannot be read.
        """
        results = Results(path, json.loads(json.dumps(dict(subject))))
        if path is None or not path.exists():
            return results
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"results '{path}' cannot be read: {error}; name another file") from None
        rows = list(filter(None, (_row(path, line, at == len(lines) - 1) for at, line in enumerate(lines))))
        if not rows:
            return results
        results._check(rows[0].get("of"))
        try:
            results.machine = machine_of(rows[0]["machine"])
            for row in rows[1:]:
                results._found[key_of(row["config"])] = Outcome(**row["outcome"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"results '{path}' is no file of partita tune; name another file") from None
        return results

    def _check(self, found: object) -> None:
        if not isinstance(found, dict) or found.keys() != self.subject.keys():
            raise ConfigError(f"results '{self.path}' is no file of partita tune; name another file")
        for key, what in _WHAT.items():
            if found[key] != self.subject[key]:
                raise ConfigError(
                    f"results '{self.path}': they are of another tuning: {what}: expected {shown(self.subject[key])}, "
                    f"got {shown(found[key])}; name another file (--out FILE.jsonl), or remove this one"
                )

    def begin(self, machine: Machine) -> None:
        """Write the file anew: the first line, and the outcomes that were read.

        Raises:
            ConfigError: the file cannot be written.
        """
        self.machine = machine
        rows: list[dict[str, Any]] = [{"of": self.subject, "machine": plain_machine(machine)}]
        rows += [{"config": json.loads(key), "outcome": asdict(outcome)} for key, outcome in self._found.items()]
        self._write("".join(json.dumps(row) + "\n" for row in rows), anew=True)

    def of(self, config: dict[str, Any]) -> Outcome | None:
        """Return the outcome of a trial of this config, if there was one."""
        return self._found.get(key_of(config))

    def add(self, config: dict[str, Any], outcome: Outcome) -> None:
        """Add the outcome of a trial.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._found[key_of(config)] = outcome
        self._write(json.dumps({"config": config, "outcome": asdict(outcome)}) + "\n", anew=False)

    def _write(self, text: str, *, anew: bool) -> None:
        """Append ``text`` to the file. With ``anew``, ``text`` replaces the file once all of it is written."""
        if self.path is None:
            return
        part = self.path.with_name(self.path.name + ".part")
        try:
            with (part if anew else self.path).open("w" if anew else "a", encoding="utf-8") as file:
                file.write(text)
            if anew:
                part.replace(self.path)
        except OSError as error:
            raise ConfigError(f"results '{self.path}' cannot be written: {error.strerror}; name another file") from None


def _row(path: Path, line: str, is_last: bool) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        if is_last:
            return None
        raise ConfigError(f"results '{path}' is no file of partita tune; name another file") from None
    if not isinstance(found, dict):
        raise ConfigError(f"results '{path}' is no file of partita tune; name another file")
    return found
