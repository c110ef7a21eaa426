"""DeepSpeed names that do not exist here, each with the remedy that its error message gives."""

from collections.abc import Mapping

from partita.errors import PartitaError

_AS_IT_IS = "in the configuration; the model does not change"
_PIPELINE = f"use partita.initialize, with parallel.pipeline {_AS_IT_IS}"
_TENSOR = f"set tensor_parallel.autotp_size {_AS_IT_IS}"
_OPTIMIZERS = (
    "set the optimizer in the configuration (AdamW, Adam, SGD, Lion: partita has kernels for them), or pass one of "
    "torch.optim to initialize(optimizer=...)"
)
_RECOMPUTE = "use torch.utils.checkpoint, or the model's gradient_checkpointing_enable()"
_GENERATE = "generate inside `with engine.gathered():` (of partita.initialize), or export the weights and serve them"

# Names in the top-level module.
MODULE = {
    "ops": _OPTIMIZERS,
    "DeepSpeedOptimizer": "the engine's optimizer is a torch.optim.Optimizer",
    "DeepSpeedDataLoader": "use torch.utils.data.DataLoader, or initialize(training_data=...), which creates one",
    "DeepSpeedConfig": "use partita.Config; partita.config.deepspeed.read reads DeepSpeed's files",
    "DeepSpeedConfigError": "catch partita.ConfigError",
    "DeepSpeedHybridEngine": _GENERATE,
    "InferenceEngine": _GENERATE,
    "init_inference": _GENERATE,
    "default_inference_config": _GENERATE,
    "DeepSpeedInferenceConfig": _GENERATE,
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "pipe": _PIPELINE,
    "tp_model_init": _TENSOR,
    "set_autotp_mode": _TENSOR,
    "module_inject": _TENSOR,
    "checkpointing": _RECOMPUTE,
    "moe": "use the model's own experts: experts that a rank does not use get zero gradients there",
    "sequence": f"set sequence_parallel_size {_AS_IT_IS}",
    "compression": "pruning and quantization of models are not available in this version of partita",
    "OnDevice": "use torch.device('meta') as a context; partita.initialize fills such models unit by unit",
    "log_dist": "use the logging module, if torch.distributed.get_rank() is 0",
    "logger": "use the logging module: logging.getLogger('partita') is partita's logger",
    "monitor": "use engine.log(...) of partita.initialize, which writes to the sinks in metrics.sinks",
    "profiling": "use engine.profile(...), engine.memory_report() and engine.traffic_report() of partita.initialize",
    "dist": "use comm",
    "launcher": "start scripts with torchrun, srun or `partita run --processes`",
    "constants": "use partita.initialize(..., mesh=) and torch.distributed",
}

# Names in `zero`.
ZERO = {
    "MiCS_Init": "set zero_hpz_partition_size in the configuration: parameters are gathered within a node",
    "TiledLinear": "use torch.nn.Linear: parameters on any tier are gathered unit by unit",
    "TiledLinearReturnBias": "use torch.nn.Linear: parameters on any tier are gathered unit by unit",
    "unwrap_model_for_generation": _GENERATE,
    "ZeroParamStatus": "print the parameter, which shows if it is sharded; engine.gathered(...) unshards it",
    "ZeroParamType": "every parameter of the engine's model has the same type",
    "DeepSpeedZeRoOffload": "set offload_param and offload_optimizer in the configuration",
}

# Names in `comm`.
COMM = {
    "inference_all_reduce": "use all_reduce",
    "log_summary": "use engine.traffic_report() of partita.initialize",
    "configure": "use engine.traffic_report() of partita.initialize",
    "initialize_mesh_device": _TENSOR,
    "mpi_discovery": "start with torchrun or srun, whose environment variables are used",
}

# Names in `accelerator`, and of its accelerator.
_DEVICE = "use torch.accelerator, and the engine's attribute device"
ACCELERATOR = dict.fromkeys(
    "Stream Event stream current_stream default_stream range_push range_pop lazy_call total_memory available_memory "
    "memory_stats reset_peak_memory_stats DeepSpeedAccelerator set_accelerator".split(),
    _DEVICE,
)

# Names in `utils`.
_LOGGING = "use the logging module, if torch.distributed.get_rank() is 0"
_STATES = "use engine.gathered(...), engine.gradient(name) and engine.optimizer_state(name) of partita.initialize"
UTILS = {
    "logger": "use the logging module: logging.getLogger('partita') is partita's logger",
    "log_dist": _LOGGING,
    "groups": "use partita.initialize(..., mesh=) and torch.distributed",
    **dict.fromkeys(
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
        "safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad".split(),
        _STATES,
    ),
}

# Names in `runtime`, all of whose submodules except `dataloader` are private to DeepSpeed's engine.
RUNTIME = dict.fromkeys(("engine", "config", "lr_schedules", "zero", "pipe", "utils"), "use partita.initialize")

# Attributes of the engine.
ENGINE = {
    "set_gradient_accumulation_boundary": "call step() after every micro-batch: it updates only at the boundary",
    "coalesce_grad_reduction": "use no_sync(), which is allowed at every stage",
    "allreduce_gradients": "call step() after every micro-batch: gradients are reduced in backward",
    "set_train_batch_size": "set the batch sizes in the configuration",
    "set_train_micro_batch_size": "set the batch sizes in the configuration",
    "compile": "compile the model's blocks before initialize (block.compile())",
    "offload_states": "set offload_optimizer and offload_param in the configuration",
    "reload_states": "set offload_optimizer and offload_param in the configuration",
    "monitor": "log get_lr(), get_global_grad_norm() and your loss",
    "flops_profiler": "use partita.observe.utilization.training_flops",
    "timers": "use engine.profile(...) of partita.initialize",
    "load_moe_state_dict": "use load_checkpoint: experts are ordinary parameters",
}


class MissingNameError(PartitaError, ImportError):
    """A DeepSpeed name that no module here defines.

    It is an ``ImportError`` because ``from ... import`` would discard the message of an ``AttributeError``.
    """


class MissingAttributeError(PartitaError, AttributeError):
    """A DeepSpeed attribute that the engine does not have."""


def missing(module: str, name: str, remedies: Mapping[str, str]) -> Exception:
    """Return the error for a name that a module does not have.

    For a name that begins with an underscore, it is a plain ``AttributeError``.
    """
    if name.startswith("_"):
        return AttributeError(f"module '{module}' has no attribute '{name}'")
    return MissingNameError(_message(module, name, remedies))


def missing_attribute(where: str, name: str, remedies: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that an object (``where``) does not have."""
    return MissingAttributeError(_message(where, name, remedies))


def _message(where: str, name: str, remedies: Mapping[str, str]) -> str:
    remedy = remedies.get(name, "use partita.initialize and its engine: see the README")
    return f"{where}.{name} of DeepSpeed is not in partita.integrations.deepspeed: {remedy}"
