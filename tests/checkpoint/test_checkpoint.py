"""Checkpoints load under any layout, resume exactly, and are never loaded if incomplete or damaged."""

import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import partita
from partita import ConfigError, PartitaError
from partita.checkpoint.format import file as checkpoint_file
from partita.checkpoint.format.backend import FileDraft
from partita.checkpoint.format.folder import complete_checkpoints
from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.offline import verify
from partita.huggingface.export import export_checkpoint
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack, square_loss
from tests.kit.plans import matrix, sampled
from tests.kit.ranks import WorkerError, on_ranks
from tests.kit.training import ADAMW, rank, whole_weights, world

BATCH = 8
STEPS_BEFORE, STEPS_AFTER = 2, 5


@dataclass(frozen=True)
class Layout:
    """Number of ranks, ZeRO stage, offload tier and precision of a run."""

    ranks: int
    stage: int
    tier: str
    compute: str
    more: tuple[tuple[str, str], ...] = field(default=())

    @property
    def config(self) -> dict[str, Any]:
        offload = {} if self.tier == "none" else {"optimizer": self.tier, "parameters": self.tier}
        return {
            "zero": {"stage": self.stage, "offload": offload},
            "precision": {"compute": self.compute, **dict(self.more)},
            "optimizer": ADAMW,
            "clip_grad_norm": 1.0,
            "schedule": {"warmup_steps": 4},
        }


LAYOUTS = [
    Layout(*axes) for axes in itertools.product((1, 2, 4), (0, 1, 2, 3), ("none", "host", "disk"), ("fp32", "bf16"))
]
LEAN = (("master", "split"), ("moments", "int8"), ("gradients", "in_backward"))


def losses_of(engine: partita.Engine, first: int, num_steps: int) -> list[float]:
    """Train; return the mean losses. The samples of a step do not depend on the number of ranks."""
    losses = []
    for step in range(first, first + num_steps):
        samples = torch.randn(BATCH, WIDTH, generator=seeds.generator(step))
        loss = engine(samples.chunk(world())[rank()]).square().mean()
        engine.backward(loss)
        assert engine.step().stepped
        losses.append(float(engine.mean(loss.detach().float())))
    return losses


def states_of(engine: partita.Engine, *, weights: bool = True) -> dict[str, Tensor]:
    """Return the full master weights and optimizer states on rank 0, nothing on other ranks."""
    states = dict(engine.state_dict()) if weights else {}
    for name, _ in engine.module.named_parameters():
        states |= {f"{name} {key}": value for key, value in engine.optimizer_state(name).items()}
    return states if rank() == 0 else {}


def saved(folder: str, layout: Layout) -> tuple[dict[str, Tensor], list[float]]:
    seeds.start()
    with partita.initialize(Stack(2), layout.config) as engine:
        losses_of(engine, 0, STEPS_BEFORE)
        engine.save(folder)
        states = states_of(engine)
        return states, losses_of(engine, STEPS_BEFORE, STEPS_AFTER)


def loaded(folder: str, layout: Layout) -> tuple[dict[str, Tensor], list[float]]:
    seeds.start(1 + rank())
    with partita.initialize(Stack(2), layout.config) as engine:
        restored = engine.load(folder)
        assert (restored.step, restored.missing, restored.unexpected) == (STEPS_BEFORE, (), ())
        return states_of(engine), losses_of(engine, STEPS_BEFORE, STEPS_AFTER)


def check_pair(folder: Path, one: Layout, other: Layout, expected: tuple[dict[str, Tensor], list[float]]) -> None:
    states, losses = on_ranks(other.ranks, loaded, str(folder), other)[0]
    assert states.keys() == expected[0].keys()
    differ = [name for name, value in states.items() if not torch.equal(value, expected[0][name])]
    assert not differ, f"{one} -> {other}: {differ}"
    if one.compute == other.compute == "fp32":
        assert losses == pytest.approx(expected[1], rel=1e-5), f"{one} -> {other}"


@pytest.mark.parametrize("number", sampled(range(24), 0, 1, 2))
def test_saved_under_one_layout_and_loaded_under_another(number: int, tmp_path: Path) -> None:
    """All numbers together load into each layout once; the first three cover each value of every axis."""
    chosen = random.Random(number)
    one = chosen.choice(LAYOUTS[number % 3 * 24 : (number % 3 + 1) * 24])
    expected = on_ranks(one.ranks, saved, str(tmp_path), one)[0]
    for other in random.Random(0).sample(LAYOUTS, len(LAYOUTS))[number::24]:
        check_pair(tmp_path, one, other, expected)


@pytest.mark.parametrize("tier", ["none", "disk"])
def test_lean_states_are_kept_as_they_are(tier: str, tmp_path: Path) -> None:
    """8-bit codes, scales and split master weights load unchanged under other ranks, stages and tiers."""
    one, other = Layout(2, 3, tier, "bf16", LEAN), Layout(4, 1, "host", "bf16", LEAN)
    check_pair(tmp_path, one, other, on_ranks(2, saved, str(tmp_path), one)[0])


