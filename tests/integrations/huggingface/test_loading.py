"""``from_pretrained`` on several ranks: rank 0 reads the values, and the engine copies them to the others."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, modeling_utils
from transformers.distributed import DistributedConfig

from partita import ConfigError
from partita.integrations.huggingface import rank_0_reads
from partita.sharding import unread
from partita.sharding.unread import is_unread
from tests.integrations.huggingface.runs import Run, alone, end, llama, losses_of, scratch, trainer_of
from tests.kit.ranks import on_ranks


def trained_from(folder: Path, run: Run, apart: bool) -> tuple[list[float], bool]:
    """Train from weights in a folder; return the losses, and True if this rank had read a parameter before training."""

    def model() -> Any:
        if not apart:
            return LlamaForCausalLM.from_pretrained(folder)
        with rank_0_reads():
            return LlamaForCausalLM.from_pretrained(folder)

    with alone(), scratch() as output:
        made = model()
        held = any(not is_unread(parameter) for parameter in made.parameters())
        trainer = trainer_of(run, output, model=made)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(unread, "_read_all", None)  # nothing may need the values before the engine
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
    plain = on_ranks(2, trained_from, tmp_path, Run(), False, timeout=120)
    found = on_ranks(2, trained_from, tmp_path, Run({"zero": {"stage": stage}}), True, timeout=120)
    assert [held for _, held in plain] == [True, True]
    assert [held for _, held in found] == [True, False]
    for losses, _ in found:
        assert losses == pytest.approx(plain[0][0], rel=1e-6)


def opened(folder: Path) -> list[str]:
    """Return the files from which this rank reads values."""
    seen: list[str] = []

    class Counted:
        def __init__(self, piece: Any, name: str) -> None:
            self._piece, self._name = piece, name

        def __getitem__(self, index: Any) -> Any:
            seen.append(self._name)
            return self._piece[index]

        def __getattr__(self, name: str) -> Any:
            return getattr(self._piece, name)

    class CountedFile:
        def __init__(self, file: str, **kwargs: Any) -> None:
            self._opened, self._name = safe_open(file, **kwargs), Path(file).name

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None:
            self._opened.__exit__(*error)

        def keys(self) -> Any:
            return self._opened.keys()

        def get_slice(self, key: str) -> Counted:
            return Counted(self._opened.get_slice(key), self._name)

    with pytest.MonkeyPatch.context() as patch, rank_0_reads():
        patch.setattr(modeling_utils, "safe_open", CountedFile)
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert dist.is_initialized()
    return sorted(set(seen))


def test_no_other_rank_reads_a_value(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    assert on_ranks(2, opened, tmp_path) == [["model.safetensors"], []]


def drawn_while_loading(folder: Path, from_state_dict: bool) -> tuple[Any, ...]:
    """Load a classifier whose head is not in the files, plainly and with :func:`rank_0_reads`. Return, for each, the
    head and the state of torch's generator; and True if exactly the other parameters are unread.
    """
    if from_state_dict:
        state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    kind, found = LlamaForSequenceClassification, []
    for manager in (nullcontext(), rank_0_reads()):
        torch.manual_seed(5)
        with manager:
            if from_state_dict:
                model = kind.from_pretrained(None, config=LlamaConfig.from_pretrained(folder), state_dict=state)
            else:
                model = kind.from_pretrained(folder)
        found += [model.score.weight.detach().clone(), torch.get_rng_state()]
    left = {name for name, parameter in model.named_parameters() if is_unread(parameter)}
    return (*found, left == {name for name, _ in model.named_parameters()} - {"score.weight"})


@pytest.mark.parametrize("from_state_dict", [False, True])
def test_other_ranks_draw_as_rank_0_does(from_state_dict: bool, tmp_path: Path) -> None:
    """Every rank draws the weights that are not in the files, so random generators stay the same on all ranks."""
    model = llama()
    model.save_pretrained(tmp_path)
    if from_state_dict:
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for rank, (head, after, other, after_other, apart) in enumerate(
        on_ranks(2, drawn_while_loading, tmp_path, from_state_dict)
    ):
        assert torch.equal(head, other)
        assert torch.equal(after, after_other)
        assert apart == (rank == 1)


DISTRIBUTED: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 2}, "leave distributed_config out, and set parallel.tensor: 2 in partita's configuration"),
    (
        {"fsdp_size": 2, "tp_size": 2, "fsdp_cpu_offload": True},
        "set parallel.tensor: 2, zero.stage: 3, zero.offload.parameters: host, zero.offload.optimizer: host in",
    ),
    ({"fsdp_size": 2, "dp_replicate_size": 2}, "set zero.stage: 3, zero.replicate: nodes in partita's configuration"),
]


@pytest.mark.parametrize(("fields", "message"), DISTRIBUTED)
@pytest.mark.parametrize("as_dict", [False, True])
def test_what_transformers_would_shard_is_refused_with_the_settings_for_it(
    fields: dict[str, Any], message: str, as_dict: bool, tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path)
    asked: Any = fields if as_dict else DistributedConfig(**fields)
    with rank_0_reads(), pytest.raises(ConfigError, match=re.escape(message)):
        LlamaForCausalLM.from_pretrained(tmp_path, distributed_config=asked)
    LlamaForCausalLM.from_pretrained(tmp_path, distributed_config=DistributedConfig())
