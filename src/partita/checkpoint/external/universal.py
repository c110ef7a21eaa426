"""DeepSpeed's universal checkpoints: separate files for each parameter, independent of the number of ranks and the ZeRO
stage that they were saved from.

``zero/<parameter>/fp32.pt`` is the master weight. ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt`` are optimizer
states. Below stage 3 each file is a dictionary with the tensor under ``param``. At stage 3 it is the flat tensor, and
there is no ``step.pt``. ``zero/optimizer_state.pt`` has the settings of the optimizer's groups. The progress of the run
is in a file next to ``zero/``.

Source: DeepSpeed 0.19.8, deepspeed.checkpoint.ds_to_universal.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from partita.checkpoint.external.source import ExternalCheckpoint, latest_step, schedule_of
from partita.checkpoint.external.torch_files import IMPLEMENTATION, TorchFiles, load_mapped
from partita.checkpoint.format.system import explain_os_errors
from partita.checkpoint.names import GROUPS, MODEL, STATE, some_of
from partita.checkpoint.training_state import CONFIGURED, ENGINE, EXTRA, SCHEDULER
from partita.errors import PartitaError

LIBRARY = "DeepSpeed"
ZERO, LATEST, LATEST_SHARDS = "zero", "latest_universal", "latest"
WEIGHT, OPTIMIZER = "fp32.pt", "optimizer_state.pt"
STEP, PARAM = "step", "param"
# Files of single ranks. Reading them needs DeepSpeed's classes, and runs code.
_SHARDS = ("*_optim_states.pt", "layer_*-model_*states.pt")
MODEL_STATES = "*_model_states.pt"
# Keys in `engine.extra` for the script's save_checkpoint(client_state=), and for DeepSpeed's counters.
CLIENT_STATE, COUNTERS = "deepspeed.client_state", "deepspeed.counters"
COUNTED = ("global_steps", "global_samples", "skipped_steps")
# The keys in a model states file that are DeepSpeed's own. All others are the client's.
_OWN = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler "
    "data_sampler random_ltd dp_world_size mp_world_size ds_config ds_version universal_checkpoint_info "
    "checkpoint_parallel_dimensions sparse_tensor_module_names".split()
) | set(COUNTED)
# Entries of an optimizer's group that are not settings: counters and switches of DeepSpeed's own classes.
_NOT_SETTINGS = IMPLEMENTATION | {"params", "step", "bias_correction"}


class _Inert:
    """A placeholder for DeepSpeed classes whose objects are inspected but never used."""


# Classes that DeepSpeed's optimizer states name in addition to tensors and plain values.
_ADMITTED: list[Any] = [
    *((_Inert, f"deepspeed.runtime.fp16.loss_scaler.{name}") for name in ("LossScaler", "DynamicLossScaler")),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig"),
    *((int, f"deepspeed.runtime.zero.{place}.ZeroStageEnum") for place in ("config", "config_utils")),
]


def find_universal(folder: Path) -> Path | None:
    """Return ``folder`` if it is a universal checkpoint, or else the one that its ``latest`` file names.

    Return None if there is none.

    Raises:
        PartitaError: the folder holds the shards of single ranks.
    """
    for latest in (LATEST, LATEST_SHARDS):
        if (folder / latest).is_file():
            with explain_os_errors(folder / latest):
                folder = folder / Path((folder / latest).read_text().strip()).name
            break
    if (folder / ZERO).is_dir():
        return folder
    if shards := [path for pattern in _SHARDS for path in sorted(folder.glob(pattern))]:
        raise PartitaError(
            f"checkpoint: '{shards[0]}' is one rank's shard of a DeepSpeed checkpoint, a pickle that could run any "
            "code: make a universal checkpoint of it where DeepSpeed is installed, and convert that: python -m "
            f"deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder {folder}_universal"
        )
    return None


def open_universal(folder: Path) -> ExternalCheckpoint:
    """Open a universal checkpoint.

    Raises:
        PartitaError: a parameter's file is damaged, or holds more than tensors and plain values; or its shape is
            unknown.
    """
    stored, notices = TorchFiles(folder), list[str]()
    file, run = _run(folder, notices)
    shapes = {name: tuple(shape) for group in run.get("param_shapes") or () for name, shape in group.items()}
    for path in sorted((folder / ZERO).glob(f"*/{WEIGHT}")):
        _add_parameter(stored, path.parent, shapes)
    for name in run.get("buffer_names") or ():
        if name in run["module"]:
            stored.add(f"{MODEL}{name}", run["module"][name], file, "module", name)
    if frozen := [name for name in run.get("frozen_param_shapes") or () if f"{MODEL}{name}" not in stored.tensors]:
        notices.append(
            f"{len(frozen)} frozen parameters ({some_of(frozen)}) are only in the ranks' shards, and not converted: "
            "load with strict=False, which keeps the model's values"
        )
    updates = int(run.get("global_steps", 0)) - int(run.get("skipped_steps", 0))
    external = ExternalCheckpoint(LIBRARY, stored, updates or latest_step(stored), _extra(run), notices=notices)
    _count_updates(stored, external.step)
    _add_optimizer(external, folder, run)
    return external


def _run(folder: Path, notices: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the name and contents of the model states file: buffers, counters, scheduler and configuration.

    Both are empty if there is no such file, or if it cannot be loaded, which adds a notice.
    """
    for path in sorted(folder.glob(MODEL_STATES)):
        try:
            return path.name, load_mapped(path)
        except PartitaError as error:
            notices.append(f"buffers, counters, scheduler and client state are not converted: {error}")
            break
    return "", {}


