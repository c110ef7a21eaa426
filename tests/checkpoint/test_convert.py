"""Training continues from converted checkpoints of other libraries as if it had never stopped."""

import json
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from typer.testing import CliRunner, Result

import partita
import partita.integrations.deepspeed as deepspeed
from partita import PartitaError
from partita.checkpoint.external.convert import open_external
from partita.checkpoint.external.source import write
from partita.checkpoint.external.universal import CLIENT_STATE, COUNTERS
from partita.checkpoint.format.stored import open_stored
from partita.cli.main import app
from partita.config.schema import Schedule as ScheduleSection
from partita.huggingface.trained import read_model
from partita.optim.schedule import Schedule
from tests.kit.models import FAMILIES
from tests.kit.ranks import on_ranks

NUM_BEFORE, NUM_AFTER = 3, 3
LINEAR = {"name": "linear", "warmup_steps": 2, "total_steps": 9}
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6}


def convert(folder: Path, out: Path) -> Result:
    return CliRunner().invoke(app, ["convert", "checkpoint", str(folder), str(out)])


class Model(nn.Module):
    """Module with buffers and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).relu()) * self.scale
        return out


def loss_of(model: Any, step: int) -> Tensor:
    """Return the loss of a step, which is the same on every rank."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
    return (model(x) - 1.0).square().mean()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: weights with decay, biases and norms without."""
    params = dict(model.named_parameters())
    decayed = [param for name, param in params.items() if param.dim() > 1]
    others = [param for param in params.values() if param.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def linear(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return Schedule(optimizer, ScheduleSection(**LINEAR))  # type: ignore[arg-type]


def halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.5**step)


class Plain:
    """An uninterrupted run in plain PyTorch."""

    def __init__(self, schedule: Any) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = AdamW(groups_of(self.model), **SETTINGS)
        self.scheduler = schedule(self.optimizer)
        self.step = 0

    def train(self, num: int) -> list[float]:
        losses = []
        for _ in range(num):
            loss = loss_of(self.model, self.step)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
            self.step += 1
        return losses


def goes_on(folder: str, schedule: Any, stage: int, strict: bool) -> tuple[list[float], dict[str, Any], set[str]]:
    torch.manual_seed(1)
    made = Model()
    optimizer = AdamW(groups_of(made), **SETTINGS)
    config = {"zero": {"stage": stage}}
    with partita.initialize(made, config, optimizer=optimizer, scheduler=schedule(optimizer)) as engine:
        restored = engine.load(folder, strict=strict)
        assert restored.step == NUM_BEFORE
        losses = []
        for step in range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER):
            loss = loss_of(engine, step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, dict(engine.extra), set(restored.missing)


def check_goes_on(folder: Path, plain: Plain, schedule: Any, strict: bool = True) -> tuple[dict[str, Any], set[str]]:
    """Check that training continues on one rank and on two with the losses of the plain run; return the engine's extra
    state and the missing keys.
    """
    expected = plain.train(NUM_AFTER)
    found = [
        rank
        for num_ranks, stage in ((1, 1), (2, 3))
        for rank in on_ranks(num_ranks, goes_on, str(folder), schedule, stage, strict)
    ]
    for losses, *_ in found:
        assert losses == pytest.approx(expected, rel=1e-6)
    return found[-1][1:]


# ------------------------------------------------------------------------------------------------------- DeepSpeed


class DynamicLossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter = 512.0, 10, 3


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0


class ZeroStageEnum(IntEnum):
    weights = 3


@contextmanager
def pickled_as_deepspeed() -> Iterator[None]:
    """Pickle the classes above under their names in DeepSpeed."""
    scalers = "deepspeed.runtime.fp16.loss_scaler"
    places = {DynamicLossScaler: scalers, LossScaler: scalers, ZeroStageEnum: "deepspeed.runtime.zero.config"}
    own = {kind: kind.__module__ for kind in places}
    modules = [place.rsplit(".", cut)[0] for place in places.values() for cut in range(place.count(".") + 1)]
    with patch.dict(sys.modules, {name: ModuleType(name) for name in modules}):
        for kind, place in places.items():
            setattr(sys.modules[place], kind.__name__, kind)
            kind.__module__ = place
        try:
            yield
        finally:
            for kind, place in own.items():
                kind.__module__ = place


def write_universal(
    folder: Path, plain: Plain, stage: int, schedule: dict[str, Any], scaler: type = DynamicLossScaler, **client: Any
) -> None:
    """Write the files of ``deepspeed.checkpoint.ds_to_universal``, which differ at stage 3 and below it."""
    named, root = dict(plain.model.named_parameters()), folder / "zero"
    root.mkdir(parents=True)

    def save(name: str, state: str, value: Tensor) -> None:
        (root / name).mkdir(exist_ok=True)
        torch.save({"param": value, "cat_dim": 0} if stage < 3 else value.flatten(), root / name / f"{state}.pt")

    for name, param in named.items():
        kept = plain.optimizer.state.get(param, {})
        if not kept and stage == 3:
            continue  # frozen
        save(name, "fp32", param.detach().clone())
        for state in ("exp_avg", "exp_avg_sq") if kept else ():
            save(name, state, kept[state])
        if kept and stage < 3:
            torch.save(kept["step"], root / name / "step.pt")
    names = {id(param): name for name, param in named.items()}
    groups = [{**group, "params": [number]} for number, group in enumerate(plain.optimizer.param_groups)]
    shapes = [
        OrderedDict((names[id(param)], param.shape) for param in group["params"] if param.requires_grad)
        for group in plain.optimizer.param_groups
    ]
    for group in groups:
        group.pop("initial_lr", None)
    with pickled_as_deepspeed():
        found = {"loss_scaler": scaler(), "zero_stage": ZeroStageEnum(3), "param_groups": groups}
        torch.save(found, root / "optimizer_state.pt")
    frozen = {"scale": plain.model.scale.shape} if stage >= 2 else None
    run = {
        "module": plain.model.state_dict(),
        "buffer_names": [name for name, _ in plain.model.named_buffers()],
        "param_shapes": shapes,
        "frozen_param_shapes": frozen,
        "optimizer": None,
        "lr_scheduler": schedule,
        "global_steps": NUM_BEFORE + 1,
        "skipped_steps": 1,
        "global_samples": 20,
        "ds_config": {"scheduler": {"type": "WarmupDecayLR"}},
        "ds_version": "0.19.8",
        **client,
    }
    prefix = "mp_rank_00" if stage < 3 else "zero_pp_rank_0_mp_rank_00"
    torch.save(run, folder / f"{prefix}_model_states.pt")


@pytest.mark.parametrize("stage", [2, 3])
def test_universal(stage: int, tmp_path: Path) -> None:
    plain = Plain(linear)
    plain.train(NUM_BEFORE)
    state = {"last_batch_iteration": NUM_BEFORE - 1}
    write_universal(tmp_path / "run" / "step3_universal", plain, stage, state, epoch=7)
    (tmp_path / "run" / "latest_universal").write_text("step3_universal")
    shown = convert(tmp_path / "run", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert "tensors of DeepSpeed after 3 steps" in shown.output
    assert ("1 frozen parameters (scale) are only in the ranks' shards" in shown.output) == (stage == 3)
    extra, missing = check_goes_on(tmp_path / "out", plain, linear, strict=stage < 3)
    assert extra == {
        CLIENT_STATE: {"epoch": 7},
        COUNTERS: {"global_steps": 4, "global_samples": 20, "skipped_steps": 1},
    }
    assert missing == ({"model.scale"} if stage == 3 else set())


WARMUP = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 5}


def deepspeed_config() -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {**SETTINGS, "weight_decay": 0.1}}
    schedule = {"type": "WarmupLR", "params": WARMUP}
    return {"train_micro_batch_size_per_gpu": 5, "optimizer": optimizer, "scheduler": schedule}


def native_steps(engine: Any, first: int) -> list[float]:
    losses = []
    for step in range(first, first + NUM_BEFORE):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def converts_and_goes_on(folder: str) -> None:
    torch.manual_seed(0)
    engine = deepspeed.initialize(model=Model(), config=deepspeed_config())[0]
    native_steps(engine, 0)
    plain = Plain(halving)  # gets the engine's current weights and states
    plain.model.load_state_dict(engine.state_dict())
    plain.optimizer = AdamW(plain.model.parameters(), **SETTINGS | {"lr": engine.get_lr()[0]}, weight_decay=0.1)
    for name, param in plain.model.named_parameters():
        if param.requires_grad:
            plain.optimizer.state[param] = engine._engine.optimizer_state(name)
    write_universal(Path(folder) / "run", plain, 2, {"last_batch_iteration": NUM_BEFORE - 1}, epoch=7)
    expected, rates = native_steps(engine, NUM_BEFORE), engine.get_lr()
    engine.destroy()
    write(open_external(Path(folder) / "run", read_model), Path(folder) / "out")

    torch.manual_seed(1)
    engine = deepspeed.initialize(model=Model(), config=deepspeed_config())[0]
    with pytest.raises(PartitaError, match="convert it with 'partita convert checkpoint .*run .*run-partita"):
        engine.load_checkpoint(f"{folder}/run")
    path, client_state = engine.load_checkpoint(f"{folder}/out")
    assert (path, client_state) == (f"{folder}/out/step-3", {"epoch": 7})
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (4, 1, 20)
    assert native_steps(engine, NUM_BEFORE) == pytest.approx(expected, rel=1e-6)
    assert engine.get_lr() == pytest.approx(rates, rel=1e-12)
    engine.destroy()
    deepspeed.comm.destroy_process_group()


def test_universal_in_a_native_loop(tmp_path: Path) -> None:
    on_ranks(1, converts_and_goes_on, str(tmp_path), with_group=False)


def test_universal_with_a_torch_scheduler(tmp_path: Path) -> None:
    plain = Plain(halving)
    plain.train(NUM_BEFORE)
    write_universal(tmp_path / "run", plain, 1, plain.scheduler.state_dict())
    assert convert(tmp_path / "run", tmp_path / "out").exit_code == 0
    check_goes_on(tmp_path / "out", plain, halving)


def loss_scale_of(folder: str) -> float:
    made = Model()
    optimizer = AdamW(groups_of(made), **SETTINGS)
    config = {"precision": {"compute": "fp16", "initial_loss_scale": 128.0}}
    with partita.initialize(made, config, optimizer=optimizer, scheduler=linear(optimizer)) as engine:
        engine.load(folder)
        engine.backward(loss_of(engine, 0))
        return engine.step().loss_scale


@pytest.mark.parametrize(("scaler", "expected"), [(DynamicLossScaler, 512.0), (LossScaler, 128.0)])
def test_loss_scale_of_universal(scaler: type, expected: float, tmp_path: Path) -> None:
    """A checkpoint without a dynamic scale leaves the configured one."""
    plain = Plain(linear)
    plain.train(NUM_BEFORE)
    write_universal(tmp_path / "run", plain, 1, {"last_batch_iteration": 2}, scaler)
    convert(tmp_path / "run", tmp_path / "out")
    assert on_ranks(1, loss_scale_of, str(tmp_path / "out")) == [expected]


class Runs:
    def __reduce__(self) -> Any:
        return print, ("this ran",)


def test_pickles_beside_a_universal_checkpoint_are_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = Plain(linear)
    plain.train(NUM_BEFORE)
    write_universal(tmp_path / "run", plain, 1, {"last_batch_iteration": 2}, arguments=Runs())
    torch.save({"param_groups": [], "loss_scaler": Runs()}, tmp_path / "run" / "zero" / "optimizer_state.pt")
    shown = convert(tmp_path / "run", tmp_path / "out")
    assert shown.exit_code == 0
    said = " ".join(shown.output.split())
    assert "note: buffers, counters, scheduler and client state are not converted: checkpoint: '" in said
    assert (
        "note: settings of the optimizer's groups are not converted, the configured ones apply: checkpoint: '" in said
    )
    write_universal(tmp_path / "flat", plain, 3, {"last_batch_iteration": 2}, arguments=Runs())
    shown = convert(tmp_path / "flat", tmp_path / "out")
    assert (shown.exit_code, "is flat, and its shape is unknown" in " ".join(shown.output.split())) == (1, True)
    torch.save(Runs(), tmp_path / "run" / "zero" / "first.weight" / "exp_avg.pt")
    shown = convert(tmp_path / "run", tmp_path / "out")
    assert (shown.exit_code, "could run any code" in shown.output) == (1, True)
    assert "this ran" not in shown.output + capsys.readouterr().out


def test_shards_of_deepspeed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step3")
    (tmp_path / "global_step3").mkdir()
    torch.save(Runs(), tmp_path / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    shown = convert(tmp_path, tmp_path / "out")
    assert shown.exit_code == 1
    step = tmp_path / "global_step3"
    said = f"deepspeed.checkpoint.ds_to_universal --input_folder {step} --output_folder {step}_universal"
    assert said in " ".join(shown.output.split())


# ------------------------------------------------------------------------------------- FSDP, and the Trainer's files


def save_as_fsdp(run: Path, full: bool, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """Write the files of FULL_STATE_DICT, or else those of SHARDED_STATE_DICT."""
    import torch.distributed.checkpoint as dcp

    if full:
        run.mkdir()
        torch.save(model, run / "pytorch_model_fsdp.bin")
        torch.save(optimizer, run / "optimizer.bin")
    else:
        dcp.save({"model": model}, checkpoint_id=run / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": optimizer}, checkpoint_id=run / "optimizer_0")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_fsdp(full: bool, tmp_path: Path) -> None:
    plain = Plain(halving)
    plain.train(NUM_BEFORE)
    names = {id(param): name for name, param in plain.model.named_parameters()}
    found = plain.optimizer.state_dict()
    order = [names[id(param)] for group in plain.optimizer.param_groups for param in group["params"]]
    states = {order[number]: state for number, state in found["state"].items()}
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in found["param_groups"]]
    run = tmp_path / "run"
    save_as_fsdp(run, full, plain.model.state_dict(), {"state": states, "param_groups": groups})
    torch.save(plain.scheduler.state_dict(), run / "scheduler.bin")
    (run / "random_states_0.pkl").write_bytes(b"")
    shown = convert(run, tmp_path / "out")
    assert "tensors of FSDP after 3 steps" in shown.output, shown.output
    assert "note: random_states_0.pkl is not converted" in shown.output
    check_goes_on(tmp_path / "out", plain, halving)
    for own in (tmp_path / "out", tmp_path / "out" / "step-3", *run.glob("optimizer_0")):
        shown = convert(own, tmp_path / "again")
        assert (shown.exit_code, "which engine.load reads without conversion" in " ".join(shown.output.split())) == (
            1,
            True,
        )


TRAINER = {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.0, "seed": 3}


def samples() -> list[dict[str, Tensor]]:
    tokens = torch.randint(3, 40, (NUM_BEFORE + NUM_AFTER, 7), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def tied_llama() -> Any:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return FAMILIES["llama"](**sizes, **ids, tie_word_embeddings=True, use_cache=True)


def train_plainly(folder: str) -> list[float]:
    """Train with a Trainer that saves every :data:`NUM_BEFORE` steps; return the losses of all steps."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    losses = list[Tensor]()

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset or self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            losses.append(super().training_step(*args, **kwargs))
            return losses[-1]

    torch.manual_seed(0)
    saves = {"save_strategy": "steps", "save_steps": NUM_BEFORE, "logging_steps": 1, "report_to": []}
    once = {"num_train_epochs": 1, "per_device_train_batch_size": 1, "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(folder, **TRAINER, **saves, **once)
    trainer = InOrder(model=tied_llama(), args=arguments, train_dataset=samples())
    trainer.train()
    return torch.stack(losses).tolist()


def goes_on_after_the_trainer(folder: str) -> list[float]:
    from transformers import get_linear_schedule_with_warmup
    from transformers.trainer import Trainer

    torch.manual_seed(1)
    model = tied_llama()
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    kept, others = (
        [p for name, p in model.named_parameters() if (name in decayed) is chosen] for chosen in (True, False)
    )
    groups = [{"params": kept, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, NUM_BEFORE + NUM_AFTER)
    with partita.initialize(model, {"zero": {"stage": 3}}, optimizer=optimizer, scheduler=scheduler) as engine:
        restored = engine.load(folder)
        assert set(restored.missing) == {"partita.extra"}
        losses = []
        for sample in samples()[NUM_BEFORE:]:
            loss = engine(**{name: value[None] for name, value in sample.items()}).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:OMP_NUM_THREADS")  # from what transformers imports
def test_trainer(tmp_path: Path) -> None:
    losses = on_ranks(1, train_plainly, str(tmp_path / "run"), with_group=False)[0]
    folder = tmp_path / "run" / f"checkpoint-{NUM_BEFORE}"
    assert (folder / "optimizer.pt").exists()
    shown = convert(folder, tmp_path / "out")
    assert "tensors of transformers after 3 steps" in shown.output, shown.output
    for after in on_ranks(2, goes_on_after_the_trainer, str(tmp_path / "out")):
        assert after == pytest.approx(losses[NUM_BEFORE:], rel=1e-6)
    assert "partita.random.0" in open_stored(tmp_path / "out").values
    (folder / "config.json").unlink()
    shown = convert(folder, tmp_path / "out")
    assert (shown.exit_code, "no config.json of a full model" in shown.output) == (1, True)


def test_nothing_that_is_known(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shown = convert(tmp_path / "run", tmp_path / "out")
    assert (shown.exit_code, "is not a known checkpoint" in shown.output) == (1, True)
    assert not (tmp_path / "out").exists()
    (tmp_path / "run" / "trainer_state.json").write_text(json.dumps({}))
    torch.save({"a": torch.ones(1)}, tmp_path / "run" / "pytorch_model_fsdp.bin")
    shown = convert(tmp_path / "run", tmp_path / "out")
    assert (shown.exit_code, "it has no global_step" in shown.output) == (1, True)
