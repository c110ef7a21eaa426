"""Scripts that ship inside published packages, unmodified."""

import json
import random
import subprocess
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from tests.clients.launch import TIMEOUT_S, run

WORDS = [f"w{number}" for number in range(60)]
ARGUMENTS = """
--use_cpu true --bf16 false --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_length 16
--learning_rate 1e-2 --max_steps 3 --save_steps 3 --logging_steps 1 --report_to none --disable_tqdm true
""".split()
TRL = {
    "sft": [],
    "sft with adapters": ["--use_peft", "--lora_target_modules", "q_proj", "v_proj"],
    "dpo": [],
    "reward": ["--center_rewards_coefficient", "0.01"],
}


def _text(source: random.Random, num_words: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(num_words))


def _row(script: str, source: random.Random) -> dict[str, str]:
    if script == "sft":
        return {"text": _text(source, source.randint(5, 15))}
    pair = {name: " " + _text(source, source.randint(3, 8)) for name in ("chosen", "rejected")}
    return pair | ({"prompt": _text(source, 4)} if script == "dpo" else {})


def prepare(script: str, folder: Path) -> list[str]:
    """Write a small model and a dataset; return the arguments that name them."""
    set_seed(0)
    names = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    source = random.Random(0)
    (folder / "data").mkdir(exist_ok=True)
    rows = [json.dumps(_row(script, source)) for _ in range(24)]
    (folder / "data" / "train.jsonl").write_text("\n".join(rows))
    return ["--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "data")]


def logged(case: str, config: dict[str, object] | None, folder: Path, named: list[str]) -> list[float]:
    """Run a script of TRL, and return the losses of its last checkpoint's log."""
    script, output = case.split()[0], folder / "trained"
    command = ["-m", f"trl.scripts.{script}", "--output_dir", str(output), *named, *ARGUMENTS, *TRL[case]]
    try:
        run(command, config, folder, 100 if config is None else TIMEOUT_S)
    except subprocess.TimeoutExpired:
        if config is not None:
            raise
        # Without partita, TRL's scripts now and then do not end after their last line on two processes without a GPU.
    log = json.loads((output / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


@cache
def plain(case: str, folder: Path) -> tuple[list[float], list[str]]:
    named = prepare(case.split()[0], folder)
    return logged(case, None, folder, named), named


@pytest.mark.clients
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("case", TRL)
def test_trl(case: str, stage: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = tmp_path_factory.getbasetemp() / case.replace(" ", "_")
    before.mkdir(exist_ok=True)
    expected, named = plain(case, before)
    config: dict[str, object] = {"zero": {"stage": stage}, "precision": {"compute": "fp32"}}
    assert len(expected) == 3
    assert logged(case, config, tmp_path, named) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.clients
def test_accelerates_operations(tmp_path: Path) -> None:
    """accelerate's ``test_ops`` passes. Others need a GPU or the hub, or are in tests/integrations/huggingface."""
    run(["-m", "accelerate.test_utils.scripts.test_ops"], {"zero": {"stage": 3}}, tmp_path)