def moments(folder: str, precision: dict[str, str]) -> dict[str, Tensor]:
    with partita.initialize(Stack(1), {"precision": precision, "optimizer": ADAMW}) as engine:
        if precision:
            losses_of(engine, 0, 3)
            engine.save(folder)
        else:
            engine.load(folder)
        return states_of(engine, weights=False)


def test_8_bit_moments_become_numbers_and_numbers_8_bit_moments(tmp_path: Path) -> None:
    coded = on_ranks(2, moments, str(tmp_path), {"moments": "int8"})[0]
    exact = on_ranks(1, moments, str(tmp_path), {})[0]
    assert all(torch.equal(exact[key], value) for key, value in coded.items())
    again = on_ranks(1, recoded, str(tmp_path))[0]
    for key, value in again.items():
        torch.testing.assert_close(value, exact[key], rtol=0.07, atol=float(exact[key].abs().max()) / 3900, msg=key)


def recoded(folder: str) -> dict[str, Tensor]:
    """Save fp32 moments, load them into a run with 8-bit moments, and return its states."""
    with partita.initialize(Stack(1), {"optimizer": ADAMW}) as engine:
        engine.load(folder)
        engine.save(folder + "/exact")
    with partita.initialize(Stack(1), {"precision": {"moments": "int8"}, "optimizer": ADAMW}) as engine:
        engine.load(folder + "/exact")
        return states_of(engine, weights=False)


def moments_of_images(folder: str, channels_last: bool, moments: str, saves: bool) -> dict[str, Tensor]:
    """Return the moments of a convolution, in three steps that end in a checkpoint or loaded from it."""
    seeds.start()
    layer = nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    with partita.initialize(layer, {"precision": {"moments": moments}, "optimizer": ADAMW}) as engine:
        scales = torch.logspace(-2, 0, 16).view(16, 1, 1)
        for step in range(3) if saves else ():
            engine.backward(engine(scales * torch.randn(2, 16, 5, 5, generator=seeds.generator(step))).square().mean())
            engine.step()
        if saves:
            engine.save(folder)
        else:
            engine.load(folder)
        return {key: value for key, value in engine.optimizer_state("weight").items() if key != "step"}


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_8_bit_moments_in_another_memory_format(before: bool, after: bool, tmp_path: Path) -> None:
    """Blocks of channels-last weights have other elements than those of contiguous ones."""
    coded = on_ranks(2, moments_of_images, str(tmp_path), before, "int8", True)[0]
    assert coded.keys() == {"exp_avg", "exp_avg_sq"}
    for num_ranks in (1, 2):
        exact = on_ranks(num_ranks, moments_of_images, str(tmp_path), after, "fp32", False)[0]
        again = on_ranks(num_ranks, moments_of_images, str(tmp_path), after, "int8", False)[0]
        for key, value in coded.items():
            assert torch.equal(exact[key], value), key
            rtol, atol = (0.07, float(value.abs().max()) / 3900) if before != after else (0.0, 0.0)
            torch.testing.assert_close(again[key], value, rtol=rtol, atol=atol, msg=key)


# --------------------------------------------------------------------------------------------------------- exact resume


