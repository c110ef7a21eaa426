"""After an exception in forward or backward nothing is in use, and the next step trains as if it had not occurred."""

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita import PartitaError
from tests.kit import seeds
from tests.kit.models import Stack, inputs, square_loss
from tests.kit.plans import ZERO, matrix
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import ADAMW, rank, small_buckets, whole_weights


class BoomError(Exception):
    pass


class Fuse(torch.autograd.Function):
    """Identity function whose backward raises while ``Fuse.lit`` is True."""

    lit = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if Fuse.lit:
            raise BoomError("in backward")
        return grads[0]


class Fragile(Stack):
    """Stack whose forward raises if ``fails_at`` is "root", and whose backward passes a `Fuse`."""

    fails_at: str = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2:
                if self.fails_at == "root":
                    raise BoomError("in the root's forward")
                x = Fuse.apply(x)
        return self.last(x)


def fail(engine: partita.Engine, where: str) -> None:
    """Run a step that raises at ``where``."""
    module: Any = engine.module
    handles = []
    if where == "root":
        module.fails_at = "root"
    elif where == "block":
        handles.append(module.blocks[3].up.register_forward_hook(_raise))
    elif where == "hook before":
        handles.append(module.blocks[3].register_forward_pre_hook(_raise))
    elif where == "input":
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine(torch.ones(3, 5))
        return
    try:
        if where == "backward":
            loss, Fuse.lit = square_loss(engine, rank(), 50), True
            with pytest.raises(BoomError):
                engine.backward(loss)
        elif where == "second backward":
            engine.backward(square_loss(engine, rank(), 60))
            loss, Fuse.lit = square_loss(engine, rank(), 50), True
            with pytest.raises(BoomError):
                engine.backward(loss)
        elif where == "plain backward":
            loss, Fuse.lit = square_loss(engine, rank(), 50), True
            with pytest.raises(BoomError):
                loss.backward()
        else:
            with pytest.raises(BoomError):
                square_loss(engine, rank(), 50)
    finally:
        Fuse.lit, module.fails_at = False, ""
        for handle in handles:
            handle.remove()


def _raise(*_: Any) -> None:
    raise BoomError("in a hook")


