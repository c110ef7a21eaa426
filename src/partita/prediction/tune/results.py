"""Results of trials in a file of JSON lines: the first line has the tuned settings, each further line one trial."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from partita.config.messages import shown
from partita.errors import ConfigError
from partita.prediction.machine import Machine, machine_of, plain_machine
from partita.prediction.tune.space import key_of
from partita.prediction.tune.trial import TrialResult

# Keys of the first line, and their names in messages.
_KEY_NAMES = {
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

    ``path``: the file; None: outcomes are stored only in memory. ``machine``: the machine of the predictions.
    """

    path: Path | None
    tuned_settings: dict[str, Any]
    machine: Machine | None = None
    _found: dict[str, TrialResult] = field(default_factory=dict)

    @staticmethod
    def open(path: Path | None, tuned_settings: Mapping[str, Any]) -> "Results":
        """Read the results of an earlier run, if the file exists. A truncated last line is ignored.

        Raises:
            ConfigError: the file has other ``tuned_settings``, or cannot be read.
        """
        results = Results(path, json.loads(json.dumps(dict(tuned_settings))))
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
                results._found[key_of(row["config"])] = TrialResult(**row["outcome"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"results '{path}' is no file of partita tune; name another file") from None
        return results

    def _check(self, found: object) -> None:
        if not isinstance(found, dict) or found.keys() != self.tuned_settings.keys():
            raise ConfigError(f"results '{self.path}' is no file of partita tune; name another file")
        for key, what in _KEY_NAMES.items():
            if found[key] != self.tuned_settings[key]:
                raise ConfigError(
                    f"results '{self.path}': they are from another tuning: {what}: expected "
                    f"{shown(self.tuned_settings[key])}, got {shown(found[key])}; name another file (--out FILE.jsonl) "
                    "or remove this one"
                )

    def begin(self, machine: Machine) -> None:
        """Rewrite the file: the first line, and the outcomes that were read.

        Raises:
            ConfigError: the file cannot be written.
        """
        self.machine = machine
        rows: list[dict[str, Any]] = [{"of": self.tuned_settings, "machine": plain_machine(machine)}]
        rows += [{"config": json.loads(key), "outcome": asdict(outcome)} for key, outcome in self._found.items()]
        self._write("".join(json.dumps(row) + "\n" for row in rows), anew=True)

    def of(self, config: dict[str, Any]) -> TrialResult | None:
        """Return the outcome of a trial of this config; None if there is none."""
        return self._found.get(key_of(config))

    def add(self, config: dict[str, Any], outcome: TrialResult) -> None:
        """Add the outcome of a trial.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._found[key_of(config)] = outcome
        self._write(json.dumps({"config": config, "outcome": asdict(outcome)}) + "\n", anew=False)

    def _write(self, text: str, *, anew: bool) -> None:
        """Append ``text`` to the file. With ``anew``, ``text`` replaces the file when it is completely written."""
        if self.path is None:
            return
        temporary = self.path.with_name(self.path.name + ".part")
        try:
            with (temporary if anew else self.path).open("w" if anew else "a", encoding="utf-8") as file:
                file.write(text)
            if anew:
                temporary.replace(self.path)
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
