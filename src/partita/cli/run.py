"""``partita run``: runs a script of accelerate, transformers or DeepSpeed, unchanged, on partita."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.cli.console import INTERRUPTED, library_errors, show_notice, user_errors
from partita.cli.processes import num_to_start
from partita.cli.script import run_script
from partita.config import accelerate, deepspeed
from partita.config.converted import Converted
from partita.config.launchers import launch_environment
from partita.config.load import load_config
from partita.errors import ConfigError

Command = Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]", help="The script and its arguments.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="partita's config, YAML or JSON.")]
DeepSpeedFile = Annotated[Path | None, typer.Option("--deepspeed", help="A ds_config.json.")]
AccelerateFile = Annotated[Path | None, typer.Option("--accelerate", help="A file of 'accelerate config'.")]
Processes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes to start on this machine.", show_default="accelerate's, else one per GPU, else one"
    ),
]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as in python -m.")]


@dataclass(frozen=True)
class Source:
    """The file with the settings; at most one is given."""

    config: Path | None
    deepspeed: Path | None
    accelerate: Path | None

    def read(self, ranks: int, ranks_per_node: int) -> Converted | None:
        """Convert the file for this number of ranks. None without a file: the script's own arguments apply.

        Raises:
            ConfigError: the file cannot be read, or has keys that are not available; or several files are given.
        """
        given = [path for path in (self.config, self.deepspeed, self.accelerate) if path is not None]
        if len(given) > 1:
            raise ConfigError("--config, --deepspeed and --accelerate: give one of them; the script has one config")
        if self.deepspeed is not None:
            return deepspeed.read(self.deepspeed, ranks, ranks_per_node, arguments={})
        if self.accelerate is not None:
            return accelerate.read(self.accelerate, ranks, ranks_per_node)
        if self.config is None:
            return None
        settings = load_config(self.config).model_dump(mode="json", exclude_unset=True)
        return Converted(str(self.config), settings, ())

    @property
    def processes(self) -> int | None:
        """The number of processes in accelerate's file, or None."""
        return accelerate.read(self.accelerate, 1).processes if self.accelerate is not None else None


def run(
    command: Command,
    config: ConfigFile = None,
    deepspeed_file: DeepSpeedFile = None,
    accelerate_file: AccelerateFile = None,
    processes: Processes = None,
    module: Module = False,
) -> None:
    """Run a script unchanged, with partita in place of accelerate's Accelerator, transformers' Trainer and DeepSpeed.

    Under torchrun or srun, this process is one of the ranks. The script's own arguments (batch, learning rate,
    precision, ...) still apply; "auto" in a ds_config.json takes their values.
    """
    source = Source(config, deepspeed_file, accelerate_file)
    with user_errors():
        environment = launch_environment()
        _check_command(command, module=module)
        num_processes = num_to_start(environment, processes, source.processes)
        started = environment.world_size > 1
        ranks = environment.world_size if started else num_processes
        converted = source.read(ranks, environment.local_world_size if started else num_processes)
    if environment.rank == 0:
        _show_settings(command[0], converted)
    settings = converted.settings if converted else None
    arguments = ["-m", *command] if module else command
    if num_processes > 1:
        from partita.cli.launch import launch  # torch's agent takes a second to import

        script_arguments = [json.dumps(settings), *arguments]
        with user_errors():
            raise typer.Exit(launch(num_processes, "partita.cli.script", script_arguments, Console(stderr=True)))
    with library_errors(f"rank {environment.rank}: " if started else ""):
        try:
            run_script(settings, arguments)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _check_command(command: list[str], *, module: bool) -> None:
    script = command[0]
    if module and find_spec(script.partition(".")[0]) is None:
        raise ConfigError(f"-m {script}: no module with this name; correct it, or install the module")
    if not module and not Path(script).is_file():
        raise ConfigError(f"SCRIPT: no file '{script}'; correct the path, or run a module with -m")


def _show_settings(script: str, converted: Converted | None) -> None:
    """Print the notices about the file, one line each, and the classes that are replaced."""
    console = Console(stderr=True)
    for line in converted.summary() if converted else ():
        show_notice(console, line)
    console.print(
        f"partita run {script}: partita replaces accelerate.Accelerator, transformers.Trainer, "
        "TrainingArguments(deepspeed=, fsdp=) and deepspeed; settings: "
        f"{converted.name if converted else 'those of the script'}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
