"""Stage 3 with a replica of the parameters on each node: nodes exchange quantized parameter deltas."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partita
from partita.layout.state_bytes import model_state_bytes
from tests.compression.lossless import lossless
from tests.compression.test_feedback import LR, SHAPES, Bag, factors, held, held_sums, sgd
from tests.compression.test_wires import on_nodes_of
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.plans import ZERO, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, rank, train_recipe, whole_weights, world

HIERARCHICAL: dict[str, Any] = {"stage": 3, "hierarchical": True}
REPLICATED: dict[str, Any] = {"stage": 3, "replicate": "nodes"}
CHANGES: dict[str, Any] = {"communication": {"parameters": "ternary"}}
BOTH: dict[str, Any] = {"communication": {"gradients": "ternary", "parameters": "ternary"}}
STEPS = 4


class Far(Stack):
    """A model whose weights are so far from zero that no update doubles or halves one, so that deltas are exact."""

    def __init__(self) -> None:
        super().__init__(2)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.where(param < 0, param - 0.1, param + 0.1))


def rests(engine: partita.Engine) -> Tensor:
    """Return this rank's stored shards of all parameters, concatenated."""
    engine._parts.updater.wait_for_updates()
    units = engine._parts.runtime.units
    return torch.cat([segment.stored.load().float() for unit in units for segment in unit.segments])


def masters(engine: partita.Engine) -> Tensor:
    """Return this rank's master weights, concatenated."""
    engine._parts.updater.wait_for_updates()
    segments = [segment for unit in engine._parts.runtime.units for segment in unit.trained]
    return torch.cat([segment.master.state.load().cpu() for segment in segments if segment.master is not None])


def own_rests(engine: partita.Engine) -> Tensor:
    """Return the stored values of the parameters whose master weights this rank has, concatenated."""
    engine._parts.updater.wait_for_updates()
    segments = [segment for unit in engine._parts.runtime.units for segment in unit.trained]
    return torch.cat([segment.slice_for_master(segment.stored.load()).float() for segment in segments])


def assert_nodes_alike(engine: partita.Engine, per_node: int) -> None:
    """Assert that ranks with the same local rank store the same bits, and ranks of one node different shards."""
    mine = rests(engine)
    every = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(every, mine)
    assert all(torch.equal(every[number], every[number % per_node]) for number in range(world()))
    assert per_node == 1 or not torch.equal(every[0], every[1])


def step(engine: partita.Engine, number: int, factor: float = 1.0) -> partita.StepResult:
    engine.backward(square_loss(engine, rank(), number).float() * factor)
    return engine.step()


# -- on the ranks ------------------------------------------------------------------------------------------------------


def bitwise_where_nothing_is_lost(per_node: int, config: dict[str, Any], uncompressed: dict[str, Any]) -> None:
    """Compare lossless deltas with an ``uncompressed`` plan that sums in the same order."""
    config = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1}, **config}
    communication = config.pop("communication", {})
    with on_nodes_of(per_node), lossless("ternary"):
        expected = train_recipe(
            Recipe(Far, config=config | {"communication": communication}, num_steps=STEPS), uncompressed
        )
        coded = config | {"communication": communication | {"parameters": "ternary"}}
        got = train_recipe(Recipe(Far, config=coded, num_steps=STEPS), HIERARCHICAL)
    assert_same_bits(got, expected, f"nothing lost, {config}")


