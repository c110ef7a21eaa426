"""Precision modes of a forward: the dtypes of arguments and outputs, and the modules that stay in fp32."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita.config.resolve import Resolved, resolve
from partita.errors import ConfigError
from partita.layout.full_precision import find_full_precision, outermost
from partita.sharding.precision import cast_buffers, forward_precision, map_floats
from partita.transforms.modules import ModuleTransforms
from tests.kit.models import CASES

CPU = torch.device("cpu")
INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


def resolved(compute: str = "bf16", **precision: Any) -> Resolved:
    return resolve(partita.Config(precision={"compute": compute, **precision}), 1, "cpu")


# ------------------------------------------------------------------------------------------------------------- casts


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finite_values_stay_finite(dtype: torch.dtype) -> None:
    lowest = torch.finfo(torch.float32).min
    cast = map_floats(torch.tensor([lowest, -1e9, 1.0, -lowest, float("inf"), -float("inf"), float("nan")]), dtype)
    assert cast.isfinite().tolist() == [True, True, True, True, False, False, False]
    assert cast[0] == torch.finfo(dtype).min
    assert cast[5] == -float("inf")


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


def in_mode(model: nn.Module, **precision: Any) -> ModuleTransforms:
    """Cast a model's parameters as the engine does, and make its forward run in the precision mode."""
    asked = resolved(**precision)
    kept = find_full_precision(model, asked)
    for param in model.parameters():
        if id(param) not in kept.params:
            param.data = param.data.to({"bf16": torch.bfloat16, "fp16": torch.float16}[asked.param_dtype])
    if asked.casts_buffers:
        cast_buffers(model, torch.bfloat16, kept)
    transforms = ModuleTransforms()
    forward_precision(model, asked, CPU, kept, transforms)
    return transforms


def dtypes_seen(model: nn.Module, *patterns: str, mode: str = "mixed") -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes of each module's first argument and output."""
    seen = dict[str, tuple[torch.dtype, torch.dtype]]()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)}))
    in_mode(model, keep_fp32=patterns, mode=mode)
    model(torch.ones(3, 4)).sum().backward()
    return seen


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
    kept = find_full_precision(model, resolved(keep_fp32=patterns))
    assert {name for name, module in model.named_modules() if id(module) in kept.modules} == set(expected)
    owners = {name.rpartition(".")[0] for name, param in model.named_parameters() if id(param) in kept.params}
    assert owners == {name for name in expected if name != "attention"}


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(ConfigError, match=r"precision.keep_fp32: 'RMSNorm' matches no module of Model by class"):
        find_full_precision(Model(), resolved(keep_fp32=["LayerNorm", "RMSNorm"]))


def test_kept_modules_take_and_return_fp32() -> None:
    model = Model()
    seen = dtypes_seen(model, "LayerNorm")
    assert seen["attention.norm"] == (torch.bfloat16, torch.float32)  # a hook sees the argument before the cast
    assert seen["first"] == (torch.float32, torch.bfloat16)
    assert model.attention.norm.weight.grad is not None
    assert model.attention.norm.weight.grad.dtype == torch.float32
    assert model.first.weight.grad is not None
    assert model.first.weight.grad.dtype == torch.bfloat16


def test_values_stay_in_fp32_inside_a_kept_module() -> None:
    seen = dtypes_seen(Model(), "attention")
    assert seen["attention.norm"] == seen["attention.out"] == (torch.float32, torch.float32)
    assert seen["attention"][1] == torch.float32


def test_the_cast_mode_casts_where_values_leave_kept_modules() -> None:
    seen = dtypes_seen(Model(), "attention", mode="cast")
    assert seen["attention.norm"] == seen["attention.out"] == (torch.float32, torch.float32)
    assert seen["attention"][1] == seen["head"][0] == torch.bfloat16


def test_a_kept_list_is_as_many_kept_modules() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    kept = find_full_precision(model, resolved(keep_fp32=["layers"]))
    assert outermost(model, kept.modules) == list(model.layers)


def test_a_shared_module_is_kept_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert outermost(model, find_full_precision(model, resolved(keep_fp32=["Linear"])).modules) == [shared]


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * (x.var(0) + self.eps).rsqrt() * self.weight + self.bias


def test_batch_norms_are_in_fp32() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), OwnNorm(4), nn.SyncBatchNorm(4))
    kept = find_full_precision(model, resolved())
    assert kept.batch_norms == {id(model[0]), id(model[3])}
    assert kept.modules == {id(model[2])}
    assert kept.params == {id(param) for number in (0, 2, 3) for param in model[number].parameters()}


