"""Inputs of recomputed modules offloaded to disk: the same bits as without offload, and the memory until backward."""

import gc
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import ConfigError, PartitaError
from partita.activation.inputs import NUM_STAYING, OffloadedTensor
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.config.schema import Config
from tests.activation.test_recompute import RECIPES
from tests.features import parity
from tests.kit.live_bytes import LiveBytes
from tests.kit.models import WIDTH, Block, Stack, inputs
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, rank, train_recipe, world

RECOMPUTED: dict[str, Any] = {"activations": {"checkpoint": "units"}}
ON_DISK: dict[str, Any] = {"activations": {"checkpoint": "units", "offload": "disk"}}
SELECTIVE: dict[str, Any] = {"activations": {"checkpoint": "selective", "offload": "disk"}}
MODELS = ("decoder", "llama", "resnet")


def _numbers(course: parity.TrainingRun) -> list[Any]:
    weights = {name: value.tolist() for name, value in course.weights.items()}
    return [course.losses, course.norms, weights]


def run_recipes() -> None:
    """Check that offload changes no bits, with dropout, batch statistics, and two forwards before a backward."""
    for name, recipe in RECIPES.items():
        results = [
            train_recipe(Recipe(*recipe, config=config), {"stage": stage})
            for stage in (0, 3)
            for config in (RECOMPUTED, ON_DISK, SELECTIVE)
        ]
        for result in results:
            assert_same_bits(result, results[0], name)


@pytest.mark.parametrize("name", [MODELS[0], *[pytest.param(name, marks=pytest.mark.thorough) for name in MODELS[1:]]])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_models_train_as_without(name: str, world: int) -> None:
    plans = ("3",) if world == 1 else ("0", "1", "2", "3", "3-kept", "3-host", "3-disk")
    settings = {"none": {}, "disk": ON_DISK, "selective": SELECTIVE}
    for courses in on_ranks(world, parity.courses_with, name, plans, settings, timeout=240):
        for (plan, setting), course in courses.items():
            assert _numbers(course) == _numbers(courses[plan, "none"]), f"{plan}, {setting}"


def test_dropout_statistics_and_two_forwards() -> None:
    on_ranks(2, run_recipes)


def losses(engine: partita.Engine, num_steps: int = 2) -> list[float]:
    """Train; return the losses."""
    found = []
    for step in range(num_steps):
        loss = engine(inputs(0, step)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def num_rooms(engine: partita.Engine) -> tuple[int, int]:
    """Return the number of buffers on disk, and how many of them are free."""
    gc.collect()
    rooms = engine._parts.activations.inputs.input_memory
    free = [*rooms._free, *rooms._returned]
    held = engine.memory_report().held.get(("activations", "disk"), 0)
    return held // max([room.num_elements for room in free], default=1), len(free)


def test_the_last_inputs_stay_and_the_others_leave() -> None:
    """After a forward of first -> 8 blocks -> last, memory contains the inputs of the last blocks, of the block that is
    being offloaded, and of the last layer, and the output.
    """
    x = torch.randn(1000, WIDTH)
    with partita.initialize(Stack(8), ON_DISK) as engine, LiveBytes() as live:
        output = engine(x)
        assert live.total // x.nbytes == NUM_STAYING + 1 + 1 + 1
        output.square().mean().backward()
        moved = engine.memory_report().disk
        assert moved is not None
        assert moved.bytes_written == (8 - NUM_STAYING) * x.nbytes
        assert moved.bytes_read == moved.bytes_written - x.nbytes  # one was still in memory when forward ended


def test_inputs_come_back_ahead_in_the_order_of_backward() -> None:
    """The input of a block is fetched before the following block is recomputed."""
    model, said, numbers = Stack(6), list[str](), dict[int, int]()
    fetch = OffloadedTensor.fetch

    def fetched(moved: OffloadedTensor) -> None:
        if moved._on_device is None and moved._back is None:
            said.append(f"fetch {numbers[id(moved)]}")
        fetch(moved)

    with partita.initialize(model, ON_DISK) as engine, mock.patch.object(OffloadedTensor, "fetch", fetched):
        for number, block in enumerate(model.blocks):
            block.norm.register_forward_pre_hook(lambda *_, number=number: said.append(f"compute {number}"))
        loss = engine(inputs(0, 0)).square().mean()
        calls = [call() for call in engine._parts.activations.inputs._calls.values()]
        numbers |= {id(call.moved[0]): number for number, call in enumerate(calls)}
        del calls
        said.clear()
        engine.backward(loss)
    assert said == [
        *("compute 5", "compute 4"),  # these stay, and block 3's input is still in memory when forward ends
        *("fetch 2", "compute 3", "fetch 1", "compute 2", "fetch 0", "compute 1", "compute 0"),
    ]


def test_a_graph_that_is_kept_dropped_or_broken() -> None:
    """Buffers are free again as soon as no graph needs them, and the next steps are not affected."""

    class Breaking(Stack):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if x.shape[0] == 3:
                raise ValueError("as the test wants")
            return output

    model, twin = Breaking(6), Breaking(6)
    twin.load_state_dict(model.state_dict())
    with partita.initialize(twin, RECOMPUTED) as engine:
        expected = losses(engine)
    with partita.initialize(model, ON_DISK) as engine:
        output = engine(inputs(0, 7))
        assert num_rooms(engine)[1] == 0
        del output
        with pytest.raises(ValueError, match="as the test wants"):
            engine(torch.randn(3, WIDTH))
        loss = engine(inputs(0, 7)).square().mean()
        weight = model.first.weight
        once = torch.autograd.grad(loss, weight, retain_graph=True)[0]
        again = torch.autograd.grad(loss, weight, retain_graph=True)[0]
        assert torch.equal(once, again)
        del loss
        engine.zero_grad()
        assert losses(engine) == expected
        rooms, free = num_rooms(engine)
        assert rooms == free == 6 - NUM_STAYING


def test_rooms_do_not_grow_with_the_steps() -> None:
    """With varying lengths, the memory on disk is that of the longest input, and does not grow further."""
    with partita.initialize(Stack(6), ON_DISK) as engine:
        held = []
        for length in (40, 7, 64, 33, 64, 1, 50, 64):
            engine.backward(engine(torch.randn(length, WIDTH)).square().mean())
            engine.step()
            held.append(engine.memory_report().held["activations", "disk"])
        assert held[2:] == [4 * (6 - NUM_STAYING) * 64 * WIDTH] * 6


class Sharing(nn.Module):
    """Model in which all blocks read a shared tensor in addition to their input."""

    class Inner(Block):
        def forward(self, x: Tensor, *, shared: Tensor, scale: float) -> Tensor:
            return super().forward(x) + scale * shared

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Sharing.Inner() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        shared = self.first(x)
        x = shared * 2
        for block in self.blocks:
            x = block(x, shared=shared, scale=0.5)
        return x


def test_what_several_modules_read_stays() -> None:
    results = [train_recipe(Recipe(Sharing, config=config), {"stage": 1}) for config in (RECOMPUTED, ON_DISK)]
    assert_same_bits(*results, "disk")
    x = torch.randn(100, WIDTH)
    with partita.initialize(Sharing(), ON_DISK) as engine:
        engine.backward(engine(x).square().mean())
        moved = engine.memory_report().disk
        assert moved is not None
        assert moved.bytes_written == (6 - NUM_STAYING) * x.nbytes


def test_memory_format_is_that_of_the_input() -> None:
    """Fetched inputs have the original strides, which can decide the kernel, and so the bits."""
    seen = list[tuple[int, ...]]()

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.stride())
            out: Tensor = self.inner(x).relu()
            return out

    model = nn.Sequential(nn.Conv2d(3, 4, 1), *[Image() for _ in range(4)]).to(memory_format=torch.channels_last)
    with partita.initialize(model, {**ON_DISK, "zero": {"units": ["Image"]}}) as engine:
        x = torch.randn(2, 3, 5, 6).to(memory_format=torch.channels_last)
        engine.backward(engine(x).square().mean())
    assert set(seen) == {(120, 1, 24, 4)}
    assert len(seen) == 8


