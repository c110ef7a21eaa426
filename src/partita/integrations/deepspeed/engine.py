"""The engine of ``deepspeed.initialize``: DeepSpeed's calls and counters on one of partita's."""

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
from partita.integrations.deepspeed.elsewhere import ENGINE, missing_attribute
from partita.integrations.deepspeed.tags import Kept, TaggedCheckpoints
from partita.integrations.deepspeed.zero import ended


class DeepSpeedEngine:
    """Trains a model; ``step()`` is called after every micro-batch, and updates at the boundary of a batch.

    Attributes: ``module`` (the model, whose attributes are the engine's, too), ``optimizer`` and ``lr_scheduler`` (None
    where there is none), ``training_dataloader``; ``global_steps`` (batches, those whose update was left out among
    them), ``skipped_steps`` (these alone), ``global_samples`` and ``micro_steps``; ``device``, ``local_rank``,
    ``global_rank``, ``world_size`` and ``dp_world_size``.

    Args:
        engine: of partita, with the same model.
        resolved: what its configuration means on these ranks.
        local_rank: this process among those of its node.
        has: whether there is an ``optimizer``, and a ``scheduler``.
        loader: of ``training_data``.
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
        """The model's own forward; floating-point inputs are cast to the compute dtype."""
        return self._engine(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`__call__`."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of ``loss`` (a scalar), averaged over the ranks.

        Args:
            retain_graph: refused.
            scale_wrt_gas: divide by ``gradient_accumulation_steps()``, what is returned as well.

        Raises:
            PartitaError: there is no optimizer, ``loss`` is no scalar that depends on the parameters, or the graph is
                to be retained.
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
        """The loss for a ``backward()`` of its own: as it is, since partita divides by the accumulation itself.

        Raises:
            PartitaError: there is a loss scale (fp16).
        """
        if self.fp16_enabled():
            raise PartitaError("scale(loss): under fp16 call engine.backward(loss), which scales the loss")
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one of a batch, so that its :meth:`step` updates."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the boundary clip, update the parameters, zero the gradients, and step the scheduler.

        Raises:
            PartitaError: there is no optimizer; or ``lr_kwargs`` are for another scheduler than torch's.
        """
        self._check_optimizer("step")
        if lr_kwargs:
            raise PartitaError(f"engine.step(lr_kwargs={dict(lr_kwargs)}): torch's schedulers are stepped without any")
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
        """Whether the last :meth:`step` changed the parameters."""
        return self._stepped

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients add up on each rank without reducing them; legal at every stage."""
        return self._engine.no_sync()

    def zero_grad(self) -> None:
        """Drop the gradients collected so far; :meth:`step` has done that after an update.

        Raises:
            PartitaError: inside a batch, whose first gradients would be lost.
        """
        done = self.micro_steps % self.gradient_accumulation_steps()
        if done:
            raise PartitaError(
                f"engine.zero_grad() after micro-batch {done} of {self.gradient_accumulation_steps()}: the gradients "
                "collected so far would be lost; leave it out: step() zeroes gradients after each update"
            )
        self._engine.zero_grad()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one batch, and return its mean loss over micro-batches and ranks.

        Args:
            data_iter: an iterator over micro-batches (mappings, tuples or tensors, as the model takes them); None:
                ``training_data``, again and again.

        Raises:
            StopIteration: the iterators of all ranks are empty.
            PartitaError: it ends inside a batch, or the model returns no loss.
        """
        losses = [self._train_on(batch) for batch in self._draw(data_iter)]
        return self._engine.mean(torch.stack(losses).mean())

    def _train_on(self, batch: Any) -> Tensor:
        loss = loss_of(call(self, batch), batch, None)
        self.backward(loss)
        self.step()
        return loss.detach()

    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """The mean loss of one batch over micro-batches and ranks, in evaluation mode; takes what :meth:`train_batch`
        does.
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
                raise PartitaError("train_batch and eval_batch: give an iterator, or training_data to initialize")
            self._iterator = self._iterator or _repeated(self.training_dataloader)
            data_iter = self._iterator
        return list(draw(data_iter, self.gradient_accumulation_steps(), self._engine.each))

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the model's evaluation mode."""
        return self.train(False)

    # ------------------------------------------------------------------- looking

    def get_global_grad_norm(self) -> float | None:
        """The gradients' norm in the last batch, before clipping; None before the first, or where it is not known."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group in the next update."""
        return [float(group["lr"]) for group in self._engine.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each parameter group."""
        groups = self._engine.optimizer.param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def gradient_accumulation_steps(self) -> int:
        return self._resolved.batch.accumulate

    def train_batch_size(self) -> int:
        """Samples of one update, over all ranks."""
        return self._resolved.batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._resolved.batch.micro

    def zero_optimization_stage(self) -> int:
        return self._engine.config.zero.stage

    def zero_optimization(self) -> bool:
        """Whether any state is split."""
        return bool(self.zero_optimization_stage())

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0 where they are not."""
        return self._engine.config.clip_grad_norm or 0.0

    def fp16_enabled(self) -> bool:
        return self._resolved.compute_dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._resolved.compute_dtype == "bf16"

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes by itself."""
        return self._engine.config.precision.loss_scale == "dynamic"

    def loss_scale(self) -> float:
        """The configured loss scale; 0 where it is dynamic."""
        found = self._engine.config.precision.loss_scale
        return 0.0 if found == "dynamic" else float(found)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's state dict, whole, with master weights, on the host of rank 0; empty on the others."""
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
        """Save all that training goes on from, as ``step-N`` in the tag's folder below ``save_dir``; every rank calls
        this.

        Args:
            tag: the same on every rank; None: ``global_step`` and the number.
            client_state: plain values, which :meth:`load_checkpoint` returns.
            save_latest: make it the one that is loaded without a tag.
            exclude_frozen_parameters: has no effect: a checkpoint holds all parameters.

        Raises:
            PartitaError: on all ranks: it cannot be written, the tags differ, the batch is not complete, or
                client_state holds something that could not be loaded again.
        """
        kept = Kept(dict(client_state or {}), self.global_steps, self.global_samples, self.skipped_steps)
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
        """Take up what :meth:`save_checkpoint` or ``partita convert checkpoint`` wrote; every rank calls this.

        Args:
            tag: None: the one saved last with ``save_latest``; without any, a warning, and nothing is loaded.
            load_module_strict: refuse a checkpoint that lacks something, or has more.
            load_optimizer_states: off: the model's weights alone are taken.
            load_lr_scheduler_states: off: the scheduler stays as it is.
            load_module_only: the model's weights alone are taken.
            custom_load_fn: refused.

        Returns:
            The checkpoint's path, and the ``client_state`` given to :meth:`save_checkpoint`; None and None where there
            is none.

        Raises:
            PartitaError: on all ranks: it is damaged, of another model, or of DeepSpeed's own format; custom_load_fn is
                given.
        """
        if custom_load_fn is not None:
            raise PartitaError("load_checkpoint(custom_load_fn=): write in zero.GatheredParameters(modifier_rank=0)")
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
        """Write the whole model's state dict, in the compute dtype, as one file of ``torch.save``; every rank calls
        this.

        Raises:
            PartitaError: on all ranks: it cannot be written.
        """
        weights = self.module_state_dict(exclude_frozen_parameters)
        dtypes = {name: param.dtype for name, param in self.module.named_parameters(remove_duplicate=False)}
        weights = {name: value.to(dtypes[name]) if name in dtypes else value for name, value in weights.items()}
        self._checkpoints.write(Path(save_dir) / save_filename, lambda path: torch.save(weights, path))
        return True

    save_fp16_model = save_16bit_model

    # ----------------------------------------------------------------------- end

    def destroy(self) -> None:
        """End training, and the process groups that were started here."""
        ended(self._engine)
        self._engine.close()

    def _check_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise PartitaError(
                f"engine.{what}(): there is no optimizer: name one in the configuration, or pass it to initialize"
            )

    def __getattr__(self, name: str) -> Any:
        """What is the model's, as DeepSpeed has it."""
        module = self.__dict__.get("module")
        if module is not None and name not in ENGINE and hasattr(module, name):
            return getattr(module, name)
        raise missing_attribute(name)


def _repeated(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
