"""``partita sample``: a text by the weights of a run."""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from partita.cli.console import user_errors
from partita.config.messages import validation_problems
from partita.errors import ConfigError
from partita.train.job import SampleSection
from partita.train.trained import continue_prompt, load_trained

_DEFAULT = SampleSection()


def sample(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run's results, or its job file.")],
    prompt: Annotated[str, typer.Argument(help="How the text begins; for a run on messages, the user's message.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens (bytes, without a tokenizer) to write.")] = _DEFAULT.tokens,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = _DEFAULT.temperature,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = _DEFAULT.seed,
) -> None:
    """Continue a prompt with the weights that partita train has written, in one process."""
    with user_errors():
        section = _section({"prompt": prompt, "tokens": tokens, "temperature": temperature, "seed": seed})
        text = continue_prompt(load_trained(run), section)
    typer.echo(text)


def _section(values: dict[str, Any]) -> SampleSection:
    """Return the sample with these values.

    Raises:
        ConfigError: a value is not valid; the message has the name of its option.
    """
    try:
        return SampleSection.model_validate(values)
    except ValidationError as error:
        problems = validation_problems(error, SampleSection, values)
        texts = (each.text if each.path == ("prompt",) else f"--{each.text}" for each in problems)
        raise ConfigError("; ".join(texts)) from None
