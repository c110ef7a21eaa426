"""Comparison of a small model's gradients in fp32 with those under autocast, the engine, accelerate and the Trainer."""

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import partita
from benchmarks._zoo_plain import PLAIN, Case
from partita.sharding.pytree import map_tensors, tensors_in

# Limit of partita's distance from fp32 (1 - cosine of the gradients), in units of autocast's distance.
FACTOR, SLACK = 1.5, 1e-6
# The device of models and batches.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Found:
    """The distance of gradients from those of fp32, as 1 - cosine, and an error if there was one."""

    distance: float
    problem: str = ""


def models() -> dict[str, Callable[[], Case]]:
    """Return all models by name, without those of transformers if it is not installed."""
    try:
        from benchmarks._zoo_transformers import TRANSFORMERS
    except ModuleNotFoundError:
        return dict(PLAIN)
    return {**PLAIN, **TRANSFORMERS}


@cache
def autocast_of(name: str, *, rounded: bool = False) -> Found:
    """Compute the gradients under ``torch.autocast`` with fp32 parameters. Outputs are cast to fp32.

    Args:
        rounded: if True, round the parameters to bf16 first, as storage in 16 bits does.
    """
    case = _made(name)
    if rounded:
        with torch.no_grad():
            for param in case.model.parameters():
                param.copy_(param.bfloat16())

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return map_tensors(case.model(*args, **kwargs), lambda x: x.float() if x.is_floating_point() else x)

    return _judged(name, lambda: _plain_gradients(case, forward), None)


def engine_of(name: str, stage: int, mode: str = "mixed", axis: str = "data") -> Found:
    """Compute the gradients with the engine. All ranks have the same batch.

    Args:
        axis: the mesh axis along which all ranks are.
    """
    case = _made(name)

    def gradients() -> Gradients:
        config: dict[str, Any] = {"zero": {"stage": stage}, "precision": {"compute": "bf16", "mode": mode}}
        if axis != "data":
            config["parallel"] = {axis: int(os.environ["WORLD_SIZE"])}
        with partita.initialize(case.model, config) as engine:
            engine.backward(_loss_of(case, _run(case, engine)))
            return {name: grad for name in _trained(case) if (grad := engine.gradient(name)) is not None}

    watches = mode != "cast" and axis == "data"  # mode "cast" casts the arguments, and other axes slice them
    return _judged(name, gradients, Probe(case) if watches else None)


def _reset_accelerate() -> None:
    """Reset accelerate's global state, which may be from a run on another number of ranks."""
    from accelerate.state import AcceleratorState, GradientState  # optional dependency

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerate_of(name: str, stage: int) -> Found:
    """Compute the gradients through accelerate."""
    from partita.integrations.huggingface import Accelerator  # needs an optional dependency

    _reset_accelerate()
    case = _made(name)

    def gradients() -> Gradients:
        accelerator = Accelerator(
            mixed_precision="bf16", cpu=DEVICE.type == "cpu", partita_config={"zero": {"stage": stage}}
        )
        model, _ = accelerator.prepare(case.model, torch.optim.SGD(case.model.parameters(), lr=0.0))
        accelerator.backward(_loss_of(case, _run(case, model)))
        (engine,) = (held.engine for held in accelerator.engines)
        found = {name: grad for name in _trained(case) if (grad := engine.gradient(name)) is not None}
        engine.zero_grad()
        accelerator.free_memory()
        return found

    return _judged(name, gradients, Probe(case))


