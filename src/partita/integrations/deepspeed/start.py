"""``deepspeed.initialize``: translates DeepSpeed's arguments into those of :func:`partita.initialize`."""

import argparse
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from partita.comm import world
from partita.comm.mesh import Mesh
from partita.config import deepspeed as configuration
from partita.config.converted import Converted
from partita.config.launchers import launch_environment
from partita.config.resolve import resolve
from partita.engine.build import UserArguments
from partita.engine.start import start as start_engine
from partita.errors import ConfigError
from partita.integrations.deepspeed import zero
from partita.integrations.deepspeed.comm import init_distributed
from partita.integrations.deepspeed.engine import DeepSpeedEngine

_log = logging.getLogger("partita")
Source = str | Path | Mapping[str, Any]


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``deepspeed.initialize``, in its order.

    ``args``: an object with ``deepspeed_config``, unless ``config`` is given; its ``local_rank`` is set if it exists.
    ``model_parameters``: the parameters, or groups of them, that the configuration's optimizer updates; None: all.
    ``optimizer`` and ``lr_scheduler``: objects, or callables that create them from the parameters and the optimizer.
    ``training_data``: a map-style dataset or an IterableDataset; each rank gets its own micro-batches.
    ``config`` (or ``config_params``): a file, or a mapping. ``distributed_port`` and ``dist_init_required`` have no
    effect: the launcher sets the rendezvous address.
    """

    args: Any = None
    model: Any = None
    optimizer: Any = None
    model_parameters: Iterable[Any] | None = None
    training_data: Any = None
    lr_scheduler: Any = None
    distributed_port: int | None = None
    mpu: Any = None
    dist_init_required: bool | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    config: Source | None = None
    mesh_param: Any = None
    config_params: Source | None = None

    def source(self) -> Source:
        """Return the configuration that was passed (a path or a mapping).

        Raises:
            ConfigError: no configuration was passed, or more than one; or another argument is wrong or not available.
        """
        if self.mpu is not None or self.mesh_param is not None:
            raise ConfigError(
                "deepspeed.initialize(mpu=) and (mesh_param=): leave them out, and set tensor_parallel.autotp_size and "
                "sequence_parallel_size in the configuration"
            )
        if self.training_data is not None and not _is_dataset(self.training_data):
            kind = type(self.training_data).__name__
            raise ConfigError(
                "deepspeed.initialize(training_data=): expected a map-style dataset (a torch Dataset, a list, a "
                f"Hugging Face dataset) or an IterableDataset, got a {kind}"
            )
        given = {
            "config": self.config,
            "config_params": self.config_params,
            "args.deepspeed_config": getattr(self.args, "deepspeed_config", None),
        }
        found = {name: value for name, value in given.items() if value is not None}
        if len(found) != 1:
            where = f"passed as {' and '.join(found)}" if found else "missing"
            raise ConfigError(
                f"deepspeed.initialize: the configuration is {where}: expected it once, as config= (a path or a "
                "mapping) or as args.deepspeed_config"
            )
        return next(iter(found.values()))


def initialize(*positional: Any, **named: Any) -> tuple[DeepSpeedEngine, Optimizer | None, Any, Any]:
    """Create the engine of a model from a DeepSpeed configuration; takes the arguments in :class:`Arguments`.

    Returns:
        The engine, its optimizer (None if there is none), a loader of ``training_data`` (else None), and the
        learning-rate scheduler (None if there is none).

    Raises:
        ConfigError: an argument or a key of the configuration is not available in partita; the message gives the
            remedy.
    """
    given = Arguments(*positional, **named)
    source = given.source()
    init_distributed()
    launch = launch_environment(running=world.running())
    if hasattr(given.args, "local_rank"):
        given.args.local_rank = launch.local_rank or 0
    converted = configuration.read(source, launch.world_size, launch.local_world_size)
    settings = _with_one_checkpoint_per_tag(converted)
    groups = _groups(given, settings)
    arguments = UserArguments(optimizer=given.optimizer, scheduler=given.lr_scheduler, parameters=groups)
    engine = start_engine(given.model, settings, arguments)
    if not launch.rank:
        for line in converted.summary():
            _log.info("%s", line)
    zero.made(engine)
    resolved = resolve(engine.config, launch.world_size, engine.mesh.device.type, launch.local_world_size)
    loader = None if given.training_data is None else _loader(given, source, engine.mesh, resolved.batch.micro)
    has = {
        "optimizer": given.optimizer is not None or "optimizer" in settings,
        "scheduler": given.lr_scheduler is not None or "schedule" in settings,
    }
    wrapper = DeepSpeedEngine(engine, resolved, launch.local_rank or 0, has, loader)
    return wrapper, wrapper.optimizer, loader, wrapper.lr_scheduler


def _with_one_checkpoint_per_tag(converted: Converted) -> dict[str, Any]:
    """Return the settings with DeepSpeed's rule that a checkpoint replaces an earlier one with the same tag."""
    return {**converted.settings, "checkpoint": {"keep": 1}}


def _groups(given: Arguments, settings: Mapping[str, Any]) -> list[Any] | None:
    """Return the ``model_parameters`` of the configured optimizer.

    Returns None if these are not given or are all trained parameters, if no optimizer is configured or another one is
    given, or if the model is not a module.
    """
    if given.optimizer is not None or given.model_parameters is None or "optimizer" not in settings:
        return None
    if not isinstance(given.model, nn.Module):
        return None
    groups = list(given.model_parameters)
    trained = {id(param) for param in given.model.parameters() if param.requires_grad}
    if all(isinstance(param, Tensor) for param in groups) and trained <= {id(param) for param in groups}:
        return None
    return groups


def _is_dataset(data: Any) -> bool:
    """Return whether DeepSpeed accepts this as a dataset: it has a length and an index, or is an IterableDataset."""
    return isinstance(data, IterableDataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def _loader(given: Arguments, source: Source, mesh: Mesh, micro: int) -> DataLoader[Any]:
    """Return a loader of this rank's micro-batches of the training data."""
    share = mesh.size("data"), mesh.coordinate("data")
    streams = isinstance(given.training_data, IterableDataset)
    return DataLoader(
        given.training_data,
        batch_size=micro,
        sampler=None if streams else DistributedSampler(given.training_data, *share),
        collate_fn=given.collate_fn,
        drop_last=bool(configuration.load(source)[1].get("dataloader_drop_last", False)),
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE``, which :func:`initialize` takes in ``args``."""
    group = parser.add_argument_group("DeepSpeed", "training on partita with a configuration of DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="only for the script; it has no effect on partita")
    group.add_argument("--deepspeed_config", default=None, help="configuration of DeepSpeed, a JSON file")
    return parser
