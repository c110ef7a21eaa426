"""Block-sparse attention with sharded or offloaded states and recomputed activations: the numbers of stage 0."""

from typing import Any

import torch

import partita
from tests.kit import seeds
from tests.kit.models import FAMILIES
from tests.kit.plans import PLANS
from tests.kit.ranks import on_ranks

ATTENTION = {"pattern": "bigbird", "block": 8, "window": 12, "global": 1, "random": 1}
NAMES = ("0", "2", "3-recomputed", "3-host")


def courses() -> dict[str, list[Any]]:
    """Return each plan's losses and norms in three steps. Lengths of the packed samples differ by rank and step."""
    found: dict[str, list[Any]] = {}
    rank = torch.distributed.get_rank()
    for name in NAMES:
        seeds.start()
        model = FAMILIES["llama"](vocab_size=64, hidden_size=32, intermediate_size=48, attention_dropout=0.2)
        torch.manual_seed(rank)
        with partita.initialize(model, {"attention": ATTENTION, **PLANS[name]}) as engine:
            found[name] = []
            for step in range(3):
                length = 40 + 7 * step + rank
                ids = torch.randint(64, (2, length), generator=seeds.generator(10 * step + rank))
                positions = torch.cat([torch.arange(19), torch.arange(length - 19)])[None]
                loss = engine(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
                engine.backward(loss)
                found[name] += [loss.item(), engine.step().grad_norm]
    return found


def test_every_plan_has_the_same_numbers() -> None:
    for found in on_ranks(2, courses):
        assert all(course == found["0"] for course in found.values()), found
