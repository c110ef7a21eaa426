"""engine.gathered: whole parameters for a while, to read and to write; and engine uses of all kinds in turn."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import PartitaError
from partita.sharding.placeholder import is_sharded
from tests.kit import seeds
from tests.kit.models import WIDTH, Stack, inputs, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import rank, whole_weights

HALF = {"precision": {"compute": "bf16"}}


def reads() -> None:
    seeds.start()
    expected = {name: p.detach().clone() for name, p in Stack().named_parameters()}
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            module: Any = engine.module
            with engine.gathered():
                for name, param in module.named_parameters():
                    assert torch.equal(param, expected[name])
            with engine.gathered(module.blocks[1], module.last.weight):
                assert torch.equal(module.blocks[1].up.weight, expected["blocks.1.up.weight"])
                assert torch.equal(module.last.weight, expected["last.weight"])
                assert is_sharded(module.blocks[2].up.weight) == (zero["stage"] == 3)
                with engine.gathered(module.blocks[1]):
                    pass
                assert torch.equal(module.blocks[1].up.weight, expected["blocks.1.up.weight"]), (
                    "held by the outer block"
                )
            assert is_sharded(module.blocks[1].up.weight) == (zero["stage"] == 3)
            assert_idle(engine)


def costs_no_memory_afterwards() -> None:
    with partita.initialize(Stack(8), {"zero": {"stage": 3}}) as engine:
        before = engine.memory_report().held["buffer_pool", "device"]
        with engine.gathered():
            assert engine.memory_report().held["buffer_pool", "device"] > before
        assert engine.memory_report().held["buffer_pool", "device"] == before


def writes() -> None:
    """What rank 0 writes is everybody's, in the optimizer, too; the next step goes on from it."""
    for config in ({}, HALF):
        ends = []
        for zero in ZERO.values():
            seeds.start()
            with partita.initialize(Stack(), {"zero": zero, **config}) as engine:
                module: Any = engine.module
                engine.backward(square_loss(engine, rank(), 0))
                engine.step()
                with engine.gathered(module.blocks[1], modify=True), torch.no_grad():
                    module.blocks[1].up.weight.fill_(0.5 + rank())
                    module.blocks[1].up.bias.copy_(torch.arange(2.0 * WIDTH))
                weights = whole_weights(engine)
                assert torch.equal(weights["blocks.1.up.weight"].float(), torch.full((2 * WIDTH, WIDTH), 0.5))
                state = engine.state_dict()
                if rank() == 0:
                    assert torch.equal(state["blocks.1.up.bias"], torch.arange(2.0 * WIDTH))
                engine.backward(square_loss(engine, rank(), 1))
                engine.step()
                ends.append(whole_weights(engine))
        assert all(torch.equal(end[name], value) for end in ends for name, value in ends[0].items())


def written_without_modify() -> list[str]:
    said = []
    for zero in ZERO.values():
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            with pytest.raises(PartitaError) as raised, engine.gathered(), torch.no_grad():
                engine.module.blocks[1].up.weight.mul_(2)  # type: ignore[union-attr]
            said.append(str(raised.value))
            assert_idle(engine)
    return said


def written_beside_what_was_asked_for() -> None:
    """A parameter that came along, being of the same unit, was not asked for."""
    with partita.initialize(Stack(), {"zero": {"stage": 3}}) as engine:
        module: Any = engine.module
        with pytest.raises(PartitaError, match=r"'blocks.1.up.weight' was written"):
            with engine.gathered(module.blocks[1].down.weight), torch.no_grad():
                module.blocks[1].up.weight.mul_(2)


def foreign() -> None:
    with partita.initialize(Stack(), {"zero": {"stage": 3}}) as engine:
        with (
            pytest.raises(PartitaError, match="does not belong to the engine's model"),
            engine.gathered(nn.Linear(2, 2)),
        ):
            pass
        with pytest.raises(PartitaError, match="does not belong"), engine.gathered(nn.Parameter(torch.ones(1))):
            pass
        with pytest.raises(PartitaError, match=r"expected modules and parameters.*str"), engine.gathered("first"):  # type: ignore[arg-type]
            pass


