"""The engine that ``deepspeed.initialize`` returns: DeepSpeed's calls and counters on top of partita's engine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.config.resolve import Resolved
from partita.engine.batches import call, draw, loss_of
from partita.engine.engine import Engine
from partita.errors import PartitaError
from partita.integrations.deepspeed.tags import CheckpointExtras, TaggedCheckpoints
from partita.integrations.deepspeed.unsupported import ENGINE, missing_attribute
from partita.integrations.deepspeed.zero import ended


class DeepSpeedEngine:
    """An engine with DeepSpeed's interface. Call ``step()`` after every micro-batch; it updates at the end of a batch.

    Attributes: ``module`` (the model; its attributes can also be read from the engine), ``optimizer`` and
    ``lr_scheduler`` (None if there is none), ``training_dataloader``; ``global_steps`` (batches, including those with a
    skipped update), ``skipped_steps`` (skipped updates), ``global_samples`` and ``micro_steps``; ``device``,
    ``local_rank``, ``global_rank``, ``world_size`` and ``dp_world_size``.

    Args:
        engine: partita's engine of the model.
        resolved: the engine's configuration, resolved for these ranks.
        local_rank: this process's rank on its node.
        has: True for ``optimizer`` and ``scheduler`` if there is one.
        loader: the loader of ``training_data``.
    """

    def __init__(
        self, engine: Engine, resolved: Resolved, local_rank: int, has: Mapping[str, bool], loader: Any = None
    ) -> None:
        self.module: nn.Module = engine.module
        self.optimizer: Optimizer | None = engine.optimizer if has["optimizer"] else None
        self.lr_scheduler = engine.scheduler if has["scheduler"] else None
        self.training_dataloader = loader
        self.global_steps = self.skipped_steps = self.global_samples = self.micro_steps = 0
        self.device = engine.mesh.device
        self.local_rank = local_rank
        self.global_rank = engine.mesh.rank
        self.world_size = engine.mesh.num_ranks
        self.dp_world_size = engine.mesh.size("data")
        self._engine = engine
        self._resolved = resolved
        self._iterator: Iterator[Any] | None = None
        self._grad_norm: float | None = None
        self._stepped = False
        self._checkpoints = TaggedCheckpoints(engine)

    # ------------------------------------------------------------------ training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; floating-point inputs are cast to the compute dtype."""
        return self._engine(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, like :meth:`__call__`."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute the gradients of ``loss`` (a scalar) and accumulate them, averaged over the ranks.

        Args:
            retain_graph: must be False.
            scale_wrt_gas: divide the loss by ``gradient_accumulation_steps()``, also in the returned value.

        Raises:
            PartitaError: there is no optimizer, ``loss`` is not a scalar that depends on the parameters, or
                ``retain_graph`` is set.
        """
        self._check_optimizer("backward")
        if retain_graph:
            raise PartitaError(
                "engine.backward(retain_graph=True): add the losses of one graph, and call backward once on their sum"
            )
        num = self.gradient_accumulation_steps()
        self._engine.backward(loss if scale_wrt_gas else loss * num)
        return loss / num if scale_wrt_gas else loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss unchanged, for a direct ``loss.backward()``: the engine divides by the accumulation steps.

        Raises:
            PartitaError: there is a loss scale (fp16).
        """
        if self.fp16_enabled():
            raise PartitaError("scale(loss): under fp16 call engine.backward(loss), which scales the loss")
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one of a batch, where :meth:`step` updates."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the boundary clip, update the parameters, zero the gradients, and step the scheduler.

        Raises:
            PartitaError: there is no optimizer; or ``lr_kwargs`` are given, which torch's schedulers do not accept.
        """
        self._check_optimizer("step")
        if lr_kwargs:
            raise PartitaError(f"engine.step(lr_kwargs={dict(lr_kwargs)}): torch's schedulers take no arguments")
        boundary = self.is_gradient_accumulation_boundary()
        result = self._engine.step()
        self._stepped = result.stepped
        if boundary:
            self._grad_norm = result.grad_norm
            self.global_steps += 1
            self.skipped_steps += result.skipped
            self.global_samples += self.train_batch_size()
        self.micro_steps += 1

    def was_step_applied(self) -> bool:
        """Return whether the last :meth:`step` updated the parameters."""
        return self._stepped

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate on each rank without reduction; allowed at every stage."""
        return self._engine.no_sync()

    def zero_grad(self) -> None:
        """Discard the gradients accumulated so far; :meth:`step` has already done this after an update.

        Raises:
            PartitaError: a batch is in progress, whose first gradients would be lost.
        """
        done = self.micro_steps % self.gradient_accumulation_steps()
        if done:
            raise PartitaError(
                f"engine.zero_grad() after micro-batch {done} of {self.gradient_accumulation_steps()}: the accumulated "
                "gradients would be lost; leave it out: step() zeroes gradients after each update"
            )
        self._engine.zero_grad()

    def empty_partition_cache(self) -> None:
        """Do nothing: unsharded parameters use a buffer pool, and there is no cache to empty."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one batch, and return its mean loss over micro-batches and ranks.

        Args:
            data_iter: an iterator over micro-batches (mappings, tuples or tensors: the model's arguments); None:
                ``training_data``, repeated.

        Raises:
            StopIteration: the iterators of all ranks are empty.
            PartitaError: the iterator ends inside a batch, or the model returns no loss.
        """
        losses = [self._train_on(batch) for batch in self._draw(data_iter)]
        return self._engine.mean(torch.stack(losses).mean())

    def _train_on(self, batch: Any) -> Tensor:
        loss = loss_of(call(self, batch), batch, None)
        self.backward(loss)
        self.step()
        return loss.detach()

    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Return the mean loss of one batch over micro-batches and ranks, in evaluation mode.

        ``data_iter`` is that of :meth:`train_batch`.
        """
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                losses = [loss_of(call(self, batch), batch, None) for batch in self._draw(data_iter)]
        finally:
            self.module.train(training)
        return self._engine.mean(torch.stack(losses).mean())

    def _draw(self, data_iter: Iterator[Any] | None) -> list[Any]:
        if data_iter is None:
            if self.training_dataloader is None:
                raise PartitaError("train_batch, eval_batch: pass an iterator, or pass training_data to initialize")
            self._iterator = self._iterator or _repeated(self.training_dataloader)
            data_iter = self._iterator
        return list(draw(data_iter, self.gradient_accumulation_steps(), self._engine.each))

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the model."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the model to evaluation mode."""
        return self.train(False)

    # ---------------------------------------------------------------- inspection

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last batch before clipping; None before the first batch, or if unknown."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group for the next update."""
        return [float(group["lr"]) for group in self._engine.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each parameter group."""
        groups = self._engine.optimizer.param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def gradient_accumulation_steps(self) -> int:
        return self._resolved.batch.accumulate

    def train_batch_size(self) -> int:
        """Return the number of samples of one update, over all ranks."""
        return self._resolved.batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._resolved.batch.micro

    def zero_optimization_stage(self) -> int:
        return self._engine.config.zero.stage

    def zero_optimization(self) -> bool:
        """Return whether any training state is sharded (stage 1 or higher)."""
        return bool(self.zero_optimization_stage())

    def gradient_clipping(self) -> float:
        """Return the norm to which gradients are clipped; 0 if they are not clipped."""
        return self._engine.config.clip_grad_norm or 0.0

    def fp16_enabled(self) -> bool:
        return self._resolved.compute_dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._resolved.compute_dtype == "bf16"

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return self._engine.config.precision.loss_scale == "dynamic"

    def loss_scale(self) -> float:
        """Return the configured loss scale; 0 if it is dynamic."""
        found = self._engine.config.precision.loss_scale
        return 0.0 if found == "dynamic" else float(found)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the model's full state dict with master weights, on the host of rank 0; empty on other ranks."""
        return self._engine.state_dict(trainable=exclude_frozen_parameters)

    state_dict = module_state_dict

    # --------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the full training state as ``step-N`` in the tag's folder below ``save_dir``; every rank calls this.

        Args:
            tag: the same on every rank; None: ``global_step`` and the number of steps.
            client_state: serializable values, which :meth:`load_checkpoint` returns.
            save_latest: make this the checkpoint that is loaded without a tag.
            exclude_frozen_parameters: has no effect: a checkpoint contains all parameters.

        Raises:
            PartitaError: on all ranks: the checkpoint cannot be written, the tags differ, the batch is not complete, or
                client_state contains something that could not be loaded again.
        """
        kept = CheckpointExtras(dict(client_state or {}), self.global_steps, self.global_samples, self.skipped_steps)
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._checkpoints.save(Path(save_dir), name, kept, latest=save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of :meth:`save_checkpoint` or ``partita convert checkpoint``; every rank calls this.

        Args:
            tag: None: the checkpoint saved last with ``save_latest``; if there is none, a warning is given and nothing
                is loaded.
            load_module_strict: refuse a checkpoint with missing or additional entries.
            load_optimizer_states: False: load only the model's weights.
            load_lr_scheduler_states: False: do not change the scheduler.
            load_module_only: load only the model's weights.
            custom_load_fn: must be None.

        Returns:
            The checkpoint's path, and the ``client_state`` given to :meth:`save_checkpoint`; None and None if there is
            no checkpoint.

        Raises:
            PartitaError: on all ranks: the checkpoint is damaged, of another model, or in DeepSpeed's own format; or
                custom_load_fn is given.
        """
        if custom_load_fn is not None:
            raise PartitaError(
                "load_checkpoint(custom_load_fn=): write the parameters inside zero.GatheredParameters(modifier_rank=0)"
            )
        only_model = load_module_only or not load_optimizer_states
        before = self._engine.scheduler.state_dict() if not load_lr_scheduler_states else None
        found = self._checkpoints.load(
            Path(load_dir), None if tag is None else str(tag), only_model=only_model, strict=load_module_strict
        )
        if found is None:
            return None, None
        path, kept = found
        if before is not None:
            self._engine.scheduler.load_state_dict(before)
        if not only_model:
            self.global_steps = kept.global_steps
            self.global_samples = kept.global_samples
            self.skipped_steps = kept.skipped_steps
            self.micro_steps = 0
        return str(path), kept.client_state

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's full state dict, in the compute dtype, as one ``torch.save`` file; every rank calls this.

        Raises:
            PartitaError: on all ranks: the file cannot be written.
        """
        weights = self.module_state_dict(exclude_frozen_parameters)
        dtypes = {name: param.dtype for name, param in self.module.named_parameters(remove_duplicate=False)}
        weights = {name: value.to(dtypes[name]) if name in dtypes else value for name, value in weights.items()}
        self._checkpoints.write(Path(save_dir) / save_filename, lambda path: torch.save(weights, path))
        return True

    save_fp16_model = save_16bit_model

    # ----------------------------------------------------------------------- end

    def destroy(self) -> None:
        """End training, and destroy the process groups that the engine started."""
        ended(self._engine)
        self._engine.close()

    def _check_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise PartitaError(
                f"engine.{what}(): there is no optimizer: set one in the configuration, or pass it to initialize"
            )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, as DeepSpeed's engine does."""
        module = self.__dict__.get("module")
        if module is not None and name not in ENGINE and hasattr(module, name):
            return getattr(module, name)
        raise missing_attribute("engine", name, ENGINE)


def _repeated(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
