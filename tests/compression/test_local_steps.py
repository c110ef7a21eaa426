"""Replicas that train independently: the outer optimizer is DiLoCo's at every stage; checkpoints have one replica."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partita
from partita.config.resolve import resolve
from partita.layout.state_bytes import model_state_bytes
from partita.layout.traffic import StepShape, step_traffic
from tests.kit.models import WIDTH, Stack, inputs, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, rank, whole_weights, world

STEPS = 7
BeforeStep = Callable[[nn.Module, int], None]
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
LOCAL = {"every": 3, "replicas": 2, "outer_lr": 0.5, "outer_momentum": 0.8}


def config(plan: str, **communication: Any) -> dict[str, Any]:
    return {"zero": ZERO[plan], "optimizer": ADAMW, "communication": LOCAL | communication, "clip_grad_norm": 0.5}


def always_trains(model: nn.Module, step: int) -> None:
    pass


def thaws_in_the_second_step(model: nn.Module, step: int) -> None:
    model.get_submodule("last").requires_grad_(step > 0)


def reference(asked: dict[str, Any], num_ranks: int, before_step: BeforeStep) -> dict[str, Tensor]:
    """Train plain PyTorch: AdamW in each replica on its ranks' samples, and torch's SGD on the mean of their deltas."""
    per_replica = num_ranks // asked["replicas"]
    shared = Recipe(lambda: Stack(2)).built()
    outer = torch.optim.SGD(
        shared.parameters(),
        lr=asked["outer_lr"],
        momentum=asked["outer_momentum"],
        nesterov=asked.get("outer_nesterov", True),
    )
    replicas = [Recipe(lambda: Stack(2)).built() for _ in range(asked["replicas"])]
    inner = [torch.optim.AdamW(replica.parameters(), **ADAMW) for replica in replicas]
    for step in range(STEPS):
        for number, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            before_step(replica, step)
            own = range(number * per_replica, (number + 1) * per_replica)
            torch.stack([replica(inputs(other, step)).square().mean() for other in own]).mean().backward()
            torch.nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % asked["every"] == 0:
            with torch.no_grad():
                for param, *apart in zip(shared.parameters(), *(r.parameters() for r in replicas), strict=True):
                    param.grad = torch.stack([param - other for other in apart]).mean(0)
                outer.step()
                for replica in replicas:
                    replica.load_state_dict(shared.state_dict())
    return {name: p.detach() for name, p in replicas[rank() // per_replica].named_parameters()}


def go(engine: partita.Engine, first: int, stop: int, before_step: BeforeStep = always_trains) -> None:
    for step in range(first, stop):
        before_step(engine.module, step)
        engine.backward(square_loss(engine, rank(), step))
        assert engine.step().stepped


def follows(plans: tuple[str, ...], before_step: BeforeStep = always_trains, **asked: Any) -> None:
    """Check each replica's weights in the middle of a round; they have the same bits at every stage."""
    first = dict[str, Tensor]()
    expected = reference(LOCAL | asked, world(), before_step)
    for plan in plans:
        model = Recipe(lambda: Stack(2)).built()
        before_step(model, 0)
        with partita.initialize(model, config(plan, **asked)) as engine:
            go(engine, 0, STEPS, before_step)
            weights = whole_weights(engine)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=f"{name}, plan {plan}")
        first = first or weights
        assert all(torch.equal(weight, first[name]) for name, weight in weights.items()), plan


