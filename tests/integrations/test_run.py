"""``partita run`` in real processes: an unchanged transformers script has the losses of the plain Trainer."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState

from tests.comm.test_launchers import free_job

UNCHANGED = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

out, batch, runs = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
found = []
for sharding in runs:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    rows = torch.randint(0, 64, (24, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=out, use_cpu=True, per_device_train_batch_size=batch, max_steps=4, logging_steps=1,
        learning_rate=1e-2, report_to="none", save_strategy="no", disable_tqdm=True, **sharding,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    engines = getattr(trainer.accelerator, "engines", None)
    found.append({
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "ranks": arguments.world_size,
        "stage": engines and engines.of(trainer.model).engine.config.zero.stage,
    })
if trainer.is_world_process_zero():
    with open(out + "/found.json", "w") as file:
        json.dump(found, file)
"""
SPLIT = {
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
SRUN = Path(__file__).parents[1] / "examples" / "srun"
PARTITA = ("-m", "partita.cli.main", "run")


def plain_losses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Run the script in this process with transformers' own Trainer; return its losses."""
    (folder / "plain.py").write_text(UNCHANGED)
    monkeypatch.setattr(sys, "argv", ["plain.py", str(folder), "4", "[{}]"])
    try:
        runpy.run_path(str(folder / "plain.py"), run_name="__main__")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    (found,) = json.loads((folder / "found.json").read_text())
    assert (found["ranks"], found["stage"]) == (1, None)
    losses: list[float] = found["losses"]
    return losses


def finished(folder: Path, runs: list[dict[str, Any]], *launcher: str) -> tuple[list[Any], str]:
    """Run the script on two ranks; return its results and its stderr."""
    script, out = folder / "train.py", folder / "out"
    script.write_text(UNCHANGED)
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", *launcher, str(script), str(out), "2", json.dumps(runs)]
    variables = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "found.json").read_text()), done.stderr


def test_what_a_script_says_of_deepspeed_and_fsdp_holds_on_partita(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with half batches have the losses of the plain Trainer on one process with full batches."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(SPLIT))
    plain = plain_losses(tmp_path, monkeypatch)
    runs = [
        {"deepspeed": str(file)},
        {"fsdp": "shard_grad_op auto_wrap"},
        {"fsdp": True, "fsdp_config": {"version": 2}},
    ]
    found, said = finished(tmp_path, runs, *PARTITA, "--processes", "2")
    assert [(run["ranks"], run["stage"]) for run in found] == [(2, 3)] * 3
    for run in found:
        assert run["losses"] == pytest.approx(plain, rel=1e-5)
    assert found[0]["losses"] == found[1]["losses"] == found[2]["losses"]
    assert said.count("settings: those of the script") == 1
    assert "scheduler.type: the trainer's own schedule is used instead" in said


@pytest.mark.thorough
def test_files_given_to_partita_run_under_torchrun_and_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, answers = tmp_path / "ds_config.json", tmp_path / "default_config.yaml"
    file.write_text(json.dumps(SPLIT))
    answers.write_text(
        "{distributed_type: FSDP, fsdp_config: {fsdp_version: 2}, mixed_precision: 'no', num_processes: 2}"
    )
    plain = plain_losses(tmp_path, monkeypatch)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_ID", free_job())
    for launcher in (
        (*torchrun, *PARTITA, "--deepspeed", str(file)),
        (*PARTITA, "--accelerate", str(answers)),
        (str(SRUN), sys.executable, "-W", "ignore", *PARTITA, "--deepspeed", str(file)),
    ):
        ((run,), said) = finished(tmp_path, [{}], *launcher)
        assert (run["ranks"], run["stage"]) == (2, 3)
        assert run["losses"] == pytest.approx(plain, rel=1e-5)
        assert said.count("; settings: ") == 1