class Noisy(nn.Module):
    """Module with dropout, a batch norm, tied weights, a channels-last convolution, a frozen layer, a scalar, and
    tensors without elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.tied, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.out.weight = self.tied.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 8))
        self.frozen_none = nn.Parameter(torch.empty(3, 0), requires_grad=False)
        self.register_buffer("cache", torch.empty(2, 0, 3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        x = nn.functional.dropout(self.tied(self.frozen(x)), 0.3, training=self.training)
        return self.out(x) * self.scale + self.none.sum()


def noisy_steps(engine: partita.Engine, num_steps: int) -> list[float]:
    """Train on samples drawn from the global generator; return the losses."""
    losses = []
    for _ in range(num_steps):
        for _ in range(2):
            loss = engine(torch.randn(2, 3, 4, 4)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


CONFIG = {"batch": {"accumulate": 2}, "schedule": {"name": "cosine", "warmup_steps": 2, "total_steps": 9}}


def resumes(folder: str, sections: dict[str, Any]) -> None:
    config = {**CONFIG, **sections}
    seeds.start(5 + rank())
    with partita.initialize(Noisy(), config) as engine:
        noisy_steps(engine, 3)
        engine.extra.update(position=12, names=["a"])
        engine.save(folder)
        expected = noisy_steps(engine, 4)
        weights, scale = whole_weights(engine), engine.step().loss_scale
    stored = open_stored(Path(folder, "step-3"))
    shapes = {name: stored.value(f"model.{name}").shape for name in ("none", "frozen_none", "cache")}
    assert shapes == {"none": (0, 8), "frozen_none": (3, 0), "cache": (2, 0, 3)}
    seeds.start(99)
    with partita.initialize(Noisy(), config) as engine:
        engine.load(folder)
        assert engine.extra == {"position": 12, "names": ["a"]}
        assert noisy_steps(engine, 4) == expected
        assert all(torch.equal(value, weights[name]) for name, value in whole_weights(engine).items())
        assert engine.step().loss_scale == scale


SECTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"zero": {"stage": 3}},
    "fp16": {"zero": {"stage": 2}, "precision": {"compute": "fp16"}},
    "sgd on disk": {
        "zero": {"stage": 3, "offload": {"optimizer": "disk"}},
        "optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.01},
    },
    "sgd without momentum": {"zero": {"stage": 2}, "optimizer": {"name": "sgd", "lr": 0.01}},
    "in the foreground": {"zero": {"stage": 1}, "checkpoint": {"background": False}},
}


@pytest.mark.filterwarnings("ignore:step 1. the gradient of .* is not finite")
@matrix(ranks=[1, 2], name=SECTIONS)
def test_resumed_as_if_never_stopped(name: str, ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, resumes, str(tmp_path), SECTIONS[name])


def scale_after(folder: str, before: dict[str, Any], after: dict[str, Any]) -> float:
    """Return the loss scale of the first step with the precision ``after``, from a checkpoint of ``before``."""
    with partita.initialize(Stack(1), {"precision": before}) as engine:
        losses_of(engine, 0, 2)
        engine.save(folder)
    with partita.initialize(Stack(1), {"precision": after}) as engine:
        engine.load(folder)
        engine.backward(square_loss(engine, rank(), 0))
        return engine.step().loss_scale


FP16 = {"compute": "fp16"}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"compute": "bf16"}, FP16, 2.0**16),
        ({"compute": "bf16"}, FP16 | {"initial_loss_scale": 2.0**7}, 2.0**7),
        (FP16 | {"loss_scale": 8.0}, FP16, 2.0**16),
        (FP16 | {"initial_loss_scale": 1.0, "loss_scale_window": 100}, FP16, 1.0),
        (FP16 | {"initial_loss_scale": 2.0**9, "loss_scale_window": 2}, FP16, 2.0**10),
        (FP16, {"compute": "bf16"}, 1.0),
    ],
    ids=str,
)
def test_only_dynamic_loss_scales_are_restored(
    before: dict[str, Any], after: dict[str, Any], expected: float, tmp_path: Path
) -> None:
    assert on_ranks(1, scale_after, str(tmp_path), before, after) == [expected]


def configured_anew(folder: str) -> None:
    def engine(rate: float, decay: float) -> partita.Engine:
        settings = {"name": "adamw", "lr": rate, "weight_decay": decay}
        config = {"optimizer": settings, "schedule": {"name": "cosine", "warmup_steps": 1, "total_steps": 9}}
        return partita.initialize(Stack(1), {"zero": {"stage": 3}, **config})

    def group(of: partita.Engine) -> tuple[float, float]:
        return of.optimizer.param_groups[0]["lr"], of.optimizer.param_groups[0]["weight_decay"]

    with engine(1e-2, 0.1) as first:
        losses_of(first, 0, 3)
        first.save(folder)
        rate, _ = group(first)
        assert 0 < rate < 1e-2
    said = (
        r"lr is 0\.001 as configured now \(the saved run was configured with 0\.01, and had 0\.00.*weight_decay is 0\.2"
    )
    with engine(1e-3, 0.2) as second:
        with pytest.warns(UserWarning, match=said) if not rank() else nullcontext():
            second.load(folder)
        assert group(second) == (pytest.approx(rate / 10), 0.2)
        losses_of(second, 3, 1)
        second.save(folder)
        expected = losses_of(second, 4, 2), group(second)
    with engine(1e-3, 0.2) as third:  # configured as the run that saved: no warning, and no change
        third.load(folder)
        assert (losses_of(third, 4, 2), group(third)) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_configured_anew_holds(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, configured_anew, str(tmp_path))


class Odd(torch.optim.Optimizer):
    """Optimizer whose state has other strides than its parameter, and is either updated in place or replaced."""

    def __init__(self, params: Any, replaces: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self._replaces = replaces

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                if not state:
                    order = tuple(reversed(range(param.dim())))
                    state["sum"] = torch.zeros([param.shape[dim] for dim in order]).permute(order)
                if self._replaces:
                    state["sum"] = state["sum"] + param.grad
                else:
                    state["sum"].add_(param.grad)
                param.sub_(state["sum"], alpha=0.1)


def saves_what_is_there_now(folder: str, stage: int, replaces: bool) -> None:
    partita.elementwise(Odd)
    made = functools.partial(Odd, replaces=replaces)
    with partita.initialize(Stack(1), {"zero": {"stage": stage}}, optimizer=made) as engine:
        for step in range(3):
            losses_of(engine, step, 1)
            engine.save(folder)
            engine.wait_for_checkpoint()
            stored = open_stored(Path(folder, f"step-{step + 1}"))
            for name, weight in whole_weights(engine).items():
                assert torch.equal(stored.value(f"model.{name}"), weight)
                for key, state in engine.optimizer_state(name).items():
                    assert torch.equal(stored.value(f"optimizer.state.{name}.{key}"), state), (step, name, key)


@matrix(ranks=[1, 2], stage=[0, 3], replaces=[False, True])
def test_every_save_is_of_the_states_of_its_moment(ranks: int, stage: int, replaces: bool, tmp_path: Path) -> None:
    on_ranks(ranks, saves_what_is_there_now, str(tmp_path), stage, replaces)


class Counting(Stack):
    """Model with an extra state in a submodule, and a buffer of ``num`` elements."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, Any] = {"calls": 0, "largest": torch.zeros(2)}

        def get_extra_state(self) -> dict[str, Any]:
            return self.seen

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.seen = state

    def __init__(self, num: int = 3) -> None:
        super().__init__(1)
        self.counter = self.Counter()
        self.register_buffer("range", torch.arange(float(num)))

    def forward(self, x: Tensor) -> Tensor:
        self.counter.seen = {"calls": self.counter.seen["calls"] + 1, "largest": x.detach().amax((0, 1)).expand(2)}
        return super().forward(x)


