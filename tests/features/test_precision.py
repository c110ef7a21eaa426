"""Compute, master and gradient dtypes; loss scaling; gradients that are not finite."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita import PartitaError
from partita.optim.consensus import SMALLEST
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack, inputs, square_loss, tiny
from tests.kit.plans import ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import Recipe, check, rank, train_recipe, whole_weights

HALF = ("bf16", "fp16")


SKIPPED = "step .* is not finite"


def as_stage_0(precision: Mapping[str, Any]) -> None:
    check(Recipe(Stack, config={"precision": precision}, plain=False, ignored=SKIPPED, num_steps=5))


def close_to_fp32() -> None:
    full = train_recipe(Recipe(Stack, num_steps=5), ZERO["3"])
    for compute in HALF:
        precision = {"compute": compute, "loss_scale": 256.0} if compute == "fp16" else {"compute": compute}
        half = train_recipe(Recipe(Stack, num_steps=5, config={"precision": precision}), ZERO["3"])
        torch.testing.assert_close(half.losses, full.losses, rtol=0.02, atol=0)
        torch.testing.assert_close(half.norms, full.norms, rtol=0.05, atol=0)


def dtypes() -> None:
    for compute, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for zero in ZERO.values():
            with partita.initialize(Stack(), {"zero": zero, "precision": {"compute": compute}}) as engine:
                assert all(p.dtype == dtype for p in engine.module.parameters())
                output = engine(inputs(0, 0))
                assert output.dtype == torch.float32
                engine.backward(output.square().mean())
                assert engine.gradient("first.weight").dtype == torch.float32  # type: ignore[union-attr]
                engine.step()
                assert engine.optimizer_state("first.weight")["exp_avg"].dtype == torch.float32
                state = engine.state_dict()
                assert all(value.dtype == torch.float32 for value in state.values())


def master_weights_keep_small_updates() -> None:
    """Check that the master weights accumulate updates below bf16's resolution."""
    for zero in ZERO.values():
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.ones_(model.weight)
        config = {"zero": zero, "precision": {"compute": "bf16"}, "optimizer": {"name": "sgd", "lr": 2.0**-11}}
        config["optimizer"]["weight_decay"] = 0.0
        with partita.initialize(model, config) as engine:
            for _ in range(8):
                engine.backward(engine(torch.eye(WIDTH)).sum())
                engine.step()
            with engine.gathered():
                expected = torch.full((WIDTH, WIDTH), 1 - 8 * 2.0**-11)
                assert torch.equal(model.weight.float(), expected.bfloat16().float())
            state = engine.state_dict()
            assert rank() or torch.equal(state["weight"], expected)


class Mixed(nn.Module):
    """Model whose layers have frozen int8 weights and boolean masks as parameters, trained scales, and norms."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randint(-5, 5, (WIDTH, WIDTH), dtype=torch.int8)
            self.weight = nn.Parameter(whole, requires_grad=False)
            self.mask = nn.Parameter(torch.rand(WIDTH) > 0.2, requires_grad=False)
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            weight = self.weight.to(x.dtype) * self.scale[:, None]
            return F.linear(x, weight) * self.mask

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixed.Quantized() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def mixed(compute: str) -> None:
    precision = {"compute": compute, "keep_fp32": ["LayerNorm"] if compute != "fp32" else []}
    check(Recipe(Mixed, config={"precision": precision}, plain=compute == "fp32"))


def kept_in_fp32() -> None:
    precision = {"compute": "bf16", "keep_fp32": ["LayerNorm", "last"]}
    for zero in ZERO.values():
        with partita.initialize(Stack(), {"zero": zero, "precision": precision}) as engine:
            module: Any = engine.module
            dtypes = {name: p.dtype for name, p in module.named_parameters()}
            assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
                name for name in dtypes if ".norm." in name or name.startswith("last")
            }
            seen = []
            module.blocks[1].norm.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
            module.blocks[1].up.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
            engine.backward(engine(inputs(rank(), 0)).float().square().mean())
            engine.step()
            assert [given for _, given in seen] == [torch.float32, torch.bfloat16]


class Explosive(Stack):
    """Stack that multiplies its output by ``factor``."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def explode(engine: partita.Engine, step: int, on_rank: int, value: float = float("inf")) -> partita.StepResult:
    module: Any = engine.module
    module.factor = value if rank() == on_rank else 1.0
    engine.backward(engine(inputs(rank(), step)).float().square().mean())
    module.factor = 1.0
    return engine.step()


