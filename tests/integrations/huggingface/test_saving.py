"""Models saved by a Trainer on partita: ``from_pretrained`` loads them; saving on one rank alone is an error."""

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from transformers import LlamaForCausalLM

from partita import PartitaError
from partita.integrations.huggingface.saving import saved_weights
from tests.huggingface import cases
from tests.integrations.huggingface.runs import (
    LENGTH,
    Run,
    alone,
    end,
    llama,
    model_of,
    samples,
    scratch,
    trainer_of,
)
from tests.kit.ranks import on_ranks


def logits_of(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.stack([row["input_ids"] for row in samples(2, 5)])).logits
    return found


def saved(run: Run, folder: Path) -> torch.Tensor:
    """Train and save; return the logits of the trained model."""
    with alone():
        trainer = trainer_of(run, folder)
        try:
            trainer.train()
            trainer.save_model(str(folder / "final"))
            return logits_of(trainer.model)
        finally:
            end(trainer)


def names_in(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as opened:
        return set(opened.keys())


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_loaded_by_from_pretrained(tied: bool, tmp_path: Path) -> None:
    logits = on_ranks(2, saved, Run({"zero": {"stage": 3}}, tied=tied), tmp_path, timeout=120)[0]
    found = LlamaForCausalLM.from_pretrained(tmp_path / "final")
    assert torch.equal(logits_of(found), logits)
    llama(tied).save_pretrained(tmp_path / "plain")
    assert names_in(tmp_path / "final/model.safetensors") == names_in(tmp_path / "plain/model.safetensors")


def rows_for(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return images or tokens, whichever the model needs, with labels."""
    generator = torch.Generator().manual_seed(2)
    if model.main_input_name == "pixel_values":
        images = torch.randn(8, 3, 8, 8, generator=generator)
        return [{"pixel_values": image, "labels": torch.tensor(number % 3)} for number, image in enumerate(images)]
    return [{"input_ids": row, "labels": row} for row in torch.randint(64, (8, 16), generator=generator)]


def saved_case(name: str, folder: Path) -> torch.Tensor:
    """Train and save; return the logits of the trained model."""
    with alone():
        trainer = trainer_of(Run({"zero": {"stage": 3}}), folder, model=cases.build(name))
        trainer.train_dataset = rows_for(trainer.model)
        try:
            trainer.train()
            trainer.save_model(str(folder / "final"))
            return cases.logits(trainer.model.eval())
        finally:
            end(trainer)


@pytest.mark.parametrize("name", ["mixtral", "vit"])
def test_other_models_are_loaded_by_from_pretrained(name: str, tmp_path: Path) -> None:
    """``from_pretrained`` loads a model with one tensor per expert in its files, and an image model."""
    logits = on_ranks(2, saved_case, name, tmp_path, timeout=120)[0]
    found = type(cases.build(name)).from_pretrained(tmp_path / "final").eval()
    torch.testing.assert_close(cases.logits(found), logits, rtol=0, atol=1e-6)
    assert not torch.equal(cases.logits(cases.build(name)), logits)
    cases.build(name).save_pretrained(tmp_path / "plain")
    assert names_in(tmp_path / "final/model.safetensors") == names_in(tmp_path / "plain/model.safetensors")


def test_a_model_that_computes_in_bf16_is_saved_as_it_came(tmp_path: Path) -> None:
    on_ranks(2, saved, Run({"zero": {"stage": 3}}, {"bf16": True}), tmp_path / "fp32", timeout=120)
    found = LlamaForCausalLM.from_pretrained(tmp_path / "fp32/final")
    assert found.dtype == torch.float32
    run = Run({"zero": {"stage": 3}}, {"bf16": True}, dtype=torch.bfloat16)
    logits = on_ranks(2, saved, run, tmp_path / "bf16", timeout=120)[0]
    found = LlamaForCausalLM.from_pretrained(tmp_path / "bf16/final")
    assert found.dtype == torch.bfloat16
    assert torch.allclose(
        logits_of(found).float(), logits, atol=2**-6
    )  # from_pretrained keeps rotary frequencies in fp32


def test_adapters_alone_are_saved(tmp_path: Path) -> None:
    from peft import PeftModel

    logits = on_ranks(2, saved, Run({"zero": {"stage": 3}}, lora=True), tmp_path, timeout=120)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from peft's calls into transformers
        found, untrained = PeftModel.from_pretrained(llama(), tmp_path / "final"), model_of(Run(lora=True))
    assert torch.allclose(logits_of(found), logits, atol=1e-6)
    assert not torch.allclose(logits_of(untrained), logits, atol=1e-4)
    assert not (tmp_path / "final/model.safetensors").exists()


ON = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
PROMPTS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}


@dataclass(frozen=True)
class Adapter:
    """A PEFT configuration.

    Attributes: ``chooses``: True if PEFT saves some tensors of the model unchanged; otherwise it computes what it
    saves, and the full model is gathered. ``added``: True if transformers adds the adapter, and the model is not
    wrapped.
    """

    kind: str
    given: dict[str, Any]
    chooses: bool = True
    added: bool = False

    def put_on(self, model: LlamaForCausalLM) -> nn.Module:
        import peft

        config = getattr(peft, self.kind)(**self.given)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            if self.added:
                model.add_adapter(config)
                return model
            return peft.get_peft_model(model, config)


ADAPTERS = {
    "LoRA, a trained copy": Adapter("LoraConfig", ON | {"r": 4, "modules_to_save": ["lm_head"]}),
    "LoRA, added": Adapter("LoraConfig", ON | {"r": 4, "modules_to_save": ["lm_head"]}, added=True),
    "P-tuning": Adapter("PromptEncoderConfig", PROMPTS | {"encoder_hidden_size": 8}),
    "VeRA": Adapter("VeraConfig", ON | {"r": 4, "target_modules": ["q_proj"]}),  # layers share buffers
}
MORE_ADAPTERS = {
    "LoRA, biases": Adapter("LoraConfig", ON | {"r": 4, "bias": "all"}),
    "LoRA, embeddings": Adapter("LoraConfig", ON | {"r": 4, "target_modules": ["q_proj", "embed_tokens"]}),
    "LoRA, tokens": Adapter("LoraConfig", ON | {"r": 4, "trainable_token_indices": [3, 4]}),
    "DoRA": Adapter("LoraConfig", ON | {"r": 4, "use_dora": True}),
    "AdaLoRA": Adapter("AdaLoraConfig", ON | {"total_step": 4, "init_r": 4, "target_r": 2, "tfinal": 1}),
    "IA3": Adapter("IA3Config", ON | {"feedforward_modules": []}),
    "LoHa": Adapter("LoHaConfig", ON | {"r": 4}),
    "LoKr": Adapter("LoKrConfig", ON | {"r": 4}),
    "OFT": Adapter("OFTConfig", ON | {"r": 0, "oft_block_size": 4}),
    "FourierFT": Adapter("FourierFTConfig", ON | {"n_frequency": 20}),
    "HRA": Adapter("HRAConfig", ON | {"r": 4}),
    "VB-LoRA": Adapter("VBLoRAConfig", ON | {"r": 4, "num_vectors": 8, "vector_length": 8}),
    "VB-LoRA, the best": Adapter(
        "VBLoRAConfig",
        ON | {"r": 4, "num_vectors": 8, "vector_length": 8, "save_only_topk_weights": True},
        chooses=False,
    ),
    "RandLoRA": Adapter("RandLoraConfig", ON | {"r": 4, "target_modules": ["q_proj"]}),
    "norms": Adapter("LNTuningConfig", {"target_modules": ["input_layernorm"], "task_type": "CAUSAL_LM"}),
    "prompts": Adapter("PromptTuningConfig", PROMPTS),
    "prefixes": Adapter("PrefixTuningConfig", PROMPTS),
    "tokens": Adapter("TrainableTokensConfig", {"token_indices": list(range(3, 50)), "task_type": "CAUSAL_LM"}),
    "MiSS": Adapter("MissConfig", ON | {"r": 4}),
    "SHiRA": Adapter("ShiraConfig", ON | {"r": 2}),
    "RoAd": Adapter("RoadConfig", ON | {"group_size": 8}),
    "C3A": Adapter("C3AConfig", ON | {"block_size": 8}),
    "DeLoRA": Adapter("DeloraConfig", ON | {"r": 4}),
    "LLaMA-Adapter": Adapter("AdaptionPromptConfig", {"adapter_len": 2, "adapter_layers": 1, "task_type": "CAUSAL_LM"}),
}


def saved_adapters(name: str, folder: Path) -> tuple[torch.Tensor, set[str], bool]:
    """Train and save; return the logits of the trained model, the names of the tensors gathered for saving, and True if
    their values are those of the full state dict.
    """
    with alone():
        model = {**ADAPTERS, **MORE_ADAPTERS}[name].put_on(llama())
        trainer = trainer_of(Run({"zero": {"stage": 3}}), folder, model=model)
        try:
            trainer.train()
            prepared = trainer.accelerator.engines.of(trainer.model)
            whole = prepared.state_dict()
            with saved_weights(prepared) as found:
                alike = all(torch.equal(found[name], whole[name]) for name in found)
            trainer.save_model(str(folder / "final"))
            return logits_of(trainer.model), set(found), alike
        finally:
            end(trainer)


@pytest.mark.parametrize(
    "name", [*ADAPTERS, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE_ADAPTERS)]
)
def test_adapters_of_all_kinds_are_saved_without_the_frozen_model(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from peft
        every = on_ranks(2, saved_adapters, name, tmp_path, timeout=120)
        loaded = PeftModel.from_pretrained(llama(), tmp_path / "final")
        logits, found, alike = every[0]
        assert torch.allclose(logits_of(loaded), logits, atol=1e-5)
        assert not torch.allclose(logits_of(llama()), logits[:, -LENGTH:], atol=1e-5)  # virtual tokens come first
    assert alike
    assert not every[1][1]
    frozen = [name for name in found if "mlp" in name and not any(part in name for part in ("bias", "adapt"))]
    assert bool(frozen) is not {**ADAPTERS, **MORE_ADAPTERS}[name].chooses


def gathered_for_two() -> tuple[set[str], set[str]]:
    """Return the names gathered to save two adapters, one of which is frozen, and the names of trainable parameters."""
    with alone(), scratch() as folder:
        trainer = trainer_of(Run({"zero": {"stage": 3}}, lora=True), folder)
        trainer.model.add_adapter("frozen", trainer.model.peft_config["default"])
        try:
            trainer.train()
            with saved_weights(trainer.accelerator.engines.of(trainer.model)) as found:
                return set(found), {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        finally:
            end(trainer)


def test_a_frozen_adapter_is_saved_beside_the_one_that_trains() -> None:
    (found, trained), (nothing, _) = on_ranks(2, gathered_for_two, timeout=120)
    assert not nothing
    assert found == trained | {name.replace(".default.", ".frozen.") for name in trained}


def saves_alone(folder: Path) -> tuple[str, float]:
    """Save on rank 0 only, as a script under ``is_world_process_zero`` does, while the other rank waits.

    Return the error, and the seconds until it is raised.
    """
    with alone():
        trainer = trainer_of(Run({"zero": {"stage": 3}}), folder)
        trainer.train()
        began, said = time.monotonic(), ""
        if trainer.is_world_process_zero():
            try:
                trainer.save_model(str(folder / "final"))
            except PartitaError as error:
                said = str(error)
        waited = time.monotonic() - began
        dist.barrier()
        end(trainer)
        return said, waited


def test_saving_on_one_rank_alone_is_named_within_seconds(tmp_path: Path) -> None:
    (said, waited), _ = on_ranks(2, saves_alone, tmp_path, timeout=120)
    assert "rank 0 is at engine.state_dict, but rank 1 waits in another collective" in said
    assert "call engine.state_dict on every rank" in said
    assert "in saves_alone" in said
    assert waited < 15


def generated(folder: Path) -> list[list[int]]:
    """Generate from prompts whose lengths differ by rank. Return the tokens of a plain model, of a trained one with
    gathered parameters, and of one that generates in lockstep with the other ranks (its learning rate is 0).
    """
    rank = dist.get_rank()
    prompt = torch.arange(3, 7 + rank)[None]
    asked = {"max_new_tokens": LENGTH - 4 * rank, "do_sample": False}
    plain = llama().generate(prompt, **asked)
    with alone():
        trainer = trainer_of(Run({"zero": {"stage": 3}}, {"learning_rate": 0.0}), folder)
        try:
            trainer.train()
            model = trainer.model.eval()
            whole = model.generate(prompt, **asked)
            model.generate._num_bytes = 2**60  # more than any machine has
            in_step = model.generate(prompt, **asked)
        finally:
            end(trainer)
    return [found[0].tolist() for found in (plain, whole, in_step)]


def test_generation_whole_or_in_step(tmp_path: Path) -> None:
    for plain, whole, in_step in on_ranks(2, generated, tmp_path, timeout=120):
        assert whole == plain
        assert in_step == plain
