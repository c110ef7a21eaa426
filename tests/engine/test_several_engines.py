"""Several engines in one process: their models, stages and optimizers are independent."""

import os
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

import partita
from partita import PartitaError
from partita.comm import world as world_module
from tests.kit import seeds
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import ADAMW, rank, whole_weights, world


def gan(zero_one: Mapping[str, Any], zero_other: Mapping[str, Any], share: bool) -> dict[str, Tensor]:
    """Train a generator and a discriminator in turn, each through the other. Return their weights."""
    seeds.start()
    config = {"optimizer": ADAMW}
    with partita.initialize(Stack(2), {**config, "zero": zero_one}) as generator:
        mesh = generator.mesh if share else None
        with partita.initialize(Stack(3), {**config, "zero": zero_other}, mesh=mesh) as discriminator:
            for step in range(3):
                real = discriminator(inputs(rank(), step)).mean()
                fake = discriminator(generator(inputs(rank(), step + 50)).detach()).mean()
                discriminator.backward(fake - real)
                discriminator.step()
                loss = discriminator(generator(inputs(rank(), step + 100))).mean()
                generator.backward(-loss)
                generator.step()
                discriminator.zero_grad()
                assert_idle(generator)
                assert_idle(discriminator)
            weights = {f"generator.{name}": p for name, p in whole_weights(generator).items()}
            return weights | {f"discriminator.{name}": p for name, p in whole_weights(discriminator).items()}


def plain_gan() -> dict[str, Tensor]:
    seeds.start()
    generator, discriminator = Stack(2), Stack(3)
    g_step, d_step = (torch.optim.AdamW(m.parameters(), **ADAMW) for m in (generator, discriminator))
    for step in range(3):
        d_step.zero_grad()
        for other in range(world()):
            real = discriminator(inputs(other, step)).mean()
            fake = discriminator(generator(inputs(other, step + 50)).detach()).mean()
            ((fake - real) / world()).backward()
        d_step.step()
        g_step.zero_grad()
        for other in range(world()):
            (-discriminator(generator(inputs(other, step + 100))).mean() / world()).backward()
        g_step.step()
    weights = {f"generator.{name}": p.detach() for name, p in generator.named_parameters()}
    return weights | {f"discriminator.{name}": p.detach() for name, p in discriminator.named_parameters()}


def gan_at_all_stages() -> None:
    expected = plain_gan()
    plans = list(ZERO.values())
    first = None
    for number, zero in enumerate(plans):
        weights = gan(zero, plans[(number + 2) % len(plans)], share=number % 2 == 0)
        first = first or weights
        for name, value in weights.items():
            assert torch.equal(value, first[name]), name
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def distilled() -> None:
    """Check that a student has equal bits at every stage, with a frozen teacher at stage 3."""
    weights = []
    for zero in ZERO.values():
        seeds.start()
        teacher_model = Stack().requires_grad_(False)
        with (
            partita.initialize(teacher_model, {"zero": {"stage": 3}}) as teacher,
            partita.initialize(Stack(2), {"optimizer": ADAMW, "zero": zero}, mesh=teacher.mesh) as student,
        ):
            for step in range(3):
                x = inputs(rank(), step)
                with torch.no_grad():
                    target = teacher(x)
                student.backward((student(x) - target).square().mean())
                assert student.step().stepped
            assert_idle(teacher)
            weights.append(whole_weights(student))
    assert all(torch.equal(other[name], value) for other in weights for name, value in weights[0].items())


def differentiable_teacher() -> None:
    """Check that gradients flow through a frozen engine's model into that of another engine."""
    weights = []
    for zero in ZERO.values():
        seeds.start()
        judge_model = Stack(2).requires_grad_(False)
        with (
            partita.initialize(judge_model, {"zero": zero}) as judge,
            partita.initialize(Stack(2), {"optimizer": ADAMW, "zero": zero}, mesh=judge.mesh) as student,
        ):
            for step in range(2):
                student.backward(judge(student(inputs(rank(), step))).square().mean())
                assert student.step().stepped
            weights.append(whole_weights(student))
    assert all(torch.equal(other[name], value) for other in weights for name, value in weights[0].items())


def one_loss_two_engines() -> None:
    """Check that one backward computes the gradients of two engines."""
    results = []
    for zero in ZERO.values():
        seeds.start()
        with (
            partita.initialize(Stack(2), {"optimizer": ADAMW, "zero": zero}) as encoder,
            partita.initialize(Stack(2), {"optimizer": ADAMW, "zero": zero}, mesh=encoder.mesh) as decoder,
        ):
            for step in range(3):
                loss = decoder(encoder(inputs(rank(), step))).square().mean()
                loss.backward()
                assert encoder.step().stepped
                assert decoder.step().stepped
            results.append((loss.item(), whole_weights(encoder), whole_weights(decoder)))
    for loss, one, other in results:
        assert loss == results[0][0]
        assert all(torch.equal(one[name], results[0][1][name]) for name in one)
        assert all(torch.equal(other[name], results[0][2][name]) for name in other)


