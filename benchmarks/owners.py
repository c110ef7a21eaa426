"""Owners of matrices under Muon: how even their work is, and the bytes that a rank sends, computed from the layout.

    python -m benchmarks.owners           # Llama-3-8B, Llama-3-70B and Qwen3-30B-A3B on 8 to 512 ranks
    python -m benchmarks.owners --quick   # one model
    python -m benchmarks.owners --save    # into benchmarks/results/owners.md

Nothing is trained. It ends with status 1 if an update takes more than 1.25 times as long as the best assignment of full
parameters could.
"""

import sys
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks._common import Report, opened
from partita.config.load import load_config
from partita.config.resolve import resolve
from partita.layout.blueprint import make_blueprint
from partita.layout.owners import Exchanges
from partita.prediction.model_source import read_source
from partita.prediction.optimizer_plan import plan_optimizer

WORLDS = (8, 16, 32, 64, 128, 256, 512)
PER_NODE = 8
MODELS = ("llama-3-8b", "llama-3-70b", "qwen3-30b-a3b")
CONFIG = load_config({"optimizer": {"name": "muon"}, "zero": {"stage": 3}})
MOST = 1.25


def main() -> int:
    report, options = opened("Owners of matrices under Muon", WORLDS, reps=1)
    report.write(_TEXT)
    report.write()
    models, worlds = (MODELS[:1], WORLDS[:1]) if options.quick else (MODELS, options.ranks)
    header = ["model", "ranks", "work of the busiest owner / mean", "at best"]
    header += ["sent / (2 P (N - 1) / N^2)", "sent / P", "GB at once"]
    report.table(header, (row for name in models for row in _rows(report, name, worlds)))
    return report.end(options.save)


_TEXT = """At ZeRO-3, with fp32 momentum. *Work of the busiest owner / mean*: operations of Newton-Schulz, summed over
the rounds of a step, each at the owner with most of them, in units of the mean over all ranks. *At best*: the same if
the owner of the largest parameter, or of eight experts, had nothing else; no assignment is better. *Sent*: bytes of the
rank that sends most, for P elements in matrices on N ranks. *GB at once*: of the largest exchange, on the rank that
sends most in it."""


def _rows(report: Report, name: str, worlds: list[int]) -> Iterator[list[str]]:
    model = _qwen() if name.startswith("qwen") else read_source(name).model
    work = plan_optimizer(model, CONFIG).work
    num_elements = sum(param.numel() for key, param in model.named_parameters() if key in work.costs)
    for world in worlds:
        exchanges = Exchanges(make_blueprint(model, resolve(CONFIG, world, "cuda", PER_NODE)).units, work)
        mean = exchanges.mean_cost
        best, found = max(1.0, exchanges.largest_cost / mean), exchanges.cost / mean
        sent = sum(each.num_bytes for each in exchanges.most_operations) / 4
        report.expect(found <= MOST * best, f"{name} on {world} ranks: {found:.2f} x the mean, {best:.2f} at best")
        at_once = max(each.num_bytes for each in exchanges.longest_operations)
        formula = 2 * num_elements * (world - 1) / world**2
        work_cells = [f"{found:.2f}", f"{best:.2f}"]
        sent_cells = [f"{sent / formula:.2f}", f"{sent / num_elements:.3f}"]
        yield [name, str(world), *work_cells, *sent_cells, f"{at_once / 1e9:.1f}"]


def _qwen() -> nn.Module:
    """Return Qwen3-30B-A3B (Yang et al., Qwen3 Technical Report, 2025, table 2) on ``meta``."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
    )
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config)


if __name__ == "__main__":
    sys.exit(main())