def dynamic_scale() -> list[str]:
    """Check that a non-finite gradient halves the scale and that its update is skipped. Return the warnings."""
    said = []
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Explosive(), {"zero": zero, "precision": {"compute": "fp16"}}) as engine:
            first = explode(engine, 0, -1)
            assert first.stepped
            assert first.loss_scale == 2.0**16
            before = whole_weights(engine)
            for turn in range(2):
                with pytest.warns(UserWarning) as caught:
                    result = explode(engine, 1, 1 if turn else 0)
                said += [str(warning.message) for warning in caught]
                assert not result.stepped
                assert result.skipped
                assert result.loss_scale == 2.0 ** (16 - turn)
                assert result.lr == first.lr
            assert all(torch.equal(value, before[name]) for name, value in whole_weights(engine).items())
            result = explode(engine, 2, -1)
            assert result.stepped
            assert result.loss_scale == 2.0**14
            assert result.grad_norm is not None
            assert result.grad_norm < 100, "the norm is that of the gradients without the scale"
            assert engine.optimizer_state("first.weight")["step"] == 2
            assert_idle(engine)
    return said


def scale_grows() -> None:
    precision = {"compute": "fp16", "initial_loss_scale": 2.0**10, "loss_scale_window": 3}
    with partita.initialize(Explosive(), {"precision": precision}) as engine:
        scales = [explode(engine, step, -1).loss_scale for step in range(7)]
        assert scales == [2.0**10] * 3 + [2.0**11] * 3 + [2.0**12]


