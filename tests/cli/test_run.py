"""``partita run`` in this process, with a stand-in for the replacement of accelerate's and transformers' classes."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from partita.cli import launch, script
from partita.cli.main import app
from partita.errors import PartitaError

CAST = {"compute": "bf16", "mode": "cast", "outputs": "compute"}  # the equivalent of DeepSpeed's section for bf16
SCRIPT = """
import json, sys
from pathlib import Path
import beside  # the script's folder is on the path
Path(sys.argv[1]).write_text(json.dumps([__name__, sys.argv[2:], beside.VALUE]))
"""


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the integration, and return a list that collects the settings of each activation."""
    found: list[Any] = []
    stand_in: Any = ModuleType("partita.integrations.huggingface")
    stand_in.activate = found.append
    monkeypatch.setitem(sys.modules, "partita.integrations", ModuleType("partita.integrations"))
    monkeypatch.setitem(sys.modules, "partita.integrations.huggingface", stand_in)
    replaces: Any = ModuleType("partita.integrations.replace_deepspeed")
    replaces.replace_deepspeed = lambda: None
    monkeypatch.setitem(sys.modules, "partita.integrations.replace_deepspeed", replaces)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return found


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def run(*arguments: str | Path) -> tuple[int, str]:
    """Run ``partita run``, and return its exit code, and its output with errors, in unwrapped lines."""
    result = CliRunner().invoke(
        app, ["run", *(str(argument) for argument in arguments)], env={"COLUMNS": "300", "TERM": "dumb"}
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_script_runs_as_it_is_with_its_own_options(activated: list[Any], written: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, said = run(written, out, "--processes", "9", "--learning_rate", "1e-4", "-m")
    assert code == 0, said
    assert json.loads(out.read_text()) == ["__main__", ["--processes", "9", "--learning_rate", "1e-4", "-m"], 7]
    assert activated == [None], "the script's own arguments say which config"
    assert said.splitlines() == [
        f"partita run {written}: partita replaces accelerate.Accelerator, transformers.Trainer, "
        "TrainingArguments(deepspeed=, fsdp=) and deepspeed; settings: those of the script"
    ]


def test_a_module_runs_too(
    activated: list[Any], written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    sys.path.insert(0, str(tmp_path))
    code, said = run("-m", "train", tmp_path / "out.json", "x")
    assert code == 0, said
    assert json.loads((tmp_path / "out.json").read_text()) == ["__main__", ["x"], 7]
    assert activated == [None]


def test_what_the_files_say_is_activated(activated: list[Any], written: Path, tmp_path: Path) -> None:
    own, theirs, answers = (tmp_path / name for name in ("config.yaml", "ds_config.json", "default_config.yaml"))
    own.write_text("zero: {stage: 3}")
    theirs.write_text('{"zero_optimization": {"stage": 2, "overlap_com": 1}, "train_batch_size": "auto", "aio": {}}')
    answers.write_text("{distributed_type: FSDP, mixed_precision: bf16, num_processes: 1}")
    for option, file in (("--config", own), ("--deepspeed", theirs), ("--accelerate", answers)):
        code, said = run(option, file, written, tmp_path / "out.json")
        assert code == 0, said
        assert said.splitlines()[-1].endswith(f"settings: {file}")
        if file is theirs:
            assert f"{theirs}: zero_optimization.overlap_com: unknown key, without effect; did you mean" in said
            assert f"{theirs}: ignored, because partita does not need: aio" in said
    assert activated == [
        {"zero": {"stage": 3}},
        {"zero": {"stage": 2}},
        {"zero": {"stage": 3}, "precision": {"compute": "bf16"}},
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "SCRIPT: no file 'nowhere.py'"),
        (["-m", "nowhere_at_all.train"], "-m nowhere_at_all.train: no module with this name"),
        (["--config", "a.yaml", "--deepspeed", "b.json", __file__], "give one of them"),
        (["--deepspeed", "b.json", __file__], "config file 'b.json' does not exist"),
        (["--config", "b.toml", __file__], "expected a path that ends in .yaml"),
    ],
)
def test_mistakes_are_one_message_before_the_script_starts(
    activated: list[Any], arguments: list[str], message: str
) -> None:
    code, said = run(*arguments)
    assert code == 2
    assert message in said
    assert "Traceback" not in said
    assert activated == []


def test_processes_are_not_started_under_a_launcher(
    activated: list[Any], written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a launcher, each process runs the script itself, and only one of them prints what is replaced."""
    places = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    code, said = run("--processes", "2", written)
    assert code == 2
    assert "a launcher has already started this process as one of 4; leave --processes out" in said
    file = tmp_path / "ds_config.json"
    file.write_text('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "bf16": {"enabled": true}}')
    assert run("--deepspeed", file, written, tmp_path / "out.json") == (0, "")
    assert activated == [{"zero": {"stage": 3, "hierarchical": True}, "precision": CAST}]


def test_several_processes_are_started_as_asked_or_as_accelerates_file_says(
    activated: list[Any], written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(num: int, module: str, arguments: list[str], console: object) -> int:
        started.append((num, module, arguments))
        return 3

    monkeypatch.setattr(launch, "launch", start)
    file = tmp_path / "default_config.yaml"
    file.write_text("{distributed_type: FSDP, num_processes: 4}")
    settings = json.dumps({"zero": {"stage": 3}})
    assert run("--accelerate", file, written, "x")[0] == 3
    assert run("--accelerate", file, "--processes", "2", "-m", "json.tool")[0] == 3
    assert run("--processes", "2", written)[0] == 3
    assert started == [
        (4, "partita.cli.script", [settings, str(written), "x"]),
        (2, "partita.cli.script", [settings, "-m", "json.tool"]),
        (2, "partita.cli.script", ["null", str(written)]),
    ]
    assert activated == [], "that is done where the script runs"


def test_what_a_script_does_wrong_is_told(activated: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "fails.py"
    file.write_text("import partita\nraise partita.ConfigError('zero.stage is 7')")
    code, said = run(file)
    assert (code, said.splitlines()[-1]) == (2, "error: zero.stage is 7")
    file.write_text("raise SystemExit(5)")
    assert run(file)[0] == 5
    file.write_text("raise KeyboardInterrupt")
    assert run(file)[0] == 130
    file.write_text("{}['key']")
    with pytest.raises(KeyError):
        run(file)


def test_a_started_process_writes_its_error_down(
    activated: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    file = tmp_path / "fails.py"
    file.write_text("import sys\nraise ValueError(sys.argv[1:])")
    assert script.main(['{"zero": {"stage": 1}}', str(file), "a", "b"]) == 1
    assert activated == [{"zero": {"stage": 1}}]
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: ['a', 'b']"


def test_without_the_extra(written: Path, monkeypatch: pytest.MonkeyPatch, activated: list[Any]) -> None:
    def missing(config: object) -> None:
        raise PartitaError(
            "partita.integrations.huggingface needs 'accelerate', which is not installed: pip install 'partita[hf]'"
        )

    monkeypatch.setattr(sys.modules["partita.integrations.huggingface"], "activate", missing)
    code, said = run(written, "out")
    assert code == 1
    assert "pip install 'partita[hf]'" in said


# -------------------------------------------------------------------------------------------------------- convert


def convert(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["convert", "config", *(str(argument) for argument in arguments)])
    return result.exit_code, result.output


def test_a_config_is_converted_with_its_notices_as_comments(tmp_path: Path) -> None:
    file, out = tmp_path / "ds_config.json", tmp_path / "config.yaml"
    file.write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "train_batch_size": "auto",\n'
        '// comments are allowed\n "steps_per_print": 10, "max_grad_norm": 1.0}'
    )
    expected = f"""# Converted from {file}.
# mapped: bf16.enabled: becomes precision.compute: 'bf16', precision.mode: 'cast', precision.outputs: 'compute'
# mapped: zero_optimization.stage: becomes zero.stage: 3
# mapped: train_batch_size: set by the trainer's arguments (auto)
# ignored: steps_per_print: partita has its own reports (engine.memory_report, engine.traffic_report)
# warning: max_grad_norm: unknown key, without effect; did you mean gradient_clipping?
zero: {{stage: 3}}
precision: {{compute: bf16, mode: cast, outputs: compute}}
"""
    assert convert(file) == (0, expected)
    code, said = convert(file, "-o", out)
    assert (code, said) == (0, f"{out}: for partita.initialize(model, '{out}')\n")
    assert out.read_text() == expected


def test_a_file_that_leaves_nothing_to_a_trainer_keeps_deepspeeds_defaults(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}')
    code, said = convert(file)
    assert code == 0
    assert yaml.safe_load(said) == {
        "zero": {"stage": 0},
        "precision": {"compute": "fp32"},
        "batch": {"total": 8},
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.0},
        "clip_grad_norm": 1.0,
    }
    file.write_text('{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}')
    assert yaml.safe_load(convert(file)[1]) == {
        "zero": {"stage": 0},
        "batch": {"total": 8},
        "optimizer": {"name": "adamw"},
    }


def test_accelerates_file_is_known_by_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "default_config.yaml"
    file.write_text("{compute_environment: LOCAL_MACHINE, distributed_type: FSDP, mixed_precision: bf16}")
    code, said = convert(file)
    assert code == 0
    assert said.endswith("zero: {stage: 3}\nprecision: {compute: bf16}\n")


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ('{"amp": {"enabled": true}}', [], "fix: use bf16, or fp16"),
        ('{"zero_optimization": ', [], "not valid JSON"),
        ('{"model": {"layers": 2}, "data": {}, "train": {"steps": 3}}', [], "A configuration of partita needs no conv"),
        ('{"zero": {"stage": 3}, "optimizer": {"lr": 0.1}}', [], "got the keys 'zero', which neither has"),
        (
            '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}',
            [],
            "7 is not a multiple of train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 2 = 4",
        ),
        ("{}", ["-o", "/proc/here"], "'/proc/here' cannot be written"),
    ],
)
def test_what_cannot_be_converted(tmp_path: Path, content: str, more: list[str], message: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(content)
    code, said = convert(file, *more)
    assert code == 2
    assert message in said
