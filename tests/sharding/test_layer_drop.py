"""LayerDrop: data ranks drop layers at stages 0 to 2. It is switched off while parameters are sharded (stage 3), and
where ranks run parts of a forward (sequence and pipeline parallelism).
"""

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit import seeds
from tests.kit.ranks import on_ranks


def wav2vec2(rate: float) -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(4, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=rate,
        **{f"{name}_dropout": 0.0 for name in ("hidden", "attention", "activation", "feat_proj", "final")},
    )
    return Wav2Vec2ForCTC(config)


def bart(rate: float) -> nn.Module:
    from transformers import BartConfig, BartModel

    config = BartConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=16,
        dropout=0.0,
        encoder_layerdrop=rate,
        decoder_layerdrop=rate,
    )
    return BartModel(config)


MODELS: dict[str, Any] = {"wav2vec2": wav2vec2, "bart": bart}


def loss(model: Any, rank: int, step: int) -> Tensor:
    generator = seeds.generator(1000 * step + rank)
    if "Bart" in type(getattr(model, "module", model)).__name__:
        found = model(input_ids=torch.randint(4, 32, (2, 8), generator=generator)).last_hidden_state
    else:
        found = model(input_values=torch.randn(2, 256, generator=generator)).logits
    return found.square().mean()  # type: ignore[no-any-return]


def trains_as_without(name: str, config: dict[str, Any]) -> None:
    expected = list[float]()
    for rate in (0.0, 0.9):
        seeds.start()
        with partita.initialize(MODELS[name](rate), {**config, "optimizer": {"lr": 1e-2}}) as engine:
            losses = list[float]()
            for step in range(3):
                found = loss(engine, engine.mesh.coordinate("data"), step)
                engine.backward(found)
                engine.step()
                losses.append(found.item())
        expected = expected or losses
        assert losses == expected


def pipeline_trains_as_without() -> None:
    losses = list[list[float]]()
    for rate in (0.0, 0.9):
        seeds.start()
        config = {"parallel": {"pipeline": 2}, "zero": {"stage": 1}, "optimizer": {"lr": 1e-2}}
        with partita.initialize(
            wav2vec2(rate), config, loss_fn=lambda output, batch: output.logits.square().mean()
        ) as engine:
            batches = [{"input_values": torch.randn(2, 256, generator=seeds.generator(step))} for step in range(3)]
            losses.append([engine.train_batch([batch]).item() for batch in batches])
    assert losses[0] == losses[1]


def is_undone(name: str, stage: int) -> list[str]:
    offload = {"parameters": "host"} if stage == 3 else {}  # sharded on one rank as well
    model = MODELS[name](0.5)
    before = {each: dict(vars(module)) for each, module in model.named_modules()}
    with mock.patch.object(logging.getLogger("partita"), "info") as told:
        partita.initialize(model, {"zero": {"stage": stage, "offload": offload}}).close()
    for each, module in model.named_modules():
        assert vars(module).keys() == before[each].keys()
        assert getattr(module, "layerdrop", 0.5) == 0.5
    return [str(call) for call in told.call_args_list if "no layers are dropped" in str(call)]


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_runs_at_stage_3(name: str) -> None:
    on_ranks(2, trains_as_without, name, {"zero": {"stage": 3}})


def test_every_layer_runs_on_slices_of_the_sequence() -> None:
    on_ranks(2, trains_as_without, "wav2vec2", {"parallel": {"sequence": 2}, "zero": {"stage": 1}})


def test_every_layer_runs_in_a_pipeline() -> None:
    on_ranks(2, pipeline_trains_as_without)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_told_and_undone(name: str) -> None:
    said = on_ranks(2, is_undone, name, 3)
    assert [len(each) for each in said] == [1, 0]
    assert on_ranks(2, is_undone, name, 2) == [[], []]
    assert on_ranks(1, is_undone, name, 3) == [[]]
