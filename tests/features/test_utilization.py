"""FLOPs counted under the engine, also at stage 3 on two ranks, are those of the model alone; counting does not change
the losses.
"""

import torch

from partita.engine.start import initialize
from partita.observe.utilization import training_flops
from partita.train.decoder import Decoder, DecoderShape
from tests.kit.ranks import on_ranks

SHAPE = DecoderShape(layers=2, width=32, heads=2, kv_heads=1, ffn_width=64, vocab=64, tied=True)


def counted_and_trained(stage: int, counts: bool) -> tuple[float, list[float]]:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    tokens = torch.arange(2 * 8).view(2, 8)
    with initialize(model, {"zero": {"stage": stage}}) as engine:
        flops = training_flops(engine.module, lambda: engine(tokens, targets=tokens)) if counts else 0.0
        losses = [engine.train_batch([(tokens, tokens)]).item() for _ in range(3)]
    return flops, losses


def test_the_engine_changes_no_count_and_counting_changes_no_training() -> None:
    alone = training_flops(model := Decoder(SHAPE), lambda: model(torch.zeros(2, 8, dtype=torch.int64)))
    for stage in (1, 3):
        without = on_ranks(2, counted_and_trained, stage, False)
        with_count = on_ranks(2, counted_and_trained, stage, True)
        assert [flops for flops, _ in with_count] == [alone] * 2
        assert [losses for _, losses in with_count] == [losses for _, losses in without]
