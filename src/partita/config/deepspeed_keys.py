"""Every key of DeepSpeed's configuration (0.19, and keys of older files), with its rule.

:mod:`partita.config.deepspeed` converts the mapped keys, and refuses unsupported values of them (an optimizer's name).
"""

from partita.config.converted import KeyClass, Rule, rules

ZERO, FP16, BF16, AUTOCAST = "zero_optimization.", "fp16.", "bf16.", "torch_autocast."
OFFLOAD_PARAM, OFFLOAD_OPTIMIZER = f"{ZERO}offload_param.", f"{ZERO}offload_optimizer."
OPTIMIZER, SCHEDULER = "optimizer.params.", "scheduler.params."

_MAPPED, _IGNORED, _WARNING, _ERROR = KeyClass.MAPPED, KeyClass.IGNORED, KeyClass.WARNING, KeyClass.ERROR
_SIZED = "partita chooses and sizes this itself"
_REPORTS = "partita has its own reports (engine.memory_report, engine.traffic_report)"
_SAVED = "partita's checkpoints need no settings here"
_SAME = "it changes no results here"
_NUMERICS = "leave it out: partita does not have this feature, which would change the results"
_CURRICULUM = "leave it out, and choose samples in your data loader"

_MAPPED_KEYS = {
    **rules(_MAPPED, "", "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"),
    **rules(_MAPPED, "", "gradient_clipping communication_data_type sequence_parallel_size"),
    **rules(_MAPPED, "", "enabled loss_scale initial_scale_power loss_scale_window", FP16),
    **rules(_MAPPED, "", "enabled dtype", AUTOCAST),
    **rules(_MAPPED, "", ("bf16.enabled", "bfloat16.enabled", "data_types.grad_accum_dtype")),
    **rules(_MAPPED, "", "stage cpu_offload cpu_offload_param prefetch_bucket_size zero_hpz_partition_size", ZERO),
    **rules(_MAPPED, "", "zero_quantized_weights zero_quantized_gradients", ZERO),
    **rules(_MAPPED, "", "stage3_prefetch_bucket_size mics_shard_size", ZERO),
    **rules(_MAPPED, "", "device nvme_path", OFFLOAD_PARAM),
    **rules(_MAPPED, "", "device nvme_path", OFFLOAD_OPTIMIZER),
    **rules(_MAPPED, "", ("optimizer.type", "scheduler.type")),
    **rules(_MAPPED, "", "lr betas eps weight_decay momentum adam_w_mode muon_lr adam_lr", OPTIMIZER),
    **rules(_MAPPED, "", "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps", SCHEDULER),
    **rules(_MAPPED, "", "warmup_min_ratio cos_min_ratio", SCHEDULER),
    **rules(_MAPPED, "", ("tensor_parallel.autotp_size", "pipeline.stages")),
    **rules(_MAPPED, "", "enabled output_path job_name", "tensorboard."),
    **rules(_MAPPED, "", "enabled output_path job_name", "csv_monitor."),
    **rules(_MAPPED, "", ("wandb.enabled",)),
}

