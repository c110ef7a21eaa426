"""A language model under transformers' Trainer: evaluation, a checkpoint, and a run that continues from it."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

folder = Path(sys.argv[1])


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def train(steps, resume):
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    arguments = TrainingArguments(
        str(folder / "trained"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
        max_steps=steps,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train(resume_from_checkpoint=resume)
    for entry in trainer.state.log_history:
        if "loss" in entry or "eval_loss" in entry:
            trainer.accelerator.print(f"loss {entry.get('loss', entry.get('eval_loss'))}")
    trainer.save_model(str(folder / "saved"))
    return trainer


train(3, None)
train(6, str(folder / "trained" / "checkpoint-3")).accelerator.end_training()