class LossInHalf(Stack):
    """Stack that returns its loss, computed in the compute dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.first.weight.dtype).square().mean()


def loss_carries_the_scale(mode: str, outputs: str) -> None:
    """Check that the scale is 2**15 without a skipped update: 2**16, its initial value, is infinite in fp16."""
    precision = {"compute": "fp16", "mode": mode, "outputs": outputs, "loss_scale_window": 2}
    for zero in ZERO.values():
        with partita.initialize(LossInHalf(), {"zero": zero, "precision": precision}) as engine:
            for step in range(6):
                engine.backward(engine(inputs(rank(), step)) / 2)
                result = engine.step()
                assert result.stepped
                assert result.loss_scale == 2.0**15
    fixed = {"compute": "fp16", "mode": mode, "outputs": outputs, "loss_scale": 2.0**16}
    with partita.initialize(LossInHalf(), {"precision": fixed}) as engine:
        with pytest.raises(
            PartitaError, match=r"precision.loss_scale: 65536 is out of the range of the loss.*float16.*32768 or"
        ):
            engine.backward(engine(inputs(rank(), 0)))
        engine.zero_grad()


def scale_ends() -> str:
    """Return the error of gradients that are not finite at the smallest scale."""
    with partita.initialize(Explosive(), {"precision": {"compute": "fp16"}}) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine._parts.updater.scale.value = SMALLEST * 2
        explode(engine, 0, 0)
        with pytest.raises(PartitaError) as raised:
            explode(engine, 1, 0)
        return str(raised.value)


def fixed_scale() -> None:
    for zero in ZERO.values():
        with partita.initialize(
            Explosive(), {"zero": zero, "precision": {"compute": "fp16", "loss_scale": 128.0}}
        ) as engine:
            assert explode(engine, 0, -1).loss_scale == 128.0
            with pytest.warns(UserWarning, match="not finite"):
                result = explode(engine, 1, 0)
            assert result.skipped
            assert result.loss_scale == 128.0
            assert explode(engine, 2, -1).stepped


def plain_backwards() -> None:
    """Check that an unscaled loss (a plain backward) gives the gradients and weights of a scaled one."""
    results = []
    for how in ("engine", "plain", "in turn"):
        config = {
            "precision": {"compute": "fp16", "loss_scale": 8.0},
            "batch": {"accumulate": 2},
            "clip_grad_norm": 0.5,
        }
        with partita.initialize(seeded(), {**config, "optimizer": {"name": "sgd", "lr": 0.5}}) as engine:
            found: list[Any] = []
            for step in range(2):
                for part in range(2):
                    loss = square_loss(engine, rank(), 2 * step + part).float()
                    if how == "engine" or (how == "in turn" and step):
                        engine.backward(loss)
                    else:
                        (loss / 1.0).backward()
                    found.append(engine.gradient("first.weight"))
                    found.append(engine.step().grad_norm)
            results.append((found, whole_weights(engine)))
    for found, weights in results[1:]:
        for one, other in zip(found, results[0][0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
        for name, value in weights.items():
            torch.testing.assert_close(value, results[0][1][name], rtol=1e-2, atol=1e-3, msg=name)


def seeded(num_blocks: int = 1) -> Stack:
    seeds.start()
    return Stack(num_blocks)


def plain_backward_says_so() -> None:
    config = {"precision": {"compute": "fp16", "loss_scale": 8.0}}
    with partita.initialize(seeded(), config) as engine:
        for step in range(2):
            square_loss(engine, rank(), step).backward()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                engine.step()
            assert len(said) == (step == 0)
            assert step or "call engine.backward(loss)" in str(said[0].message)
            assert step or said[0].filename == __file__


def mixed_scales(zero: Mapping[str, Any], on_rank: int | None) -> str:
    """Return the error of several loss scales in one batch, on each rank (None) or on different ranks."""
    config = {"precision": {"compute": "fp16", "loss_scale": 8.0}, "zero": zero}
    with partita.initialize(seeded(), config) as engine:
        loss = square_loss(engine, rank(), 0)
        if on_rank is None:
            loss.backward()
            engine.backward(square_loss(engine, rank(), 0))
        elif rank() == on_rank:
            loss.backward()
        else:
            engine.backward(loss)
        with pytest.raises(PartitaError) as raised:
            engine.gradient("first.weight")
        with pytest.raises(PartitaError, match="several loss scales"):
            engine.step()
        engine.zero_grad()
        engine.backward(square_loss(engine, rank(), 0))
        assert engine.step().stepped
        return str(raised.value)


def one_loss_through_two_engines() -> None:
    """Check that a backward of one loss gives both engines their gradients, whatever their loss scales."""
    actor_config, critic_config = (
        {"precision": {"compute": compute, "loss_scale": scale}} for compute, scale in (("fp16", 64.0), ("fp16", 8.0))
    )
    for second in (critic_config, {"precision": {"compute": "fp32"}}):
        with partita.initialize(seeded(1), actor_config) as actor, partita.initialize(seeded(2), second) as critic:
            loss = square_loss(actor, rank(), 0).float() + square_loss(critic, rank(), 0).float()
            actor.backward(loss)
            gradients = [engine.gradient("last.weight") for engine in (actor, critic)]
            norms = [engine.step().grad_norm for engine in (actor, critic)]
        with partita.initialize(seeded(1), actor_config) as actor, partita.initialize(seeded(2), second) as critic:
            for engine, gradient, norm in zip((actor, critic), gradients, norms, strict=True):
                engine.backward(square_loss(engine, rank(), 0))
                torch.testing.assert_close(engine.gradient("last.weight"), gradient, rtol=1e-2, atol=1e-3)
                assert engine.step().grad_norm == pytest.approx(norm, rel=1e-2)


def through_one_in_backward() -> None:
    """Check that gradients applied in backward are refused if another engine has scaled the loss."""
    lean = {"zero": {"stage": 1}, "precision": {"gradients": "in_backward"}}
    scaled = {"precision": {"compute": "fp16", "loss_scale": 8.0}}
    with partita.initialize(seeded(), scaled) as one, partita.initialize(seeded(), lean) as other:
        loss = square_loss(one, rank(), 0).float() + square_loss(other, rank(), 0)
        with pytest.raises(PartitaError, match="multiplied by another engine's loss scale"):
            one.backward(loss)


def without_scale(compute: str) -> list[str]:
    """Check that fp32 and bf16 skip the update of a non-finite gradient, too, and continue. Return the warnings."""
    said = []
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Explosive(), {"zero": zero, "precision": {"compute": compute}}) as engine:
            explode(engine, 0, -1)
            before = whole_weights(engine)
            for turn in range(2):
                with pytest.warns(UserWarning) as caught:
                    result = explode(engine, 1, 1, float("nan") if turn else float("inf"))
                said += [str(warning.message) for warning in caught]
                assert result.skipped
                assert result.loss_scale == 1.0
            assert all(torch.equal(value, before[name]) for name, value in whole_weights(engine).items())
            assert explode(engine, 2, -1).stepped
    return said


def first_culprit() -> str:
    """Return the warning about a non-finite gradient, which must name a parameter that has one."""
    model = Stack()
    with partita.initialize(model, {"zero": {"stage": 3}}) as engine:
        module: Any = engine.module
        if rank() == 1:
            module.blocks[2].up.weight.register_hook(lambda grad: grad * float("nan"))
        for step in range(2):
            engine.backward(square_loss(engine, rank(), step))
            with pytest.warns(UserWarning) as caught:
                assert engine.step().skipped
        return str(caught[0].message)


class Masked(Stack):
    """Stack that adds a mask to its output, as attention does to scores."""

    def forward(self, x: Tensor, more: Mapping[str, Tensor] | None = None) -> Tensor:
        hidden = super().forward(x)
        return hidden if more is None else hidden + more["mask"]


def argument_named(compute: str, value: float) -> str:
    with partita.initialize(Masked(), {"precision": {"compute": compute}}) as engine:
        mask = torch.zeros(WIDTH)
        engine.backward(engine(inputs(rank(), 0), more={"mask": mask}).square().mean())
        assert engine.step().stepped
        mask[0] = value if rank() == 1 else 0.0
        engine.backward(engine(inputs(rank(), 1), more={"mask": mask}).square().mean())
        with pytest.warns(UserWarning) as caught:
            assert engine.step().skipped
        return str(caught[0].message)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.float())


def dtype_errors_are_explained() -> list[str]:
    found = []
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Inner()))
    precision = {"compute": "bf16", "mode": "cast"}
    with partita.initialize(model, {"precision": precision}) as engine:
        with pytest.raises(RuntimeError, match="dtype") as raised:
            engine(inputs(rank(), 0))
        found += raised.value.__notes__
    with partita.initialize(model, {"precision": {**precision, "keep_fp32": ["Inner"]}}) as engine:
        engine.backward(engine(inputs(rank(), 0)).square().mean())
        assert engine.step().stepped
    return found


def clipped() -> None:
    """Check that gradient norms and clipping are equal at every stage, and in fp32 equal to torch's."""
    for config in ({}, {"precision": {"compute": "bf16"}}):
        recipe = Recipe(Stack, config={"clip_grad_norm": 0.05, **config}, plain=False)
        check(recipe)
    seeds.start()
    plain = Stack()
    for other in range(2):
        (square_loss(plain, other, 0) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    expected = {name: p - 0.5 * p.grad for name, p in plain.named_parameters() if p.grad is not None}
    config = {"clip_grad_norm": 0.05, "optimizer": {"name": "sgd", "lr": 0.5, "weight_decay": 0.0}}
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Stack(), {"zero": zero, **config}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            result = engine.step()
            torch.testing.assert_close(result.grad_norm, norm.item(), rtol=1e-5, atol=0)
            for name, value in whole_weights(engine).items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, *, options: dict[str, Any], index: Tensor) -> dict[str, Tensor]:
        self.seen = [x, options["y"], options["list"][0], index]
        return {"hidden": self.encode(x), "fp16": x.half()}  # cuDNN's recurrent networks return fp16 under any autocast

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x)


