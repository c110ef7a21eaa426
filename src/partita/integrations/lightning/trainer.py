"""The strategy for Lightning's Trainer."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from partita.checkpoint.settings import apply_rates
from partita.config.schema import Config
from partita.engine.engine import Engine
from partita.errors import ConfigError, PartitaError
from partita.integrations.lightning import checkpoint as checkpoints
from partita.integrations.lightning import settings
from partita.integrations.lightning.module import EngineModule, start, start_frozen
from partita.integrations.lightning.precision import EnginePrecision
from partita.integrations.lightning.ranks import Ranks
from partita.memory import accelerator

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class PartitaStrategy(DDPStrategy):
    """A Trainer strategy that trains a LightningModule on partita, with DDP's processes, samplers and logging.

    Accumulation, clipping, precision, optimizer and schedulers are set by the Trainer and the module. If
    ``configure_optimizers`` returns None, the config's optimizer and schedule are used. A checkpoint is a folder, which
    loads at any stage and on any number of ranks; one with only weights is an ordinary file. The engine stays open
    after ``fit``, for ``test`` and ``save_checkpoint``, until the next ``fit``. With manual optimization
    ``training_step`` runs outside the model's forward: call ``self(...)`` in it.

    Attributes: ``engine``, once the Trainer has set the strategy up.

    Args:
        config: partita's config: a YAML or JSON file, a mapping, a :class:`partita.Config`, or None for all defaults.
        weights: a safetensors file or folder for a model that ``configure_model`` builds on the meta device.
        cluster_environment: the launcher of the processes, if Lightning cannot detect it.
        start_method: how Lightning starts the processes of a node, if no launcher has started them.

    Raises:
        ConfigError: the config is wrong, or sets something that Lightning controls.
    """

    strategy_name = "partita"
    optimizers: list[Optimizer]  # a property of Lightning's

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        weights: str | Path | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        start_method: StartMethod = "popen",
    ) -> None:
        self._config = settings.read(config)
        timeout = timedelta(seconds=self._config.communication.timeout_s)
        self._weights = None if weights is None else str(weights)
        self._engine_module: EngineModule | None = None
        super().__init__(cluster_environment=cluster_environment, timeout=timeout, start_method=start_method)
        self._ranks = Ranks(self, self._config)

    @property
    def engine(self) -> Engine:
        """The current engine.

        Raises:
            PartitaError: the Trainer has not set the strategy up.
        """
        return self._open().engine

    def _open(self) -> EngineModule:
        if self._engine_module is None:
            raise PartitaError(
                "PartitaStrategy has no engine yet: the Trainer creates it in fit, validate, test and predict"
            )
        return self._engine_module

    @property
    def precision_plugin(self) -> EnginePrecision:
        """The Trainer's precision plugin, adapted to the engine."""
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, given: FabricPrecision | None) -> None:
        self._precision = EnginePrecision(given or FabricPrecision(), self._config, self._open)

    # ---------------------------------------------------------------------- begin

    def setup_environment(self) -> None:
        """Connect to the other processes."""
        super().setup_environment()
        self._ranks.joined("Lightning's Trainer")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Sampler arguments for Lightning; ranks with the same data coordinate read the same samples."""
        return self._ranks.sampler_arguments

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make ``configure_model`` and ``trainer.init_module`` build on the host, or on meta with ``empty_init``.

        The engine moves what is stored on the device.
        """
        with torch.device("meta") if empty_init else accelerator.HOST:
            yield

    def setup(self, trainer: Trainer) -> None:
        """Create the engine; evaluation uses the engine that has trained the module, if there is one."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        engine_module = self._engine_module
        if engine_module is None or fits or engine_module.module is not self.lightning_module:
            self._end()
            config = self._config_with(trainer)
            engine_module = self._start_training(trainer, config) if fits else self._start_evaluation(config)
        self.model = self._engine_module = engine_module

    def _config_with(self, trainer: Trainer) -> Config:
        """Return the config with the values of the Trainer's arguments."""
        config = self.precision_plugin.config
        settings.check_clipping(config, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        return settings.with_accumulation(config, trainer.accumulate_grad_batches, "accumulate_grad_batches")

    def _start_training(self, trainer: Trainer, config: Config) -> EngineModule:
        module = self.lightning_module
        assert isinstance(module, LightningModule)
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        self.setup_optimizers(trainer)
        settings.check_schedule(config, bool(self.lr_scheduler_configs))
        given = self.optimizers[0] if self.optimizers else None
        engine_module = start(module, config, given, self.root_device, self._weights)
        self.optimizers = [engine_module.engine.optimizer]
        return engine_module

    def _start_evaluation(self, config: Config) -> EngineModule:
        assert self.lightning_module is not None
        return start_frozen(self.lightning_module, config, self.root_device, self._weights)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Call ``configure_optimizers``, which returns one optimizer, or None for the config's.

        Raises:
            ConfigError: it returns several optimizers.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*this fit will run with no optimizer")
            super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ConfigError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers; PartitaStrategy trains with one: "
                "use several parameter groups, or train each model with its own engine (partita.initialize, or "
                "fabric.setup for each)"
            )
        if isinstance(self.optimizers[0], _MockOptimizer):
            self.optimizers = []

    # ---------------------------------------------------------------------- train

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` inside its forward; with manual optimization outside, because it updates
        parameters.
        """
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return module.training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip gradient reduction, where possible, in backwards other than the last one of a batch."""
        with self._open().no_sync():
            yield

    # ---------------------------------------------------------------- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the engine, which loads the checkpoint, exists after setup."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engine restores the optimizer."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty mapping: the engine saves the weights."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an empty mapping: the engine saves the optimizer's states."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save the engine and Lightning's state as the folder ``filepath``; only weights as an ordinary file.

        Raises:
            PartitaError: the checkpoint cannot be written, or storage options are given for a folder.
        """
        path = Path(self.broadcast(filepath))
        if "optimizer_states" not in checkpoint:
            weights = self.engine.state_dict()
            super().save_checkpoint({**checkpoint, "state_dict": weights}, path, storage_options)
            return
        if storage_options is not None:
            raise PartitaError("storage_options: not available for PartitaStrategy, whose checkpoints are folders")
        checkpoints.save(self.engine, path, checkpoint)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder; for evaluation, only the weights of a folder or a file.

        Raises:
            PartitaError: training cannot resume from a file.
        """
        assert self.lightning_module is not None
        path, fits = Path(checkpoint_path), self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if path.is_dir():
            strict = self.lightning_module.strict_loading
            found: dict[str, Any]
            found, changed = checkpoints.load(
                self.engine, path, only_model=not fits, strict=strict, weights_only=weights_only
            )
            for scheduler in found.get("lr_schedulers", ()):
                apply_rates(changed, self.engine.optimizer, scheduler)
            return found
        if fits:
            raise PartitaError(
                f"'{path}' is not a folder that PartitaStrategy saved, so training cannot resume from it; to start "
                f"from its weights pass {type(self.lightning_module).__name__}.load_from_checkpoint('{path}') to fit"
            )
        file: dict[str, Any] = super().load_checkpoint(path, weights_only)
        return file

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a file; those of a folder are loaded already."""
        if checkpoint["state_dict"]:
            with self.engine.gathered(modify=True):
                super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: the engine has loaded the optimizer's states."""

    # ------------------------------------------------------------------------ end

    def on_exception(self, exception: BaseException) -> None:
        """Close the engine, and report the error to the ranks that wait for this one."""
        engine_module, self._engine_module = self._engine_module, None
        if engine_module is not None:
            engine_module.fail(exception)

    def teardown(self) -> None:
        """End fit or evaluation; parameters stay where the engine stores them."""
        if self._engine_module is not None:
            self.engine.wait_for_checkpoint()
        if isinstance(self.launcher, _MultiProcessingLauncher):  # this process sends the weights to its parent
            self._end()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _end(self) -> None:
        """Close the current engine, and restore the ordinary module."""
        if self._engine_module is not None:
            self._engine_module.close()
            self._engine_module = None