def alike(codec: str, per_node: int, config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Check that after each step all ranks have the same norm and all nodes the same bits.

    Returns: the losses with quantized deltas, and those with uncompressed parameters.
    """
    losses = list[list[float]]()
    for parameters in (codec, "full"):
        seeds.start()
        communication = config.get("communication", {}) | {"parameters": parameters}
        asked = {"zero": HIERARCHICAL, "optimizer": {"lr": 5e-3}, **config, "communication": communication}
        own = list[float]()
        with on_nodes_of(per_node), partita.initialize(Stack(2), asked) as engine:
            for _ in range(12):
                loss = square_loss(engine, 0, 0).float()
                own.append(loss.item())
                engine.backward(loss)
                norm = engine.step().grad_norm
                every: list[Any] = [None] * world()
                dist.all_gather_object(every, norm)
                assert set(every) == {norm}
                if parameters != "full":
                    assert_nodes_alike(engine, per_node)
        losses.append(own)
    return losses[0], losses[1]


def telescopes(codec: str, compute: str, accumulate: int) -> None:
    """Check that master weights include all gradients, and that stored parameters lag behind by about one update."""
    precision = {"compute": compute, **({"initial_loss_scale": 2.0**10} if compute == "fp16" else {})}
    config = {"zero": HIERARCHICAL, "communication": {"parameters": codec}, "batch": {"accumulate": accumulate}}
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with on_nodes_of(2), partita.initialize(Bag(), config | {"precision": precision}, optimizer=sgd) as engine:
        for number in range(5 * accumulate):
            engine.backward(engine(factors(number, rank())))
            engine.step()
            for other in range(world()):
                for name, factor in factors(number, other).items():
                    seen = factor if compute == "fp32" else factor.half().float()
                    given[name] += seen / (world() * accumulate)
        master = masters(engine)
        behind = (master - own_rests(engine)).abs().max()
        assert 0.01 * LR < float(behind) < 5 * LR, "an update is of about LR"
        for name, weight in engine.state_dict().items():
            torch.testing.assert_close(weight, -LR * given[name], rtol=1e-4, atol=1e-5 if compute == "fp32" else 1e-4)
        engine._parts.runtime.prepare_for_checkpoint()
        assert torch.equal(own_rests(engine), master.to(torch.float16).float() if compute == "fp16" else master)


def left_out(compute: str) -> None:
    """Check that a non-finite step leaves stored parameters, master weights and residuals unchanged on every rank."""
    precision = {"compute": compute, **({"initial_loss_scale": 2.0**8} if compute == "fp16" else {})}
    config = {"zero": HIERARCHICAL, "precision": precision, "clip_grad_norm": 0.5, **BOTH}
    with on_nodes_of(2), partita.initialize(Stack(2), config) as engine:
        for number in range(3):
            assert step(engine, number).stepped
        before = rests(engine).clone(), masters(engine).clone(), held_back(engine)
        with pytest.warns(UserWarning, match="is skipped"):
            assert step(engine, 3, float("inf") if rank() == 1 else 1.0).skipped
        for old, now in zip(before, (rests(engine), masters(engine), held_back(engine)), strict=True):
            assert torch.equal(old, now)
        assert step(engine, 4).stepped
        assert not torch.equal(before[0], rests(engine))
        assert_nodes_alike(engine, 2)


def held_back(engine: partita.Engine) -> Tensor:
    return held(engine).clone()


def with_offload(tier: str) -> dict[str, Tensor]:
    """Train with optimizer states on a tier; check the ledger's bytes against the plan, and return the weights."""
    zero = HIERARCHICAL | {"offload": {"optimizer": tier}}
    gradients = {} if tier == "disk" else {"gradients": "ternary"}
    config = {"zero": zero, "communication": {"parameters": "int4", **gradients}, "clip_grad_norm": 0.1}
    seeds.start()
    with on_nodes_of(2), partita.initialize(Stack(2), config) as engine:
        for number in range(STEPS):
            step(engine, number)
        planned = model_state_bytes(engine.units, rank())
        held = engine.memory_report().held
        for state in ("parameters", "master", "feedback", "moments"):
            mine = {key: size for key, size in held.items() if key[0] == state}
            assert mine == {key: size for key, size in planned.items() if key[0] == state}, state
        assert [tier for state, tier in held if state == "master"] == ["device" if tier == "none" else tier]
        assert_nodes_alike(engine, 2)
        return whole_weights(engine)


def first_steps(warmup: str) -> None:
    """Check that stored parameters equal the master weights only in an uncompressed warm-up, not with int8 deltas."""
    communication = BOTH["communication"] | {"warmup_steps": 3, "warmup": warmup}
    with on_nodes_of(2), partita.initialize(Stack(2), {"zero": HIERARCHICAL, "communication": communication}) as engine:
        for number in range(5):
            step(engine, number)
            assert torch.equal(own_rests(engine), masters(engine)) == (warmup == "full" and number < 3), number
            assert_nodes_alike(engine, 2)


def gradients_telescope(accumulate: int) -> None:
    """Check twice that updates and residuals add up to all gradients; the first check settles the residuals."""
    config = {"zero": HIERARCHICAL, "batch": {"accumulate": accumulate}, **BOTH}
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with on_nodes_of(2), partita.initialize(Bag(), config, optimizer=sgd) as engine:
        for number in range(10 * accumulate):
            engine.backward(engine(factors(number, rank())))
            engine.step()
            for other in range(world()):
                for name, factor in factors(number, other).items():
                    given[name] += factor / (world() * accumulate)
            if number + 1 in (5 * accumulate, 10 * accumulate):
                assert float(held_back(engine).abs().max()) > 0.1, "nothing was held back"
                sums, weights = held_sums(engine), engine.state_dict()
                for name, weight in weights.items():
                    told = -weight / LR + sums[name].view(SHAPES[name])
                    torch.testing.assert_close(told, given[name], rtol=1e-4, atol=1e-3)


def sums_held(engine: partita.Engine) -> dict[str, Tensor]:
    """Return the sum of all ranks' residuals for each parameter, or an empty dict without error feedback."""
    has = bool(engine._parts.runtime.reducer.sync_states)
    return {f"held of {name}": total for name, total in held_sums(engine).items()} if has else {}


def frozen() -> nn.Module:
    model = Stack(3)
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    return model


def saved(folder: Path, config: dict[str, Any], per_node: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save after three steps; return weights and residuals at that point, and the weights three steps later."""
    seeds.start()
    with on_nodes_of(per_node), partita.initialize(frozen(), config) as engine:
        for number in range(3):
            step(engine, number)
        engine.save(folder)
        engine.wait_for_checkpoint()
        at = whole_weights(engine) | sums_held(engine)
        for number in range(3, 6):
            step(engine, number)
        return at, whole_weights(engine)


def resumed(
    folder: Path, config: dict[str, Any], per_node: int, drops: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(7)
    with on_nodes_of(per_node), partita.initialize(frozen(), config) as engine:
        drops = drops and rank() == 0
        with pytest.warns(UserWarning, match="which this run does not use") if drops else contextlib.nullcontext():
            assert engine.load(folder).step == 3
        at = whole_weights(engine) | sums_held(engine)
        for number in range(3, 6):
            step(engine, number)
        return at, whole_weights(engine)


def looked_at(folder: Path) -> None:
    """Check that `gathered` and exports return stored parameters, and a state dict the master weights.

    Values written in `gathered` change both.
    """
    with on_nodes_of(2), partita.initialize(Stack(2), {"zero": HIERARCHICAL, **CHANGES}) as engine:
        for number in range(3):
            step(engine, number)
        weights, state = whole_weights(engine), engine.state_dict()
        if rank() == 0:
            gaps = [float((state[name] - weight).abs().max()) for name, weight in weights.items()]
            assert 0 < max(gaps) < 0.01, gaps
        gradient_sum_is_whole(engine)
        with engine.gathered(engine.module.first, modify=True), torch.no_grad():
            engine.module.first.weight.fill_(0.25)
        assert bool((whole_weights(engine)["first.weight"] == 0.25).all())
        state = engine.state_dict()
        assert rank() or bool((state["first.weight"] == 0.25).all())
        engine.export(folder)
        weights = whole_weights(engine)
        moments = engine.optimizer_state("blocks.1.up.weight")
        assert moments["exp_avg"].shape == (32, 16)
    with on_nodes_of(2), partita.initialize(Stack(2), {"zero": HIERARCHICAL, **CHANGES}, weights=folder) as engine:
        for name, weight in engine.state_dict().items():
            assert torch.equal(weight, weights[name]), name
        assert torch.equal(own_rests(engine), masters(engine))
        step(engine, 3)


def gradient_sum_is_whole(engine: partita.Engine) -> None:
    engine.backward(square_loss(engine, rank(), 9))
    mine = engine.gradient("blocks.0.up.weight")
    assert mine is not None
    every = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(every, mine)
    assert all(torch.equal(mine, other) for other in every)
    engine.zero_grad()


def unfrozen_later() -> None:
    """Check that the master weights of a segment that is unfrozen start from its stored values."""
    with on_nodes_of(2), partita.initialize(frozen(), {"zero": HIERARCHICAL, **CHANGES}) as engine:
        step(engine, 0)
        before = whole_weights(engine)
        engine.module.blocks[1].requires_grad_(True)
        for number in range(1, 3):
            step(engine, number)
        assert_nodes_alike(engine, 2)
        after = whole_weights(engine)
        change = (after["blocks.1.up.weight"] - before["blocks.1.up.weight"]).abs()
        assert 0 < float(change.max()) < 0.01, "two steps of 0.001"


def on_one_node(config: dict[str, Any]) -> None:
    """Check that on one node, where no deltas are sent between nodes, the run is bitwise that of stage 3."""
    recipe = Recipe(lambda: Stack(2), config=config)
    coded = Recipe(lambda: Stack(2), config=config | CHANGES)
    with on_nodes_of(world()):
        assert_same_bits(train_recipe(coded, HIERARCHICAL), train_recipe(recipe, ZERO["3"]), "one node")


# -- tests -------------------------------------------------------------------------------------------------------------


CODED_SUMS = {"communication": {"gradients": "ternary"}}


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "config", "uncompressed"),
    [
        (4, 2, {"clip_grad_norm": 0.1}, REPLICATED),
        (4, 2, {"batch": {"accumulate": 2}, "precision": {"compute": "bf16"}}, REPLICATED),
        (4, 2, {"clip_grad_norm": 0.1, **CODED_SUMS}, HIERARCHICAL),
        (2, 1, {"clip_grad_norm": 0.1}, {"stage": 0}),
        (2, 1, {"batch": {"accumulate": 2}, **CODED_SUMS}, {"stage": 3}),
    ],
    ids=str,
)
def test_where_nothing_is_lost_it_is_bitwise_the_uncompressed_run(
    num_ranks: int, per_node: int, config: dict[str, Any], uncompressed: dict[str, Any]
) -> None:
    on_ranks(num_ranks, bitwise_where_nothing_is_lost, per_node, config, uncompressed)


@pytest.mark.parametrize("codec", sampled(["ternary", "int8", "int4", "2bit", "onebit", "topk"], "ternary", "topk"))
def test_every_codec_trains_and_nodes_stay_alike(codec: str) -> None:
    config: dict[str, Any] = {"clip_grad_norm": 0.5, "communication": {"gradients": "int4"}}
    (losses, full), *others = on_ranks(4, alike, codec, 2, config)
    assert all(other[0] == losses for other in others)
    assert losses != full
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    "config",
    [
        {"precision": {"compute": "bf16"}, **CODED_SUMS},
        {"precision": {"compute": "bf16", "gradients": "bf16"}, **CODED_SUMS},
        {"communication": {"gradients": "low_rank", "low_rank": 2}},
        {
            "communication": {"warmup_steps": 3},
            "optimizer": {"name": "onebit_adam", "sends": "gradients", "lr": 5e-3},
        },
    ],
    ids=str,
)
def test_nodes_stay_alike(config: dict[str, Any]) -> None:
    (losses, _), *_ = on_ranks(4, alike, "ternary", 2, config)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("codec", "compute", "accumulate"), [("ternary", "fp32", 2), ("onebit", "fp32", 1), ("int4", "fp16", 1)]
)
def test_master_weights_have_what_was_given_and_parameters_follow(codec: str, compute: str, accumulate: int) -> None:
    on_ranks(4, telescopes, codec, compute, accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_were_sent_and_are_held_back_are_those_given(accumulate: int) -> None:
    on_ranks(4, gradients_telescope, accumulate)


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_a_step_that_is_left_out_changes_nothing(compute: str) -> None:
    on_ranks(4, left_out, compute)


def test_states_off_the_device_change_no_bit() -> None:
    weights = {tier: on_ranks(4, with_offload, tier)[0] for tier in ("none", "host")}
    for name, weight in weights["none"].items():
        assert torch.equal(weight, weights["host"][name]), name
    on_ranks(4, with_offload, "disk")


@pytest.mark.parametrize("warmup", ["full", "int8"])
def test_the_first_steps(warmup: str) -> None:
    on_ranks(4, first_steps, warmup)


@pytest.mark.parametrize("gradients", ["full", "ternary"])
def test_a_checkpoint_is_of_every_layout(tmp_path: Path, gradients: str) -> None:
    config = {"zero": HIERARCHICAL, "communication": {"gradients": gradients, "parameters": "ternary"}}
    (at, continued), *_ = on_ranks(4, saved, tmp_path, config, 2)
    (same_at, same_continued), *_ = on_ranks(4, resumed, tmp_path, config, 2)
    assert all(torch.equal(value, same_at[name]) for name, value in at.items())
    assert all(torch.equal(weight, same_continued[name]) for name, weight in continued.items())
    assert (gradients == "full") == (not any(name.startswith("held of") for name in at))
    for num_ranks, per_node, other in (
        (2, 2, {"zero": {"stage": 1}}),
        (4, 1, config),
        (2, 1, config),
    ):
        drops = gradients == "ternary" and "communication" not in other
        (other_at, _), *_ = on_ranks(num_ranks, resumed, tmp_path, other, per_node, drops)
        for name, value in other_at.items():
            assert torch.equal(value, at[name]), (name, num_ranks, per_node)


def test_looking_and_writing(tmp_path: Path) -> None:
    on_ranks(4, looked_at, tmp_path)


def test_a_part_of_the_model_that_begins_to_train() -> None:
    on_ranks(4, unfrozen_later)


@pytest.mark.parametrize("config", [{}, {"precision": {"compute": "bf16"}}], ids=str)
def test_on_one_node_it_is_stage_3(config: dict[str, Any]) -> None:
    on_ranks(2, on_one_node, config)
