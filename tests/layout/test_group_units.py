"""Tests of units: modules whose parameters are gathered together; every parameter is in exactly one unit."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.layout.parameters import find_stage_parameters
from partita.layout.units import LEAF_SHARE, UnitSpec, group_units, modules_like
from tests.kit.models import CASES


def names(model: nn.Module, choice: str | Sequence[str] = "auto") -> list[str]:
    return [unit.name for unit in group_units(model, choice)]


def unit_of(units: list[UnitSpec], fqn: str) -> str:
    (found,) = [unit.name for unit in units for info in unit.infos if fqn in info.fqns]
    return found


def check(model: nn.Module, units: list[UnitSpec]) -> None:
    """Assert that each parameter is in one unit, whose module contains it, and that all are in the model's order."""
    params = [id(info.param) for unit in units for info in unit.infos]
    assert sorted(params) == sorted(id(param) for param in model.parameters())
    position = {name: number for number, (name, _) in enumerate(model.named_modules())}
    order = {id(param): number for number, param in enumerate(model.parameters())}
    assert [position[unit.name] for unit in units] == sorted(position[unit.name] for unit in units)
    for unit in units:
        assert model.get_submodule(unit.name) is unit.module
        mine = {id(param) for param in unit.module.parameters()}
        places = [order[id(info.param)] for info in unit.infos]
        assert places
        assert places == sorted(places)
        for info in unit.infos:
            assert id(info.param) in mine
            for fqn in info.fqns:
                assert model.get_parameter(fqn) is info.param
            for owner, attribute in info.owners:
                assert owner._parameters[attribute] is info.param


# ------------------------------------------------------------------------------------------------------------ the zoo

ZOO = {
    "decoder": ["", "blocks.0", "blocks.1"],
    "gpt2": ["", "transformer.h.0", "transformer.h.1"],
    "llama": ["", "model.layers.0", "model.layers.1"],
    "bert": ["", "bert.encoder.layer.0", "bert.encoder.layer.1"],
    "resnet": ["", "layers.0", "layers.1", "layers.2"],
    "lstm": [""],
    "mixtral": ["", "model.layers.0", "model.layers.1"],
}


def test_the_zoo_is_covered() -> None:
    assert set(ZOO) == set(CASES)


@pytest.mark.parametrize("name", ZOO)
def test_units_of_the_zoo(name: str) -> None:
    model = CASES[name].build(device="meta")
    units = group_units(model)
    assert [unit.name for unit in units] == ZOO[name]
    check(model, units)


@pytest.mark.parametrize("name", ZOO)
def test_every_choice_covers_the_zoo(name: str) -> None:
    model = CASES[name].build(device="meta")
    classes = {type(module).__name__ for module in model.modules()}
    for choice in (["*"], ["*.*"], sorted(classes), [type(model).__name__]):
        if choice != ["*.*"] or name != "lstm":
            check(model, group_units(model, choice))


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("gpt2", ["transformer.wte.weight", "lm_head.weight"]),
        ("bert", ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"]),
        ("bert", ["cls.predictions.bias", "cls.predictions.decoder.bias"]),
    ],
)
def test_tied_parameters_of_the_zoo(name: str, tied: list[str]) -> None:
    (info,) = [h for h in find_stage_parameters(CASES[name].build(device="meta")) if tied[0] in h.fqns]
    assert info.fqns == tied
    assert len(info.owners) == 2


# -------------------------------------------------------------------------------------------------- finding the blocks


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mix(x))


class Model(nn.Module):
    """An embedding, blocks, a norm and a head, in this order."""

    def __init__(self, vocab: int, blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 8)
        self.blocks = blocks
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, vocab, bias=False)


def blocks(num: int = 2) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(num))


def test_small_layers_outside_the_blocks_belong_to_the_root() -> None:
    units = group_units(Model(4, blocks()))
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1"]
    assert [h.fqns[0] for h in units[0].infos] == ["embedding.weight", "norm.weight", "norm.bias", "head.weight"]