def keeps_extra_states(folder: str) -> None:
    config = {"zero": {"stage": 3}}
    with partita.initialize(Counting(), config) as engine:
        losses_of(engine, 0, 2)
        engine.save(folder)
        seen, state = engine.module.counter.seen, engine.state_dict()
        with (
            pytest.warns(UserWarning, match="extra state of 'counter' is not exported") if not rank() else nullcontext()
        ):
            engine.export(folder + "/exported")
    if rank() == 0:
        again = Counting()
        again.load_state_dict(state)
        assert again.counter.seen is seen
    for only_model in (False, True):
        with partita.initialize(Counting(), config) as engine:
            engine.load(folder, only_model=only_model)
            assert engine.module.counter.seen["calls"] == 2
            assert rank() or torch.equal(engine.module.counter.seen["largest"], seen["largest"])
    with partita.initialize(Counting(1), config) as engine:
        with pytest.raises(
            PartitaError, match=r"shapes differ: 'range' is \(1,\) in the model, \(3,\) in the checkpoint"
        ):
            engine.load(folder, strict=False)
        with pytest.raises(ConfigError, match=r"buffer 'range' has shape \(3,\), but the model's buffer has \(1,\)"):
            partita.initialize(Counting(1), config, weights=folder + "/exported", mesh=engine.mesh)
    with partita.initialize(Stack(1), config) as engine:
        with pytest.raises(PartitaError, match=r"not in the model: counter\._extra_state, range"):
            engine.load(folder)
        losses_of(engine, 0, 1)
        engine.save(folder + "/without")
    with partita.initialize(Counting(), config) as engine:
        with pytest.raises(
            PartitaError, match=r"missing in the checkpoint: model\.range, model\.counter\._extra_state"
        ):
            engine.load(folder + "/without")


@pytest.mark.parametrize("ranks", [1, 2])
def test_extra_states_and_shapes_of_buffers(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, keeps_extra_states, str(tmp_path))
    with pytest.warns(UserWarning, match=r"extra state of 'model\.counter' is not exported"):
        export_checkpoint(open_stored(tmp_path / "step-2"), tmp_path / "offline", None, None)


# ----------------------------------------------------------------------------------------------- folders of checkpoints


def names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def saves_by_itself(folder: str) -> None:
    config = {"checkpoint": {"dir": folder, "every_steps": 2, "keep": 2}, "zero": {"stage": 3}}
    with partita.initialize(Stack(1), config) as engine:
        losses_of(engine, 0, 7)
    assert names(folder) == ["step-4", "step-6"]
    with partita.initialize(Stack(1), config) as engine:
        assert engine.load().step == 6
        losses_of(engine, 6, 2)
        assert engine.load(Path(folder) / "step-6").step == 6
    assert names(folder) == ["step-6", "step-8"]


def test_saves_by_itself_and_keeps_the_newest(tmp_path: Path) -> None:
    on_ranks(2, saves_by_itself, str(tmp_path))


def starts_again(folder: str) -> None:
    """Start a run in the checkpoint folder of a longer one."""
    config = {"checkpoint": {"dir": folder, "every_steps": 2, "keep": 2}}
    with partita.initialize(Stack(1), config) as engine:
        losses_of(engine, 0, 8)
    with partita.initialize(Stack(1), config) as engine:
        said = pytest.warns(UserWarning, match=r"holds later steps \(to step-8\) than step-2")
        with said if rank() == 0 else contextlib.nullcontext():
            losses_of(engine, 0, 2)
        losses_of(engine, 2, 1)
        path = engine.save()
        engine.wait_for_checkpoint()
        assert names(folder) == ["step-2", path.name] == ["step-2", "step-3"]
        assert engine.load().step == 3


def test_a_run_in_the_folder_of_a_longer_one_keeps_its_own(tmp_path: Path) -> None:
    on_ranks(2, starts_again, str(tmp_path))


def goes_back_to_the_start(folder: str, offload: dict[str, str]) -> None:
    """Save before the first step, when the optimizer has no states; train, load, and train again."""
    seeds.start()
    with partita.initialize(Stack(1), {"zero": {"stage": 3, "offload": offload}}) as engine:
        engine.save(folder)
        expected = losses_of(engine, 0, 3)
        assert engine.load(folder).step == 0
        assert engine.optimizer_state("first.weight") == {}
        assert losses_of(engine, 0, 3) == expected


@pytest.mark.parametrize("offload", [{}, {"optimizer": "disk"}], ids=["device", "disk"])
def test_a_checkpoint_from_before_the_first_step(offload: dict[str, str], tmp_path: Path) -> None:
    on_ranks(2, goes_back_to_the_start, str(tmp_path), offload)


