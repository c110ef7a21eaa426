"""``partita checkpoint``: shows, verifies and compares checkpoints, and exports their weights."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from partita.checkpoint.format.stored import StoredFiles, open_stored
from partita.checkpoint.names import optimizer_prefixes
from partita.checkpoint.offline import differences, verify
from partita.cli.console import FAILURE, Overwrite, busy, show_error, show_table, user_errors
from partita.config.messages import format_bytes
from partita.errors import ConfigError
from partita.huggingface.export import export_checkpoint, files_of_weights
from partita.layout.dtypes import dtype_of
from partita.table.residence import ENCODINGS

checkpoint = typer.Typer(
    name="checkpoint", no_args_is_help=True, help="Inspect checkpoints of partita and torch.distributed."
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a folder of checkpoints (the newest).")]


@checkpoint.command()
def inspect(
    folder: Folder, every: Annotated[bool, typer.Option("--all", help="Every tensor, with shape and pieces.")] = False
) -> None:
    """Show the origin and contents of a checkpoint."""
    console = Console()
    with user_errors():
        stored = open_stored(folder)
    show_table(console, str(stored.folder), _content(stored))
    if every:
        for key, tensor in sorted(stored.tensors.items()):
            console.print(f"{key}  {list(tensor.shape)} {tensor.dtype} in {len(tensor.chunks)} pieces", highlight=False)


def _content(stored: StoredFiles) -> Iterator[tuple[str, str]]:
    if stored.manifest:
        versions = ", ".join(f"{name} {number}" for name, number in stored.manifest["versions"].items())
        yield "step", str(stored.manifest["step"])
        yield "saved by", f"{stored.manifest['ranks']} ranks, {versions}"
    else:
        yield "saved by", "torch.distributed.checkpoint; it has no checksums"
    sizes, numbers = Counter[str](), Counter[str]()
    optimizers = tuple(optimizer_prefixes(stored.keys))
    for key, tensor in stored.tensors.items():
        kind = "optimizer" if key.startswith(optimizers) else "model"
        numbers[kind] += 1
        sizes[kind] += torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
    for kind, num in numbers.items():
        yield kind, f"{num} tensors, {format_bytes(sizes[kind])}"
    yield "values", ", ".join(sorted(stored.values)) or "none"


@checkpoint.command(name="verify")
def verify_command(folder: Folder) -> None:
    """Read a full checkpoint and compare it with its checksums; exit code 1 if something is wrong."""
    with user_errors():
        stored = open_stored(folder)
        with busy(f"reading {stored.folder}"):
            problems = list(verify(stored))
    for problem in problems:
        show_error(Console(stderr=True), problem)
    if problems:
        raise typer.Exit(FAILURE)
    checked = "all checksums match" if stored.manifest else "everything can be read (it has no checksums)"
    typer.echo(f"{stored.folder}: {checked}")


@checkpoint.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write into.")],
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or stored (unchanged).")] = "stored",
    config: Annotated[Path | None, typer.Option(help="A folder whose configuration and tokenizer are copied.")] = None,
    prefix: Annotated[str | None, typer.Option(help="The copy of the weights to export, if there are several.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a checkpoint's weights as safetensors, in the layout of Hugging Face."""
    with user_errors():
        if dtype != "stored" and dtype not in ENCODINGS:
            raise ConfigError(f"--dtype: expected stored, {', '.join(ENCODINGS)}; got {dtype}")
        if not overwrite and (found := files_of_weights(out)):
            raise ConfigError(
                f"'{out}' already contains a model ({found[0].name}); pass --overwrite to replace it, or name another "
                "folder"
            )
        wanted = None if dtype == "stored" else dtype_of(ENCODINGS[dtype])
        with busy(f"exporting {folder}"):
            num = export_checkpoint(open_stored(folder), out, wanted, config, prefix)
    typer.echo(f"{num} tensors are in {out}")


@checkpoint.command()
def diff(
    one: Folder, other: Annotated[Path, typer.Argument(metavar="OTHER", help="The checkpoint to compare with.")]
) -> None:
    """Show the differences between two checkpoints; exit code 1 if there are any."""
    with user_errors():
        found = list(differences(open_stored(one), open_stored(other)))
    for key, how in found:
        typer.echo(f"{key}: {how}")
    if found:
        raise typer.Exit(FAILURE)
    typer.echo("the checkpoints are identical, bit by bit")
