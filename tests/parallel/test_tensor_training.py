"""Training under tensor parallelism by config: parity with one process at every stage, memory, and errors if ranks get
different batches or only one rank reads logits.
"""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import partita
from partita import ConfigError, PartitaError
from partita.parallel.batch_check import BatchCheck
from tests.kit.plans import PLANS, matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Trained, assert_exact, assert_same_bits, rank, world
from tests.parallel import training, zoo

TIMEOUT_S = 240
NAMES = ("llama", "qwen3", "qwen3moe", "gpt2", "bloom", "t5", "vit", "decoder", "mixtral", "mamba", "jamba")
ALL_PLANS = ("0", "1", "2", "3", "3-host", "3-recomputed")


def trained(name: str, tensor: int, plans: tuple[str, ...]) -> dict[str, Trained]:
    return {plan: training.train(name, {"parallel": {"tensor": tensor}, **PLANS[plan]}) for plan in plans}


def check(name: str, world: int, size: int, plans: tuple[str, ...]) -> None:
    (alone,) = on_ranks(1, training.train_alone, name, world // size, timeout=TIMEOUT_S)
    first, *others = on_ranks(world, trained, name, size, plans, timeout=TIMEOUT_S)
    for plan in plans:
        assert_exact(first[plan], alone, plan)
        assert_same_bits(first[plan], first[plans[0]], plan)
        for other in others:
            assert_same_bits(other[plan], first[plan], plan)


@matrix(size=(2, 3), name=NAMES)
def test_tensor_ranks_train_as_one_process(size: int, name: str) -> None:
    """Ten steps with clipping match one process, also where 3 divides neither key heads nor vocabulary."""
    check(name, size, size, ("0", "3"))


FEW = ("llama", ("0", "2", "3-host"))


@pytest.mark.parametrize(("name", "plans"), sampled([FEW, *product(NAMES, [ALL_PLANS])], FEW))
def test_stages_are_equal_beside_data_ranks(name: str, plans: tuple[str, ...]) -> None:
    check(name, 4, 2, plans)


# -- memory, export, generation, compilation ---------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Dispatch mode that records the number of elements of the largest computed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor) and not x.is_meta]
        self.elements = max([self.elements, *made])
        return result


def largest_tensor(size: int) -> int:
    """Return the elements of the largest tensor of a step whose logits have more elements than any other tensor."""
    with partita.initialize(zoo.build("llama"), {"parallel": {"tensor": size}}) as engine:
        tokens = zoo.batch("llama", 0, 64)["input_ids"]
        with Largest() as largest:
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        return largest.elements


def test_logits_are_never_whole() -> None:
    whole = 64 * zoo.LENGTH * zoo.VOCAB
    assert on_ranks(1, largest_tensor, 1) == [whole]
    assert max(on_ranks(2, largest_tensor, 2)) < 0.8 * whole


def looked_at(folder: Path) -> tuple[float, float]:
    """Return the losses of the engine and of an exported copy. The full model inside ``gathered`` has the same loss."""
    from transformers import LlamaForCausalLM

    with partita.initialize(zoo.build("llama"), {"parallel": {"tensor": 2}, "zero": {"stage": 3}}) as engine:
        batch = zoo.batch("llama", 0)
        split = engine(**batch).loss.item()
        with engine.gathered(), torch.no_grad():
            assert engine.module.lm_head.weight.shape == (zoo.VOCAB, zoo.WIDTH)
            assert engine.module(**batch).loss.item() == pytest.approx(split, abs=1e-5)
        engine.export(folder)
        engine.backward(engine(**batch).loss)  # on slices again
        copied = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return split, copied(**batch).loss.item()


def test_whole_parameters_are_looked_at_and_exported(tmp_path: Path) -> None:
    for split, copied in on_ranks(2, looked_at, tmp_path, timeout=TIMEOUT_S):
        assert split == pytest.approx(copied, abs=1e-5)


def in_bf16() -> list[float]:
    losses = []
    with partita.initialize(
        zoo.build("llama"), {"parallel": {"tensor": 2}, "precision": {"compute": "bf16"}, "zero": {"stage": 2}}
    ) as engine:
        for _ in range(5):
            loss = engine(**zoo.batch("llama", 0)).loss
            engine.backward(loss)
            assert engine.step().stepped
            losses.append(loss.item())
    return losses


def test_bf16_learns() -> None:
    one, other = on_ranks(2, in_bf16, timeout=TIMEOUT_S)
    assert one == other
    assert one[-1] < one[0] - 0.01


def explained() -> str:
    model = zoo.build("llama")
    with partita.initialize(model, {"parallel": {"tensor": 2, "tensor_rules": {"*.mlp": "whole"}}}) as engine:
        told = engine.explain()
    assert all("forward" not in vars(module) for module in model.modules())
    return told


def test_the_engine_explains_itself() -> None:
    one, other = on_ranks(2, explained)
    assert one == other
    assert re.search(r"layers\.1\.mlp\.up_proj +copies \(parallel\.tensor_rules: '\*\.mlp'\)", one)


def generated(stage: int) -> list[list[int]]:
    model = zoo.build("llama")
    tokens = zoo.batch("llama", 0)["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    alone = model.generate(tokens, **settings)
    with partita.initialize(model, {"parallel": {"tensor": 2}, "zero": {"stage": stage}}) as engine:
        engine.eval()
        split = model.generate(tokens, **settings)
    assert torch.equal(alone, split)
    return alone.tolist()


@pytest.mark.parametrize("stage", [0, 3])
def test_text_is_generated_on_slices(stage: int) -> None:
    """Generation on slices, with a cache of each rank's own key heads, gives one process's text."""
    one, other = on_ranks(2, generated, stage, timeout=TIMEOUT_S)
    assert one == other


def compiled() -> list[list[float]]:
    """Return the losses of three steps, without and with compiled blocks."""
    losses = []
    for compiles in (False, True):
        model = zoo.build("decoder")
        if compiles:
            for block in model.blocks:
                block.compile(backend="eager")
        with partita.initialize(model, {"parallel": {"tensor": 2}, "zero": {"stage": 3}}) as engine:
            found = []
            for step in range(3):
                loss = engine(**training.part("decoder", step, 0, 1))
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            losses.append(found)
    return losses


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
def test_blocks_may_be_compiled() -> None:
    for plain, with_compile in on_ranks(2, compiled, timeout=TIMEOUT_S):
        assert plain == pytest.approx(with_compile, abs=1e-6)


# -- errors, and weights from files ------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[partita.Engine, dict[str, Tensor]], object]] = {
    "engine": lambda engine, batch: engine(**batch),
    "model": lambda engine, batch: engine.module(**batch),  # as other libraries' loops call it
    "train_batch": lambda engine, batch: engine.train_batch([batch]),
    "eval_batch": lambda engine, batch: engine.eval_batch([batch]),
}


def fed_differently(call: str, kind: str, message: str) -> None:
    with partita.initialize(zoo.build("llama"), {"parallel": {"tensor": 2}}) as engine:
        batch = zoo.batch("llama", 0)
        if rank() == 1:
            batch["labels"] = batch["labels"].clone()
            if kind == "values":
                batch["labels"][1, 5] = 7
            else:
                batch = {key: value[:, :-1] for key, value in batch.items()}
        with engine.gathered(), torch.no_grad():  # every rank has the full model
            engine.module(**batch)
        with pytest.raises(PartitaError, match=message):
            CALLS[call](engine, batch)


@pytest.mark.parametrize(("call", "kind"), [("engine", "lengths"), *((call, "values") for call in CALLS)])
def test_ranks_that_share_samples_are_fed_the_same(call: str, kind: str) -> None:
    name = "labels" if kind == "values" else "input_ids"
    message = f"one data coordinate .0. got different batches: '{name}' of ranks 0 and 1 along tensor differs"
    on_ranks(2, fed_differently, call, kind, message)


def recomputed() -> None:
    """Recompute a forward in the backward, and count the checks."""
    with partita.initialize(zoo.build("llama"), {"parallel": {"tensor": 2}}) as engine:
        batch = zoo.batch("llama", 0)
        with mock.patch.object(BatchCheck, "check") as check:
            loss = checkpoint(lambda: engine.module(**batch).loss, use_reentrant=False)
            engine.backward(loss)
            assert check.call_count == 1


def test_a_forward_that_is_recomputed_is_checked_once() -> None:
    on_ranks(2, recomputed)


def read_on_one_rank() -> None:
    with partita.initialize(zoo.build("llama"), {"parallel": {"tensor": 2}}) as engine:
        output = engine(**zoo.batch("llama", 0))
        if rank() == 0:
            output.logits.argmax(-1)
        engine.backward(output.loss)


def test_logits_that_one_rank_reads_are_named() -> None:
    with pytest.raises(PartitaError, match="rank 0: 'argmax' reads logits that are split over 2 tensor ranks"):
        on_ranks(2, read_on_one_rank)


def wrong(config: dict[str, Any]) -> None:
    model = zoo.build("llama")
    try:
        partita.initialize(model, {"parallel": {"tensor": 2, **config}})
    finally:
        assert all("forward" not in vars(module) for module in model.modules())


def test_a_rule_that_fits_no_module_is_an_error_and_changes_nothing() -> None:
    with pytest.raises(ConfigError, match=r"parallel.tensor_rules: 'layers\.\*' matches no module"):
        on_ranks(2, wrong, {"tensor_rules": {"*.down_proj": "row_split", "layers.*": "whole"}})


def from_files(folder: str, device: str) -> list[float]:
    """Train a model of whose weights each rank reads its shards from files; return the losses."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    config = {"parallel": {"tensor": world()}, "zero": {"stage": 3}, "optimizer": training.ADAMW}
    losses = []
    with partita.initialize(model, {**config, "clip_grad_norm": training.CLIP}, weights=folder) as engine:
        for step in range(3):
            loss = engine(**training.part("llama", step, 0, 1)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


# Two key heads are not split over four ranks: every rank has a copy of them.
@pytest.mark.parametrize(("device", "num_ranks"), [("cpu", 2), ("meta", 2), ("meta", 4)])
def test_weights_are_read_into_shares(tmp_path: Path, device: str, num_ranks: int) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    alone = training.train_alone("llama", 1, 3)
    for losses in on_ranks(num_ranks, from_files, str(tmp_path), device, timeout=TIMEOUT_S):
        assert losses == pytest.approx(alone.losses, abs=1e-5)