def test_an_input_that_is_changed_in_place() -> None:
    class Adding(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                y = block(x)
                x.add_(1)
                x = y
            return x

    with partita.initialize(Adding(4), ON_DISK) as engine:
        with pytest.raises(PartitaError, match=r"an input of shape \(4, 16\) of a recomputed module was changed"):
            engine.backward(engine(inputs(0, 0)).square().mean())


def no_room_on_one_rank() -> str:
    """Return this rank's error at the step, if the last rank's disk is full; the engine then continues to train."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    x = torch.randn(1000, WIDTH)
    with partita.initialize(Stack(4), {**ON_DISK, "zero": {"stage": 3}}) as engine:
        with mock.patch.object(os, "posix_fallocate", full) if rank() == world() - 1 else nullcontext():
            engine.backward(engine(x).square().mean())
            with pytest.raises(PartitaError) as raised:
                engine.step()
        engine.zero_grad()
        engine.backward(engine(x).square().mean())
        assert engine.step().stepped
        return str(raised.value)


def test_no_room_is_told_to_all_ranks() -> None:
    missing = "reserving 61440 bytes failed: No space"  # 65536 without the first page, reserved at the start
    (alone,) = on_ranks(1, no_room_on_one_rank)
    other, own = on_ranks(2, no_room_on_one_rank)
    assert missing in alone
    assert missing in own
    assert other.startswith("rank 1 of the group over data failed: PartitaError: offload to disk")
    assert missing in other


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    config = {**ON_DISK, "zero": {"offload": {"path": str(tmp_path / "missing")}}}
    with pytest.raises(PartitaError, match="create the folder, or set zero.offload.path to another"):
        partita.initialize(Stack(4), config)


def test_compiled_modules_keep_their_inputs() -> None:
    model = Stack(4)
    for block in model.blocks:
        block.compile(backend="eager")
    with partita.initialize(model, ON_DISK) as engine:
        with pytest.warns(
            UserWarning, match="activations.offload, partition and keep_bytes do not apply to compiled modules"
        ):
            engine.backward(engine(inputs(0, 0)).square().mean())
        moved = engine.memory_report().disk
        assert moved is not None
        assert moved.bytes_written == 0


def test_the_host_of_a_cpu_is_said_to_be_no_tier() -> None:
    config = load_config({"activations": {"checkpoint": "units", "offload": "host"}})
    assert resolve(config, 1, "cuda").notices == ()
    (notice,) = resolve(config, 1, "cpu").notices
    assert notice.startswith("ignored: activations.offload")
    with partita.initialize(Stack(2), config) as engine:
        engine.backward(engine(inputs(0, 0)).square().mean())
        assert not any(state == "activations" for state, _ in engine.memory_report().held)


def test_offload_without_recomputation_is_refused() -> None:
    with pytest.raises(ConfigError, match="activations.offload offloads the inputs of recomputed modules"):
        resolve(Config(activations={"offload": "disk"}), 1, "cpu")