def _add_parameter(stored: TorchFiles, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Register the files of one parameter."""
    name = folder.name
    for path in sorted(folder.glob("*.pt")):
        file = str(path.relative_to(stored.folder))
        found = stored.content(file)
        within = (PARAM,) if isinstance(found, Mapping) else ()
        value = found[PARAM] if within else found
        if path.stem == STEP:
            stored.add_in_memory(f"{STATE}{name}.{STEP}", torch.tensor(float(value), dtype=torch.float32, device="cpu"))
            continue
        if not within and name not in shapes:
            raise PartitaError(
                f"checkpoint: '{path}' is flat, and its shape is unknown: the file '{MODEL_STATES}' next to '{ZERO}' "
                "is missing, or contains other classes than tensors and plain values; save again with a client_state "
                "of plain values"
            )
        key = f"{MODEL}{name}" if path.name == WEIGHT else f"{STATE}{name}.{path.stem}"
        stored.add(key, value, file, *within, shape=None if within else shapes.get(name))


def _count_updates(stored: TorchFiles, step: int) -> None:
    """Set the update count of each parameter that has optimizer states but no count to ``step``."""
    trained = {key.removeprefix(STATE).rpartition(".")[0] for key in stored.tensors if key.startswith(STATE)}
    for name in sorted(trained):
        if f"{STATE}{name}.{STEP}" not in stored.tensors:
            stored.add_in_memory(f"{STATE}{name}.{STEP}", torch.tensor(float(step), dtype=torch.float32, device="cpu"))


def _extra(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for ``engine.extra``: the script's client state and DeepSpeed's counters."""
    client = {key: value for key, value in run.items() if key not in _OWN}
    return {EXTRA: {CLIENT_STATE: client, COUNTERS: {name: run[name] for name in COUNTED if name in run}}}


def _add_optimizer(external: ExternalCheckpoint, folder: Path, run: Mapping[str, Any]) -> None:
    """Add the settings of the optimizer's groups, the scheduler and the loss scale to ``external``."""
    path = folder / ZERO / OPTIMIZER
    try:
        with torch.serialization.safe_globals(_ADMITTED):
            found = load_mapped(path)
    except PartitaError as error:
        external.notices.append(
            f"settings of the optimizer's groups are not converted, the configured ones apply: {error}"
        )
        return
    scaler = found.get("loss_scaler")
    if isinstance(scaler, _Inert) and "cur_iter" in (state := vars(scaler)):  # only a dynamic scale counts
        good_steps = state["cur_iter"] - state.get("last_overflow_iter", -1) - 1
        external.values[ENGINE] |= {"dynamic_loss_scale": float(state["cur_scale"]), "good_steps": int(good_steps)}
    groups, names = found["param_groups"], [list(shapes) for shapes in run.get("param_shapes") or ()]
    if len(groups) == 1:  # stage 3 may have split it into several of these
        names = [[name for group in names for name in group]]
    if len(groups) != len(names):
        external.notices.append(
            f"settings of the optimizer's {len(groups)} groups are not converted, the configured ones apply: the "
            f"checkpoint has {len(names)} groups of parameters, and does not say which group has which settings"
        )
        return
    settings = [{key: value for key, value in group.items() if key not in _NOT_SETTINGS} for group in groups]
    for number, found in enumerate(settings):
        for key, value in {**found, "params": names[number]}.items():
            external.values[f"{GROUPS}{number}.{key}"] = value
    # The configured learning rate is not stored, so the rate at the time of saving applies.
    external.values[CONFIGURED] = [{key: value for key, value in found.items() if key != "lr"} for found in settings]
    if (schedule := run.get("lr_scheduler")) is not None:
        derived = schedule_of(external.step, [float(group["lr"]) for group in groups])
        external.values[SCHEDULER] = schedule if "last_epoch" in schedule else derived
