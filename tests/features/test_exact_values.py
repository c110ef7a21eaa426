"""Under 16-bit compute, master weights and frozen weights keep the fp32 values that the engine received."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import partita
from tests.compression.test_wires import on_nodes_of
from tests.kit import seeds
from tests.kit.plans import TIERS, ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

WAYS = ("model", "meta", "weights", "load_state_dict", "gathered", "checkpoint")
STAGES = {name: (ZERO | TIERS)[name] for name in ("0", "1", "2", "3", "3-host", "3-disk")}
STEADY = {"name": "adamw", "lr": 0.0, "weight_decay": 0.0}


class Frozen(nn.Module):
    """Model with a frozen layer, and with sizes that are not multiples of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(19, 37), nn.Linear(37, 37), nn.Linear(37, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


def built(number: int) -> Frozen:
    seeds.start(number)
    return Frozen()


def is_exact(engine: partita.Engine, way: str, expected: Mapping[str, Tensor]) -> None:
    state = engine.state_dict()
    if rank() == 0:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert value.dtype == torch.float32, name
            assert torch.equal(value, expected[name]), f"{name} {way}"


def initialized(zero: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the initial values of a model on the meta device under fp32 compute."""
    with torch.device("meta"):
        model = Frozen()
    seeds.start(1)
    with partita.initialize(model, {"zero": zero}) as engine:
        return engine.state_dict()


def arrives_exactly(plan: str, master: str, ways: tuple[str, ...], folder: Path) -> None:
    wanted = built(1).state_dict()
    precision = {"compute": "bf16", "master": master}
    zero = {**STAGES[plan], "offload": {**STAGES[plan].get("offload", {}), "path": str(folder)}}
    config = {"zero": zero, "precision": precision, "optimizer": STEADY, "checkpoint": {"dir": str(folder)}}
    for way in ways:
        model, weights = built(0), None
        if way == "model":
            model = built(1)
        elif way in ("meta", "weights"):
            with torch.device("meta"):
                model = Frozen()
            model.frozen.requires_grad_(False)
        if way == "weights":
            weights = folder / f"{rank()}.safetensors"
            save_file(wanted, weights)
        expected = initialized(zero) if way == "meta" else wanted
        seeds.start(1)
        with partita.initialize(model, config, weights=weights) as engine:
            if way == "gathered" or (way == "load_state_dict" and STAGES[plan]["stage"] == 3):
                with engine.gathered(modify=True):
                    assert model.first.weight.dtype == torch.float32
                    model.load_state_dict(wanted)
                assert model.first.weight.dtype == torch.bfloat16
            elif way == "load_state_dict":
                model.load_state_dict(wanted)
            elif way == "checkpoint":
                with engine.gathered(modify=True):
                    model.load_state_dict(wanted)
                engine.save()
                with engine.gathered(modify=True), torch.no_grad():
                    for param in model.parameters():
                        param.zero_()
                engine.load()
            is_exact(engine, way, expected)
            for _ in range(2):  # a learning rate of 0 changes nothing, also in the layer unfrozen below
                engine.backward(engine(torch.randn(3, 19)).square().mean())
                engine.step()
                is_exact(engine, way, expected)
                model.frozen.requires_grad_(True)
            with engine.gathered():
                for name, param in model.named_parameters() if rank() == 0 else ():
                    torch.testing.assert_close(param.float(), expected[name], rtol=2.0**-8, atol=0, msg=name)


@matrix(world=(1, 2), plan=tuple(STAGES), master=("fp32", "split"))
def test_fp32_values_arrive_unrounded(world: int, plan: str, master: str, tmp_path: Path) -> None:
    on_ranks(world, arrives_exactly, plan, master, WAYS, tmp_path)


def loads_the_other_16_bits(stage: int, compute: str, dtype: torch.dtype, factor: float) -> None:
    wanted = {name: (factor * value).to(dtype) for name, value in built(1).state_dict().items()}
    with partita.initialize(built(0), {"zero": {"stage": stage}, "precision": {"compute": compute}}) as engine:
        engine.module.load_state_dict(wanted)
        is_exact(engine, "load_state_dict", {name: value.float() for name, value in wanted.items()})


@pytest.mark.parametrize(("compute", "dtype", "factor"), [("bf16", torch.float16, 1), ("fp16", torch.bfloat16, 1e-6)])
@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (2, 0), (2, 2)])
def test_values_in_the_other_16_bits_arrive_unrounded(
    ranks: int, stage: int, compute: str, dtype: torch.dtype, factor: float
) -> None:
    """fp16 has more bits of mantissa than bf16, and smaller numbers in bf16 are zero in fp16."""
    on_ranks(ranks, loads_the_other_16_bits, stage, compute, dtype, factor)


def secondary_is_loaded() -> None:
    """Check that loaded values replace the secondary shards of an earlier forward without a step."""
    zero = {"stage": 3, "hierarchical": True}
    with on_nodes_of(2), partita.initialize(built(0), {"zero": zero, "precision": {"compute": "bf16"}}) as engine:
        x = torch.randn(3, 19)
        assert engine(x).abs().sum() > 0
        engine.module.load_state_dict({name: torch.zeros_like(value) for name, value in built(0).state_dict().items()})
        assert engine(x).abs().sum() == 0


def test_secondary_shards_are_loaded() -> None:
    on_ranks(4, secondary_is_loaded)


def rounds_frozen() -> None:
    for frozen, dtype in (("fp32", torch.float32), ("compute", torch.bfloat16)):
        config = {"precision": {"compute": "bf16", "frozen": frozen}}
        model = built(0)
        expected = model.frozen.weight.detach().to(dtype, copy=True)
        with partita.initialize(model, config) as engine:
            state = engine.state_dict()
            if rank() == 0:
                assert state["frozen.weight"].dtype == dtype
                assert torch.equal(state["frozen.weight"], expected)


def test_frozen_parameters_can_be_rounded_for_good() -> None:
    on_ranks(2, rounds_frozen)


def warns_of_writes(zero: Mapping[str, Any], master: str, message: str) -> None:
    model = nn.Linear(8, 8)
    config = {"precision": {"compute": "bf16", "master": master}, "zero": zero}
    with partita.initialize(model, config) as engine:
        with torch.no_grad():
            model.weight.mul_(0.9999)
        if rank() == 0:
            with pytest.warns(UserWarning, match=rf"'weight' was written in place in bfloat16: {message}"):
                engine.state_dict()
        else:
            engine.state_dict()


ROUNDED = r"the written values are rounded.*modify=True.*keep_fp32$"
ALL_ROUNDED = r"all values of the parameter are rounded.*modify=True.*precision.master: fp32"


@pytest.mark.parametrize(
    ("stage", "master", "message"),
    [(1, "fp32", ROUNDED), (1, "split", ALL_ROUNDED), (3, "split", ROUNDED)],
    ids=["fp32", "split", "sharded"],
)
def test_a_write_that_is_rounded_is_reported(stage: int, master: str, message: str) -> None:
    on_ranks(2, warns_of_writes, {"stage": stage}, master, message)


def halfway() -> Frozen:
    """Return a model whose values are half-way between two bf16 numbers, which rounding rules resolve differently."""
    model = built(1)
    with torch.no_grad():
        for param in model.parameters():
            bits = (param.bfloat16().view(torch.int16).to(torch.int32) << 16) + 0x8000
            param.copy_(bits.view(torch.float32))
    return model


def in_compute(engine: partita.Engine) -> dict[str, Tensor]:
    with engine.gathered():
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


UPDATES: dict[str, Mapping[str, Any]] = {
    "by kernels": {},
    "of split masters": {"master": "split"},
    "of 8-bit moments": {"moments": "int8"},
    "in backward": {"gradients": "in_backward"},
    "by torch": {},
}


def rounds_alike(plan: str, updates: str, folder: Path) -> None:
    """Check that at a learning rate of 0 neither an update nor a checkpoint changes a parameter."""
    config = {"zero": STAGES[plan], "precision": {"compute": "bf16", **UPDATES[updates]}, "optimizer": STEADY}
    factory = None
    if updates == "by torch":
        factory = partial(torch.optim.AdamW, lr=0.0, weight_decay=0.0)
        del config["optimizer"]
    seeds.start(rank())
    x = torch.randn(4, 19)
    with partita.initialize(halfway(), config, optimizer=factory) as engine:
        first = in_compute(engine)
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()
        stepped = in_compute(engine)
        engine.save(folder)
    with partita.initialize(built(2), config, optimizer=factory) as engine:
        engine.load(folder)
        loaded = in_compute(engine)
    for name, param in first.items():
        assert torch.equal(param, stepped[name]), f"{name} changed in an update"
        assert torch.equal(param, loaded[name]), f"{name} changed in a checkpoint"


@matrix(world=(1, 2), plan=tuple(STAGES), updates=tuple(UPDATES))
def test_masters_are_rounded_by_one_rule(world: int, plan: str, updates: str, tmp_path: Path) -> None:
    if (plan, updates) != ("0", "in backward"):  # not allowed by the config
        on_ranks(world, rounds_alike, plan, updates, tmp_path)