def arguments_and_outputs(zero: Mapping[str, Any], precision: Mapping[str, Any]) -> None:
    given = precision.get("mode") == "cast" and torch.bfloat16
    returned = torch.bfloat16 if precision.get("outputs") == "compute" else torch.float32
    with partita.initialize(Takes(), {"zero": zero, "precision": {"compute": "bf16", **precision}}) as engine:
        x = inputs(0, 0)
        output = engine(x, options={"y": x, "list": [x, "text"], "none": None}, index=torch.arange(3))
        assert [each.dtype for each in engine.module.seen] == [*[given or torch.float32] * 3, torch.int64]
        assert given or engine.module.seen[1] is x
        assert output["hidden"].dtype == engine.module.encode(x).dtype == output["fp16"].dtype == returned
        engine.backward(output["hidden"].float().square().mean())
        engine.step()


def losses_of_counts(compute: str, counts: list[float]) -> list[float]:
    """Return the loss of the same samples for each ``num_items_in_batch``, times that number, in mode cast."""
    case = tiny("llama")
    batch = case.make_batch(seeds.generator(0), 2)
    precision = {"compute": compute, "mode": "cast"}
    with partita.initialize(case.build(), {"precision": precision}) as engine, torch.no_grad():
        return [engine(**batch, num_items_in_batch=torch.tensor(count)).loss.item() * count for count in counts]


@matrix(gradients=["fp32", "bf16"], compute=HALF, mode=["mixed", "autocast", "cast"])
def test_half_precision_as_stage_0(compute: str, gradients: str, mode: str) -> None:
    on_ranks(2, as_stage_0, {"compute": compute, "gradients": gradients, "mode": mode})


def test_half_precision_is_close_to_full() -> None:
    on_ranks(2, close_to_fp32)


def test_dtypes_of_all_states() -> None:
    on_ranks(2, dtypes)


def test_master_weights_keep_small_updates() -> None:
    on_ranks(2, master_weights_keep_small_updates)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_mixed_dtypes_in_a_unit(compute: str) -> None:
    on_ranks(2, mixed, compute)


