"""Requirements on a model's parameters and modules: an error names those that cannot be trained correctly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import partita
from partita.errors import ConfigError
from tests.kit.ranks import on_ranks


def _pair(change: Callable[[nn.Linear, nn.Linear], None] = lambda a, b: None) -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    change(model["a"], model["b"])  # type: ignore[arg-type]
    return model


def _same_data(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = a.weight.data


def _transposed(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = a.weight.data.t()


def _overlapping_views(a: nn.Linear, b: nn.Linear) -> None:
    buffer = torch.zeros(24)
    a.weight.data, b.weight.data = buffer[:16].view(4, 4), buffer[8:].view(4, 4)


def _of_other_dtypes(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.data.view(torch.bfloat16))


def _one_element(a: nn.Linear, b: nn.Linear) -> None:
    buffer = torch.zeros(7, 4)
    a.weight.data, b.weight.data = buffer[:4], buffer.as_strided((4, 4), (4, 1), 12)


def _views_side_by_side(a: nn.Linear, b: nn.Linear) -> None:
    buffer = torch.zeros(32)
    a.weight.data, b.weight.data = buffer[:16].view(4, 4), buffer[16:].view(4, 4)


def _interleaved(a: nn.Linear, b: nn.Linear) -> None:
    buffer = torch.zeros(4, 8)
    a.weight.data, b.weight.data = buffer[:, ::2], buffer[:, 1::2]


def _empty(a: nn.Linear, b: nn.Linear) -> None:
    a.weight.data = b.weight.data = torch.zeros(0, 4)


def _one_object(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = a.weight


@pytest.mark.parametrize("share", [_same_data, _transposed, _overlapping_views, _of_other_dtypes, _one_element])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_parameters_over_one_memory(share: Callable[[Any, Any], None], device: str) -> None:
    with torch.device(device):
        model = _pair(share)
    with pytest.raises(ConfigError, match=r"'a.weight' and 'b.weight' share memory .*module.weight = other.weight"):
        partita.initialize(model)


@pytest.mark.parametrize("share", [_views_side_by_side, _interleaved, _empty, _one_object])
def test_memory_without_an_element_in_common(share: Callable[[Any, Any], None]) -> None:
    with partita.initialize(_pair(share)):
        pass


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 3, "offload": {"parameters": "host"}}])
def test_meta_models_share_nothing(zero: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = _pair()
    with partita.initialize(model, {"zero": zero}):
        pass


@pytest.mark.parametrize("trains", [True, False])
def test_float64_is_not_cast_unasked(trains: bool) -> None:
    model = _pair()
    model["b"].double().requires_grad_(trains)
    with pytest.raises(ConfigError, match=r"'b.weight' is in float64, .* auto trains in fp32: call model.float\(\)"):
        partita.initialize(model)
    with partita.initialize(model, {"precision": {"compute": "fp32"}}):
        assert model["b"].weight.dtype == torch.float32


def test_float64_buffers_stay() -> None:
    model = _pair()
    model.register_buffer("table", torch.ones(3, dtype=torch.float64))
    with partita.initialize(model):
        assert model.table.dtype == torch.float64


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_torchscript(stage: int) -> None:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.script"):
        model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match=r"module '1' is a TorchScript module.*before torch.jit.script"):
        partita.initialize(model, {"zero": {"stage": stage}})


def test_model_that_is_distributed_already() -> None:
    model = nn.Sequential(nn.DataParallel(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match=r"module '0' is a DataParallel, .* pass the module inside it: 0.module"):
        partita.initialize(model, {})
    with pytest.raises(ConfigError, match=r"the model is a DataParallel, .* pass the module inside it: model.module"):
        partita.initialize(model[0], {})


def _wrapped() -> None:
    with pytest.raises(ConfigError, match=r"the model is a DistributedDataParallel, .*: model.module"):
        partita.initialize(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), {})
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ConfigError, match=r"the model is a FSDPModule, .*: pass the model before it is sharded"):
        partita.initialize(sharded, {})


def test_model_in_torchs_wrappers() -> None:
    on_ranks(2, _wrapped)
