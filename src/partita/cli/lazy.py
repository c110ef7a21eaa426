"""Commands whose modules are imported when they are run: the program's help needs neither torch nor the library."""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class Command:
    """A command of the program.

    Attributes:
        place: module and name of the function, or of the ``typer.Typer`` of a group of commands, as ``module:name``.
        help: the first paragraph of its help.
        context_settings: settings of its parser.
    """

    place: str
    help: str
    context_settings: Mapping[str, Any] = field(default_factory=dict)

    def load(self, name: str) -> Any:
        """Import the module, and return the command."""
        path, _, attribute = self.place.partition(":")
        module = import_module(path)
        found = getattr(module, attribute)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        alone = typer.Typer(add_completion=False)
        alone.command(name, context_settings=dict(self.context_settings))(found)
        return typer.main.get_command(alone)


class _Commands(MutableMapping[str, Any]):
    """The commands by name, each loaded when it is first read."""

    def __init__(self, known: Mapping[str, Command]) -> None:
        self._known = dict[str, Any](known)

    def __getitem__(self, name: str) -> Any:
        if isinstance(found := self._known[name], Command):
            self._known[name] = found = found.load(name)
        return found

    def __setitem__(self, name: str, command: Any) -> None:
        self._known[name] = command

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class LazyGroup(TyperGroup):
    """A group of commands that are loaded when they are run. Subclasses list them as ``known``."""

    known: ClassVar[Mapping[str, Command]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(self.known)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the group, which shows names and first paragraphs of its commands, without loading them."""
        loaded, self.commands = self.commands, _stubs(self.known)
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = loaded


def _stubs(known: Mapping[str, Command]) -> MutableMapping[str, Any]:
    return {name: TyperCommand(name, callback=None, help=command.help) for name, command in known.items()}