def test_modules_kept_in_fp32() -> None:
    on_ranks(2, kept_in_fp32)


def test_dynamic_loss_scale() -> None:
    for said in on_ranks(2, dynamic_scale):
        assert len(said) == 2 * len(ZERO)
        for number, text in enumerate(said):
            turn = number % 2
            assert f"step {2 + turn}: the gradient of '" in text, text
            assert "is not finite" in text
            assert "the update is skipped" in text
            assert f"loss scale {2 ** (16 - turn)} -> {2 ** (15 - turn)}" in text, text
            assert f"from rank {turn})" in text, text


def test_loss_scale_grows() -> None:
    on_ranks(2, scale_grows)


@pytest.mark.parametrize(("mode", "outputs"), [("mixed", "fp32"), ("cast", "fp32"), ("cast", "compute")])
def test_the_loss_scale_is_one_that_the_loss_can_carry(mode: str, outputs: str) -> None:
    on_ranks(2, loss_carries_the_scale, mode, outputs)


def test_loss_scale_at_its_end_names_the_parameter() -> None:
    for text in on_ranks(2, scale_ends):
        assert "the loss scale is at its minimum" in text
        assert "the gradient of '" in text


def test_fixed_loss_scale() -> None:
    on_ranks(2, fixed_scale)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_not_finite_without_loss_scale(compute: str) -> None:
    for said in on_ranks(2, without_scale, compute):
        assert all("is not finite" in text and "the update is skipped" in text for text in said), said
        assert all("from rank 1)" in text for text in said), said
        assert not any("loss scale" in text for text in said)


@pytest.mark.parametrize(
    ("compute", "value", "said"),
    [
        ("fp32", float("-inf"), "has infinite values"),
        ("bf16", float("nan"), "has NaN"),
        ("fp16", 3e38, "has values above 65504, the largest of the compute dtype"),
    ],
)
def test_an_argument_that_makes_the_loss_infinite_is_named(compute: str, value: float, said: str) -> None:
    for text in on_ranks(2, argument_named, compute, value):
        assert f"(from rank 1); on rank 1, the forward's argument 'more' {said}; the update is skipped" in text


def test_errors_about_dtypes_name_module_and_key() -> None:
    assert on_ranks(1, dtype_errors_are_explained) == [
        [
            "in '1.0.linear', under precision.compute bfloat16 and precision.mode cast: set precision.mode: mixed, "
            'whose operators cast their operands, or list the module in precision.keep_fp32 (["1.0.linear"])'
        ]
    ]


def test_culprit_is_named() -> None:
    for text in on_ranks(2, first_culprit):
        assert "'blocks.2.up.weight' is not finite (from rank 1)" in text


def test_clipping() -> None:
    on_ranks(2, clipped)


@matrix(
    plan=list(ZERO),
    precision=[
        {},
        {"mode": "autocast"},
        {"mode": "cast"},
        {"outputs": "compute"},
        {"mode": "cast", "outputs": "compute"},
    ],
)
def test_arguments_and_outputs(plan: str, precision: Mapping[str, Any]) -> None:
    on_ranks(2, arguments_and_outputs, ZERO[plan], precision)


@pytest.mark.parametrize("compute", HALF)
def test_cast_does_not_round_the_number_of_predicted_tokens(compute: str) -> None:
    """257 has no bf16 value, and 131072 is above fp16's largest."""
    ((one, *others),) = on_ranks(1, losses_of_counts, compute, [1.0, 257.0, 131072.0])
    assert others == pytest.approx([one, one], rel=1e-5)


@pytest.mark.filterwarnings("ignore:loss.backward")
@pytest.mark.parametrize("world", [1, 2])
def test_plain_backward_under_a_loss_scale(world: int) -> None:
    on_ranks(world, plain_backwards)


def test_plain_backward_under_a_loss_scale_says_what_is_lost() -> None:
    on_ranks(1, plain_backward_says_so)


@matrix(stage=[1, 3], on_rank=[None, 0, 1])
def test_several_loss_scales_in_a_batch(stage: int, on_rank: int | None) -> None:
    for said in on_ranks(2, mixed_scales, {"stage": stage}, on_rank):
        assert "several loss scales" in said


@pytest.mark.parametrize("world", [1, 2])
def test_one_loss_through_two_engines(world: int) -> None:
    on_ranks(world, one_loss_through_two_engines)


def test_scaled_loss_through_one_that_updates_in_backward() -> None:
    on_ranks(1, through_one_in_backward)