def test_a_large_embedding_and_head_are_units_in_their_place() -> None:
    model = Model(500, blocks())
    units = group_units(model)
    assert [unit.name for unit in units] == ["", "embedding", "blocks.0", "blocks.1", "head"]
    check(model, units)


def test_how_large_a_layer_has_to_be() -> None:
    block_bytes = sum(param.nbytes for param in Block().parameters())
    vocab = math.ceil(LEAF_SHARE * block_bytes / (8 * 4))
    assert names(Model(vocab, blocks())) == ["", "embedding", "blocks.0", "blocks.1", "head"]
    assert names(Model(vocab - 1, blocks())) == ["", "blocks.0", "blocks.1"]


def test_large_tied_layers_belong_to_the_root() -> None:
    model = Model(500, blocks())
    model.head.weight = model.embedding.weight
    assert names(model) == ["", "blocks.0", "blocks.1"]


def test_without_blocks_there_is_one_unit() -> None:
    for model in (nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), Model(500, blocks(1))):
        assert names(model) == [""]


def test_blocks_in_containers_of_containers() -> None:
    stages = nn.ModuleList([nn.Sequential(Block(), nn.Dropout(), Block()), nn.Sequential(Block(), Block())])
    assert names(stages) == ["0.0", "0.2", "1.0", "1.1"]
    assert names(nn.ModuleDict({"a": Block(), "b": Block()})) == ["a", "b"]
    assert names(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))) == ["0", "2"]


def test_a_block_that_contains_blocks_is_one_unit() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = blocks()

    assert names(nn.ModuleList([Outer(), Outer()])) == ["0", "1"]


def test_children_that_have_no_sibling_of_their_class_are_no_blocks() -> None:
    assert names(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))) == [""]