def save_one(folder: str) -> None:
    seeds.start()
    with partita.initialize(Stack(2), {"zero": {"stage": 3}}) as engine:
        losses_of(engine, 0, 1)
        engine.save(folder)
        losses_of(engine, 1, 1)
        engine.save(folder)


def damage_raises(folder: str, named: str) -> None:
    """Load a damaged checkpoint: every rank raises an error that names the file, and can then load another one."""
    with partita.initialize(Stack(2), {"zero": {"stage": 3}}) as engine:
        with pytest.raises(PartitaError, match="checkpoint") as caught:
            engine.load(folder)
        said = str(caught.value)
        dist.barrier()
        if named not in said:
            raise AssertionError(f"{named!r} is not in: {said}")
        engine.load(Path(folder) / "step-1")
        losses_of(engine, 1, 1)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def flip(path: Path) -> None:
    place = path.stat().st_size // 2
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 16]))


DAMAGES: dict[str, Callable[[Path], object]] = {"cut off": cut_off, "flipped": flip, "missing": Path.unlink}
FILES = ("__0_0.distcp", "__1_0.distcp", "__1_0.json", "manifest.json")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, file: str, tmp_path: Path) -> None:
    on_ranks(2, save_one, str(tmp_path))
    DAMAGES[damage](tmp_path / "step-2" / file)
    if (damage, file) == ("missing", "manifest.json"):
        assert list(complete_checkpoints(tmp_path)) == [1]  # it is no checkpoint
    else:
        on_ranks(2, damage_raises, str(tmp_path), file)


def test_what_a_crash_leaves_is_removed_and_never_chosen(tmp_path: Path) -> None:
    on_ranks(2, save_one, str(tmp_path))
    (tmp_path / "step-2").rename(tmp_path / ".step-2.partial")
    (tmp_path / "step-9").mkdir()
    assert list(complete_checkpoints(tmp_path)) == [1]
    on_ranks(2, goes_on_from_step_1, str(tmp_path))
    assert names(tmp_path) == ["step-1", "step-2", "step-9"]


def goes_on_from_step_1(folder: str) -> None:
    with partita.initialize(Stack(2), {"zero": {"stage": 3}}) as engine:
        assert engine.load(folder).step == 1
        losses_of(engine, 1, 1)
        engine.save(folder)


def without_step_2(folder: Path) -> dict[int, Path]:
    """Return the listing of a node that does not see the newest checkpoint yet."""
    return {step: path for step, path in complete_checkpoints(folder).items() if step != 2}


def loads_where_rank_1_lists_less(folder: str) -> tuple[int, int]:
    """Return the step that each rank loads from a folder whose listing is old on rank 1, then by its own path."""
    stale = mock.patch("partita.checkpoint.format.folder.complete_checkpoints", without_step_2)
    with partita.initialize(Stack(2), {"zero": {"stage": 3}}) as engine:
        with stale if rank() == 1 else nullcontext():
            listed = engine.load(folder)
        own = Path(folder, "..", f"as rank {rank()} names it")
        own.symlink_to(folder)
        return listed.step, engine.load(own).step


