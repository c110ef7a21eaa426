"""``partita schema``: the JSON schema with which editors complete and check configurations and job files."""

import json
from typing import Annotated

import typer

from partita.config.json_schema import json_schema
from partita.config.schema import Config
from partita.train.job import Job

OfJob = Annotated[bool, typer.Option("--job", help="Of the job files of partita train, not of an engine's config.")]


def schema(job: OfJob = False) -> None:
    """Print the JSON schema of the config, for editors: partita schema > partita.schema.json"""
    typer.echo(json.dumps(json_schema(Job if job else Config), indent=2))
