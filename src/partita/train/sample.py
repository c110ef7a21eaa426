"""Text written by a model, one token after another; the whole context is computed again for each."""

import torch
from torch import Tensor

from partita.train.job import SampleSection
from partita.train.models import ReadyModel


@torch.no_grad()
def write_sample(model: ReadyModel, sample: SampleSection, context: int) -> str:
    """``sample.prompt`` and ``sample.tokens`` tokens that follow it; each sees at most ``context`` tokens before it.

    The draws come from ``sample.seed`` alone: every rank writes the same text.
    """
    module = model.module
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(sample.seed)
    tokens = model.encode(sample.prompt.encode()).long()
    was_training = module.training
    module.eval()
    for _ in range(sample.tokens):
        logits = model.logits(tokens[None, -context:].to(device))[0, -1].float().cpu()
        tokens = torch.cat((tokens, _draw(logits, sample.temperature, generator)))
    module.train(was_training)
    return model.decode(tokens.tolist())


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(keepdim=True)
    return torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator)
