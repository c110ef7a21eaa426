"""`import partita`, help and schema do not import torch; listed help texts of commands are those of their modules."""

import inspect
import subprocess
import sys

import pytest
import typer.main
from typer.testing import CliRunner

import partita
from partita.cli.main import Commands, app

HEAVY = ("torch", "numpy", "transformers", "matplotlib", "partita.engine", "partita.prediction.plan")
COMMAND = "from partita.cli.main import app; app({arguments}, standalone_mode=False)"


@pytest.mark.parametrize(
    "code",
    [
        "import partita; dir(partita); partita.PartitaError; partita.Config",
        COMMAND.format(arguments=["--help"]),
        COMMAND.format(arguments=["-h"]),
        COMMAND.format(arguments=["--version"]),
        COMMAND.format(arguments=["schema"]),
        COMMAND.format(arguments=["schema", "--job"]),
    ],
)
def test_without_torch(code: str) -> None:
    check = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_names_that_are_imported_when_they_are_used() -> None:
    code = "import sys, partita; partita.initialize; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert partita.initialize.__module__ == "partita.engine.start"
    assert all(getattr(partita, name) is not None for name in partita.__all__)
    with pytest.raises(AttributeError, match="module 'partita' has no attribute 'initialise'"):
        partita.initialise  # noqa: B018


def test_internal_packages_are_not_completed() -> None:
    assert hasattr(partita, "errors")
    assert hasattr(partita, "config")
    assert dir(partita) == sorted([*partita.__all__, "__version__"])


@pytest.mark.parametrize("name", Commands.known)
def test_the_listed_help_is_the_command_s(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert command.name == name
    first, _, _ = inspect.cleandoc(command.help).partition("\n\n")
    assert Commands.known[name].help == " ".join(first.split())


def test_short_help_of_every_command() -> None:
    for arguments in (["-h"], ["plan", "-h"], ["checkpoint", "-h"], ["checkpoint", "export", "-h"]):
        short, long = (CliRunner().invoke(app, [*arguments[:-1], option]) for option in ("-h", "--help"))
        assert short.exit_code == 0
        assert short.stdout == long.stdout
        assert "Usage: partita" in short.stdout


def test_a_misspelled_command_is_suggested() -> None:
    result = CliRunner().invoke(app, ["trian"])
    assert result.exit_code == 2
    assert "Did you mean 'train'" in result.output
