"""``activate()`` runs unchanged scripts on partita, here in their own processes."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import accelerate
import pytest
import transformers

from partita import ConfigError
from partita.integrations.huggingface.activate import _earlier_uses, activate
from tests.integrations.huggingface.runs import Run, history
from tests.integrations.huggingface.test_trl import losses

ROOT = Path(__file__).parents[3]

UNCHANGED = """
import json, sys
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments, LlamaForCausalLM
from tests.integrations.huggingface.runs import arguments, llama, losses_of, samples

class Mine(Trainer):
    pass

folder = sys.argv[1]
llama().save_pretrained(folder + "/start")
model = LlamaForCausalLM.from_pretrained(folder + "/start")
trainer = Mine(model=model, args=arguments(folder), train_dataset=samples(9, 1))
trainer.train()
trainer.save_model(folder + "/end")
engines = getattr(trainer.accelerator, "engines", None)
try:
    activate()
except Exception as error:
    again = str(error)
print("FOUND", json.dumps({
    "losses": losses_of(trainer),
    "trainer": [kind.__module__ for kind in Mine.__mro__],
    "accelerators": [isinstance(trainer.accelerator, Accelerator), Accelerator.__mro__[1].__module__],
    "again": again,
    "stage": engines and engines.of(trainer.model).engine.config.zero.stage,
}))
"""
FIRST_LINE = "from partita.integrations.huggingface import activate; activate({'zero': {'stage': 3}})\n"


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    path = folder / "script.py"
    path.write_text(script)
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(path), str(folder)]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=200, check=False)


def found(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    content: dict[str, object] = json.loads(line.removeprefix("FOUND "))
    return content


def test_a_script_with_one_line_before_it(tmp_path: Path) -> None:
    activated = found(run(FIRST_LINE + UNCHANGED, tmp_path))
    assert activated["losses"] == pytest.approx(losses_of_rows(history(Run())), rel=1e-6)
    assert "partita.integrations.huggingface.trainer" in activated["trainer"]  # type: ignore[operator]
    assert activated["accelerators"] == [True, "partita.integrations.huggingface.accelerator"]
    assert activated["stage"] == 3
    assert "it was already called" in str(activated["again"])


def losses_of_rows(rows: list[dict[str, float]]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


class Mine(transformers.Trainer):  # type: ignore[misc]
    """A trainer that is derived before ``activate()``."""


def test_too_late() -> None:
    """``activate()`` reports classes that a script has already imported or derived from."""
    with pytest.raises(ConfigError, match="before it could be replaced; call activate\\(\\) in the first line"):
        activate()
    assert f"{__name__}.Mine was derived from Trainer" in list(_earlier_uses())
    script = types.ModuleType("script")
    script.Loop = accelerate.accelerator.Accelerator  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "script", script)
        assert "script imported Accelerator" in list(_earlier_uses())


TRL_UNCHANGED = """
import json, sys
import trl
from transformers import set_seed
from tests.integrations.huggingface.runs import llama, losses_of
from tests.integrations.huggingface.test_trl import SETTINGS, data, tokenizer

set_seed(7)
args = trl.SFTConfig(sys.argv[1], max_length=16, **SETTINGS)
trainer = trl.SFTTrainer(llama(), args, train_dataset=data("sft"), processing_class=tokenizer())
trainer.train()
prepared = trainer.accelerator.engines.of(trainer.model)
print("FOUND", json.dumps({"losses": losses_of(trainer), "stage": prepared.engine.config.zero.stage}))
"""


@pytest.mark.thorough
def test_a_script_of_trls_with_one_line_before_it(tmp_path: Path) -> None:
    activated = found(run(FIRST_LINE + TRL_UNCHANGED, tmp_path))
    assert activated["stage"] == 3
    assert activated["losses"] == pytest.approx(losses("sft", None), rel=1e-6)


def test_the_arguments_of_other_libraries_are_read(tmp_path: Path) -> None:
    """DeepSpeed's and FSDP's arguments are read, also from copies of the arguments and from JSON text. Together with a
    partita configuration they are refused.
    """
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"}
    content = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    reads = f"""
from partita.integrations.huggingface import activate; activate()
import dataclasses, json, sys
from transformers import Seq2SeqTrainingArguments, Trainer
from partita import ConfigError
from tests.integrations.huggingface.runs import arguments, llama, losses_of, samples
given = arguments(sys.argv[1], deepspeed={content!r})
args = Seq2SeqTrainingArguments(**given.to_dict())  # as TRL's trainers change the class of the arguments
trainer = Trainer(model=llama(), args=args, train_dataset=samples(9, 1))
trainer.train()
config = trainer.accelerator.engines.of(trainer.model).engine.config
said = ""
try:
    Trainer(model=llama(), args=args, train_dataset=samples(9, 1), partita_config={{"zero": {{"stage": 1}}}})
except ConfigError as error:
    said = str(error)
wrapped = {{"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}
fsdp = arguments(sys.argv[1], fsdp="full_shard offload", fsdp_config=wrapped)
Trainer(model=llama(), args=fsdp)
text = {{"deepspeed": json.dumps({{"zero_optimization": {{"stage": 3}}}}), "fsdp_config": json.dumps(wrapped)}}
copies = [
    dataclasses.replace(trainer.args, seed=5),
    dataclasses.replace(fsdp, seed=5),
    arguments(sys.argv[1], deepspeed=text["deepspeed"]),
    dataclasses.replace(fsdp, fsdp_config=text["fsdp_config"]),
]
try:
    arguments(sys.argv[1], deepspeed=text["deepspeed"][:-1])
except ConfigError as error:
    invalid = str(error)
print("FOUND", json.dumps({{"losses": losses_of(trainer), "stage": config.zero.stage, "said": said,
    "fsdp": fsdp.partita_settings, "given": given.partita_settings, "invalid": invalid,
    "copies": [copied.partita_settings for copied in copies],
    "tier": config.zero.offload.optimizer, "clip": config.clip_grad_norm, "compute": config.precision.compute}}))
"""
    done = found(run(reads, tmp_path))
    assert (done["stage"], done["tier"], done["clip"], done["compute"]) == (2, "host", 1.0, "fp32")
    assert len(done["losses"]) == 6  # type: ignore[arg-type]
    assert "and a configuration of partita are both given" in str(done["said"])
    offload = {"parameters": "host", "optimizer": "host"}
    assert done["fsdp"] == {"zero": {"stage": 3, "offload": offload, "units": ["LlamaDecoderLayer"]}}
    assert done["copies"] == [done["given"], done["fsdp"], {"zero": {"stage": 3}}, done["fsdp"]]
    assert str(done["invalid"]).startswith("TrainingArguments(deepspeed=...), line 1: not valid JSON")
