"""``partita sample``: a text by the weights of a run."""

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.console import user_errors
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
        section = SampleSection(prompt=prompt, tokens=tokens, temperature=temperature, seed=seed)
        text = continue_prompt(load_trained(run), section)
    typer.echo(text)