def test_every_rank_loads_the_checkpoint_that_rank_0_finds(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    on_ranks(2, save_one, str(folder))
    assert on_ranks(2, loads_where_rank_1_lists_less, str(folder)) == [(2, 2), (2, 2)]


def loads_from_nodes(folder: str) -> str:
    """Load from a folder of each rank's own; return the error."""
    with partita.initialize(Stack(2), {"zero": {"stage": 3}}) as engine:
        with pytest.raises(PartitaError) as caught:
            engine.load(Path(folder, str(rank())))
        assert engine.load(Path(folder, str(rank()), "step-1")).step == 1
        return str(caught.value)


@pytest.mark.parametrize("names_it", ["does not exist", "this rank finds"])
def test_a_checkpoint_that_a_rank_lacks_is_an_error(names_it: str, tmp_path: Path) -> None:
    on_ranks(2, save_one, str(tmp_path / "0"))
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    (tmp_path / "1" / "step-2").rename(tmp_path / "1" / ".step-2.one-1.removed")
    if names_it == "this rank finds":  # another checkpoint of the same step
        shutil.copytree(tmp_path / "1" / "step-1", tmp_path / "1" / ".step-2.one-1.replaced")
    for said in on_ranks(2, loads_from_nodes, str(tmp_path)):
        assert names_it in said
        assert f"{tmp_path / '1' / 'step-2'}'" in said


# ------------------------------------------------------------------------------------------------------------- failures


def opened_in(folder: str) -> list[str]:
    """Return the files in a folder that this process has open, including removed ones."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor
            found.append(str(link.readlink()))
    return [path for path in found if path.startswith(folder)]


def disk_fails(folder: str, background: bool, call: str) -> None:
    """Fail a rank's writes: every rank raises, no file remains or stays open, and training and saving continue."""
    failing = mock.patch.object(checkpoint_file.os, call, side_effect=OSError(28, "No space left on device"))
    with partita.initialize(Stack(1), {"zero": {"stage": 3}, "checkpoint": {"background": background}}) as engine:
        losses_of(engine, 0, 1)

        def save() -> None:
            if rank() == 1:
                with failing:
                    engine.save(folder)
                    engine.wait_for_checkpoint()
            else:
                engine.save(folder)
                engine.wait_for_checkpoint()

        with pytest.raises(PartitaError, match=r"No space left on device; free disk space, lower checkpoint\.keep"):
            save()
        dist.barrier()
        assert (names(folder), opened_in(folder)) == ([], [])
        losses_of(engine, 1, 1)
        engine.save(folder)
        engine.wait_for_checkpoint()
        assert list(complete_checkpoints(Path(folder))) == [2]


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_full_disk_is_an_error_on_every_rank(background: bool, call: str, tmp_path: Path) -> None:
    on_ranks(2, disk_fails, str(tmp_path), background, call)


def main_thread_is_in(function: str) -> bool:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return any(caller.f_code.co_name == function for caller, _ in traceback.walk_stack(frame))


def when(condition: Callable[[], bool], act: Callable[[], Any]) -> threading.Thread:
    """Start a thread that calls ``act`` when ``condition`` holds, or after a minute."""

    def wait() -> None:
        end = time.monotonic() + 60
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_ctrl_c_in_a_save_that_waits_for_the_last_one(tmp_path: Path) -> None:
    """The checkpoint that is being written in the background stays that of its step."""
    may_write, is_saved, real = threading.Event(), threading.Event(), os.pwrite
    main = threading.main_thread().ident or 0

    def write_later(*arguments: Any) -> int:
        may_write.wait()
        return real(*arguments)

    def train(engine: partita.Engine, step: int) -> dict[str, Tensor]:
        losses_of(engine, step, 1)
        return {name: value.clone() for name, value in engine.state_dict().items()}

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            mock.patch.object(checkpoint_file.os, "pwrite", write_later),
            partita.initialize(Stack(1), {"optimizer": ADAMW, "checkpoint": {"background": True}}) as engine,
        ):
            weights = {1: train(engine, 0)}
            engine.save(tmp_path)
            train(engine, 1)
            pressing = when(lambda: main_thread_is_in("_join"), lambda: signal.pthread_kill(main, signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                engine.save(tmp_path)
            pressing.join()
            weights[3] = train(engine, 2)
            releasing = when(lambda: main_thread_is_in("_join") or is_saved.is_set(), may_write.set)
            engine.save(tmp_path)
            is_saved.set()
            releasing.join()
    finally:
        is_saved.set()
        may_write.set()
        signal.signal(signal.SIGINT, before)
    assert list(complete_checkpoints(tmp_path)) == [1, 3]
    for step, expected in weights.items():
        folder = tmp_path / f"step-{step}"
        assert not list(verify(open_stored(folder)))
        with partita.initialize(Stack(1), {"optimizer": ADAMW}) as engine:
            engine.load(folder)
            found = engine.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not all(torch.equal(weights[1][name], value) for name, value in weights[3].items())


def saves_into_a_folder_of_its_own(folder: str) -> None:
    own = Path(folder, str(rank()))
    with partita.initialize(Stack(1), {"zero": {"stage": 3}}) as engine:
        losses_of(engine, 0, 1)
        with pytest.raises(PartitaError, match=r"rank 1 does not see the folder '.*\.partial', .* all nodes share"):
            engine.save(own)
        dist.barrier()
        assert rank() or names(own) == []
        engine.save(folder)
    assert list(complete_checkpoints(Path(folder))) == [1]


def test_folders_that_the_nodes_do_not_share(tmp_path: Path) -> None:
    on_ranks(2, saves_into_a_folder_of_its_own, str(tmp_path))


def dies_while_it_writes(folder: str) -> None:
    with partita.initialize(Stack(1)) as engine:
        losses_of(engine, 0, 1)
        if rank() == 1:
            mock.patch.object(FileDraft, "write", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)).start()
        engine.save(folder)
        engine._parts.checkpoints._saver._join()


def test_a_rank_that_dies_while_it_writes_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="rank 1 died with exit code -9") as caught:
        on_ranks(2, dies_while_it_writes, str(tmp_path))
    (other,) = (note for note in caught.value.__notes__ if note.startswith("on rank 0:"))
    assert "rank 1 ended before its file in" in other
    assert complete_checkpoints(tmp_path) == {}


def other_models(folder: str) -> None:
    with partita.initialize(Stack(2), {"zero": {"stage": 3}}) as engine:
        losses_of(engine, 0, 1)
        engine.save(folder)
    with partita.initialize(Stack(3), {"zero": {"stage": 3}}) as engine:
        with pytest.raises(
            PartitaError, match=r"the model: missing in the checkpoint: model\.blocks\.2.*strict=False loads"
        ):
            engine.load(folder)
        restored = engine.load(folder, strict=False)
        *missing, group = restored.missing
        assert all(name.startswith("model.blocks.2") for name in missing)
        assert group == "optimizer.param_groups.0.*"
        assert restored.unexpected == ()
        losses_of(engine, 1, 1)
    with partita.initialize(Stack(1), {"zero": {"stage": 1}}) as engine:
        with pytest.raises(PartitaError, match=r"not in the model: blocks\.1\.down\.bias"):
            engine.load(folder, only_model=True)
        assert "blocks.1.up.weight" in engine.load(folder, only_model=True, strict=False).unexpected
        assert engine.optimizer_state("first.weight") == {}
    with partita.initialize(nn.Sequential(Stack(1)), {"zero": {"stage": 1}}) as engine:
        with pytest.raises(PartitaError, match="does not match the model"):
            engine.load(folder)
        with pytest.raises(PartitaError, match="nothing' does not exist"):
            engine.load(folder + "/nothing")
        with pytest.raises(ConfigError, match=r"name a folder, or set checkpoint\.dir"):
            engine.save()
    with partita.initialize(Stack(1), {"optimizer": {"name": "sgd"}}) as engine:
        losses_of(engine, 0, 1)
        engine.save(folder + "/sgd")
    with (
        partita.initialize(Stack(1), {"optimizer": {"name": "sgd", "momentum": 0.9}}) as engine,
        pytest.raises(PartitaError, match=r"missing in the checkpoint: optimizer\.state\.\*; strict=False loads"),
    ):
        engine.load(folder + "/sgd")


