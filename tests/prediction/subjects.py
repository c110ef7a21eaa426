"""Models for both simulation and training."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from partita.prediction.simulate.rank import SimulatedModel

LENGTH = 16


def llama(layers: int = 2, **sizes: int) -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 96} | sizes
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, **shape))


def batch(samples: int) -> dict[str, Tensor]:
    ids = torch.zeros(samples, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def simulated_model(layers: int = 2, **sizes: Any) -> SimulatedModel:
    return SimulatedModel(lambda: llama(layers, **sizes), batch)
