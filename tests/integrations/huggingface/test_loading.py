"""``from_pretrained`` under several ranks: rank 0 reads, and the values reach the others with the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import LlamaForCausalLM, modeling_utils

from partita.integrations.huggingface import rank_0_reads
from tests.integrations.huggingface.runs import Run, alone, end, llama, losses_of, scratch, trainer_of
from tests.local import pool


def trained_from(folder: Path, run: Run, apart: bool) -> tuple[list[float], bool]:
    """Losses from weights in a folder; and whether this rank held any parameter before training."""

    def model() -> Any:
        if not apart:
            return LlamaForCausalLM.from_pretrained(folder)
        with rank_0_reads():
            return LlamaForCausalLM.from_pretrained(folder)

    with alone(), scratch() as output:
        made = model()
        held = any(not parameter.is_meta for parameter in made.parameters())
        trainer = trainer_of(run, output, model=made)
        try:
            trainer.train()
            return [*losses_of(trainer), trainer.evaluate()["eval_loss"]], held
        finally:
            end(trainer)


@pytest.mark.parametrize(("stage", "tied"), [(3, False), (1, True)])
def test_rank_0_reads(stage: int, tied: bool, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model = llama(tied)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path)
    plain = pool.run(2, trained_from, tmp_path, Run(), False, timeout=120)
    found = pool.run(2, trained_from, tmp_path, Run({"zero": {"stage": stage}}), True, timeout=120)
    assert [held for _, held in plain] == [True, True]
    assert [held for _, held in found] == [True, False]
    for losses, _ in found:
        assert losses == pytest.approx(plain[0][0], rel=1e-6)


def opened(folder: Path) -> list[str]:
    """Files of weights that this rank opens."""
    seen: list[str] = []

    def counted(file: str, **kwargs: Any) -> Any:
        seen.append(Path(file).name)
        return safe_open(file, **kwargs)

    with pytest.MonkeyPatch.context() as patch, rank_0_reads():
        patch.setattr(modeling_utils, "safe_open", counted)
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert dist.is_initialized()
    return seen


def test_no_other_rank_opens_a_file(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    assert pool.run(2, opened, tmp_path) == [["model.safetensors"], []]