_IGNORED_KEYS = {
    f"{AUTOCAST}lower_precision_safe_modules": Rule(_IGNORED, "all parameters are stored and communicated in fp32"),
    **rules(
        _IGNORED,
        _SIZED,
        "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
        "allgather_bucket_size overlap_comm compute_grad_norm sub_group_size param_persistence_threshold "
        "model_persistence_threshold max_live_parameters max_reuse_distance module_granularity_threshold "
        "use_all_reduce_for_fetch_params allgather_sequential stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
        "ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment memory_efficient_linear "
        "override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory "
        "cpu_offload_use_pin_memory leaf_module mics_hierarchical_params_gather",
        ZERO,
    ),
    **rules(_IGNORED, _SIZED, "buffer_count buffer_size max_in_cpu pin_memory", OFFLOAD_PARAM),
    **rules(
        _IGNORED,
        _SIZED,
        "buffer_count buffer_size pin_memory pipeline_read pipeline_write pipeline fast_init super_offload "
        "cpuadam_cores_perc",
        OFFLOAD_OPTIMIZER,
    ),
    **rules(_IGNORED, _SIZED, "aio disable_allgather disable_python_gc graph_harvesting allgather_size"),
    **rules(
        _IGNORED,
        _SIZED,
        "dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend tensor_parallel tp "
        "tp_size tp_grain_size injection_policy_tuple partition_config preset_model keep_module_on_host "
        "replace_with_kernel_inject kernel_inject",
        "tensor_parallel.",
    ),
    **rules(
        _IGNORED,
        _SIZED,
        "partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
        "pipeline.",
    ),
    **rules(
        _IGNORED,
        "engine.export always gathers full weights",
        "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save gather_fp16_weights_on_model_save",
        ZERO,
    ),
    **rules(_IGNORED, _SAVED, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint", ZERO),
    **rules(
        _IGNORED,
        _SAVED,
        "tag_validation use_node_local_storage parallel_write writer checkpoint_serialization",
        "checkpoint.",
    ),
    **rules(_IGNORED, _SAVED, "datastates nebula"),
    **rules(
        _IGNORED,
        _REPORTS,
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level timers comms_logger "
        "flops_profiler autotuning comet comet_ml monitor_config",
    ),
    "wandb.project": Rule(_IGNORED, "set WANDB_PROJECT in the environment"),
    "wandb.team": Rule(_IGNORED, "set WANDB_ENTITY in the environment"),
    "wandb.group": Rule(_IGNORED, "set WANDB_RUN_GROUP in the environment"),
    **rules(_IGNORED, _SAME, "vocabulary_size zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
    **rules(_IGNORED, _SAME, "use_data_before_expert_parallelism seq_parallel_communication_data_type"),
    **rules(_IGNORED, _SAME, "auto_cast", FP16),
    **rules(_IGNORED, _SAME, "immediate_grad_update", BF16),
    **rules(_IGNORED, _SAME, "torch_adam set_grad_none fused foreach capturable differentiable", OPTIMIZER),
    **rules(_IGNORED, _SAME, "fp32_optimizer_states freeze_step cuda_aware comm_backend_name", OPTIMIZER),
    "optimizer.legacy_fusion": Rule(_IGNORED, _SAME),
    f"{OPTIMIZER}ns_method": Rule(_IGNORED, "set optimizer.muon.steps and coefficients of the Newton-Schulz iteration"),
    **rules(_IGNORED, "gradients are always averaged over the ranks", "prescale_gradients"),
    **rules(_IGNORED, "gradients are always averaged over the ranks", "gradient_predivide_factor"),
    **rules(_IGNORED, "gradients of embeddings are sent dense", "sparse_gradients"),
    **rules(_IGNORED, "set it on your own data loader", "dataloader_drop_last"),
    **rules(_IGNORED, "write compile: {modules: units} in a config of partita", "compile"),
    **rules(
        _IGNORED,
        "this section does not enable recomputation; activations.checkpoint: units in partita's config does",
        "activation_checkpointing",
    ),
}

_WARNING_KEYS = {
    f"{FP16}hysteresis": Rule(_WARNING, "partita's loss scale halves at every overflow", (2, "2")),
    f"{FP16}consecutive_hysteresis": Rule(_WARNING, "partita's loss scale halves at every overflow"),
    f"{FP16}min_loss_scale": Rule(_WARNING, "partita raises an error if the loss scale falls to 2**-10", (1, "1")),
    f"{BF16}check_grad_overflow": Rule(
        _WARNING, "gradients that are not finite never reach the weights (precision.nonfinite)", (True,)
    ),
    f"{BF16}check_overflow": Rule(
        _WARNING, "gradients that are not finite never reach the weights (precision.nonfinite)", (True,)
    ),
    f"{OFFLOAD_OPTIMIZER}ratio": Rule(
        _WARNING,
        "all optimizer states are offloaded; zero.offload.optimizer: auto keeps as many on the device as fit",
        (1, "1"),
    ),
    **rules(_WARNING, "quantized gradients use stochastic rounding, no error feedback", "zeropp_loco_param", ZERO),
    f"{ZERO}zero_quantized_nontrainable_weights": Rule(
        _WARNING, "frozen weights keep the dtype in which they were loaded"
    ),
    "checkpoint.load_universal": Rule(_WARNING, "partita convert checkpoint reads DeepSpeed's universal checkpoints"),
    **rules(_WARNING, "persistent buffers get the compute dtype, others keep theirs", "buffer_dtype", "data_types."),
    "data_types.keep_in_fp32_modules": Rule(
        _WARNING, "it applies to buffers; precision.keep_fp32 keeps modules and their buffers in fp32", ("auto",)
    ),
}

_ERROR_KEYS = {
    "gradient_allreduce_op": Rule(
        _ERROR,
        "write mean: partita averages gradients over the ranks; multiply the loss by the number of ranks",
        ("mean",),
    ),
    "managed_gradient_accumulation": Rule(
        _ERROR,
        "leave it out, set gradient_accumulation_steps to 1, and call engine.step() only at the end of each batch: "
        "gradients of several backwards accumulate",
        (True,),
    ),
    f"{ZERO}zenflow": Rule(_ERROR, "leave it out: updates of offloaded states overlap with the next forward"),
    f"{FP16}fp16_master_weights_and_grads": Rule(
        _ERROR, "use bf16 with precision.master: split, which takes 4 bytes per parameter and is exact"
    ),
    f"{BF16}bf16_master_weights_and_grads": Rule(
        _ERROR, "use precision.master: split, which takes 4 bytes per parameter and is exact"
    ),
    f"{BF16}bf16_optimizer_states": Rule(_ERROR, "use precision.moments: int8, which takes 2 bytes per parameter"),
    "amp": Rule(_ERROR, "use bf16, or fp16"),
    "data_types.param_dtype": Rule(_ERROR, "enable bf16 or fp16: partita stores parameters in the compute dtype"),
    **rules(_ERROR, _NUMERICS, "compression_training quantize_training eigenvalue progressive_layer_drop"),
    **rules(_ERROR, _NUMERICS, "weight_quantization"),
    **rules(_ERROR, _CURRICULUM, "curriculum_learning data_efficiency"),
    "sparse_attention": Rule(_ERROR, "leave it out, and set attention.pattern in a config of partita"),
    "elasticity": Rule(
        _ERROR,
        "leave it out, and start the run with torchrun --nnodes MIN:MAX: it resumes on any number of ranks",
    ),
    "hybrid_engine": Rule(_ERROR, "leave it out, and generate inside engine.gathered(model)"),
    "expert_parallel": Rule(_ERROR, "leave it out: experts are sharded over the data ranks like all parameters"),
    f"{OPTIMIZER}max_grad_norm": Rule(_ERROR, "write gradient_clipping at the top level instead"),
    f"{OPTIMIZER}bias_correction": Rule(_ERROR, "pass an optimizer without it to partita.initialize", (True,)),
    f"{OPTIMIZER}amsgrad": Rule(_ERROR, "pass torch.optim.AdamW(..., amsgrad=True) to partita.initialize"),
    f"{OPTIMIZER}nesterov": Rule(_ERROR, "pass torch.optim.SGD(..., nesterov=True) to partita.initialize"),
    f"{OPTIMIZER}dampening": Rule(_ERROR, "pass torch.optim.SGD(..., dampening=...) to partita.initialize"),
    f"{OPTIMIZER}maximize": Rule(_ERROR, "pass an optimizer with maximize=True to partita.initialize"),
    f"{SCHEDULER}last_batch_iteration": Rule(_ERROR, "leave it out: engine.load restores the schedule", (-1,)),
}

RULES: dict[str, Rule] = _MAPPED_KEYS | _IGNORED_KEYS | _WARNING_KEYS | _ERROR_KEYS
# Intended keys for common misspellings.
MEANT = {"max_grad_norm": "gradient_clipping"}
