"""Adapters of PEFT on a classifier under transformers' Trainer. The classifier's head trains in full."""

import sys

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[0] % 3}


set_seed(0)
config = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    num_labels=3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
adapters = LoraConfig(TaskType.SEQ_CLS, r=4, target_modules=["query", "value"], lora_dropout=0.0)
model = get_peft_model(BertForSequenceClassification(config), adapters)
model.print_trainable_parameters()
arguments = TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=3,
    learning_rate=1e-2,
    max_steps=4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Sentences())
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        trainer.accelerator.print(f"loss {entry['loss']}")
trainer.save_model()
trainer.accelerator.end_training()