def train_over(zero: Mapping[str, Any], where: str, plain: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train three steps, with a failed step before the second if ``where`` names one. Return losses and weights."""
    seeds.start()
    losses = []
    with small_buckets(), partita.initialize(Fragile(), {"optimizer": ADAMW, "zero": zero}) as engine:
        for step in range(3):
            if step == 1 and where:
                fail(engine, where)
                engine.zero_grad()
            loss = square_loss(engine, rank(), step)
            if plain:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            assert_idle(engine)
        return losses, whole_weights(engine)


WHERE = ("root", "block", "hook before", "input", "backward", "plain backward", "second backward")


def survive(where: str, plan: str, plain: bool) -> None:
    expected, expected_weights = train_over(ZERO[plan], "", plain)
    losses, weights = train_over(ZERO[plan], where, plain)
    assert losses == expected
    assert all(torch.equal(weights[key], expected_weights[key]) for key in weights)


def interrupted(zero: Mapping[str, Any], ends: str) -> None:
    """Check that forwards after a KeyboardInterrupt (a notebook's stop button) find changes of the model."""
    seeds.start()
    model: Any = Stack(2)
    model.first.requires_grad_(False)
    with partita.initialize(model, {"optimizer": ADAMW, "zero": zero}) as engine:
        handle = model.blocks[1].up.register_forward_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine(inputs(rank(), 0))
        handle.remove()
        if ends == "zero_grad":
            engine.zero_grad()
        else:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
        before = whole_weights(engine)["first.weight"]
        model.first.requires_grad_(True)
        engine.backward(square_loss(engine, rank(), 1))
        engine.step()
        assert not torch.equal(whole_weights(engine)["first.weight"], before)
        assert_idle(engine)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def batches_over(zero: Mapping[str, Any], fails: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train two batches; if ``fails``, a batch that raises in its third micro-batch comes before the second."""
    seeds.start()
    settings = {"optimizer": ADAMW, "zero": zero, "batch": {"micro": 4, "accumulate": 4}}
    with small_buckets(), partita.initialize(Fragile(), settings, loss_fn=lambda output, _: output.mean()) as engine:
        module: Any = engine.module
        losses = []
        for step in range(2):
            if step and fails:
                calls = iter(["", "", "root"])
                handle = module.register_forward_pre_hook(lambda *_: setattr(module, "fails_at", next(calls)))
                with pytest.raises(BoomError):
                    engine.train_batch([inputs(rank(), 50 + micro) for micro in range(4)])
                handle.remove()
                module.fails_at = ""
            losses.append(engine.train_batch([inputs(rank(), 4 * step + micro) for micro in range(4)]).item())
            assert engine.last_step.stepped
            assert_idle(engine)
        return losses, whole_weights(engine)


def next_batch_is_whole() -> None:
    for zero in ZERO.values():
        (expected, expected_weights), (losses, weights) = (batches_over(zero, fails) for fails in (False, True))
        assert losses == expected
        assert all(torch.equal(weights[key], expected_weights[key]) for key in weights)


def batch_inside_a_batch() -> None:
    with partita.initialize(Stack(), {"batch": {"micro": 4, "accumulate": 2}}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        assert not engine.step().stepped
        with pytest.raises(PartitaError, match=r"engine.train_batch\(\) after micro-batch 1 of 2: .*engine.zero_grad"):
            engine.train_batch([inputs(rank(), 1), inputs(rank(), 2)])
        engine.backward(square_loss(engine, rank(), 1))
        assert engine.step().stepped


def stale(zero: Mapping[str, Any], plain: bool) -> str:
    with partita.initialize(Stack(), {"zero": zero}) as engine:
        engine.backward(square_loss(engine, rank(), 0))
        old = square_loss(engine, rank(), 1)
        engine.step()
        with pytest.raises(PartitaError) as raised:
            old.backward() if plain else engine.backward(old)
        engine.zero_grad()
        engine.backward(square_loss(engine, rank(), 2))
        assert engine.step().stepped
        assert_idle(engine)
        return str(raised.value)


def stale_graphs(plain: bool) -> list[str]:
    return [stale(zero, plain) for zero in ZERO.values()]


def stale_after_writing() -> list[str]:
    messages = []
    for zero in ZERO.values():
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            loss = square_loss(engine, rank(), 0)
            with engine.gathered(modify=True), torch.no_grad():
                engine.module.first.weight.mul_(2)
            with pytest.raises(PartitaError) as raised:
                engine.backward(loss)
            messages.append(str(raised.value))
    return messages


def graph_that_is_dropped() -> None:
    """Check that the output of a forward without a backward is freed when it is dropped."""
    for zero in ZERO.values():
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            for step in range(3):
                output = engine(inputs(rank(), 100))
                seen = weakref.ref(output)
                del output
                gc.collect()
                assert seen() is None
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
                assert_idle(engine)


@matrix(where=WHERE, plan=ZERO, plain=[False, True])
def test_next_step_is_as_if_it_had_not_happened(where: str, plan: str, plain: bool) -> None:
    on_ranks(2, survive, where, plan, plain)


@matrix(plan=["1", "3"], ends=["zero_grad", "step"])
def test_forwards_after_an_interrupt_find_changes(plan: str, ends: str) -> None:
    on_ranks(2, interrupted, ZERO[plan], ends)


def test_next_batch_is_as_if_none_had_failed() -> None:
    on_ranks(2, next_batch_is_whole)


def test_a_batch_is_not_begun_inside_another() -> None:
    on_ranks(2, batch_inside_a_batch)


@pytest.mark.parametrize("plain", [False, True])
def test_backward_after_the_step_is_refused(plain: bool) -> None:
    for messages in on_ranks(2, stale_graphs, plain):
        assert all("run the forward again" in message for message in messages), messages


def test_backward_after_writing_is_refused() -> None:
    for messages in on_ranks(2, stale_after_writing):
        assert all("run the forward again" in message for message in messages), messages


def test_dropped_graph_holds_nothing() -> None:
    on_ranks(2, graph_that_is_dropped)