def trainer_of(name: str, stage: int) -> Found:
    """Compute the gradients through the Trainer, for models that return a loss."""
    from transformers import TrainerCallback, TrainingArguments  # optional dependency

    from partita.integrations.huggingface import Trainer

    _reset_accelerate()
    case, gradients = _made(name), Gradients()

    class Collect(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (engine,) = (held.engine for held in trainer.accelerator.engines)
            gradients.update({name: g for name in _trained(case) if (g := engine.gradient(name)) is not None})

    with tempfile.TemporaryDirectory() as folder, _quietly():
        arguments = TrainingArguments(
            folder, max_steps=1, bf16=True, use_cpu=DEVICE.type == "cpu", report_to=[], disable_tqdm=True,
            save_strategy="no", optim="sgd", learning_rate=0.0, logging_strategy="no", remove_unused_columns=False,
            max_grad_norm=0.0, average_tokens_across_devices=False,
        )  # fmt: skip

        def collated(_: Any) -> dict[str, Any]:
            return map_tensors(case.kwargs, Tensor.cpu)

        trainer = Trainer(
            model=case.model,
            args=arguments,
            train_dataset=[{"at": i} for i in range(64)],
            data_collator=collated,
            callbacks=[Collect()],
            partita_config={"zero": {"stage": stage}},
        )

        def run() -> Gradients:
            torch.manual_seed(1)
            trainer.train()
            return gradients

        return _judged(name, run, Probe(case))


def is_close(found: Found, autocast: Found, factor: float = FACTOR) -> bool:
    """Return True if gradients are as close to those of fp32 as autocast's, or if autocast fails."""
    return bool(autocast.problem) or (not found.problem and found.distance <= factor * autocast.distance + SLACK)


def failures(names: Iterable[str], way: str, stage: int) -> list[str]:
    """Return the models whose gradients are farther from fp32 than autocast's, with and without rounded parameters.

    Args:
        way: a key of :data:`WAYS`.
    """
    found = []
    for name in names:
        mine = WAYS[way](name, stage)
        # With split layers, each rank rounds its sum of products before the sums are added.
        factor = 2 * FACTOR if way == "tensor" else FACTOR
        if not any(is_close(mine, autocast_of(name, rounded=rounded), factor) for rounded in (False, True)):
            found.append(f"{name}: {mine.problem or f'1 - cosine {mine.distance:.1e}'}")
    return found


class Probe:
    """Check, inside all wrappers, that a model's forward receives its arguments with unchanged dtypes and values."""

    def __init__(self, case: Case) -> None:
        self._given = [tensor.clone() for tensor in tensors_in((case.args, case.kwargs))]
        self.problem = ""
        own = case.model.forward

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            got = list(tensors_in((args, {key: kwargs[key] for key in case.kwargs if key in kwargs})))
            for mine, theirs in zip(got, self._given, strict=True):
                if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
                    self.problem = f"an argument in {theirs.dtype} was {mine.dtype} in forward, or of other values"
            return own(*args, **kwargs)

        case.model.forward = forward  # type: ignore[method-assign]


def _made(name: str) -> Case:
    torch.manual_seed(0)
    with DEVICE:
        return models()[name]()


def _trained(case: Case) -> list[str]:
    return [name for name, param in case.model.named_parameters() if param.requires_grad]


def _run(case: Case, forward: Callable[..., Any]) -> Any:
    torch.manual_seed(1)
    with DEVICE:
        output = forward(*case.args, **case.kwargs)
    if narrow := {x.dtype for x in tensors_in(output) if x.is_floating_point()} - {torch.float32}:
        raise TypeError(f"outputs are in {narrow}")
    return output


def _loss_of(case: Case, output: Any) -> Tensor:
    if case.loss is not None:
        with DEVICE:
            return case.loss(output)
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _plain_gradients(case: Case, forward: Callable[..., Any]) -> Gradients:
    _loss_of(case, _run(case, forward)).backward()
    params = case.model.named_parameters()
    return {name: param.grad for name, param in params if param.requires_grad and param.grad is not None}


@cache
def _true_gradients(name: str) -> Gradients:
    case = _made(name)
    return _plain_gradients(case, case.model)


def _judged(name: str, gradients: Callable[[], Gradients], probe: Probe | None) -> Found:
    true = _true_gradients(name)
    try:
        with _quietly():
            found = gradients()
    except Exception as error:  # record any error of the model
        return Found(2.0, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}")
    mine, theirs = (torch.cat([grads[key].double().flatten() for key in sorted(true)]) for grads in (found, true))
    distance = 1 - F.cosine_similarity(mine, theirs, 0).item()
    if not bool(mine.isfinite().all()):
        return Found(2.0, "gradients are not finite")
    return Found(distance, probe.problem if probe is not None else "")


@contextmanager
def _quietly() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("partita", "transformers")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


WAYS: dict[str, Callable[[str, int], Found]] = {
    "the engine": engine_of,
    "tensor": partial(engine_of, axis="tensor"),
    "sequence": partial(engine_of, axis="sequence"),
    "accelerate": accelerate_of,
    "the Trainer": trainer_of,
}
