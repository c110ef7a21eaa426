"""Values written into parameters are kept, outside and inside forward, whatever copy the optimizer updates."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import PartitaError
from partita.sharding.structure import checksum
from tests.kit import seeds
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights, world

pytestmark = pytest.mark.filterwarnings("ignore:.*was written in place in:UserWarning")

STILL = {"name": "sgd", "lr": 0.0, "momentum": 0.9, "weight_decay": 0.0}
BF16 = {"compute": "bf16"}
PLANS: dict[str, dict[str, Any]] = {
    "fp32": {"zero": {"stage": 1}},
    "stage 0": {"zero": {"stage": 0}, "precision": BF16},
    "stage 2": {"zero": {"stage": 2}, "precision": BF16},
    "fp16": {"zero": {"stage": 1}, "precision": {"compute": "fp16", "loss_scale": 8.0}},
    "split": {"zero": {"stage": 1}, "precision": {**BF16, "master": "split"}},
    "host": {"zero": {"stage": 1, "offload": {"optimizer": "host"}}},
    "disk": {"zero": {"stage": 2, "offload": {"optimizer": "disk"}}, "precision": BF16},
    "in backward": {"zero": {"stage": 2}, "precision": {**BF16, "gradients": "in_backward"}},
    "stage 3": {"zero": {"stage": 3}},
    "stage 3 in bf16": {"zero": {"stage": 3}, "precision": BF16},
    "stage 3 on host": {"zero": {"stage": 3, "offload": {"parameters": "host", "optimizer": "host"}}},
    "stage 3 on disk": {
        "zero": {"stage": 3, "offload": {"parameters": "disk", "optimizer": "disk"}},
        "precision": BF16,
    },
    "stage 3 in backward": {"zero": {"stage": 3}, "precision": {**BF16, "gradients": "in_backward"}},
}

STAGE_3 = {"stage": 3, "units": ["Halving"]}
SHARDED: dict[str, dict[str, Any]] = {
    "fp32": {"zero": {**STAGE_3}},
    "kept": {"zero": {**STAGE_3, "keep_gathered": True}},
    "bf16": {"zero": {**STAGE_3}, "precision": BF16},
    "split": {"zero": {**STAGE_3}, "precision": {**BF16, "master": "split"}},
    "host": {"zero": {**STAGE_3, "offload": {"parameters": "host", "optimizer": "host"}}},
    "disk": {"zero": {**STAGE_3, "offload": {"parameters": "disk", "optimizer": "disk"}}, "precision": BF16},
    "in backward": {"zero": {**STAGE_3}, "precision": {**BF16, "gradients": "in_backward"}},
    "recomputed": {"zero": {**STAGE_3}, "activations": {"checkpoint": ["Halving"]}},
}


def fresh_values(module: nn.Module) -> dict[str, Tensor]:
    """Return random multiples of 1/128 below 2 for each parameter, which bf16 and fp16 represent exactly."""
    generator = seeds.generator(7)
    named = module.named_parameters()
    return {name: torch.randn(p.shape, generator=generator).mul(32).round() / 128 for name, p in named}


def train_step(engine: partita.Engine, step: int) -> None:
    engine.backward(square_loss(engine, rank(), step))
    assert engine.step().stepped


def holds(engine: partita.Engine, expected: Mapping[str, Tensor]) -> None:
    """Assert that the parameters, and the values that the optimizer updates, are the expected ones."""
    for found in (whole_weights(engine), engine.state_dict()):
        for name, value in found.items():
            assert torch.equal(value.float(), expected[name]), name


def lasts(plan: str, folder: Path) -> None:
    seeds.start()
    config = {**PLANS[plan], "optimizer": STILL, "checkpoint": {"dir": str(folder), "background": False}}
    with partita.initialize(Stack(2), config) as engine:
        train_step(engine, 0)
        expected = fresh_values(engine.module)
        engine.module.load_state_dict(expected)
        holds(engine, expected)
        train_step(engine, 1)
        holds(engine, expected)
        with torch.no_grad():
            for param in engine.module.parameters():
                param.clamp_(-0.5, 0.5)
        clamped = {name: value.clamp(-0.5, 0.5) for name, value in expected.items()}
        holds(engine, clamped)
        train_step(engine, 2)
        holds(engine, clamped)
        nn.init.ones_(engine.module.last.weight)
        engine.save()
        nn.init.zeros_(engine.module.first.weight)
        engine.load()
        holds(engine, {**clamped, "last.weight": torch.ones(16, 16)})
        train_step(engine, 3)
        holds(engine, {**clamped, "last.weight": torch.ones(16, 16)})


def lasts_before_the_step(plan: str) -> None:
    """Check that values last that are written between a backward and its step."""
    with still(plan) as (engine, expected):
        module: Any = engine.module
        kept = None if plan.startswith("stage 3") else module.first.bias.data.view(-1)
        for step in range(2):
            engine.backward(square_loss(engine, rank(), step))
            with torch.no_grad():
                module.first.weight.fill_(0.5 + step)
            expected["first.weight"] = torch.full((16, 16), 0.5 + step)
            module.last.weight.data.fill_(0.25 + step)
            expected["last.weight"] = torch.full((16, 16), 0.25 + step)
            if kept is not None:
                kept.fill_(0.125 + step)
                expected["first.bias"] = torch.full((16,), 0.125 + step)
            assert engine.step().stepped
            holds(engine, expected)


def leaves_the_rest() -> None:
    """Check that master weights keep their precision except in elements that were written."""
    seeds.start()
    with partita.initialize(Stack(1), {**PLANS["stage 2"], "optimizer": {"lr": 1e-3}}) as engine:
        train_step(engine, 0)
        before = engine.state_dict()
        with torch.no_grad():
            engine.module.first.weight[0] = 1.0
        after = engine.state_dict()
        if rank() == 0:
            assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
            assert torch.equal(after["first.weight"][0], torch.ones(16))
            before["first.weight"][0] = 1.0
            assert all(torch.equal(after[name], value) for name, value in before.items())


def leaves_a_value_between_two(plan: str) -> None:
    """Check that a master weight half-way between two bf16 numbers is kept when its neighbour is written."""
    half_way = 1.0 + 2.0**-8
    with partita.initialize(Stack(1), {**PLANS[plan], "optimizer": STILL}) as engine:
        weight: Any = engine.module.first.weight
        for value in (half_way, -half_way, half_way + 2.0**-7):  # of odd and even bf16 numbers
            with engine.gathered(engine.module.first, modify=True):
                nn.init.constant_(weight, value)
            with torch.no_grad():
                weight[0] = 2.0
            expected = torch.full((16, 16), value)
            expected[0] = 2.0
            state = engine.state_dict()
            assert rank() or torch.equal(state["first.weight"], expected)


def _clamp(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.data.clamp_(-0.5, 0.5)


def _foreach(params: Sequence[nn.Parameter]) -> None:
    data = [param.data for param in params]
    torch._foreach_clamp_min_(data, -0.5)
    torch._foreach_clamp_max_(data, 0.5)


def _views(params: Sequence[nn.Parameter]) -> None:
    for view in [param.data.view(-1) for param in params]:
        view.clamp_(-0.5, 0.5)


def lasts_through_data(write: Callable[[Sequence[nn.Parameter]], None], plan: str) -> None:
    seeds.start()
    model = Stack(2)
    expected = fresh_values(model)
    model.load_state_dict(expected)
    with partita.initialize(model, {**PLANS[plan], "optimizer": STILL}) as engine:
        for step in range(2):
            train_step(engine, step)
            write(list(engine.module.parameters()))
            expected = {name: value.clamp(-0.5, 0.5) for name, value in expected.items()}
            holds(engine, expected)
            train_step(engine, step)
            holds(engine, expected)
            engine.module.load_state_dict(expected := fresh_values(engine.module))


def lasts_through_a_kept_view(plan: str) -> None:
    """Check that a kept view of ``data`` writes the parameter in every later step, too."""
    seeds.start()
    with partita.initialize(Stack(2), {**PLANS[plan], "optimizer": STILL}) as engine:
        kept = engine.module.first.weight.data.view(-1)  # type: ignore[union-attr]
        for step in range(3):
            train_step(engine, step)
            kept.fill_(0.5 * step)
            train_step(engine, step)
            state = engine.state_dict()
            assert rank() or torch.equal(state["first.weight"], torch.full((16, 16), 0.5 * step))


class ThroughData(nn.Module):
    """A weight and a frozen codebook that forward halves through ``data``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.codes = nn.Parameter(torch.randn(16, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.codes.data.mul_(0.5)
        self.weight.data.mul_(0.5)
        return x @ self.weight + x @ self.codes


def lasts_in_forward_through_data(zero: Mapping[str, Any], precision: Mapping[str, Any]) -> None:
    seeds.start()
    model = nn.Sequential(nn.Linear(16, 16), ThroughData(), ThroughData())
    expected = fresh_values(model)
    model.load_state_dict(expected)
    config = {"zero": zero, "precision": precision, "optimizer": STILL}
    with warnings.catch_warnings(action="ignore"), partita.initialize(model, config) as engine:
        for step in range(2):
            train_step(engine, step)
            expected = {name: value if name.startswith("0") else value * 0.5 for name, value in expected.items()}
            holds(engine, expected)


def reads_of_data() -> None:
    """Check that reads of ``data``, even on one rank only, are no writes and are not tracked after the next step."""
    for zero in ({"stage": 1}, {"stage": 3}):
        with partita.initialize(Stack(1), {"zero": zero, "precision": BF16, "optimizer": {"lr": 1e-2}}) as engine:
            for step in range(2):
                train_step(engine, step)
                with engine.gathered():
                    if rank() == 0:
                        assert all(param.data.isfinite().all() for param in engine.module.parameters())
                engine.state_dict()
                train_step(engine, step)
                assert not engine._parts.runtime.written._exposed


def gathered_through_data() -> None:
    for config in ({"zero": {"stage": 3}}, {"zero": {"stage": 2}}, {"parallel": {"tensor": 2}}):
        with partita.initialize(Stack(1), {"optimizer": STILL, **config}) as engine:
            weight: Any = engine.module.blocks[0].up.weight  # type: ignore[index, union-attr]
            with pytest.raises(PartitaError, match=r"'blocks.0.up.weight' was written inside engine.gathered"):
                with engine.gathered():
                    weight.data.mul_(2)
            engine.zero_grad()
            with engine.gathered(modify=True):
                weight.data.fill_(2.0)
            state = engine.state_dict()
            assert rank() or torch.equal(state["blocks.0.up.weight"], torch.full((32, 16), 2.0))


def moved(precision: Mapping[str, Any]) -> None:
    """Check that the next use of the engine raises an error after ``set_`` has given a parameter other memory."""
    with partita.initialize(Stack(1), {"precision": precision, "optimizer": STILL}) as engine:
        param: Any = engine.module.first.weight
        with torch.no_grad():
            param.set_(torch.ones_like(param))
        with pytest.raises(PartitaError, match="'first.weight' is no longer a view of its unit's flat buffer"):
            engine.state_dict()
        with pytest.raises(PartitaError, match="'first.weight' is no longer a view of its unit's flat buffer"):
            train_step(engine, 0)


@contextmanager
def still(plan: str) -> Iterator[tuple[partita.Engine, dict[str, Tensor]]]:
    """Yield an engine whose steps change no value, and the model's values."""
    seeds.start()
    model = Stack(1)
    expected = fresh_values(model)
    model.load_state_dict(expected)
    with partita.initialize(model, {**PLANS[plan], "optimizer": STILL}) as engine:
        yield engine, expected


def assigned(plan: str, assign: Callable[[nn.Parameter], None]) -> None:
    """Check that values assigned to ``data`` are copied into the parameter's own memory."""
    with still(plan) as (engine, expected):
        param: Any = engine.module.first.weight
        for step in range(2):
            param.data = param.data.clone()
            train_step(engine, step)
            holds(engine, expected)
            assign(param)
            expected["first.weight"] = torch.ones(16, 16)
            holds(engine, expected)
            train_step(engine, step)
            holds(engine, expected)
            engine.module.load_state_dict(expected := fresh_values(engine.module))
        param.data = param.data.to("cpu")  # no change
        if PLANS[plan]["zero"]["stage"] == 3:
            with pytest.raises(PartitaError, match="'first.weight' is no longer a view of its unit's flat buffer"):
                param.data = torch.ones(2)


def swapped(plan: str) -> None:
    """Check that assigning to ``data`` while its previous tensor is kept as a backup is an error: both would change."""
    with partita.initialize(Stack(1), {**PLANS[plan], "optimizer": STILL}) as engine:
        param: Any = engine.module.first.weight
        backup = param.data.clone()
        for _ in range(2):
            param.data = torch.ones_like(param)
            param.data.copy_(backup)
            assert torch.equal(param, backup)
        for kept in (param.data, param.detach()):
            with pytest.raises(PartitaError, match=r"'first.weight': .* while its previous param.data is kept"):
                param.data = torch.zeros_like(param)
                param.data = kept
            del kept


def _data(param: nn.Parameter) -> None:
    param.data = torch.ones_like(param)


def _vector(param: nn.Parameter) -> None:
    nn.utils.vector_to_parameters(torch.ones(param.numel(), dtype=param.dtype), [param])


def _permuted_data(param: nn.Parameter, permuted: Tensor) -> None:
    param.data = permuted


def _permuted_in_data(param: nn.Parameter, permuted: Tensor) -> None:
    param.data.copy_(permuted)


def lasts_permuted(write: Callable[[nn.Parameter, Tensor], None], plan: str) -> None:
    """Check that a permutation of a parameter's values lasts, which does not change the sum of their bits."""
    with still(plan) as (engine, expected):
        param: Any = engine.module.first.weight
        for step in range(2):
            train_step(engine, step)
            permuted = param.data.clone().flip(0)
            write(param, permuted)
            expected["first.weight"] = expected["first.weight"].flip(0)
            holds(engine, expected)
            train_step(engine, step)
            holds(engine, expected)


class Halving(nn.Module):
    """Multiplies its weight by ``factor`` in every forward."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.average = nn.Parameter(torch.randn(16, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(self.factor)
        return x @ self.weight + x @ self.average


class Writing(nn.Module):
    """Blocks that write their own weights, in a model that writes the frozen parameter of the first block."""

    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Halving(factor) for _ in range(3)])
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        with torch.no_grad():
            first.average.mul_(0.5)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def after_a_forward(values: Mapping[str, Tensor], runs: int = 1) -> dict[str, Tensor]:
    """Return the parameters of :class:`Writing` after one forward in which its blocks run ``runs`` times."""
    written = dict(values)
    for name in (name for name in values if name.startswith("blocks") and name.endswith("weight")):
        written[name] = values[name] * 0.5**runs
    written["blocks.0.average"] = values["blocks.0.average"] * 0.5
    return written


def lasts_in_forward(plan: str, folder: Path) -> None:
    """Check that every forward, and every recomputation, halves the weights, as in one process."""
    seeds.start()
    model = Writing()
    expected = fresh_values(model)
    model.load_state_dict(expected)
    config = {**SHARDED[plan], "optimizer": STILL, "checkpoint": {"dir": str(folder), "background": False}}
    # The warning: a parameter is written outside the forward of its unit, which then stays unsharded.
    with warnings.catch_warnings(action="ignore"), partita.initialize(model, config) as engine:
        for step in range(3):
            train_step(engine, step)
            expected = after_a_forward(expected, 2 if plan == "recomputed" else 1)
            holds(engine, expected)
        engine.save()
        with torch.no_grad():
            engine(inputs(0, 9))
        holds(engine, after_a_forward(expected))
        engine.load()
        holds(engine, expected)


def differs_in_forward(zero: Mapping[str, Any], precision: Mapping[str, Any], use: str) -> str:
    seeds.start()
    with partita.initialize(
        Writing(0.5 + rank()), {"zero": zero, "precision": precision, "optimizer": STILL}
    ) as engine:
        with pytest.raises(PartitaError) as raised, warnings.catch_warnings(action="ignore"):
            engine.backward(square_loss(engine, 0, 0))
            engine.step() if use == "step" else engine.state_dict()
        return str(raised.value)


def keeps_digits(master: str) -> None:
    """Check that when forward writes one row, the other rows of the master weights keep their precision."""
    seeds.start()
    config = {"zero": {"stage": 3}, "precision": {**BF16, "master": master}, "optimizer": {"lr": 0.1}}
    with partita.initialize(Renormalized(), config) as engine:
        for _ in range(2):
            engine.backward(engine(torch.tensor([3])).square().mean() + engine(torch.tensor([5])).mean())
            assert engine.step().stepped
        with engine.gathered(modify=True), torch.no_grad():
            engine.module.table.weight[3] = 1.0  # a norm of 4, which the next forward renormalizes
        before = engine.state_dict()
        with torch.no_grad():
            engine(torch.tensor([3]))
        after = engine.state_dict()
        if rank() == 0:
            assert not torch.equal(before["table.weight"], before["table.weight"].bfloat16().float())
            assert after["table.weight"][3].norm() < 0.51 < before["table.weight"][3].norm()
            before["table.weight"][3] = after["table.weight"][3]
            assert torch.equal(after["table.weight"], before["table.weight"])


class Renormalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16, max_norm=0.5)
        self.last = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.table(tokens))


def refuses_codes() -> None:
    """Check that a write in forward is an error if the unsharded parameters are quantized."""
    config = {"zero": {"stage": 3}, "communication": {"parameters": "int8"}, "optimizer": STILL}
    with partita.initialize(Writing(), config) as engine:
        match = r"'blocks.[01].weight' was written in forward.*communication.parameters"
        with pytest.raises(PartitaError, match=match), warnings.catch_warnings(action="ignore"):
            engine.backward(square_loss(engine, 0, 0))
            engine.step()


def _one_more(engine: partita.Engine) -> None:
    if rank():
        nn.init.zeros_(engine.module.first.weight)


def _other_values(engine: partita.Engine) -> None:
    nn.init.constant_(engine.module.first.weight, float(rank()))


def differs(write: Callable[[partita.Engine], None], plan: str, use: str) -> str:
    with partita.initialize(Stack(1), {**PLANS[plan], "optimizer": STILL}) as engine:
        train_step(engine, 0)
        write(engine)
        with pytest.raises(PartitaError) as raised:
            train_step(engine, 1) if use == "step" else engine.state_dict()
        engine.zero_grad()
        with engine.gathered(engine.module.first, modify=True):
            nn.init.ones_(engine.module.first.weight)
        train_step(engine, 2)
        assert torch.equal(whole_weights(engine)["first.weight"].float(), torch.ones(16, 16))
        assert world() == 2
        return str(raised.value)


@matrix(plan=PLANS, world=[1, 2])
def test_what_is_written_lasts(plan: str, world: int, tmp_path: Path) -> None:
    on_ranks(world, lasts, plan, tmp_path)


@matrix(plan=PLANS, world=[1, 2])
def test_what_is_written_before_the_step_lasts(plan: str, world: int) -> None:
    on_ranks(world, lasts_before_the_step, plan)


def test_other_values_are_left_alone() -> None:
    on_ranks(2, leaves_the_rest)


@pytest.mark.parametrize("plan", ["stage 2", "stage 3 in bf16"])
def test_a_value_between_two_is_left_alone(plan: str) -> None:
    on_ranks(2, leaves_a_value_between_two, plan)


@matrix(write=[_one_more, _other_values], plan=["stage 2", "host", "in backward"], use=["step", "state_dict"])
def test_ranks_that_write_differently_are_told(write: Any, plan: str, use: str) -> None:
    for said in on_ranks(2, differs, write, plan, use):
        assert "rank 1 wrote other values into parameters than rank 0" in said
        assert "'first.weight'" in said
        assert "engine.gathered(..., modify=True)" in said


@matrix(write=[_clamp, _foreach], plan=PLANS)
def test_what_is_written_through_data_lasts(write: Any, plan: str) -> None:
    on_ranks(2, lasts_through_data, write, plan)


@pytest.mark.parametrize("plan", [plan for plan in PLANS if not plan.startswith("stage 3")])
def test_what_is_written_through_views_of_data_lasts(plan: str) -> None:
    on_ranks(2, lasts_through_data, _views, plan)


def test_views_of_several_sharded_units_are_not_written() -> None:
    with pytest.raises(PartitaError, match="was written through a view that was kept while the parameter was sharded"):
        on_ranks(2, lasts_through_data, _views, "stage 3")


@pytest.mark.parametrize("plan", ["stage 2", "host"])
def test_what_is_written_through_kept_data_lasts(plan: str) -> None:
    on_ranks(2, lasts_through_a_kept_view, plan)


@matrix(stage=[1, 3], precision=[{"compute": "fp32"}, BF16])
def test_what_forward_writes_through_data_lasts(stage: int, precision: Mapping[str, Any]) -> None:
    on_ranks(2, lasts_in_forward_through_data, {"stage": stage}, precision)


def test_reading_data_is_no_write() -> None:
    on_ranks(2, reads_of_data)


def test_data_written_without_modify() -> None:
    on_ranks(2, gathered_through_data)


@pytest.mark.parametrize("precision", [{"compute": "fp32"}, BF16])
def test_new_memory_is_told(precision: Mapping[str, Any]) -> None:
    on_ranks(2, moved, precision)


@matrix(plan=PLANS, assign=[_data, _vector])
def test_new_data_lasts(plan: str, assign: Any) -> None:
    on_ranks(2, assigned, plan, assign)


@matrix(plan=["stage 2", "split", "host", "stage 3 on host"], write=[_permuted_data, _permuted_in_data])
def test_permuted_data_lasts(plan: str, write: Any) -> None:
    on_ranks(2, lasts_permuted, write, plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("num", [8, 3 * (1 << 18) + 5])
def test_checksums_depend_on_the_order(dtype: torch.dtype, num: int) -> None:
    values = torch.arange(num).remainder(251).to(dtype)
    assert torch.equal(checksum(values), checksum(values.clone()))
    for permuted in (values.flip(0), values.roll(1), values.roll(1 << 18) if num > 8 else values.roll(2)):
        assert not torch.equal(checksum(values), checksum(permuted))
    pattern = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1]).to(dtype)  # with linear weights, its complement has the same sum
    assert not torch.equal(checksum(pattern), checksum(1 - pattern))


def test_the_checksum_of_no_values() -> None:
    assert int(checksum(torch.zeros(0))) == 0


@pytest.mark.parametrize("plan", ["stage 2", "stage 3"])
def test_backups_that_would_change_are_refused(plan: str) -> None:
    on_ranks(2, swapped, plan)


@matrix(plan=SHARDED, world=[1, 2])
def test_what_forward_writes_lasts(plan: str, world: int, tmp_path: Path) -> None:
    on_ranks(world, lasts_in_forward, plan, tmp_path)


@matrix(stage=[1, 2, 3], precision=[{"compute": "fp32"}, BF16], use=["step", "state_dict"])
def test_forwards_that_write_differently_are_told(stage: int, precision: Mapping[str, Any], use: str) -> None:
    for said in on_ranks(2, differs_in_forward, {"stage": stage}, precision, use):
        assert "rank 1 wrote other values into parameters than rank 0" in said
        assert re.search(r"'blocks.\d.weight'", said)


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_rows_that_forward_leaves_alone_keep_their_digits(master: str) -> None:
    on_ranks(2, keeps_digits, master)


def test_written_codes_are_refused() -> None:
    on_ranks(2, refuses_codes)