def test_checkpoints_of_other_models(tmp_path: Path) -> None:
    on_ranks(2, other_models, str(tmp_path))


def not_finite(folder: str, policy: str, optimizer: str) -> None:
    """Train with a NaN loss on one rank in the fourth step."""
    config = {
        "zero": {"stage": 3},
        "optimizer": {"name": optimizer},
        "precision": {"nonfinite": policy},
        "checkpoint": {"dir": folder, "every_steps": 2},
    }
    with partita.initialize(Stack(1), config) as engine:
        engine.extra["seen"] = 0
        losses_of(engine, 0, 3)
        weights = whole_weights(engine)
        engine.extra["seen"] = 3
        engine.backward(square_loss(engine, rank(), 3) * (float("nan") if rank() == 1 else 1.0))
        if policy == "raise":
            with pytest.raises(PartitaError, match=r"step 4: the gradient of .* is not finite .*nonfinite: raise"):
                engine.step()
            assert all(torch.equal(value, weights[name]) for name, value in whole_weights(engine).items())
        else:
            with pytest.warns(UserWarning, match="training goes back to step 2"):
                result = engine.step()
            assert (result.stepped, result.skipped, result.rewound_to) == (False, True, 2)
            assert engine.extra == {"seen": 0}
            losses_of(engine, 2, 1)
            assert all(torch.equal(value, weights[name]) for name, value in whole_weights(engine).items())
        losses_of(engine, 3, 2)


@pytest.mark.filterwarnings("ignore:.*the update is skipped")
@pytest.mark.parametrize(("policy", "optimizer"), [("raise", "adamw"), ("rewind", "adamw"), ("rewind", "sgd")])
def test_what_is_not_finite(policy: str, optimizer: str, tmp_path: Path) -> None:
    on_ranks(2, not_finite, str(tmp_path), policy, optimizer)


def stays_not_finite(folder: str, gradients: str) -> None:
    """Repeat a NaN loss in step 4, after one in step 1, when there is no checkpoint to rewind to."""
    config = {
        "precision": {"nonfinite": "rewind", "gradients": gradients},
        "checkpoint": {"dir": folder, "every_steps": 2},
    }

    def spoilt_step() -> int | None:
        engine.backward(square_loss(engine, rank(), 3) * float("nan"))
        return engine.step().rewound_to

    with partita.initialize(Stack(1), config) as engine:
        with pytest.raises(
            PartitaError, match=r"step 1: the gradient of .* is not finite.*cannot go back.*no complete"
        ):
            spoilt_step()
        losses_of(engine, 0, 2)  # the skipped step is counted
        for _ in range(2):
            for _ in range(3):
                assert spoilt_step() == 2
                losses_of(engine, 2, 1)
            with pytest.raises(PartitaError, match=r"step 4: the gradient of .*rank.* 3 times .* get past step 4"):
                spoilt_step()
            assert engine.load().step == 2
            losses_of(engine, 2, 1)


@pytest.mark.filterwarnings("ignore:.*not finite:UserWarning")
@pytest.mark.parametrize("gradients", ["fp32", "in_backward"])
def test_going_back_has_an_end(gradients: str, tmp_path: Path) -> None:
    on_ranks(2, stays_not_finite, str(tmp_path), gradients)


