"""The ``partita`` command. A user error is shown as one message without a traceback.

The exit code is 2 for wrong usage and 1 for a failure at run time.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from partita.cli.console import replace_unprintable, show_warnings_in_one_line
from partita.cli.lazy import Command, LazyGroup


class Commands(LazyGroup):
    """The commands of ``partita``, in the order in which its help shows them."""

    known: ClassVar[Mapping[str, Command]] = {
        "train": Command(
            "partita.cli.train:train",
            "Train a model; write metrics, a loss plot, a sample and the weights (safetensors) to the job's folder.",
        ),
        "eval": Command(
            "partita.cli.evaluate:eval_command",
            "Show the held-out loss and the perplexity of the weights that partita train has written.",
        ),
        "sample": Command(
            "partita.cli.sample:sample",
            "Continue a prompt with the weights that partita train has written, in one process.",
        ),
        "run": Command(
            "partita.cli.run:run",
            "Run a script unchanged, with partita in place of accelerate's Accelerator, transformers' Trainer and "
            "DeepSpeed.",
            context_settings={"allow_interspersed_args": False},  # arguments after SCRIPT belong to the script
        ),
        "plan": Command(
            "partita.cli.plan:plan",
            "Predict memory and speed of training a model, and find the best plan; exit code 1 if nothing fits.",
        ),
        "tune": Command(
            "partita.cli.tune:tune",
            "Find the fastest config on this machine, by short trials of plans and of variants of the best ones.",
        ),
        "machine": Command(
            "partita.cli.machine:machine",
            "Measure this machine: its memory, and the speed of compute, copies and collectives with this many ranks.",
        ),
        "simulate": Command(
            "partita.cli.simulate:simulate",
            "Show what each rank of a cluster would store and send, without a cluster.",
        ),
        "doctor": Command(
            "partita.cli.doctor:doctor", "Show this machine's hardware and libraries, and what partita uses of them."
        ),
        "schema": Command(
            "partita.cli.schema:schema",
            "Print the JSON schema of the config, with which editors complete and check it.",
        ),
        "attention": Command("partita.cli.attention:attention", "Show attention patterns."),
        "checkpoint": Command(
            "partita.cli.checkpoint:checkpoint", "Inspect checkpoints of partita and torch.distributed."
        ),
        "convert": Command("partita.cli.convert:convert", "Convert configs and checkpoints of other libraries."),
    }


app = typer.Typer(
    name="partita",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train PyTorch models that do not fit on one device, by sharding and offloading every training state.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("partita"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Handle the options of the top-level command."""
    replace_unprintable()
    show_warnings_in_one_line()


if __name__ == "__main__":
    app()
