"""accelerate's Accelerator, with an engine for each model that it prepares."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from partita.checkpoint.settings import apply_rates
from partita.comm import world
from partita.config.accelerate import read_parallelism
from partita.config.launchers import launch_environment
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.errors import ConfigError, PartitaError
from partita.integrations.data_rank import data_rank
from partita.integrations.huggingface.arguments import Argument, check_equal, merged, precision_of
from partita.integrations.huggingface.engines import Engines, accumulates_unsharded
from partita.integrations.huggingface.generation import hook_generation
from partita.integrations.huggingface.optimizer import EngineOptimizer
from partita.integrations.huggingface.prepared import PreparedModel
from partita.integrations.huggingface.saving import saved_weights
from partita.integrations.huggingface.sharing import SharedScheduler, Sharing
from partita.memory.accelerator import HOST, device_type

CHECKPOINT = "partita"  # the folder of an engine's checkpoints in one of accelerate's or the Trainer's
Source = str | Path | Mapping[str, Any] | Config | None
_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


class Accelerator(accelerate.Accelerator):
    """An Accelerator whose models train on partita. ``prepare`` returns the model itself, not a wrapper.

    Ranks that share a model (``parallel.tensor``, ``parallel.sequence``) receive the same samples, which count once in
    gathered or summed values. Attributes: ``engines``; ``data_rank``, this rank's data-parallel position.

    Args:
        partita_config: a YAML or JSON file, a mapping, or a :class:`partita.Config`; None: the class's default, or all
            defaults. Omit keys that are also arguments of the Accelerator (mixed precision, accumulation), or omit the
            arguments: ``gradient_accumulation_steps`` of 1 means ``batch.accumulate`` of the config.
        partita_values: additional configuration values, by key.
        for_trainer: the loop is partita's Trainer, which passes full batches to ``engine.train_batch``, as pipelines
            need them, and keeps its engine from one training to the next.
        **kwargs: accelerate's own arguments. The sizes of ``parallelism_config`` become ``parallel`` of the config.

    Raises:
        ConfigError: a value is given twice and differs, or another library would shard the model.
    """

    default_config: Source = None

    def __init__(
        self,
        *args: Any,
        partita_config: Source = None,
        partita_values: Mapping[str, object] | None = None,
        for_trainer: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_no_other_library(kwargs)
        config = load_config(partita_config if partita_config is not None else self.default_config)
        if (parallelism := kwargs.pop("parallelism_config", None)) is not None:
            config = _with_parallelism(config, parallelism)
        if not args and device_type() == HOST.type:
            kwargs.setdefault("cpu", True)  # without it, accelerate does not recognize several processes on the CPU
        super().__init__(*args, **kwargs)
        self.gradient_accumulation_steps: int
        self._models: list[nn.Module]
        self._optimizers: list[Optimizer]
        self._save_model_state_pre_hook: OrderedDict[int, Any]
        self._load_model_state_pre_hook: OrderedDict[int, Any]
        if self.distributed_type in _OTHERS:
            raise _another_library(self.distributed_type.value)
        _check_ranks(self.num_processes)
        steps = self.gradient_accumulation_steps
        if steps > 1:
            check_equal(config, [Argument("batch.accumulate", "gradient_accumulation_steps", steps)])
        precision = precision_of(config, self.mixed_precision)
        # The engine casts and scales the loss; accelerate only runs autocast if it is requested.
        self.native_amp = precision.autocast
        self.scaler = None
        batch = {"batch.accumulate": steps} if steps > 1 else {}
        settings = merged(config, batch | dict(partita_values or {}) | self._compilation(config))
        resolved = resolve(settings, self.num_processes, self.device.type)
        mesh = resolved.mesh
        if steps == 1 and "batch.accumulate" not in (partita_values or {}):
            self.gradient_accumulation_steps = resolved.batch.accumulate
        self._must_accumulate = self.gradient_accumulation_steps != steps
        self.num_stages = mesh.pipeline
        self.data_rank = data_rank(mesh, self.process_index, "accelerate's loop", trains_by_batch=for_trainer)
        self._sharing = Sharing(self.data_rank)
        batch_by_engine = settings if mesh.pipeline > 1 else _without_batch(settings)
        self.engines = Engines(batch_by_engine, precision.compute, self.device, has_scheduler=for_trainer)
        self._schedule = config.schedule
        self._for_trainer = for_trainer
        # Prepared models without a prepared optimizer, and the hooks that move them to the device.
        self._waiting = dict[nn.Module, RemovableHandle]()

    def _compilation(self, config: Config) -> dict[str, object]:
        """Return the values of ``compile`` that the arguments ask for, and keep accelerate from compiling the models.

        Raises:
            ConfigError: the arguments have options of the backend, which the config does not have.
        """
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO or plugin.disable:
            return {}
        if plugin.options:
            raise ConfigError(
                "dynamo_plugin: partita compiles the model's blocks itself, without options of the backend: leave "
                "options out, or compile the blocks before they are prepared (block.compile(options=...))"
            )
        backend, plugin.backend = plugin.backend.value.lower(), DynamoBackend.NO
        values = {"modules": "units", "backend": backend, "mode": plugin.mode, "dynamic": plugin.dynamic}
        return {f"compile.{key}": value for key, value in values.items() if key not in config.compile.model_fields_set}

    # ------------------------------------------------------------------ preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers; models are returned themselves, with hooks.

        The engine of a model that trains is created when its optimizer is prepared, in this call or in a later one.
        """
        models = [item for item in args if isinstance(item, nn.Module)]
        for model in models:
            if self.engines.of(model) is None and _trains(model):
                self._wait_for_optimizer(model)
        for item in args:
            if isinstance(item, Optimizer) and not isinstance(item, EngineOptimizer):
                self._match(item)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model; with ``evaluation_mode``, a model that does not train, such as a reference model."""
        prepared = self.engines.of(model)
        if prepared is None and not (evaluation_mode or not _trains(model)):
            self._wait_for_optimizer(model)
            return model
        if prepared is None:
            prepared = self.engines.freeze(model)
            hook_generation(prepared.engine)
        wrapped: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return wrapped

    def _wait_for_optimizer(self, model: nn.Module) -> None:
        """Note a model whose optimizer may be prepared later. Until then, its first forward moves it to the device."""

        def to_device(module: nn.Module, args: Any) -> None:
            module.to(self.device)

        if model not in self._waiting:
            self._waiting[model] = model.register_forward_pre_hook(to_device)

    def _stop_waiting(self, model: nn.Module) -> None:
        if (hook := self._waiting.pop(model, None)) is not None:
            hook.remove()

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Prepare the optimizer of a model that was prepared earlier or in the same call."""
        if isinstance(optimizer, EngineOptimizer):
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        prepared = self.engines.with_optimizer(optimizer) or self._match(optimizer)
        wrapped = EngineOptimizer(prepared.engine)
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """Prepare a scheduler.

        Raises:
            ConfigError: it is a ReduceLROnPlateau, whose metric could differ between ranks; or the configuration also
                has a schedule.
        """
        if self._schedule.model_fields_set:
            raise ConfigError(
                f"accelerator.prepare: a {type(scheduler).__name__}, but the config also has a schedule "
                f"({self._schedule.name}): leave one of the two out"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "accelerator.prepare: ReduceLROnPlateau depends on a metric, which may differ between the ranks; leave "
                "it out of prepare, and call its step with a metric that was gathered from all ranks"
            )
        return SharedScheduler(super().prepare_scheduler(scheduler), self.data_rank)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader; ranks with the same data coordinate read the same samples."""
        if self.data_rank.copies == 1:
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        with self._sharing.loaders(self.dispatch_batches):
            return super().prepare_data_loader(data_loader, *args, **kwargs)

    def _match(self, optimizer: Optimizer) -> PreparedModel:
        """Create an engine for the prepared model whose parameters the optimizer updates."""
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._waiting:
            if any(id(parameter) in wanted for parameter in model.parameters()):
                self._stop_waiting(model)
                prepared = self.engines.train(model, optimizer)
                hook_generation(prepared.engine)
                super().prepare_model(model, device_placement=False, evaluation_mode=True)
                return prepared
        raise ConfigError(
            "accelerator.prepare: the optimizer's parameters belong to no prepared model without an optimizer; prepare "
            "a model together with its optimizer (one optimizer per model)"
        )

    # ------------------------------------------------------------------- training

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run a micro-batch inside: the optimizer steps with the last one of a batch."""
        self._must_accumulate = False
        with super().accumulate(*models):
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss, averaged over ranks and accumulation steps, and accumulate them.

        Raises:
            PartitaError: there is no optimizer yet, or the config has an accumulation that the loop does not make.
        """
        if self._must_accumulate:
            raise PartitaError(
                f"accelerator.backward: the config has {self.gradient_accumulation_steps} micro-batches per step "
                "(batch.accumulate), but the loop does not accumulate: run each one inside 'with "
                "accelerator.accumulate(model):', or leave batch.accumulate out"
            )
        for optimizer in self._of_engines:
            optimizer.gradients_added()
        prepared = self.engines.the_trained()
        if self._waiting and not any(one.trains for one in self.engines):
            name = type(next(iter(self._waiting))).__name__
            raise PartitaError(
                f"accelerator.backward: the prepared {name} has no optimizer yet, so its gradients would not be "
                "reduced; prepare its optimizer, too, before the first backward"
            )
        loss = loss / self.gradient_accumulation_steps
        if prepared is not None and not kwargs:
            prepared.engine.backward(loss)
            return
        if any(one.trains and one.engine.config.precision.compute == "fp16" for one in self.engines):
            raise PartitaError(
                "accelerator.backward: under fp16 each engine scales its own loss: expected one model that trains, and "
                "no additional arguments; use bf16"
            )
        loss.backward(**kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Skip gradient reduction inside, if gradients are stored unsharded between micro-batches."""
        prepared = self.engines.of(model)
        skips = prepared is not None and self.num_stages == 1 and accumulates_unsharded(prepared.engine)
        with prepared.engine.no_sync() if prepared is not None and skips else nullcontext():
            yield

    def clip_grad_norm_(
        self, parameters: nn.Parameter | Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the gradients in the next step; return their norm before clipping."""
        items = _listed(parameters)
        prepared = self.engines.with_parameters(items, "clip_grad_norm_")
        if prepared is None:
            norm: Tensor = super().clip_grad_norm_(items, max_norm, norm_type)
            return norm
        if norm_type != 2:
            raise PartitaError(f"clip_grad_norm_: expected norm_type 2 (the gradients' 2-norm); got {norm_type}")
        config = prepared.engine.config
        check_equal(config, [Argument("clip_grad_norm", "max_norm of clip_grad_norm_", float(max_norm))])
        optimizer = next(one for one in self._of_engines if one.optimizer is prepared.engine.optimizer)
        return optimizer.clip(max_norm)

    @property
    def _of_engines(self) -> list[EngineOptimizer]:
        """The prepared optimizers that belong to engines."""
        return [optimizer for optimizer in self._optimizers if isinstance(optimizer, EngineOptimizer)]

    def clip_grad_value_(self, parameters: nn.Parameter | Iterable[nn.Parameter], clip_value: float) -> None:
        """Clip gradients by value; not available for an engine's model."""
        items = _listed(parameters)
        if self.engines.with_parameters(items, "clip_grad_value_") is not None:
            raise PartitaError("clip_grad_value_: gradients are in an engine's buffers; use clip_grad_norm_")
        super().clip_grad_value_(items, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the engine unscales gradients when it clips or steps."""

    def gather(self, tensor: Any) -> Any:
        """Return the concatenated tensors of all data-parallel positions."""
        return self._sharing.one_per_data_rank(super().gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the result of :meth:`gather` without the samples that pad the last batch."""
        with self._sharing.objects_one_per_data_rank():
            return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean over all data-parallel positions."""
        own = self._sharing.term_of_sum(tensor) if reduction == "sum" else tensor
        return super().reduce(own, reduction, scale)

    # --------------------------------------------------------------------- saving

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's full state dict on rank 0; empty on other ranks. Every rank calls this."""
        prepared = self.engines.of(model)
        if prepared is not None:
            return prepared.state_dict()
        values: dict[str, Any] = super().get_state_dict(model, unwrap)
        return values

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Save everything that was prepared; each engine's states become a partita checkpoint in the folder.

        Hooks (``register_save_state_pre_hook``) receive all prepared models and their weights, which are unsharded on
        rank 0.
        """
        with self._without_engines():
            location = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        for number, prepared in enumerate(self.engines):
            prepared.engine.save(Path(location) / _folder(number))
            prepared.engine.wait_for_checkpoint()
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load what :meth:`save_state` saved, with any number of ranks, stage and tiers.

        Hooks (``register_load_state_pre_hook``) receive all prepared models, unsharded. Models with engines are always
        loaded, after the hooks.
        """
        with self._without_engines():
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        folder = Path(input_dir or _newest(Path(self.project_dir) / "checkpoints")).expanduser()
        for number, prepared in enumerate(self.engines):
            restored = prepared.engine.load(folder / _folder(number))
            for scheduler in self._schedulers_of(prepared.engine.optimizer):
                apply_rates(restored.changes, prepared.engine.optimizer, scheduler)

    def _schedulers_of(self, optimizer: Optimizer) -> list[LRScheduler]:
        """Return the schedulers of an optimizer that accelerate loads: prepared, or registered for checkpointing."""
        found = [getattr(each, "scheduler", each) for each in (*self._schedulers, *self._custom_objects)]
        return [each for each in found if isinstance(each, LRScheduler) and _optimizer_of(each) is optimizer]

    @contextmanager
    def _without_engines(self) -> Iterator[None]:
        """Hide models and optimizers of engines from accelerate inside the block; hooks still receive all of them."""
        models, optimizers = self._models, self._optimizers
        saving, loading = self._save_model_state_pre_hook, self._load_model_state_pre_hook
        self._models = [model for model in models if self.engines.of(model) is None]
        self._optimizers = [one for one in optimizers if not isinstance(one, EngineOptimizer)]
        # One hook calls all others, so that models are gathered once. Without hooks, there is none.
        before_saving = {0: partial(self._before_saving, models, saving)} if saving else {}
        before_loading = {0: partial(self._before_loading, models, loading)} if loading else {}
        self._save_model_state_pre_hook = OrderedDict[int, Any](before_saving)
        self._load_model_state_pre_hook = OrderedDict[int, Any](before_loading)
        try:
            yield
        finally:
            self._models = models
            self._optimizers = optimizers
            self._save_model_state_pre_hook = saving
            self._load_model_state_pre_hook = loading

    def _before_saving(
        self,
        prepared: list[nn.Module],
        hooks: Mapping[int, Any],
        others: list[nn.Module],
        weights: list[Any],
        folder: str,
    ) -> None:
        """Call hooks with all models. accelerate saves the ``weights`` that they do not remove, except those of
        engines.
        """
        own = dict(zip(map(id, others), weights, strict=True))
        with ExitStack() as stack:
            found = {id(m): stack.enter_context(saved_weights(one)) for m in prepared if (one := self.engines.of(m))}
            every = [own.get(id(model), found.get(id(model))) for model in prepared]
            for hook in hooks.values():
                hook(list(prepared), every, folder)
        remaining = set(map(id, every))
        weights[:] = [value for value in weights if id(value) in remaining]

    def _before_loading(
        self, prepared: list[nn.Module], hooks: Mapping[int, Any], others: list[nn.Module], folder: str
    ) -> None:
        """Call hooks with all models. accelerate loads the models that they do not remove, except those of engines."""
        every = list(prepared)
        with ExitStack() as stack:
            for model in prepared:
                if (one := self.engines.of(model)) is not None:
                    stack.enter_context(one.engine.gathered(modify=True))
            for hook in hooks.values():
                hook(every, folder)
        remaining = set(map(id, every))
        others[:] = [model for model in others if id(model) in remaining]

    # ------------------------------------------------------------------------ end

    def free_memory(self, *objects: Any) -> Any:
        """Release everything that was prepared. Close the engines of the given models; of all, if nothing is given."""
        models = [item for item in objects if isinstance(item, nn.Module)]
        if not objects and not self._for_trainer:
            models = [*self._waiting, *(prepared.engine.module for prepared in self.engines)]
        for model in models:
            self._stop_waiting(model)
        self.engines.close(model for model in models if self.engines.of(model) is not None)
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Close all engines, the trackers and the process group."""
        self.engines.close()
        super().end_training()


def _optimizer_of(scheduler: LRScheduler) -> Any:
    """Return the optimizer of a scheduler, without accelerate's wrapper."""
    return getattr(scheduler.optimizer, "optimizer", scheduler.optimizer)


def _trains(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _listed(parameters: nn.Parameter | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)


def _folder(number: int) -> str:
    return CHECKPOINT if number == 0 else f"{CHECKPOINT}_{number}"


def _newest(folder: Path) -> Path:
    """Return the folder with the highest number."""
    return max(folder.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))


def _without_batch(config: Config) -> Config:
    """Return the config without batch sizes: the training loop sets them, and each engine step ends a batch."""
    return load_config(config.model_dump(exclude_unset=True, exclude={"batch"}))


def _with_parallelism(config: Config, parallelism: Any) -> Config:
    """Return the config with the sizes of an ``accelerate.ParallelismConfig``.

    Raises:
        ConfigError: the config has another size.
    """
    launch = launch_environment(running=world.running())
    sizes = {name: size for name, size in vars(parallelism).items() if name.endswith("_size")}
    sections: Any = read_parallelism(sizes, launch.world_size, launch.local_world_size).settings
    values = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    check_equal(config, [Argument(key, "the size in ParallelismConfig", value) for key, value in values.items()])
    return merged(config, values)


def _check_ranks(num_processes: int) -> None:
    """Check that accelerate and the launcher agree on the number of processes."""
    ranks = launch_environment(running=world.running()).world_size
    if ranks != num_processes:
        raise ConfigError(
            f"accelerate has {num_processes} processes, but the launcher has started {ranks}: start the script with "
            "'partita run', or call partita.integrations.huggingface.activate() in its first line; on machines without "
            "an accelerator, its first PartialState, Accelerator (cpu=True) or TrainingArguments (use_cpu=True) decides"
        )


def _check_no_other_library(kwargs: Mapping[str, Any]) -> None:
    """Check that no other library would shard the model."""
    for name in ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"):
        if kwargs.get(name) is not None:
            raise _another_library(name)


def _another_library(name: str) -> ConfigError:
    return ConfigError(
        f"Accelerator: {name} cannot be combined with partita, which shards the model itself; leave it out, or start "
        "the script with 'partita run --accelerate FILE' or 'partita run --deepspeed FILE', which convert its "
        "configuration"
    )