def inside_a_batch(folder: str) -> None:
    with partita.initialize(Stack(1), {"batch": {"accumulate": 2}}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        with pytest.raises(PartitaError, match="after micro-batch 1 of 2: the accumulated gradients would be lost"):
            engine.save(folder)


def numbers_of_numpy(folder: str) -> None:
    """Resume with NumPy scalars in hyperparameters and ``extra``; refuse values that could not be loaded again."""

    def engine() -> partita.Engine:
        seeds.start()
        return partita.initialize(
            Stack(1),
            {"zero": {"stage": 3}},
            optimizer=functools.partial(torch.optim.AdamW, weight_decay=numpy.float32(0.1)),
            scheduler=lambda made: LambdaLR(made, lambda step: 0.5 * (1 + numpy.cos(numpy.pi * step / 100))),
        )

    with engine() as first:
        losses_of(first, 0, 2)
        for value, where in ((Path("a"), "'v'"), ([1, Path("a")], r"'v'\]\[1")):
            first.extra["v"] = value
            with pytest.raises(PartitaError, match=rf"engine\.extra\[{where}\] is of pathlib\."):
                first.save(folder)
        first.extra["v"] = numpy.int64(3)
        first.save(folder)
        expected = losses_of(first, 2, 3), first.optimizer.param_groups[0]["lr"]
    with engine() as second:
        second.load(folder)
        assert second.extra == {"v": 3}
        assert (losses_of(second, 2, 3), second.optimizer.param_groups[0]["lr"]) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_saved_can_be_loaded(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, numbers_of_numpy, str(tmp_path))


def test_no_checkpoint_inside_a_batch(tmp_path: Path) -> None:
    on_ranks(2, inside_a_batch, str(tmp_path))


def test_the_manifest_says_what_it_is_of(tmp_path: Path) -> None:
    on_ranks(2, save_one, str(tmp_path))
    stored = open_stored(tmp_path / "step-2")
    manifest = json.loads(json.dumps(stored.manifest))
    assert (manifest["step"], manifest["ranks"], manifest["config"]["zero"]["stage"]) == (2, 2, 3)
    assert stored.tensors["model.blocks.1.up.weight"].shape == (32, 16)
    assert set(manifest["files"]) == {"__0_0.distcp", "__1_0.distcp"}
    for name, num_bytes in manifest["files"].items():
        assert (tmp_path / "step-2" / name).stat().st_size == num_bytes


def extras_by_rank(folder: str, num_ranks: int) -> tuple[Any, list[str]]:
    """Load what ``num_ranks`` ranks saved; return this rank's ``extra`` and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with partita.initialize(Stack(1), {"checkpoint": {"background": False}}) as engine:
            losses_of(engine, 0, 1)
            if world() == num_ranks:
                engine.extra.update(epoch=2, order=torch.arange(3), position=100 + rank())
                engine.save(folder)
                engine.extra.clear()
            engine.load(folder)
            found = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in engine.extra.items()}
            return found, [str(warning.message) for warning in caught]


def test_extra_that_differs_by_rank(tmp_path: Path) -> None:
    same = {"epoch": 2, "order": [0, 1, 2]}
    for number, (found, said) in enumerate(on_ranks(2, extras_by_rank, str(tmp_path), 2)):
        assert found == {**same, "position": 100 + number}
        assert not any("extra" in line for line in said)
    for number, (found, said) in enumerate(on_ranks(3, extras_by_rank, str(tmp_path), 2)):
        assert found == {**same, "position": 100}
        told = [line for line in said if "engine.extra differed" in line and "('position')" in line]
        assert len(told) == (number == 0)


def names_that_are_too_long(folder: str) -> None:
    with partita.initialize(Stack(1), {"checkpoint": {"background": False}}) as engine:
        for call in (engine.save, engine.load):
            with pytest.raises(PartitaError, match="File name too long; name a folder with a shorter name"):
                call(Path(folder, "n" * 300))
        engine.save(folder)


def test_a_folder_whose_name_is_too_long(tmp_path: Path) -> None:
    on_ranks(2, names_that_are_too_long, str(tmp_path))


def loads_with_another_index(folder: str) -> None:
    with partita.initialize(Stack(1), {"checkpoint": {"background": False}}) as engine:
        engine.save(folder)
        index = Path(folder, "step-0", ".metadata")
        if rank() == 0:
            index.write_bytes(index.read_bytes() + b"more")
        with pytest.raises(PartitaError, match=r"\.metadata' is damaged"):
            engine.load(folder)


def test_a_changed_index_is_found_by_load(tmp_path: Path) -> None:
    on_ranks(2, loads_with_another_index, str(tmp_path))


def goes_on_with_another_optimizer(folder: str, name: str) -> list[str]:
    """Load a checkpoint of adam into a run with another optimizer; return the warnings."""

    def engine(name: str) -> partita.Engine:
        return partita.initialize(Stack(1), {"optimizer": {"name": name}, "checkpoint": {"background": False}})

    with engine("adam") as first:
        losses_of(first, 0, 1)
        first.save(folder)
    with engine(name) as second, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.load(folder)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("name", "told"), [("adam", 0), ("lion", 1)])
def test_another_optimizer_is_told(name: str, told: int, tmp_path: Path) -> None:
    first, second = on_ranks(2, goes_on_with_another_optimizer, str(tmp_path), name)
    said = f"was saved with the optimizer adam, and this one is {name}"
    assert [sum(said in line for line in lines) for lines in (first, second)] == [told, 0]


def test_a_run_that_was_loaded_in_inference_mode_trains_on(tmp_path: Path) -> None:
    """States that ``engine.load`` allocates inside ``torch.inference_mode`` can be updated afterwards."""

    def steps(engine: partita.Engine, first: int) -> None:
        for step in range(first, 3):
            engine.backward(square_loss(engine, 0, step))
            engine.step()
            if not first and not step:
                engine.save(tmp_path)

    config = {"zero": {"stage": 1}}
    with partita.initialize(Stack(1), config) as engine:
        steps(engine, 0)
        expected = whole_weights(engine)
    with partita.initialize(Stack(1), config) as engine:
        with torch.inference_mode():
            engine.load(tmp_path)
        steps(engine, 1)
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, expected[name]), name