def test_attention_is_never_split_from_its_projection() -> None:
    """nn.MultiheadAttention and its out_proj are in one unit, because it reads out_proj's weight without calling it."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks()
            self.attention = nn.MultiheadAttention(64, 4)
            self.head = nn.Linear(64, 64)

    units = group_units(Attending())
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1", "head"]
    assert {unit_of(units, f"attention.{fqn}") for fqn in ("in_proj_weight", "out_proj.weight")} == {""}
    layers = group_units(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2))
    assert [unit.name for unit in layers] == ["layers.0", "layers.1"]


# ------------------------------------------------------------------------------------------------- shared and tied


def test_a_shared_block_is_a_unit() -> None:
    first, second = Block(), Block()
    model = Model(4, nn.ModuleList([first, second, first, second]))
    units = group_units(model)
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.1"]
    assert units[1].infos[0].fqns == ["blocks.0.mix.weight", "blocks.2.mix.weight"]
    assert units[1].infos[0].owners == [(first.mix, "weight")]
    check(model, units)


def test_a_module_shared_by_two_blocks_belongs_to_what_is_around_both() -> None:
    model = Model(4, blocks(3))
    model.blocks[2].mix = model.blocks[0].mix
    units = group_units(model)
    assert unit_of(units, "blocks.0.mix.weight") == ""
    assert unit_of(units, "blocks.0.norm.weight") == "blocks.0"
    check(model, units)


def test_a_parameter_tied_inside_a_block_stays_in_it() -> None:
    model = Model(4, blocks())
    model.blocks[1].norm.bias = model.blocks[1].mix.bias
    units = group_units(model)
    assert unit_of(units, "blocks.1.norm.bias") == unit_of(units, "blocks.1.mix.bias") == "blocks.1"


def test_a_parameter_under_two_names_of_one_module() -> None:
    layer = nn.Linear(3, 3)
    layer.register_parameter("again", layer.weight)
    (info,) = [h for h in find_stage_parameters(layer) if "weight" in h.fqns]
    assert info.fqns == ["weight", "again"]
    assert info.owners == [(layer, "weight"), (layer, "again")]


def test_holdings_are_in_the_order_of_named_parameters() -> None:
    model = Model(4, blocks())
    model.head.weight = model.embedding.weight
    assert [h.fqns[0] for h in find_stage_parameters(model)] == [name for name, _ in model.named_parameters()]


# ------------------------------------------------------------------------------------------------- chosen by the user


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (["Block"], ["", "blocks.0", "blocks.1", "blocks.2"]),
        (["blocks.*"], ["", "blocks.0", "blocks.1", "blocks.2"]),
        (["blocks.[01]"], ["", "blocks.0", "blocks.1"]),
        (["*"], ["embedding", "blocks", "norm", "head"]),
        (["*.norm"], ["", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm"]),
        (["head", "Block"], ["", "blocks.0", "blocks.1", "blocks.2", "head"]),
        (["Block", "blocks"], ["", "blocks.0", "blocks.1", "blocks.2"]),
        (["blocks.0", "Linear"], ["", "blocks.0", "blocks.0.mix", "blocks.1.mix", "blocks.2.mix", "head"]),
        (["Model"], [""]),
    ],
)
def test_chosen(choice: list[str], expected: list[str]) -> None:
    model = Model(4, blocks(3))
    units = group_units(model, choice)
    assert [unit.name for unit in units] == expected
    check(model, units)


def test_units_inside_units_hold_their_own_parameters() -> None:
    units = group_units(Model(4, blocks(1)), ["blocks.0", "Linear"])
    held = {unit.name: [info.fqns[0] for info in unit.infos] for unit in units}
    assert held["blocks.0"] == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert held["blocks.0.mix"] == ["blocks.0.mix.weight", "blocks.0.mix.bias"]


def test_a_pattern_names_the_outermost_modules() -> None:
    model = Model(4, blocks(2))
    assert modules_like(model, "blocks.*", "key") == list(model.blocks)
    assert modules_like(model, "*norm", "key") == [model.blocks[0].norm, model.blocks[1].norm, model.norm]


def test_a_class_names_modules_inside_others_of_it_too() -> None:
    inner = Block()
    outer = Block()
    outer.mix = inner
    assert modules_like(nn.Sequential(outer), "Block", "key") == [outer, inner]


@pytest.mark.parametrize("pattern", ["Blok", "layers.*", "", "block.0"])
def test_a_pattern_that_matches_nothing(pattern: str) -> None:
    message = f"zero.units: '{pattern}' matches no module of Model by class or name; its module classes are Block, "
    with pytest.raises(ConfigError) as caught:
        group_units(Model(4, blocks()), ["Block", pattern])
    assert str(caught.value).startswith(message)


def test_frozen_and_empty_modules() -> None:
    model = Model(4, nn.ModuleList([Block(), nn.Dropout(), Block(), nn.Identity()]))
    model.requires_grad_(False)
    model.blocks[0].register_parameter("absent", None)
    model.register_buffer("scale", torch.ones(()))
    units = group_units(model)
    assert [unit.name for unit in units] == ["", "blocks.0", "blocks.2"]
    check(model, units)


class Mix(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 1)


class Bottleneck(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1)
        self.conv2 = nn.Conv2d(width, width, 3)
        self.mix = Mix(width)


class Stage(nn.Module):
    """A stage whose blocks are attributes; the first block has another input width."""

    def __init__(self, width_in: int, width: int, depth: int) -> None:
        super().__init__()
        for number in range(depth):
            self.add_module(f"b{number}", Bottleneck(width if number else width_in, width))


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.body = nn.Module()
        self.body.s1, self.body.s2, self.body.s3 = Stage(8, 8, 1), Stage(8, 16, 1), Stage(16, 32, 3)
        self.head = nn.Linear(32, 10)


def test_blocks_in_stages_that_are_attributes() -> None:
    """A small stage is one unit; a large stage is split into its blocks, which are not split further."""
    model = Stages()
    assert names(model) == ["", "body.s1", "body.s2", "body.s3.b0", "body.s3.b1", "body.s3.b2"]
    check(model, group_units(model))
    nested = nn.Sequential(*(nn.Sequential(Bottleneck(8 * width, 8 * width)) for width in (1, 2, 4)))
    assert names(nested) == ["0.0", "1.0", "2.0"]
