"""Tests of engine.gathered, which unshards parameters to read or write them, and of mixed uses of an engine."""

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


def reads_in_inference_mode() -> None:
    """Parameters can be read in inference mode, and training continues as without these reads."""
    for zero in ZERO.values():
        ends = []
        for reading in (False, True):
            seeds.start()
            with partita.initialize(Stack(), {"zero": zero, **HALF}) as engine:
                module: Any = engine.module
                for step in range(2):
                    if reading:
                        with torch.inference_mode():
                            engine(inputs(rank(), step))
                            norm = module.first.weight.norm()
                            with engine.gathered(module.first):
                                assert torch.equal(module.first.weight.norm(), norm)
                            engine.state_dict()
                    engine.backward(square_loss(engine, rank(), step))
                    assert engine.step().stepped
                ends.append(whole_weights(engine))
        assert all(torch.equal(ends[1][name], value) for name, value in ends[0].items())


def writes() -> None:
    """Rank 0's writes reach all ranks and the optimizer's master weights; the next step continues from them."""
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
    """Writing a parameter that is gathered only because it is in the same unit is an error."""
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
    """Forward and backward work inside gathered; a step is an error at every stage."""
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
    """A gathered module runs on one rank alone, also after the order of units has been recorded."""
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
    """A stack that generates ``num`` tokens one by one."""

    def generate(self, x: Tensor, num: int) -> Tensor:
        for _ in range(num):
            x = torch.cat([x, self(x[-1:])])
        return x


def generates() -> None:
    """Ranks generate different lengths inside gathered, and each unit is gathered once, not for every token."""
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
    """Ranks that generate the same number of tokens need no gathered."""
    seeds.start()
    expected = Generator().generate(inputs(rank(), 0), 3)
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Generator(), {"zero": zero}) as engine, torch.no_grad():
            assert torch.equal(engine.module.generate(inputs(rank(), 0), 3), expected)  # type: ignore[operator]


class ManySided(Generator):
    """A generator with methods other than forward: one runs a block, one runs the root's own layers."""

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)

    def embed(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def everything_in_turn() -> None:
    """Mixed training, evaluation, generation and other methods cause no warnings or leaks; all stages agree bitwise."""
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
    """Evaluation before any training allocates no optimizer states and no gradients."""
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
    """Ranks can evaluate different numbers of batches inside gathered."""
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
    """A gathered model can be copied, e.g. for an average of weights or a reference model."""
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
    """Copies and pickles of a bf16 model are plain models, without the engine's hooks, casts and classes."""
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
    """The user's own exponential moving average of gathered weights is the same at every stage."""
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


def test_reading_in_inference_mode() -> None:
    on_ranks(2, reads_in_inference_mode)


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
