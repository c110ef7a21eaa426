"""Sentence embeddings under sentence-transformers' trainer, with negatives from the batch."""

import os
import sys
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

folder = Path(sys.argv[1])
set_seed(0)
words = [f"w{number}" for number in range(40)]
names = {name: number for number, name in enumerate(["[PAD]", "[UNK]", *words])}
made = Tokenizer(models.WordLevel(names, unk_token="[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
config = BertConfig(
    vocab_size=len(names),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
base = folder / f"base-{os.environ['RANK']}"
BertModel(config).save_pretrained(base)
PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(base)
encoder = Transformer(str(base), max_seq_length=8)
model = SentenceTransformer(modules=[encoder, Pooling(32)], device="cpu")
pairs = {
    "anchor": [f"w{number} w{number + 1}" for number in range(24)],
    "positive": [f"w{number + 1} w{number + 2}" for number in range(24)],
}
arguments = SentenceTransformerTrainingArguments(
    str(folder / "trained"),
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    max_steps=3,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = SentenceTransformerTrainer(
    model, arguments, train_dataset=Dataset.from_dict(pairs), loss=MultipleNegativesRankingLoss(model)
)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        trainer.accelerator.print(f"loss {entry['loss']}")
trainer.accelerator.end_training()
