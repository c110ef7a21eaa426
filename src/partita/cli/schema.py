"""``partita schema``: prints the JSON schema with which editors complete and check configs and job files."""

from importlib import resources
from typing import Annotated

import typer

OfJob = Annotated[bool, typer.Option("--job", help="The schema of job files of partita train instead of configs.")]


def schema(job: OfJob = False) -> None:
    """Print the JSON schema of the config, with which editors complete and check it.

    Write it to a file: partita schema > partita.schema.json
    """
    # Files, because editors may call this often and the modules of the config take longer to import.
    found = resources.files("partita.cli") / "schemas" / ("job.json" if job else "config.json")
    typer.echo(found.read_text(encoding="utf-8"), nl=False)
