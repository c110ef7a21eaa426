"""Models from Hugging Face configurations: the architecture that they name, and a batch for its forward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, PretrainedConfig, RegNetConfig, ViTConfig

from partita.errors import ConfigError
from partita.prediction.model_source import read_source

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VIT: dict[str, Any] = {**SMALL, "image_size": 32, "patch_size": 8}
BERT: dict[str, Any] = {**SMALL, "max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("config", "architecture", "shapes"),
    [
        (ViTConfig(**VIT), "ViTForImageClassification", {"pixel_values": (3, 3, 32, 32), "labels": (3,)}),
        (ViTConfig(**VIT), "ViTModel", {"pixel_values": (3, 3, 32, 32)}),
        (RegNetConfig(), "RegNetForImageClassification", {"pixel_values": (3, 3, 224, 224), "labels": (3,)}),
        (BertConfig(**BERT), "BertForSequenceClassification", {"input_ids": (3, 16), "labels": (3,)}),
        (BertConfig(**BERT), "BertForMaskedLM", {"input_ids": (3, 16), "labels": (3, 16)}),
        (
            BertConfig(**BERT),
            "BertForQuestionAnswering",
            {"input_ids": (3, 16), "start_positions": (3,), "end_positions": (3,)},
        ),
    ],
)
def test_the_named_architecture_takes_the_batch(
    config: PretrainedConfig, architecture: str, shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    source = read_source(str(tmp_path))
    assert type(source.model).__name__ == architecture
    batch = source.batch(3, torch.device("meta"))
    assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    output = source.model(**batch)
    assert (getattr(output, "loss", None) is not None) == (len(shapes) > 1)


def test_a_configuration_without_an_architecture(tmp_path: Path) -> None:
    ViTConfig(**VIT).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="names no architecture, and vit has no causal language model; set architec"):
        read_source(str(tmp_path))
