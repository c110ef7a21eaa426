"""``partita doctor``: shows this machine's hardware and libraries, and what partita uses of them."""

import importlib.util
import platform
import shutil
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from partita.cli.console import show_table
from partita.config.messages import format_bytes
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.memory import accelerator
from partita.memory.capacity import host_memory, usable_cores

# Optional packages, with the consequence of not having them.
OPTIONAL_PACKAGES = {
    "transformers": "no Hugging Face models in a job",
    "tensorboard": "no event files, only metrics.jsonl",
}
# Libraries whose versions belong in a bug report.
LIBRARIES = (
    *("numpy", "safetensors", "pydantic", "accelerate", "peft", "trl", "lightning", "ray", "deepspeed"),
    *("bitsandbytes", "torchao"),
)
ForReports = Annotated[bool, typer.Option("--markdown", help="Print a Markdown table, for bug reports.")]


def doctor(markdown: ForReports = False) -> None:
    """Show this machine's hardware and libraries, and what partita uses of them."""
    parts = {"this machine": machine_rows(), "what partita uses here": choice_rows()}
    if markdown:
        typer.echo(markdown_table(row for rows in parts.values() for row in rows))
        return
    console = Console()
    for title, rows in parts.items():
        show_table(console, title, rows)
        console.print()
    show_table(console, "this folder", [("disk", _disk(Path.cwd()))])


def markdown_table(rows: Iterable[tuple[str, str]]) -> str:
    """Return the rows as a Markdown table; characters that would end a cell or a row are escaped."""
    cells = ((name, text.replace("|", "\\|").replace("\n", "<br>")) for name, text in rows)
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in cells)])


def machine_rows() -> Iterator[tuple[str, str]]:
    """Yield versions, devices, cores and memory, without names of users, folders or hosts."""
    yield "partita", metadata.version("partita")
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "PyTorch", torch.__version__
    yield "libraries", ", ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES if _is_importable(name))
    yield "devices", "\n".join(_devices())
    yield "cores", f"{usable_cores()} usable; PyTorch computes with {torch.get_num_threads()} threads"
    total, free = host_memory()
    yield "memory", f"{format_bytes(total)}, {format_bytes(free)} free"
    yield "backends", ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in _backends().items())


def choice_rows() -> Iterator[tuple[str, str]]:
    """Yield partita's choices on this machine, and the consequences of missing optional packages."""
    device = torch.device(accelerator.device_type())
    yield "processes", f"{max(1, accelerator.count())} by default (partita train --processes)"
    yield "compute dtype", f"{resolve(Config(), 1, device.type).compute_dtype} (precision.compute: auto)"
    yield (
        "collectives",
        "gloo; gradients by all-to-all and a local sum in rank order; within a node by reading memory, if allowed"
        if accelerator.is_host(device)
        else f"{accelerator.backend(device)}; gradients by its reduce-scatter",
    )
    yield (
        "gathered memory",
        "buffer pool, by storage swap"
        if hasattr(torch.UntypedStorage, "_swap_data_ptr_")
        else "allocated and freed by resize_ (this PyTorch has no storage swap)",
    )
    yield (
        "compiled kernels",
        "present" if _is_importable("partita.kernels._native") else "not built; plain PyTorch is used",
    )
    for package, loss in OPTIONAL_PACKAGES.items():
        yield package, metadata.version(package) if _is_importable(package) else f"not installed: {loss}"


def _disk(folder: Path) -> str:
    disk = shutil.disk_usage(folder)
    return f"{format_bytes(disk.total)}, {format_bytes(disk.free)} free, at {folder}"


def _devices() -> list[str]:
    names = [f"CPU: {platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"]
    found = enumerate(accelerator.installed())
    return names + [f"GPU {index}: {name}, {format_bytes(num_bytes)}" for index, (name, num_bytes) in found]


def _backends() -> dict[str, bool]:
    return {name: dist.is_backend_available(name) for name in dist.Backend.backend_list if name != "undefined"}


def _is_importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
