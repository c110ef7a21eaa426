"""A Fabric loop on partita trains as on Lightning's own DDP."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from partita import ConfigError, PartitaError
from tests.integrations.lightning.loops import Loop, batch, fabric, on_ddp, on_partita
from tests.integrations.lightning.modules import NOISE, STAGES, Net, quietly, worst
from tests.kit.ranks import on_ranks

pytestmark = [pytest.mark.filterwarnings(noise) for noise in NOISE]

SAME = 1e-6


@quietly()
def beside_ddp(folder: str) -> tuple[list[float], dict[int, list[float]], dict[int, list[float]]]:
    """Return the losses and norms of DDP, of each stage, and of runs resumed after three steps at another stage."""
    world = dist.get_world_size()
    ddp = Loop(fabric(on_ddp(), world)).run(0, 6)
    whole, resumed = {}, {}
    for stage in STAGES:
        strategy = on_partita(stage)
        loop = Loop(fabric(strategy, world))
        loop.run(0, 3)
        loop.save(Path(folder) / f"{stage}")
        whole[stage] = loop.run(3, 6)
        strategy.teardown()
        strategy = on_partita(3 - stage)
        loop = Loop(fabric(strategy, world))
        state = loop.state()
        assert loop.fabric.load(Path(folder) / f"{stage}", state) == {}
        resumed[stage] = loop.run(state["step"], 6)
        strategy.teardown()
    return ddp, whole, resumed


@pytest.mark.parametrize("world", [1, 2])
def test_losses_norms_and_resumed_runs_are_those_of_ddp(tmp_path: Path, world: int) -> None:
    for ddp, whole, resumed in on_ranks(world, beside_ddp, str(tmp_path)):
        for stage in STAGES:
            assert worst(whole[stage], ddp) <= SAME
            assert worst(resumed[stage], whole[stage][9:]) <= SAME


@quietly()
def rates_of(folder: str) -> tuple[list[float], list[float]]:
    """Return the learning rates of three steps after a checkpoint, and of a run that loads it with a tenth of them."""
    found = []
    for factor in (1.0, 0.1):
        strategy = on_partita(2)
        loop = Loop(fabric(strategy, dist.get_world_size()), 1e-2 * factor)
        if factor == 1.0:
            loop.run(0, 3)
            loop.save(Path(folder))
        else:
            loop.fabric.load(Path(folder), loop.state())
        rates = []
        for step in range(3, 6):
            rates.append(loop.optimizer.param_groups[0]["lr"])
            loop.run(step, step + 1)
        found.append(rates)
        strategy.teardown()
    return found[0], found[1]


@pytest.mark.filterwarnings("ignore:engine.load. the optimizer is configured differently")
def test_a_changed_learning_rate_stays(tmp_path: Path) -> None:
    for rates, tenth in on_ranks(2, rates_of, str(tmp_path)):
        assert tenth == pytest.approx([rate / 10 for rate in rates])


@quietly()
def other_models() -> None:
    """Use one model that only evaluates and two that train in one loop."""
    strategy = on_partita(3)
    made = fabric(strategy, dist.get_world_size())
    frozen = made.setup(Net())
    loop = Loop(made)
    with torch.no_grad():
        assert torch.equal(frozen(batch(0, 0)[0]), loop.model(batch(0, 0)[0]))
    loop.run(0, 2)
    with torch.no_grad():
        before = loop.loss(0)
    second = Loop(made)
    with pytest.raises(PartitaError, match="2 models were set up with an optimizer.* name one"):
        made.backward(second.loss(0))
    made.backward(second.loss(0), model=second.model)
    second.optimizer.zero_grad()  # drops the gradients
    made.backward(second.loss(0), model=second.model, retain_graph=True)
    second.optimizer.step()
    with torch.no_grad():
        assert torch.equal(loop.loss(0), before)
    strategy.teardown()
    assert type(second.optimizer.optimizer) is torch.optim.AdamW


def test_several_models() -> None:
    on_ranks(2, other_models)


@quietly()
def dropped() -> tuple[float, float]:
    """Return a batch's gradient norm after another batch's gradients were dropped, and without that."""
    strategy = on_partita(2)
    loop = Loop(fabric(strategy, dist.get_world_size()))
    norms = []
    for numbers in ((0, 1), (1,)):
        for number in numbers:
            loop.optimizer.zero_grad()
            loop.fabric.backward(loop.loss(number))
        norms.append(float(loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=1.0)))  # type: ignore[arg-type]
    strategy.teardown()
    return norms[0], norms[1]


def test_zero_grad_drops_gradients() -> None:
    for one, other in on_ranks(2, dropped):
        assert one == other


@quietly()
def in_16_bits() -> tuple[list[float], ...]:
    found = []
    for strategy in (on_ddp(), on_partita(3, precision={"compute": "fp32"}), on_partita(0), on_partita(3)):
        found.append(Loop(fabric(strategy, dist.get_world_size(), precision="bf16-mixed")).run(0, 4))
        strategy.teardown()
    return tuple(found)


def test_bf16_mixed_casts_or_autocasts() -> None:
    for ddp, autocast, cast, sharded in on_ranks(2, in_16_bits):
        assert worst(autocast, ddp) <= 1e-5  # norms of bf16 gradients, summed in another order
        assert cast == sharded
        assert 0 < worst(cast, ddp) < 0.1


@quietly()
def on_meta_and_from_a_file(folder: str) -> None:
    strategy = on_partita(3)
    made = fabric(strategy, dist.get_world_size())
    with made.init_module(empty_init=True):
        model = Net()
    assert all(param.is_meta for param in model.parameters())
    model, optimizer = made.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = Net()
    x = batch(0, 0)[0]
    assert torch.equal(model(x), expected(x))
    with torch.no_grad():
        expected.scale.mul_(3.0)
    if made.global_rank == 0:
        torch.save(expected.state_dict(), f"{folder}/raw.pt")
    made.barrier()
    made.load_raw(f"{folder}/raw.pt", model)
    torch.testing.assert_close(model(x), expected(x))
    whole = strategy.get_module_state_dict(model._forward_module)
    assert set(whole) == (set(expected.state_dict()) if made.global_rank == 0 else set())
    made.save(f"{folder}/plain.pt", {"numbers": [1, 2]})
    assert made.load(f"{folder}/plain.pt") == {"numbers": [1, 2]}
    with pytest.raises(PartitaError, match="raw.pt' is not a folder that fabric.save wrote for an engine"):
        made.load(f"{folder}/raw.pt", {"model": model, "optimizer": optimizer})
    with pytest.raises(PartitaError, match="a folder with its full state; pass neither filter"):
        made.save(f"{folder}/some", {"model": model}, filter={"model": lambda name, value: True})
    strategy.teardown()


def test_meta_and_plain_files(tmp_path: Path) -> None:
    on_ranks(2, on_meta_and_from_a_file, str(tmp_path))


@quietly()
def refused() -> None:
    strategy = on_partita(1)
    made, model = fabric(strategy, 1), Net()
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in ([model.scale], model.layers.parameters())]
    with pytest.raises(ConfigError, match=r"fabric.setup: got 2 optimizers; .* trains a model with one"):
        made.setup(model, *optimizers)
    with pytest.raises(ConfigError, match=r"set up model and optimizer: fabric.setup\(model, optimizer\)"):
        made.setup_optimizers(optimizers[0])
    loop = Loop(made)
    made.backward(loop.loss(0))
    with pytest.raises(ConfigError, match=r"clip_val=1.0 .* only by their global norm: pass max_norm"):
        made.clip_gradients(loop.model, loop.optimizer, clip_val=1.0)
    with pytest.raises(ConfigError, match="partita clips by the 2-norm; got norm_type=1"):
        made.clip_gradients(loop.model, loop.optimizer, max_norm=1.0, norm_type=1)
    loop.optimizer.zero_grad()
    made.backward(loop.loss(0) * float("inf"))
    with pytest.raises(PartitaError, match="the norm of the gradients is (nan|inf)"):
        made.clip_gradients(loop.model, loop.optimizer, max_norm=1.0)
    strategy.teardown()
    with pytest.raises(ConfigError, match="batch.accumulate is 4"):
        on_partita(1, batch={"accumulate": 4})


def test_what_fabric_cannot_ask_for() -> None:
    on_ranks(1, refused)