def exception_inside() -> None:
    for zero in ZERO.values():
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            with pytest.raises(KeyError), engine.gathered():
                raise KeyError("the user's")
            assert_idle(engine)
            engine.backward(square_loss(engine, rank(), 0))
            assert engine.step().stepped


def trains_inside() -> None:
    """Forward and backward work inside; the step does not, at any stage."""
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            with engine.gathered():
                loss = square_loss(engine, rank(), 0)
                engine.backward(loss)
                with pytest.raises(PartitaError, match=r"engine.step\(\) inside engine.gathered"):
                    engine.step()
            assert engine.step().stepped
            assert_idle(engine)


def runs_on_one_rank() -> None:
    """A module that is held runs on one rank alone, also once the order of units is known."""
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Stack(), {"zero": zero}) as engine, torch.no_grad():
            module: Any = engine.module
            with torch.enable_grad():
                engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            with engine.gathered(module.blocks[0]):
                x = inputs(0, 0)
                found = module.blocks[0](x) if rank() == 0 else None
            with engine.gathered():
                assert found is None or torch.equal(found, module.blocks[0](x))
            assert_idle(engine)


class Generator(Stack):
    """Makes tokens one by one, until it likes to stop."""

    def generate(self, x: Tensor, num: int) -> Tensor:
        for _ in range(num):
            x = torch.cat([x, self(x[-1:])])
        return x


def generates() -> None:
    """Unequal lengths on the ranks, and gathers once, not for every token."""
    seeds.start()
    expected = Generator().generate(inputs(rank(), 0), 3 + 4 * rank())
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Generator(), {"zero": zero}) as engine, torch.no_grad():
            before = engine.traffic_report()
            module: Any = engine.module
            with engine.gathered():
                got = module.generate(inputs(rank(), 0), 3 + 4 * rank())
            assert torch.equal(got, expected)
            rows = engine.traffic_report().since(before).rows
            calls = sum(row.calls for key, row in rows.items() if key.purpose == "parameters")
            assert calls == (len(engine.units) if zero["stage"] == 3 else 0)
            assert_idle(engine)


def generates_at_rest() -> None:
    """The same number of tokens everywhere works without gathered, too."""
    seeds.start()
    expected = Generator().generate(inputs(rank(), 0), 3)
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Generator(), {"zero": zero}) as engine, torch.no_grad():
            assert torch.equal(engine.module.generate(inputs(rank(), 0), 3), expected)  # type: ignore[operator]


