"""transformers' Trainer, and every trainer derived from it, with an engine behind its accelerator."""

from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from partita.checkpoint.settings import apply_rates
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.engine.batches import LossCall
from partita.engine.engine import Engine
from partita.errors import ConfigError, PartitaError
from partita.integrations.huggingface.accelerator import CHECKPOINT, Accelerator, Source
from partita.integrations.huggingface.arguments import check_training_arguments, given, has_schedule, of_data_rank
from partita.integrations.huggingface.checkpoints import newest_on_rank_0, why_incomplete
from partita.integrations.huggingface.optimizer import EngineOptimizer
from partita.integrations.huggingface.patched import patched
from partita.integrations.huggingface.prepared import PreparedModel
from partita.integrations.huggingface.saving import keep_dtype, saved_weights
from partita.integrations.huggingface.training_arguments import SETTINGS, without_sharding
from partita.layout.blueprint import row_of
from partita.optim.build import build_schedule

_SCHEDULER = "scheduler.pt"


class Trainer(transformers.Trainer):
    """A Trainer whose model trains on partita.

    Args:
        partita_config: a YAML or JSON file, a mapping, or a :class:`partita.Config`, in place of the class's default;
            omit keys that TrainingArguments set (batch, clipping, precision, optimizer, schedule).
        *args: transformers' own arguments, like **kwargs.

    Raises:
        ConfigError: configuration and TrainingArguments differ, or contradict each other.
    """

    default_config: Source = None
    accelerator_class = Accelerator

    def __init__(self, *args: Any, partita_config: Source = None, **kwargs: Any) -> None:
        if partita_config is not None:
            self.default_config = partita_config
        self.optimizer: Optimizer | None
        self.lr_scheduler: Any  # None until it is created
        optimizer, scheduler = kwargs.get("optimizers", (None, None))
        self._makes_optimizer = optimizer is None
        self._makes_scheduler = scheduler is None
        self._pending = list[dict[str, Any]]()  # micro-batches of a pipeline's next batch
        with ExitStack() as self._during_init:
            super().__init__(*args, **kwargs)

    @property
    def _prepared(self) -> PreparedModel | None:
        found: PreparedModel | None = self.accelerator.engines.of(self.model)
        return found

    @property
    def _engine(self) -> Engine:
        prepared = self._prepared
        assert prepared is not None, "the Trainer prepares its model before it trains"
        return prepared.engine

    def create_accelerator_and_postprocess(self) -> None:
        args = self.args
        config = self._config = load_config(self._source())
        if getattr(args, SETTINGS, None) is not None:
            self._during_init.enter_context(without_sharding(args))
        check_training_arguments(config, args, own_optimizer=self._makes_optimizer)
        values = {
            "batch.micro": args.train_batch_size,
            "batch.accumulate": args.gradient_accumulation_steps,
            "clip_grad_norm": args.max_grad_norm or None,
        }
        if args.auto_find_batch_size:
            _check_unsharded(config, args)
        made = partial(self.accelerator_class, partita_config=config, partita_values=values, for_trainer=True)
        with patched(transformers.trainer, "Accelerator", made):
            super().create_accelerator_and_postprocess()
        if self._makes_scheduler:
            self.accelerator.engines.omit_section("schedule")  # create_scheduler handles it
        if self.accelerator.data_rank.copies > 1:
            _check_samples(type(self), self.accelerator.data_rank.copies)
        if self.accelerator.num_stages > 1:
            _check_loss(type(self), self.accelerator.num_stages)

    def get_tp_size(self) -> int:
        """Return the number of ranks that receive the same samples: pipeline x sequence x tensor."""
        copies: int = self.accelerator.data_rank.copies
        return copies

    def _get_num_items_in_batch(self, *args: Any) -> Any:
        """Undo the base class's division by :meth:`get_tp_size`: gathered values already count each sample once."""
        found = super()._get_num_items_in_batch(*args)
        return found if found is None else found * self.get_tp_size()

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader whose sampler and workers depend on the data rank only: ranks that share a model get the same
        samples.
        """
        with patched(self, "args", of_data_rank(self.args, self.accelerator.data_rank)):
            return super()._get_dataloader(*args, **kwargs)

    def _source(self) -> Source:
        """Return the configuration of the class, the constructor, or ``TrainingArguments(deepspeed=..., fsdp=...)``."""
        settings: Source = getattr(self.args, SETTINGS, None)
        if settings is not None and self.default_config is not None:
            raise ConfigError(
                "TrainingArguments(deepspeed=..., fsdp=...) and a configuration of partita are both given: leave one "
                "of the two out"
            )
        return settings if settings is not None else self.default_config

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the engine moves states to the device, on which the full model may not fit."""

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Return the schedule that the configuration sets, else the one of the arguments."""
        if self.lr_scheduler is None and has_schedule(self._config, self.args, num_training_steps):
            trained = optimizer or self.optimizer
            assert trained is not None, "the Trainer makes its optimizer first"
            self.lr_scheduler = build_schedule(trained, self._config.schedule)
            self._created_lr_scheduler = True
        scheduler: LRScheduler = super().create_scheduler(num_training_steps, optimizer)
        return scheduler

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model, and close the engine of the previous one."""
        if isinstance(self.model, nn.Module):
            self.accelerator.free_memory(self.model)
        model: nn.Module = super().call_model_init(trial)
        return model

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; before training, first create the engine with the optimizer, which training will need."""
        if self._prepared is None and any(parameter.requires_grad for parameter in self.model.parameters()):
            self.create_optimizer()
            _, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        return super().evaluation_loop(*args, **kwargs)

    # ---------------------------------------------------------------------- pipeline

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run a micro-batch's forward and backward; in a pipeline, those of a full batch with its last micro-batch.

        Returns:
            The loss. In a pipeline it is that of the batch, and 0 for the micro-batches before the last one.
        """
        if self.accelerator.num_stages == 1:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        model.train()
        self._pending.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), dtype=torch.float32, device=self.args.device)
        batch, self._pending = self._pending, []
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = self.compute_loss_func is not None or (
                self.model_accepts_loss_kwargs and num_items_in_batch is not None
            )
        num = self.args.gradient_accumulation_steps
        weight = num if scaled else num / len(batch)  # the engine divides by the number
        calls = [self._loss_call(model, inputs, num_items_in_batch, weight) for inputs in batch]
        # The last batch of an epoch may be shorter than the schedule; what is added has no gradient.
        calls += [self._loss_call(model, batch[-1], num_items_in_batch, 0.0)] * (num - len(batch))
        mean = self._engine.train_batch(calls)
        self.optimizer.stepped_ahead(self._engine.last_step)  # type: ignore[union-attr]
        return mean.to(self.args.device)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Evaluate a batch as the base class does; in a pipeline, only its loss.

        Raises:
            PartitaError: more than the loss is needed in a pipeline.
        """
        if self.accelerator.num_stages == 1:
            found: tuple[Any, Any, Any] = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return found
        if not prediction_loss_only:
            raise PartitaError(
                f"parallel.pipeline: {self.accelerator.num_stages}: an evaluation has only the loss, because the "
                "predictions are on the last stage: set prediction_loss_only=True in TrainingArguments, without "
                "compute_metrics"
            )
        inputs = self._prepare_inputs(inputs)
        num_items = self._get_num_items_in_batch([inputs], self.args.device)
        loss = self._engine.eval_batch([self._loss_call(model, inputs, num_items, 1.0)], local=True)
        return loss.to(self.args.device), None, None

    def _loss_call(self, model: nn.Module, inputs: dict[str, Any], num_items: Any, weight: float) -> LossCall:
        """Return a micro-batch whose loss :meth:`compute_loss` computes; it is multiplied by ``weight``."""

        def compute() -> Tensor:
            with self.compute_loss_context_manager():
                loss: Tensor = self.compute_loss(model, dict(inputs), num_items_in_batch=num_items)
            return loss * weight

        return LossCall(inputs, compute)

    # -------------------------------------------------------------------- resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as ``transformers.Trainer.train`` does; True resumes from the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            folder = Path(self.args.output_dir)
            resume_from_checkpoint = str(newest_on_rank_0(folder, self.args.process_index))
        elif resume_from_checkpoint and (reason := why_incomplete(Path(resume_from_checkpoint))):
            raise PartitaError(f"Can't find a valid checkpoint at '{resume_from_checkpoint}': {reason}")
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        self._engine.wait_for_checkpoint()
        return output

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Train without the gradients of a batch that an error has ended."""
        self._pending.clear()
        if self._prepared is not None and isinstance(self.optimizer, EngineOptimizer):
            self.optimizer.discard_batch()
        return super()._inner_training_loop(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Skip a partita checkpoint: the engine loads its weights later, with the optimizer's states."""
        if not (Path(resume_from_checkpoint) / CHECKPOINT).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        restored = self._engine.load(Path(checkpoint) / CHECKPOINT)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))
        apply_rates(restored.changes, self._engine.optimizer, self.lr_scheduler)

    def _load_best_model(self) -> None:
        self._engine.wait_for_checkpoint()
        states = Path(self.state.best_model_checkpoint) / CHECKPOINT
        if states.is_dir():
            self._engine.load(states, only_model=True)
            return
        with self._engine.gathered(modify=True):
            super()._load_best_model()

    # ---------------------------------------------------------------------- saving

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Gather the weights on all ranks, and write them on rank 0."""
        prepared = self._prepared
        with (
            saved_weights(prepared) if prepared is not None and state_dict is None else nullcontext(state_dict) as found
        ):
            super()._save(output_dir, found)
        if prepared is not None and self.args.should_save:
            keep_dtype(Path(output_dir or self.args.output_dir), prepared.dtypes)

    @property
    def _saves_in_background(self) -> bool:
        """True if checkpoints are written in the background.

        This is only on request, because ``on_save`` callbacks then find an incomplete folder; and never if a folder is
        uploaded at once, or replaces the last complete one.
        """
        asked = given(self._config, "checkpoint.background")
        return bool(asked) and self.args.save_total_limit != 1 and not self.args.push_to_hub

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._engine.save(Path(output_dir) / CHECKPOINT)  # waits for an earlier checkpoint in the background
        if not self._saves_in_background:
            self._engine.wait_for_checkpoint()
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)


def on_partita(trainer_class: type[transformers.Trainer], config: Source = None) -> type[transformers.Trainer]:
    """Return a trainer class that trains on partita: ``on_partita(SFTTrainer, "config.yaml")``.

    Args:
        trainer_class: transformers' Trainer, or a class derived from it.
        config: the default of its trainers; each may get another one as ``partita_config``.
    """
    bases = (trainer_class,) if issubclass(trainer_class, Trainer) else (Trainer, trainer_class)
    own = {"default_config": config, "__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__}
    return type(trainer_class.__name__, bases, own)


def _check_samples(kind: type[transformers.Trainer], copies: int) -> None:
    """Check that a trainer gets its samples from a loader, which gives the ranks that share a model the same ones.

    Raises:
        ConfigError: its class generates them.
    """
    if hasattr(kind, "_generate_and_score_completions"):
        raise ConfigError(
            f"parallel: {copies} ranks share a model, and each of them would generate other samples in "
            f"{kind.__name__}, which counts processes instead of data ranks: leave parallel out; zero.stage: 3 shards "
            "the model over all ranks"
        )


def _check_loss(kind: type[transformers.Trainer], num_stages: int) -> None:
    """Check that a trainer computes its loss from the model's output alone, which only the last stage has.

    Raises:
        ConfigError: its class computes the loss in another way.
    """
    for name in ("compute_loss", "training_step", "prediction_step"):
        owner = next(each for each in kind.__mro__ if each is not Trainer and name in vars(each))
        if owner is not transformers.Trainer:
            raise ConfigError(
                f"parallel.pipeline: {num_stages}: {owner.__name__}.{name} may read what only the last stage has: pass "
                "compute_loss_func to transformers' Trainer in its place, or use parallel.tensor and parallel.sequence"
            )


def _check_unsharded(config: Config, args: Any) -> None:
    row = row_of(resolve(config, args.world_size, args.device.type))
    if row.param_stored.shard_axes:
        raise ConfigError(
            "auto_find_batch_size with sharded parameters (zero.stage: 3): if a rank runs out of memory in a forward, "
            "the others hang in an all-gather; leave it out and set per_device_train_batch_size, or use zero.stage 2"
        )