def one_after_the_other() -> None:
    """Check that a closed engine's model can be initialized again, except with sharded parameters (stage 3)."""
    for name, zero in ZERO.items():
        model = Stack()
        with partita.initialize(model, {"zero": zero}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            with pytest.raises(PartitaError, match=r"'first.weight' .* another engine"):
                partita.initialize(model, {"zero": zero})
        if zero["stage"] < 3:
            with partita.initialize(model, {"zero": zero}) as engine:
                engine.backward(square_loss(engine, rank(), 0))
                assert engine.step().stepped, name
        else:
            with pytest.raises(PartitaError, match="'first.weight'"):
                partita.initialize(model, {"zero": zero})


def closed_engine() -> None:
    """Check that after close an unsharded model trains in plain PyTorch, and the engine raises that it is closed."""
    for zero in ({"stage": 0}, {"stage": 1}, {"stage": 2}):
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
        engine.close()  # a second close has no effect
        model: Any = engine.module
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = model.first.weight.detach().clone()
        model(inputs(0, 0)).square().mean().backward()
        optimizer.step()
        assert not torch.equal(before, model.first.weight)
        with pytest.raises(PartitaError, match="closed"):
            engine.backward(square_loss(model, 0, 0))
        with pytest.raises(PartitaError, match="closed"):
            engine.step()
        with pytest.raises(PartitaError, match="closed"):
            engine(inputs(0, 0))


def groups_are_closed() -> bool:
    with partita.initialize(Stack(), {"zero": {"stage": 3}}) as one:
        other = partita.initialize(Stack(), {"zero": {"stage": 3}}, mesh=one.mesh)
        other.close()
        one.backward(square_loss(one, rank(), 0))
        assert one.step().stepped, "the mesh closes with its last engine"
    return dist.is_initialized()


def outlives_the_first() -> None:
    """Check that an engine trains on after the engine that created its mesh was closed, and closes the mesh itself."""
    for zero in ZERO.values():
        first = partita.initialize(Stack(1), {"zero": zero})
        engine = partita.initialize(Stack(1), {"zero": zero}, mesh=first.mesh)
        engine.backward(square_loss(engine, rank(), 0))
        assert engine.step().stepped
        first.close()
        engine.backward(square_loss(engine, rank(), 1))
        assert engine.step().stepped
        third = partita.initialize(Stack(1), {"zero": zero}, mesh=engine.mesh)
        engine.close()
        third.backward(square_loss(third, rank(), 2))
        assert third.step().stepped
        third.close()
        with pytest.raises(PartitaError, match="the mesh is closed, because all its engines are closed"):
            partita.initialize(Stack(1), {"zero": zero}, mesh=third.mesh)


def in_turn(later: int) -> int:
    """Create and close engines in turn; rank ``later`` closes each after the other rank has begun the next."""
    for step in range(12):
        with partita.initialize(Stack(1), {"communication": {"timeout_s": 30.0}}) as engine:
            engine.backward(square_loss(engine, rank(), step))
            assert engine.step().stepped
            if rank() == later:
                time.sleep(0.05)
    return step + 1


def overlapping() -> bool:
    """Close an engine while a second one, on its own mesh, trains. Return True if a default process group is left."""
    one = partita.initialize(Stack(1))
    other = partita.initialize(Stack(1), {"zero": {"stage": 3}})
    one.close()
    one.close()
    other.backward(square_loss(other, rank(), 0))
    assert other.step().stepped
    other.close()
    return dist.is_initialized()


def beside_the_users_group() -> float:
    """Check that closing a mesh leaves alone a process group that the user started later. Return a sum over it."""
    engine = partita.initialize(Stack(1))
    dist.destroy_process_group()
    store = PrefixStore("users", world_module._here.store)
    dist.init_process_group("gloo", store=store, rank=rank_in_environment(), world_size=2)
    engine.close()
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def rank_in_environment() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize("later", [0, 1])
def test_in_turn(later: int) -> None:
    assert on_ranks(2, in_turn, later, with_group=False) == [12, 12]


def test_in_a_job_of_more_ranks() -> None:
    """Engines work in processes that have started different numbers of process groups before."""
    for num_ranks in (2, 3):
        assert on_ranks(num_ranks, overlapping, with_group=False) == [False] * num_ranks


def test_the_last_mesh_ends_torch_distributed() -> None:
    assert on_ranks(2, overlapping, with_group=False) == [False, False]


def test_another_group_of_the_users_stays() -> None:
    assert on_ranks(2, beside_the_users_group, with_group=False) == [1.0, 1.0]


def test_gan_at_different_stages() -> None:
    on_ranks(2, gan_at_all_stages)


def test_teacher_and_student() -> None:
    on_ranks(2, distilled)


def test_gradients_through_a_frozen_engine() -> None:
    on_ranks(2, differentiable_teacher)


def test_one_backward_for_two_engines() -> None:
    on_ranks(2, one_loss_two_engines)


def test_model_given_twice() -> None:
    on_ranks(2, one_after_the_other)


@pytest.mark.parametrize("world", [1, 2])
def test_after_close(world: int) -> None:
    on_ranks(world, closed_engine)


def test_shared_mesh_is_closed_by_its_owner() -> None:
    assert on_ranks(2, groups_are_closed) == [True, True]
    assert on_ranks(2, groups_are_closed, with_group=False) == [False, False]


def test_engine_outlives_the_first() -> None:
    on_ranks(2, outlives_the_first)
