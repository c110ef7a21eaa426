"""Dtypes at the borders: floating-point values are cast, nothing else is, and kept modules work in fp32."""

import pytest
import torch
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.planner.group_units import keep_fp32_modules
from partita.sharding.casts import cast_borders, map_floats
from tests.local.models import CASES

INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_floats_are_cast(dtype: torch.dtype) -> None:
    batch = {
        "floats": [torch.ones(2, dtype=given) for given in (torch.float64, torch.float32, torch.bfloat16)],
        "others": tuple(torch.ones(2).to(given) for given in INTEGERS),
        "name": "x",
    }
    changed = map_floats(batch, dtype)
    assert {tensor.dtype for tensor in changed["floats"]} == {dtype}
    assert changed["others"] is batch["others"]
    assert changed["name"] == "x"


def test_nothing_is_copied_where_nothing_changes() -> None:
    batch = {"pixels": torch.ones(2), "labels": torch.ones(2, dtype=torch.int64)}
    assert map_floats(batch, torch.float32) is batch


def test_a_cast_is_differentiable() -> None:
    x = torch.ones(3, requires_grad=True)
    map_floats([x], torch.bfloat16)[0].float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------- kept in fp32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.head = nn.Linear(4, 4), Attention(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.first(x)))


def cast(patterns: list[str], compute: torch.dtype) -> tuple[Model, dict[str, tuple[torch.dtype, torch.dtype]]]:
    """A model that computes in ``compute``, and (once it has run) the dtypes that each module is given and gives."""
    model, seen = Model().to(compute), dict[str, tuple[torch.dtype, torch.dtype]]()
    kept = keep_fp32_modules(model, patterns)
    for module in model.modules():
        if id(module) in kept:
            module.float()
    cast_borders(model, compute, kept)
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)}))
    return model, seen


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], []),
        (["LayerNorm"], ["attention.norm"]),
        (["*.norm"], ["attention.norm"]),
        (["attention"], ["attention", "attention.norm", "attention.out"]),
        (["Attention", "head"], ["attention", "attention.norm", "attention.out", "head"]),
        (["Linear"], ["first", "attention.out", "head"]),
    ],
)
def test_modules_that_are_kept(patterns: list[str], expected: list[str]) -> None:
    model = Model()
    kept = keep_fp32_modules(model, patterns)
    assert {name for name, module in model.named_modules() if id(module) in kept} == set(expected)


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(ConfigError, match=r"precision.keep_fp32: 'RMSNorm' matches no module of Model by class"):
        keep_fp32_modules(Model(), ["LayerNorm", "RMSNorm"])


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_kept_modules_work_in_fp32(compute: torch.dtype) -> None:
    model, seen = cast(["LayerNorm"], compute)
    model(torch.ones(3, 4, dtype=compute)).sum().backward()
    assert seen.pop("attention.norm") == (torch.float32, compute)
    assert set(seen.values()) == {(compute, compute)}
    assert model.attention.norm.weight.grad is not None
    assert model.attention.norm.weight.grad.dtype == torch.float32
    assert model.first.weight.grad is not None
    assert model.first.weight.grad.dtype == compute


def test_values_stay_in_fp32_inside_a_kept_module() -> None:
    model, seen = cast(["attention"], torch.bfloat16)
    model(torch.ones(3, 4, dtype=torch.bfloat16))
    assert seen["attention.norm"] == seen["attention.out"] == (torch.float32, torch.float32)
    assert seen["attention"] == (torch.float32, torch.bfloat16)
    assert seen["first"] == seen["head"] == (torch.bfloat16, torch.bfloat16)


def test_a_kept_list_is_as_many_kept_modules() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    cast_borders(model, torch.bfloat16, keep_fp32_modules(model, ["layers"]))
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    assert [layer(x).dtype for layer in model.layers] == [torch.bfloat16] * 2


def test_a_shared_module_is_cast_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    cast_borders(model, torch.bfloat16, keep_fp32_modules(model, ["Linear"]))
    assert len(shared._forward_pre_hooks) == len(shared._forward_hooks) == 1
    assert model(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_in_fp32_there_are_no_borders() -> None:
    model = Model()
    before = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    cast_borders(model, torch.float32, keep_fp32_modules(model, ["LayerNorm"]))
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == before


def test_the_norms_of_a_real_model() -> None:
    model = CASES["llama"].build().bfloat16()
    kept = keep_fp32_modules(model, ["LlamaRMSNorm"])
    for module in model.modules():
        if id(module) in kept:
            module.float()
    plain = CASES["llama"].build()
    cast_borders(model, torch.bfloat16, kept)
    batch = next(CASES["llama"].batches(2))
    got, expected = (CASES["llama"].loss(m(**batch)) for m in (model, plain))
    assert got.item() == pytest.approx(expected.item(), rel=0.02)
