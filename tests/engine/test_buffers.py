"""Buffers start as rank 0's. Those that a training forward changes are broadcast from rank 0, or stay local."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import partita
from partita import PartitaError
from tests.kit import seeds
from tests.kit.models import WIDTH, inputs, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

SGD = {"name": "sgd", "lr": 0.1, "weight_decay": 0.0}


class Normalized(nn.Module):
    """Model with batch norms in the root and in units, two constant buffers, and a counter of training forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("constant", torch.full((3,), float(rank())))
        self.register_buffer("sliced", torch.randn(4, 4).t())
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        if self.training:
            self.steps += 1
        return self.norm(x)


def against_ddp() -> None:
    """Check that batch statistics are local and running statistics are rank 0's, as in DistributedDataParallel."""
    seeds.start()
    ddp = DistributedDataParallel(Normalized())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        square_loss(ddp, rank(), step).backward()
        optimizer.step()
    expected = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    for buffer in ddp.module.buffers():
        dist.broadcast(buffer, 0)
    for zero in ZERO.values():
        seeds.start()
        with partita.initialize(Normalized(), {"zero": zero, "optimizer": SGD}) as engine:
            for step in range(4):
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
            state = engine.state_dict()
            buffers = dict(engine.module.named_buffers())
        if rank() == 0:
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=name)
        for name, value in ddp.module.named_buffers():
            torch.testing.assert_close(buffers[name], value, rtol=1e-4, atol=1e-6, msg=name)


def start() -> None:
    """Check that all ranks start with rank 0's buffers, for any strides."""
    seeds.start(rank())
    with partita.initialize(Normalized(), {"zero": {"stage": 1}}) as engine:
        module: Any = engine.module
        assert torch.equal(module.constant, torch.zeros(3))
        seeds.start()
        assert torch.equal(module.sliced, Normalized().sliced)


NAMES = """
    bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float8_e4m3fn float8_e5m2 float8_e8m0fnu float16 bfloat16
    float32 float64 complex64 complex128
"""
DTYPES: list[torch.dtype] = [getattr(torch, name) for name in NAMES.split()]