class ManySided(Generator):
    """Methods other than forward: one that runs the blocks, one that runs the root's own layers."""

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)

    def embed(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def everything_in_turn() -> None:
    """Training, evaluation, generation and other methods: no warning, no leak, the same numbers at every stage."""
    results = []
    for zero in ZERO.values():
        seeds.start()
        outputs = []
        with partita.initialize(ManySided(), {"zero": zero}) as engine:
            module: Any = engine.module
            for step in range(4):
                engine.train()
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
                assert_idle(engine)
                engine.eval()
                with torch.no_grad():
                    outputs += [engine(inputs(rank(), step)), module.encode(inputs(rank(), step))]
                    with engine.gathered():
                        outputs.append(module.generate(inputs(rank(), step), 2 + rank()))
                outputs.append(module.embed(inputs(rank(), step)).detach())
                engine.train()
                engine.backward(module.embed(module.encode(inputs(rank(), step))).square().mean())
                engine.step()
                assert_idle(engine)
        results.append(outputs)
    assert all(torch.equal(mine, theirs) for other in results for mine, theirs in zip(other, results[0], strict=True))


def evaluates() -> None:
    """Evaluation before any training: no optimizer states, no gradients beyond what rests from the start."""
    for zero in ZERO.values():
        seeds.start()
        model = Stack()
        expected = [model(inputs(rank(), step)) for step in range(3)]
        with partita.initialize(model, {"zero": zero}) as engine, torch.no_grad():
            engine.eval()
            before = engine.memory_report().held
            for step in range(3):
                assert torch.equal(engine(inputs(rank(), step)), expected[step])
            after = engine.memory_report().held
            assert before == after
            assert ("moments", "device") not in after
            assert not engine.optimizer.state


def ragged_evaluation() -> None:
    """Another number of batches on each rank: inside gathered at stage 3, anyhow below."""
    for zero in ZERO.values():
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            engine.eval()
            with torch.no_grad(), engine.gathered():
                for step in range(2 + 3 * rank()):
                    engine(inputs(rank(), step))
            engine.train()
            engine.backward(square_loss(engine, rank(), 1))
            assert engine.step().stepped


def copies() -> None:
    """A gathered model can be copied (for an average of weights, a reference), also on one rank."""
    zero = {"stage": 3, "offload": {"optimizer": "host"}}
    with partita.initialize(Stack(), {"zero": zero}) as engine:
        with engine.gathered():
            weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
            twin, average = copy.deepcopy(engine.module), torch.optim.swa_utils.AveragedModel(engine.module)
            read = pickle.loads(pickle.dumps(engine.module))
        expected = engine(inputs(0, 0))
        for other in (twin, average, read):
            assert torch.equal(other(inputs(0, 0)), expected)
        twin(inputs(0, 0)).sum().backward()
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        assert all(torch.equal(p, weights[name]) for name, p in twin.named_parameters())
        with engine.gathered():
            average.update_parameters(engine.module)
        assert not torch.equal(average.module.first.weight, weights["first.weight"])


def copies_in_16_bits(mode: str) -> None:
    """Copies and pickles of a model in bf16 are plain models: without hooks, casts and classes of the engine's."""
    for stage in (1, 3):
        precision = {"compute": "bf16", "mode": mode}
        with partita.initialize(Stack(), {"zero": {"stage": stage}, "precision": precision}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            with engine.gathered():
                for other in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
                    pairs = zip(other.parameters(), engine.module.parameters(), strict=True)
                    assert all(type(mine) is nn.Parameter and torch.equal(mine, theirs) for mine, theirs in pairs)
                    other(inputs(0, 0).bfloat16()).sum().backward()
            engine.backward(square_loss(engine, rank(), 1))
            assert engine.step().stepped


def averages() -> None:
    """An exponential moving average of the weights, kept by the user."""
    averages = []
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Stack(), {"zero": zero}) as engine:
            average = whole_weights(engine)
            for step in range(3):
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
                with engine.gathered():
                    for name, param in engine.module.named_parameters():
                        average[name].lerp_(param.detach(), 0.1)
            averages.append(average)
    assert all(torch.equal(other[name], value) for other in averages for name, value in averages[0].items())


def test_reading() -> None:
    on_ranks(2, reads)


def test_memory_is_given_back() -> None:
    on_ranks(2, costs_no_memory_afterwards)


@pytest.mark.parametrize("world", [1, 2])
def test_writing(world: int) -> None:
    on_ranks(world, writes)


def test_writing_without_modify_is_refused() -> None:
    for said in on_ranks(2, written_without_modify):
        assert all("'blocks.1.up.weight' was written" in text and "modify=True" in text for text in said), said
    on_ranks(2, written_beside_what_was_asked_for)


def test_what_is_no_part_of_the_model() -> None:
    on_ranks(2, foreign)


def test_exception_inside() -> None:
    on_ranks(2, exception_inside)


@pytest.mark.parametrize("world", [1, 2])
def test_training_inside(world: int) -> None:
    on_ranks(world, trains_inside)


def test_what_is_held_runs_on_one_rank() -> None:
    on_ranks(2, runs_on_one_rank)


def test_generation_gathers_once() -> None:
    on_ranks(2, generates)


def test_generation_at_rest() -> None:
    on_ranks(2, generates_at_rest)


def test_all_kinds_of_use_in_turn() -> None:
    on_ranks(2, everything_in_turn)


def test_evaluation_allocates_nothing() -> None:
    on_ranks(2, evaluates)
    on_ranks(2, ragged_evaluation)


@pytest.mark.parametrize("mode", ["mixed", "cast"])
def test_copies_in_16_bits_are_plain_models(mode: str) -> None:
    on_ranks(2, copies_in_16_bits, mode)


def test_copies_of_the_model() -> None:
    on_ranks(2, copies)


def test_average_of_weights() -> None:
    on_ranks(2, averages)
