"""Outputs that a model collects from its blocks: they are completed, or an error names the setting to change."""

from typing import Any

import pytest
import torch
from torch import nn

import partita
from partita import ConfigError, PartitaError
from partita.parallel.block_outputs import BlockOutputs
from partita.transforms.modules import ModuleTransforms, Order
from tests.kit.ranks import on_ranks
from tests.parallel import sequence, stages

AXES = ("sequence", "pipeline")


def fixed(axis: str) -> dict[str, Any]:
    return {"parallel": {axis: 2}, "optimizer": {"lr": 0.0, "weight_decay": 0.0}}


def loss_of(model: nn.Module, axis: str, batch: Any) -> float:
    """Return the loss of one batch on two ranks of an axis, with learning rate 0."""
    with partita.initialize(model, fixed(axis)) as engine:
        return engine.train_batch([batch]).item()


def asked_in_the_call() -> None:
    """Request router logits in every second call; each loss must be the one of the model in one process."""
    for axis in AXES:
        model, batch = stages.build("balanced"), stages.batch("balanced", 1)
        expected = [model(**batch, output_router_logits=asked).loss.item() for asked in (True, False)]
        model.config.output_router_logits = False
        assert abs(expected[0] - expected[1]) > 0.1
        with partita.initialize(
            model, {"parallel": {axis: 2}, "optimizer": {"lr": 0.0, "weight_decay": 0.0}}
        ) as engine:
            for asked, loss in zip((False, True, False, True), (*reversed(expected), *reversed(expected)), strict=True):
                found = engine.train_batch([{**batch, "output_router_logits": asked}]).item()
                assert found == pytest.approx(loss, rel=1e-5), (axis, asked)


def test_a_call_may_ask_for_router_logits() -> None:
    on_ranks(2, asked_in_the_call)


def hidden_states() -> float:
    """Return the largest difference of hidden states on slices from those of one process."""
    model, batch = sequence.built("llama"), sequence.batch_of("llama")
    expected = model(**batch, output_hidden_states=True).hidden_states
    with partita.initialize(model, {"parallel": {"sequence": 2}}) as engine:
        found = engine(**batch, output_hidden_states=True).hidden_states
        assert len(found) == len(expected) == 3
        return max(float((one - other).detach().abs().max()) for one, other in zip(found, expected, strict=True))


def test_hidden_states_have_all_positions() -> None:
    assert max(on_ranks(2, hidden_states)) < 1e-5


def on_two_axes(name: str) -> None:
    """Check the loss on sequence 2 x pipeline 2, where stages pass on slices of hidden states, and router logits."""
    model, batch = stages.build(name), stages.batch(name, 1)
    expected = model(**batch).loss.item()
    config = {**fixed("sequence"), "parallel": {"sequence": 2, "pipeline": 2}}
    with partita.initialize(model, config) as engine:
        assert engine.train_batch([batch]).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["wav2vec2", "balanced", "llava"])
def test_stages_pass_on_slices(name: str) -> None:
    on_ranks(4, on_two_axes, name)


def of_two_parts() -> float:
    """Return the largest difference of an encoder's hidden states from those of one process. The encoder has as many
    positions as this rank's slice of the decoder.
    """
    model, batch = sequence.built("t5"), sequence.batch_of("t5")
    batch = {"input_ids": batch["input_ids"][:, :11], "labels": batch["labels"][:, :22].contiguous()}
    expected = model(**batch, output_hidden_states=True).encoder_hidden_states
    with partita.initialize(model, fixed("sequence")) as engine:
        for _ in range(2):  # the second forward knows the decoder's slices of the first one
            found = engine(**batch, output_hidden_states=True).encoder_hidden_states
        assert [one.shape for one in found] == [one.shape for one in expected]
        return max(float((one - other).detach().abs().max()) for one, other in zip(found, expected, strict=True))


def test_hidden_states_of_one_part_are_not_slices_of_another() -> None:
    assert max(on_ranks(2, of_two_parts)) < 1e-5


def without_fields() -> None:
    for axis in AXES:
        model, batch = stages.build("balanced"), stages.batch("balanced", 1)
        model.model.config.return_dict = False
        with pytest.raises(
            PartitaError, match="expected an output with fields, .* set return_dict to True, or"
        ) as info:
            loss_of(model, axis, batch)
        assert "got a tuple" in str(info.value)


def test_outputs_without_fields_are_refused() -> None:
    on_ranks(2, without_fields)


def undeclared() -> None:
    for axis in AXES:
        model = stages.build("llama")
        model.config.output_router_logits = True
        with pytest.raises(ConfigError, match="does not say in _can_record_outputs .* set output_router_logits to"):
            partita.initialize(model, {"parallel": {axis: 2}})


def test_models_that_do_not_declare_their_routers_are_refused() -> None:
    on_ranks(2, undeclared)


def test_router_logits_that_a_run_without_data_does_not_find_are_named() -> None:
    model, transforms = stages.build("balanced"), ModuleTransforms()
    blocks = [f"model.layers.{number}" for number in range(4)]
    outputs = BlockOutputs(model, blocks, (), transforms.at(Order.SEQUENCE), across_stages=True)
    errors = list[str]()

    def check(module: nn.Module, args: Any) -> None:
        outputs.check_found(module, "model.layers.1", [torch.zeros(1)])
        with pytest.raises(PartitaError) as info:
            outputs.check_found(module, "model.layers.1", [])
        errors.append(str(info.value))

    model.model.layers[1].register_forward_pre_hook(check)
    model(**stages.batch("balanced", 0))
    assert errors == [
        "parallel.pipeline: 'model.layers.1': expected the router logits of 1 routers, whose shapes are found by a run "
        "without data; got 0; set output_router_logits to False"
    ]
    outputs.check_found(model.model.layers[1], "model.layers.1", [])  # no error outside a forward that collects them
