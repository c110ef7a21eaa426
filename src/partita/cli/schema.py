"""``partita schema``: prints the JSON schema with which editors complete and check configs and job files."""

import json
from typing import Annotated

import typer

from partita.config.json_schema import json_schema
from partita.config.schema import Config
from partita.train.job import Job

OfJob = Annotated[bool, typer.Option("--job", help="The schema of job files of partita train instead of configs.")]


def schema(job: OfJob = False) -> None:
    """Print the JSON schema of the config, with which editors complete and check it.

    Write it to a file: partita schema > partita.schema.json
    """
    typer.echo(json.dumps(json_schema(Job if job else Config), indent=2))