@pytest.mark.parametrize("mode", ["mixed", "cast"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, OwnNorm])
def test_batch_norms_run_beside_layers_in_16_bits(norm: Callable[[int], nn.Module], mode: str) -> None:
    model = nn.Sequential(norm(4), nn.Linear(4, 4), norm(4), nn.Linear(4, 2))
    in_mode(model, mode=mode)
    model(torch.randn(6, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


class Listed(Model):
    _keep_in_fp32_modules = ("attention.out",)
    _keep_in_fp32_modules_strict = ("head", "bias_correction")

    def __init__(self) -> None:
        super().__init__()
        self.bias_correction = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(("compute", "modules"), [("bf16", {"head"}), ("fp16", {"head", "attention.out"})])
def test_the_lists_of_transformers_hold(compute: str, modules: set[str]) -> None:
    model = Listed()
    kept = find_full_precision(model, resolved(compute))
    assert {name for name, module in model.named_modules() if id(module) in kept.modules} == modules
    assert id(model.bias_correction) in kept.params


def test_a_model_in_16_bits_keeps_its_modules_in_fp32() -> None:
    model = Model().bfloat16()
    model.head.float()
    kept = find_full_precision(model, resolved())
    assert kept.modules == {id(model.head)}
    assert not find_full_precision(Model(), resolved()).modules


class Adapted(nn.Module):
    """A layer with an adapter, structured as in PEFT."""

    adapter_layer_names = ("lora_A", "lora_embedding_A")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4).bfloat16()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.zeros(2, 4))})


def test_the_adapters_of_a_model_in_16_bits_are_cast() -> None:
    assert not find_full_precision(nn.Sequential(Adapted()), resolved()).params


def test_in_fp32_nothing_is_wrapped() -> None:
    model = Model()
    asked = resolve(partita.Config(precision={"compute": "fp32", "keep_fp32": ["LayerNorm"]}), 1, "cpu")
    assert forward_precision(model, asked, CPU, find_full_precision(model, asked), ModuleTransforms()) is None


def test_the_norms_of_a_real_model() -> None:
    case = CASES["llama"]
    model, plain = case.build(), case.build()
    in_mode(model, keep_fp32=["LlamaRMSNorm"])
    batch = next(case.batches(2))
    got, expected = (case.loss(m(**batch)) for m in (model, plain))
    assert got.item() == pytest.approx(expected.item(), rel=0.02)


# -------------------------------------------------------------------------------------------- arguments and outputs


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.seen = dict[str, Any]()

    def forward(self, x: Tensor, *, targets: list[dict[str, Tensor]]) -> dict[str, Any]:
        self.seen = {"x": x, "boxes": targets[0]["boxes"]}
        hidden = self.layer(x)
        self.seen |= {"hidden": hidden, "encoded": self.encode(x)}
        return {"logits": hidden, "parts": (hidden, targets[0]["boxes"]), "weight": self.layer.weight}

    def encode(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight)


def call(model: Takes) -> dict[str, Any]:
    return model(torch.randn(2, 4), targets=[{"boxes": torch.tensor([1333.0])}])


@pytest.mark.parametrize("mode", ["mixed", "autocast"])
def test_arguments_reach_the_model_as_they_are(mode: str) -> None:
    model = Takes()
    kept = find_full_precision(model, resolved())
    forward_precision(model, resolved(mode=mode), CPU, kept, ModuleTransforms())
    call(model)
    assert model.seen["x"].dtype == torch.float32
    assert model.seen["boxes"].item() == 1333.0
    assert model.seen["hidden"].dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["mixed", "cast"])
@pytest.mark.parametrize(("outputs", "dtype"), [("fp32", torch.float32), ("compute", torch.bfloat16)])
def test_outputs(mode: str, outputs: str, dtype: torch.dtype) -> None:
    model = Takes()
    in_mode(model, mode=mode, outputs=outputs)
    output = call(model)
    assert output["logits"].dtype == output["parts"][0].dtype == dtype
    assert output["weight"] is model.layer.weight


def test_the_cast_mode_casts_arguments_and_persistent_buffers() -> None:
    model = Takes()
    in_mode(model, mode="cast")
    call(model)
    assert model.seen["x"].dtype == model.seen["boxes"].dtype == torch.bfloat16
    assert model.shift.dtype == torch.bfloat16
    assert model.table.dtype == torch.float32


def test_other_methods_run_as_the_forward_does() -> None:
    model = Takes()
    transforms = in_mode(model)
    assert model.encode(torch.randn(2, 4)).dtype == torch.float32
    call(model)
    assert model.seen["encoded"].dtype == torch.bfloat16  # inside a forward its output stays as it is
    transforms.undo()
    assert "forward" not in vars(model)
    assert "encode" not in vars(model)


def test_methods_of_torch_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    in_mode(model)
    assert "append" not in vars(model)


def test_a_forward_that_fails_leaves_autocast() -> None:
    model = Takes()
    in_mode(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5), targets=[{"boxes": torch.ones(1)}])
    assert not torch.is_autocast_enabled("cpu")
    assert call(model)["logits"].dtype == torch.float32


def test_a_copy_has_its_own_forward() -> None:
    model = Takes()
    in_mode(model)
    copied = copy.deepcopy(model).float()
    assert copied(torch.randn(2, 4), targets=[{"boxes": torch.ones(1)}])["logits"].dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