def averages() -> None:
    """Check that rounds of one step with an outer SGD of rate 1 average the replicas' parameters."""
    own = Recipe(lambda: Stack(2)).built()
    optimizer = torch.optim.AdamW(own.parameters(), **ADAMW)
    plain = {"every": 1, "replicas": world(), "outer_lr": 1.0, "outer_momentum": 0.0, "outer_nesterov": False}
    with partita.initialize(Recipe(lambda: Stack(2)).built(), config("2", **plain)) as engine:
        for step in range(4):
            go(engine, step, step + 1)
            own(inputs(rank(), step)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(own.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for param in own.parameters():
                    dist.all_reduce(param)
                    param /= world()
            for name, weight in whole_weights(engine).items():
                torch.testing.assert_close(weight, own.get_parameter(name), rtol=1e-5, atol=1e-6)


def alike(values: Tensor) -> bool:
    every = [torch.empty_like(values) for _ in range(world())]
    dist.all_gather(every, values)
    return all(torch.equal(values, other) for other in every)


def flat(engine: partita.Engine) -> Tensor:
    return torch.cat([weight.view(-1) for weight in whole_weights(engine).values()])


def counted(plan: str, codec: str, compute: str) -> None:
    """Check measured against planned bytes, and that replicas are bitwise equal at the end of a round and only there.

    The last step of the training ends a round.
    """
    num_steps = 2 * LOCAL["every"] + 1
    asked = config(plan, gradients=codec) | {"precision": {"compute": compute}, "schedule": {"total_steps": num_steps}}
    with partita.initialize(Stack(2), asked) as engine:
        for step in range(num_steps):
            ends = (step + 1) % LOCAL["every"] == 0 or step + 1 == num_steps
            before = engine.traffic_report()
            go(engine, step, step + 1)
            found = engine.traffic_report().since(before)
            expected = step_traffic(engine.units, StepShape(ends_round=ends))
            assert found == expected, f"step {step}\n{found}\n{expected}"
            assert alike(flat(engine)) == ends
        planned = model_state_bytes(engine.units, rank())
        held = engine.memory_report().held
        assert {key: held[key] for key in held if key[0] == "outer"} == {
            k: planned[k] for k in planned if k[0] == "outer"
        }


def resumed(folder: Path, plan: str, codec: str, at: int, zero: dict[str, Any]) -> None:
    """Check that a run resumed from a checkpoint, saved inside a round or at its end, equals the continued run."""
    asked = config(plan, gradients=codec)
    asked["zero"] = asked["zero"] | zero
    with partita.initialize(Recipe(lambda: Stack(2)).built(), asked) as engine:
        go(engine, 0, at)
        engine.save(folder)
        assert alike(flat(engine))
        go(engine, at, at + 4)
        continued = whole_weights(engine)
    with partita.initialize(Stack(2), asked) as engine:
        engine.load(folder)
        go(engine, at, at + 4)
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, continued[name]), name


def elsewhere(folder: Path) -> None:
    """Check that a checkpoint loads with another number of replicas, and in a run without replicas."""
    with partita.initialize(Recipe(lambda: Stack(2)).built(), config("1", gradients="ternary")) as engine:
        go(engine, 0, 4)
        engine.save(folder)
        saved = whole_weights(engine)
    for communication in (LOCAL | {"replicas": 4, "gradients": "ternary"}, {}):
        dropped = not communication and rank() == 0
        with partita.initialize(Stack(2), config("3") | {"communication": communication}) as engine:
            with pytest.warns(UserWarning, match="which this run does not use") if dropped else nullcontext():
                engine.load(folder)
            assert all(torch.equal(weight, saved[name]) for name, weight in whole_weights(engine).items())
            go(engine, 4, 6)


def left_out() -> None:
    """Check that a non-finite gradient in one replica skips the step in all replicas."""
    with partita.initialize(Stack(2), config("1", gradients="ternary")) as engine:
        go(engine, 0, 2)
        before = flat(engine)
        engine.backward(square_loss(engine, rank(), 2) * (float("inf") if rank() == world() - 1 else 1.0))
        with pytest.warns(UserWarning, match="the update is skipped"):
            assert engine.step().skipped
        assert torch.equal(flat(engine), before)
        assert not alike(before)
        with pytest.raises(partita.PartitaError, match="replicas that train separately"):
            with engine.gathered(modify=True):
                pass
        go(engine, 2, 3)
        assert alike(flat(engine))
        with engine.gathered(modify=True), torch.no_grad():
            if rank() == 0:
                engine.module.first.bias.fill_(0.5)
        assert torch.equal(flat(engine)[WIDTH * WIDTH :][:WIDTH], torch.full((WIDTH,), 0.5))
        assert alike(flat(engine))


# -- tests -------------------------------------------------------------------------------------------------------------


def test_every_stage_is_diloco() -> None:
    on_ranks(4, follows, ("0", "1", "2", "3"))


def test_without_looking_ahead() -> None:
    on_ranks(2, follows_plain)


def follows_plain() -> None:
    follows(("3",), outer_nesterov=False)


def test_a_layer_that_is_unfrozen_inside_a_round() -> None:
    on_ranks(2, follows, ("0", "1", "3"), thaws_in_the_second_step)


def test_of_every_step_it_is_the_mean_of_the_parameters() -> None:
    on_ranks(2, averages)


@pytest.mark.parametrize(
    ("plan", "codec", "compute"),
    [("0", "full", "fp32"), ("1", "int8", "bf16"), ("2", "ternary", "fp32"), ("3", "onebit", "bf16")],
)
def test_bytes_are_the_plan_s(plan: str, codec: str, compute: str) -> None:
    on_ranks(4, counted, plan, codec, compute)


@pytest.mark.parametrize(
    ("plan", "codec", "at", "zero"),
    [
        ("1", "full", 4, {}),
        ("3", "ternary", 5, {}),
        ("0", "onebit", 3, {"offload": {"optimizer": "host"}}),
    ],
)
def test_a_resumed_run_is_the_continued_one(
    tmp_path: Path, plan: str, codec: str, at: int, zero: dict[str, Any]
) -> None:
    on_ranks(4, resumed, tmp_path, plan, codec, at, zero)


def test_other_layouts_take_it_up(tmp_path: Path) -> None:
    on_ranks(4, elsewhere, tmp_path)


def test_a_step_is_left_out_by_all() -> None:
    on_ranks(4, left_out)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"communication": {"outer_lr": 0.5}}, "applies only to replicas that train separately"),
        ({"communication": {"every": 2, "parameters": "int8"}, "zero": {"stage": 3}}, "sends quantized parameters"),
        ({"communication": {"every": 2}, "precision": {"gradients": "in_backward"}}, "before it is known whether all"),
        ({"communication": {"every": 2}, "zero": {"offload": {"optimizer": "disk"}}}, "on the device or on the host"),
        ({"communication": {"every": 2, "replicas": 3}}, "cannot form 3 groups of equal size"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(partita.ConfigError, match=said):
        resolve(partita.Config(**asked), 4, "cpu")


def test_on_one_node_there_is_nothing_to_meet() -> None:
    assert (
        "ignored: communication.every (all data ranks are on one node)"
        in resolve(partita.Config(communication={"every": 2}), 4, "cpu", ranks_per_node=4).notices
    )