class Typed(nn.Module):
    """Model with buffers and frozen parameters of one dtype, of many shapes and strides; values 0 and ``value``."""

    def __init__(self, dtype: torch.dtype, value: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        values = (torch.arange(12).view(3, 4) % 2 * value).to(dtype)
        shaped = {"matrix": values, "transposed": values.t(), "gaps": values[:, ::2], "scalar": values[0, 1]}
        if dtype.is_complex:
            shaped["conjugate"] = (values * 1j).conj()
        for name, value in {**shaped, "empty": values[:0]}.items():
            self.register_buffer(name, value)
            self.register_parameter(f"frozen_{name}", nn.Parameter(value.clone(), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def every_dtype(within_node: str) -> None:
    """Check that buffers and frozen parameters of any dtype start with rank 0's values."""
    for dtype, zero in ((dtype, zero) for dtype in DTYPES for zero in ({"stage": 1}, {"stage": 3})):
        exchange = {"within_node": within_node, "timeout_s": 20}
        config = {"zero": zero, "precision": {"compute": "fp32"}, "communication": exchange}
        expected = Typed(dtype, 1).state_dict()
        with partita.initialize(Typed(dtype, int(rank() == 0)), config) as engine, engine.gathered():
            for name, value in engine.module.state_dict().items():
                if not name.startswith("linear"):
                    assert value.dtype == dtype or name.startswith("frozen"), name
                    assert torch.equal(_bytes(value.to(dtype)), _bytes(expected[name])), f"{name} in {dtype}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().resolve_conj().view(-1).view(torch.uint8)


def evaluated(setting: str, zero: Mapping[str, Any]) -> list[float]:
    """Train on this rank's own samples. Return the output in evaluation for samples that are equal on all ranks."""
    seeds.start()
    with partita.initialize(Normalized(), {"zero": zero, "communication": {"buffers": setting}}) as engine:
        for step in range(3):
            if step < 2 or rank() == 0:  # the other ranks run no forward in the last step
                engine.backward(square_loss(engine, rank(), step))
            engine.step()
        engine.eval()
        before = engine.traffic_report()
        value: Tensor = engine(inputs(0, 9))
        assert not [key for key in engine.traffic_report().since(before).rows if key.purpose == "buffers"]
        return value.flatten().tolist()


def alone_in_evaluation() -> None:
    """Check that with unsharded parameters one rank may evaluate alone between training steps of all ranks."""
    with partita.initialize(Normalized(), {"zero": {"stage": 1}}) as engine:
        for step in range(3):
            engine.train()
            engine.backward(square_loss(engine, rank(), step))
            if rank() == 0:
                engine.eval()
                square_loss(engine, 0, 50)
                engine.train()
            assert engine.step().stepped
            if rank() == 0:
                engine.eval()
                square_loss(engine, 0, 60)


def frozen_statistics() -> None:
    """Check that a model that trains in evaluation mode sends no statistics."""
    with partita.initialize(Normalized(), {"zero": {"stage": 3}}) as engine:
        engine.eval()
        before = engine.traffic_report()
        engine.backward(square_loss(engine, rank(), 0))
        assert engine.step().stepped
        assert not [key for key in engine.traffic_report().since(before).rows if key.purpose == "buffers"]


def follow(setting: str) -> list[float]:
    """Return the running means after two training forwards; in the second, all ranks have the same samples."""
    with partita.initialize(Normalized(), {"communication": {"buffers": setting}}) as engine:
        module: Any = engine.module
        square_loss(engine, rank(), 0)
        square_loss(engine, 0, 5)
        return module.norm.running_mean.tolist()


def constants_do_not_travel() -> None:
    with partita.initialize(Normalized(), {"zero": {"stage": 1}}) as engine:
        for step in range(3):
            before = engine.traffic_report()
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
            rows = engine.traffic_report().since(before).rows
            calls = sum(row.calls for key, row in rows.items() if key.purpose == "buffers")
            assert calls == 4 * 3 + 1, "three buffers for each batch norm, and the counter"


def written_by_the_user() -> list[float]:
    """Write a buffer outside forward. Return it after the next training forward, which broadcasts rank 0's values."""
    with partita.initialize(Normalized(), {"zero": {"stage": 3}}) as engine:
        module: Any = engine.module
        module.constant.fill_(5.0 + rank())
        engine(inputs(rank(), 0))
        return module.constant.tolist()


class Codebook(nn.Module):
    """Model that writes buffers through ``data``, differently on each rank, from the ``first`` training forward on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first, self.num_forwards = first, 0
        self.register_buffer("codes", torch.zeros(3, WIDTH).t())
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        codes: Any = self.codes
        count: Any = self.count
        if self.training:
            self.num_forwards += 1
            if self.num_forwards >= self.first:
                codes.data.add_(1 + rank())
                count.data.add_(1 + rank())
        return self.linear(x)


def written_through_data(config: Mapping[str, Any], first: int) -> None:
    """Check that a write without a new version is found by comparing contents, and broadcast from then on."""
    with partita.initialize(Codebook(first), {**config, "optimizer": SGD}) as engine:
        module: Any = engine.module
        for step in range(first + 1):
            engine.backward(square_loss(engine, 0, step))
            engine.step()
        assert torch.equal(module.codes, torch.full((WIDTH, 3), 2.0))
        assert module.count == 2


class Growing(nn.Module):
    """Model with a mask as long as its longest input, and with frequencies of the last input longer than 4."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("frequencies", torch.ones(8), persistent=False)

    def forward(self, x: Tensor, grows: bool) -> Tensor:
        n = len(x)
        if grows and (self.mask is None or len(self.mask) < n):
            self.register_buffer("mask", torch.ones(n, n).tril(), persistent=False)
        if n > 4:
            self.register_buffer("frequencies", torch.ones(8) / n, persistent=False)
        return self.linear(x)


def grown_on_one_rank(stage: int, evaluates: bool) -> list[float]:
    """Replace a buffer on rank 1 alone, for which no rank may wait. Return the buffer, which must follow rank 0."""
    config = {"zero": {"stage": stage}, "optimizer": SGD, "communication": {"timeout_s": 20}}
    with partita.initialize(Growing(), config) as engine:
        for step in range(3):
            if evaluates:
                engine.eval()
                engine(inputs(0, step, 3 + 3 * rank(), WIDTH), False)
                engine.train()
            engine.backward(engine(inputs(0, step, 3 + 3 * rank(), WIDTH), False).square().mean())
            assert engine.step().stepped
        frequencies: Any = engine.module.frequencies
        return frequencies.tolist()


def grown_apart(setting: str) -> str:
    """Grow a buffer to different shapes. Return the error, or an empty text if each rank keeps its own buffer."""
    config = {"zero": {"stage": 1}, "communication": {"buffers": setting, "timeout_s": 20}}
    with partita.initialize(Growing(), config) as engine:
        loss = engine(inputs(0, 0, 3 + 3 * rank(), WIDTH), True).square().mean()
        engine.backward(loss)
        try:
            engine.step()
        except PartitaError as error:
            return str(error)
        module: Any = engine.module
        assert torch.equal(module.mask, torch.ones(3 + 3 * rank(), 3 + 3 * rank()).tril())
        return ""


def grown_alike() -> None:
    """Check that buffers that all ranks replace by longer ones follow rank 0, whatever their length before."""
    with partita.initialize(Growing(), {"zero": {"stage": 3}, "communication": {"timeout_s": 20}}) as engine:
        module: Any = engine.module
        for step, length in enumerate((2, 3, 3, 5)):
            engine.backward(engine(inputs(0, step, length, WIDTH), True).square().mean())
            module.mask.add_(rank())
            assert engine.step().stepped
            assert torch.equal(module.mask, torch.ones(length, length).tril()) or step == 2
            module.mask.copy_(torch.ones(length, length).tril())


def local_in_checkpoints(folder: str, num_ranks: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], list[str]]:
    """Return the buffers that ``num_ranks`` ranks saved, those that this rank has loaded, and the warnings."""
    saved = []
    with partita.initialize(Normalized(), {"communication": {"buffers": "local"}}) as engine:
        module: Any = engine.module
        if dist.get_world_size() == num_ranks:
            square_loss(engine, rank(), 0)
            module.constant = torch.full((3 + rank(),), float(rank()))
            engine.save(folder)
            saved = [{name: buffer.clone() for name, buffer in module.named_buffers()}]
            for buffer in module.buffers():
                buffer.zero_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.load(folder)
        found = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return saved, found, [str(warning.message) for warning in caught]


def broadcast_after_local(folder: str) -> list[float]:
    with partita.initialize(Normalized(), {"zero": {"stage": 1}}) as engine:
        engine.load(folder)
        return engine.module.norm.running_mean.tolist()


def half_precision() -> None:
    """Check that batch norms stay in fp32 under bf16 compute."""
    for zero in ZERO.values():
        with partita.initialize(Normalized(), {"zero": zero, "precision": {"compute": "bf16"}}) as engine:
            module: Any = engine.module
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            assert module.norm.running_mean.dtype == torch.float32
            assert module.norm.weight.dtype == torch.float32
            assert module.layers[0][0].weight.dtype == torch.bfloat16
            assert module.norm.running_mean.abs().sum() > 0


def test_running_statistics_as_in_ddp() -> None:
    on_ranks(2, against_ddp)


def test_start_from_rank_0() -> None:
    on_ranks(2, start)


@pytest.mark.parametrize("within_node", ["auto", "network"])
def test_every_dtype(within_node: str) -> None:
    on_ranks(2, every_dtype, within_node)


@pytest.mark.parametrize("name", ["0", "1", "2"])
def test_every_rank_evaluates_with_the_same_statistics(name: str) -> None:
    one, other = on_ranks(2, evaluated, "broadcast", ZERO[name])
    assert one == other
    one, other = on_ranks(2, evaluated, "local", ZERO[name])
    assert one != other


def test_one_rank_evaluates_alone() -> None:
    on_ranks(2, alone_in_evaluation)


def test_frozen_statistics_do_not_travel() -> None:
    on_ranks(2, frozen_statistics)


def test_broadcast_or_local() -> None:
    one, other = on_ranks(2, follow, "broadcast")
    assert one == other
    one, other = on_ranks(2, follow, "local")
    assert one != other


def test_local_buffers_in_checkpoints(tmp_path: Path) -> None:
    (((first,), loaded, said), ((second,), other, more)) = on_ranks(2, local_in_checkpoints, str(tmp_path), 2)
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
    assert first["constant"].shape != second["constant"].shape
    for saved, found in ((first, loaded), (second, other)):
        assert all(torch.equal(found[name], buffer) for name, buffer in saved.items())
    assert (said, more) == ([], [])
    for number, (_, found, lines) in enumerate(on_ranks(3, local_in_checkpoints, str(tmp_path), 2)):
        assert all(torch.equal(found[name], buffer) for name, buffer in first.items())
        told = [line for line in lines if "buffers differed between the 2 ranks that saved" in line]
        assert len(told) == (number == 0)
    assert on_ranks(2, broadcast_after_local, str(tmp_path)) == [first["norm.running_mean"].tolist()] * 2


def test_constant_buffers_do_not_travel() -> None:
    on_ranks(2, constants_do_not_travel)


def test_buffer_written_by_the_user() -> None:
    assert on_ranks(2, written_by_the_user) == [[5.0] * 3] * 2


def test_batch_norm_in_half_precision() -> None:
    on_ranks(2, half_precision)


@pytest.mark.parametrize("config", [{"zero": {"stage": 0}}, {"zero": {"stage": 3}}, {"parallel": {"tensor": 2}}])
@pytest.mark.parametrize("first", [1, 4])
def test_buffers_written_through_data(config: Mapping[str, Any], first: int) -> None:
    on_ranks(2, written_through_data, config, first)


@pytest.mark.parametrize(("stage", "evaluates"), [(1, False), (1, True), (3, True)])
def test_a_buffer_replaced_on_one_rank(stage: int, evaluates: bool) -> None:
    one, other = on_ranks(2, grown_on_one_rank, stage, evaluates)
    assert one == other == [1.0] * 8


def test_buffers_of_other_shapes() -> None:
    for said in on_ranks(2, grown_apart, "broadcast"):
        assert "buffer 'mask' has changed and is [3, 3] in float32 on cpu on rank 0, [6, 6]" in said
        assert "communication.buffers: local" in said
    assert on_ranks(2, grown_apart, "local") == ["", ""]


def test_buffers_that_grow_alike() -> None:
    on_ranks(2, grown_alike)
