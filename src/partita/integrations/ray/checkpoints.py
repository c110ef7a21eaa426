"""Checkpoints of an engine in Ray Train's storage, from which restarted workers resume."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.collective import broadcast_from_rank_zero

from partita.checkpoint.load import Restored
from partita.engine.engine import Engine
from partita.errors import PartitaError


def report(engine: Engine, metrics: Mapping[str, Any]) -> None:
    """Save the engine into the run's storage, and report it to Ray with these metrics.

    Call it on all workers, between two steps; ``ray.train.report(metrics)`` reports metrics without a checkpoint.
    ``CheckpointConfig`` sets the number of checkpoints that Ray keeps. Restarted workers get the newest one.

    Raises:
        PartitaError: on all ranks: ``RunConfig.storage_path`` is not a folder of a file system, or cannot be written.
    """
    context = ray.train.get_context()
    storage = context.get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise PartitaError(
            f"report: the run's storage is on '{storage.storage_filesystem.type_name}', but all ranks write into one "
            "checkpoint folder: set RunConfig(storage_path=) to a folder that all nodes share (NFS, ...)"
        )
    name = broadcast_from_rank_zero(f"checkpoint_{datetime.now():%Y-%m-%d_%H-%M-%S.%f}")
    folder = storage.build_checkpoint_path_from_name(name)
    engine.save(folder)
    engine.wait_for_checkpoint()
    saved = Checkpoint(folder, storage.storage_filesystem) if context.get_world_rank() == 0 else None
    ray.train.report(
        dict(metrics),
        checkpoint=saved,
        checkpoint_dir_name=name,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it is already in the run's storage
    )


def resume(engine: Engine) -> Restored | None:
    """Load the newest checkpoint that was reported before the workers were restarted; return None at the first start.

    The number of ranks may differ.

    Raises:
        PartitaError: on all ranks: the checkpoint is damaged, or of another model.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return engine.load(folder)
