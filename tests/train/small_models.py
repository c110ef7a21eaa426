"""A tiny Llama with a word tokenizer, and documents of these words, in folders."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.kit import seeds

NUM_WORDS = 30
UNKNOWN, END = 0, 1
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
# Writes each message as its role and its words.
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
# As in many models, the header of the assistant's role prompts the answer, and a mark ends each message.
WITH_HEADERS = (
    "{% for m in messages %}{{ m['role'] }} w9 {{ m['content'] }} w8 {% endfor %}"
    "{% if add_generation_prompt %}assistant w9 {% endif %}"
)


def tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the words w0, w1, ..., user and assistant. Words are numbered from 2."""
    names = [*(f"w{number}" for number in range(NUM_WORDS)), "user", "assistant"]
    words = {"[UNK]": UNKNOWN, "</s>": END} | {name: number for number, name in enumerate(names, start=2)}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **{"unk_token": "[UNK]", "eos_token": "</s>"} | settings)


def model_folder(folder: Path, **settings: Any) -> Path:
    """Write the model and its tokenizer into ``folder``, and return it."""
    seeds.start(5)
    config = LlamaConfig(**SIZES | {"vocab_size": 40, "bos_token_id": None, "eos_token_id": END} | settings)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def texts(num: int = 60, seed: int = 0) -> list[str]:
    """Return texts of 3 to 24 words with increasing numbers, so that a model can learn them."""
    draw = random.Random(seed)
    begins = [(draw.randrange(NUM_WORDS), draw.randrange(3, 25)) for _ in range(num)]
    return [" ".join(f"w{(begin + place) % NUM_WORDS}" for place in range(length)) for begin, length in begins]


def write_rows(path: Path, rows: list[Any], field: str = "text") -> Path:
    """Write JSON lines with one field."""
    path.write_text("".join(json.dumps({field: row}) + "\n" for row in rows))
    return path


def job_sections(folder: Path, **data: Any) -> dict[str, Any]:
    """Return the sections of a short job on a model and documents in ``folder``, which are written if missing."""
    if not (folder / "model").exists():
        model_folder(folder / "model")
    if not (folder / "rows.jsonl").exists():
        write_rows(folder / "rows.jsonl", texts())
    corpus = {"format": "jsonl", "corpus": str(folder / "rows.jsonl"), "sequence": 32, "held_out": 0.1}
    return {
        "model": {"huggingface": str(folder / "model")},
        "data": {**corpus, **data},
        "train": {
            "steps": 6,
            "eval_every": 3,
            "eval_batches": 2,
            "log_every": 1,
            "metrics": [],
            "out": f"{folder}/out",
        },
        "engine": {"zero": {"stage": 3}, "batch": {"total": 4}, "optimizer": {"lr": 1e-2}},
    }
