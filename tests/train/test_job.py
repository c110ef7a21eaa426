"""The job file: defaults, overrides, derived settings, and error messages."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.train.job import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"


def written(folder: Path, text: str) -> Path:
    path = folder / "tale.yaml"
    path.write_text(text)
    return path


def test_an_empty_job_is_one_of_defaults(tmp_path: Path) -> None:
    job = load_job(written(tmp_path, ""))
    assert job.engine == Config()
    assert (job.model.layers, job.data.corpus, job.train.steps) == (4, "stdlib", 1000)
    assert job.out == Path("runs", "tale")


def test_overrides_reach_every_section() -> None:
    overrides = ["train.steps=10", "engine.zero.stage=2", "model.kv_heads=1", "train.out=elsewhere", "data.seed=4"]
    job = load_job({"train": {"steps": 500}, "engine": {"zero": {"stage": 3}}}, overrides)
    assert (job.train.steps, job.engine.zero.stage, job.model.kv_heads, job.data.seed) == (10, 2, 1, 4)
    assert job.out == Path("elsewhere")


@pytest.mark.parametrize(
    ("schedule", "total_steps"),
    [
        ({"name": "cosine"}, 40),
        ({"name": "linear", "warmup_steps": 3}, 40),
        ({"name": "cosine", "total_steps": 99}, 99),
        ({"name": "cosine", "total_steps": None}, 40),
        ({"name": "constant"}, None),
        ({"warmup_steps": 3}, None),
    ],
)
def test_a_schedule_that_ends_ends_with_the_job(schedule: dict[str, Any], total_steps: int | None) -> None:
    job = load_job({"train": {"steps": 40}, "engine": {"schedule": schedule}})
    assert job.engine.schedule.total_steps == total_steps


def test_the_job_written_down_is_the_job(tmp_path: Path) -> None:
    huggingface = {"model_type": "llama", "hidden_size": 32}
    job = load_job({"model": {"huggingface": huggingface, "seed": 2}, "engine": {"schedule": {"name": "cosine"}}})
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    assert load_job(path) == job


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("model:\n  widht: 64", ["model.widht: unknown key; did you mean model.width?", "tale.yaml, line 2"]),
        ("zero: {stage: 3}", ["zero: unknown key; did you mean engine.zero?"]),
        ("engine:\n  zero:\n    stge: 3", ["zero.stge: unknown key; did you mean zero.stage?", "tale.yaml, line 3"]),
        ("engine: 3", ["engine: expected a section with the keys parallel, zero,", "got 3"]),
        ("train: 3", ["train: expected a section with the keys steps,", "got 3"]),
        ("train: {steps: 0}", ["train.steps: expected a whole number", "got 0"]),
        ("data: {held_out: 1.5}", ["data.held_out: expected a number", "below 1", "got 1.5"]),
        ("data: {sequence: lots}", ["data.sequence: expected a whole number", "got 'lots'"]),
        (
            "model: {huggingface: [a]}",
            ["model.huggingface: expected the path of a model folder or", "a section such as {model_type:", "or null"],
        ),
        (
            "model:\n  width: 30\n  heads: 4",
            ["model.width: 30 over model.heads 4", "set model.width to a multiple of 8", "tale.yaml, line 2"],
        ),
        (
            "model: {heads: 4, kv_heads: 3}",
            ["model.kv_heads: 3 does not divide model.heads 4", "set one of 1, 2, 4"],
        ),
        (
            "model: {huggingface: some/folder, layers: 2}",
            ["model.layers: has no effect on a Hugging Face model"],
        ),
        (
            "data:\n  format: jsonl\n  corpus: rows.jsonl",
            ["data.format: jsonl has documents, which need a tokenizer", "set model.huggingface", "tale.yaml, line 2"],
        ),
        (
            "model: {huggingface: some/folder}\ndata: {format: parquet}",
            ["data.corpus: data.format: parquet needs rows", "set data.corpus to their file or folder"],
        ),
        (
            "model: {huggingface: some/folder}\ndata: {format: jsonl, corpus: rows, sequence: 3}",
            ["data.sequence: 3 tokens are too few", "set data.sequence to at least 4"],
        ),
        ("data: {field: body}", ["data.field: has no effect with data.format: text", "set data.format to that of"]),
        ("data: {pack: false}", ["data.pack: has no effect with data.format: text"]),
        ("data: {predict: answers}", ["data.predict: has no effect with data.format: text"]),
        (
            "model: {huggingface: some/folder}\ndata: {format: jsonl, corpus: rows, predict: answers}",
            ["data.predict: answers needs conversations", "set data.chat_template to tokenizer or to a Jinja file"],
        ),
        ("data: {tokenizer: some/folder}", ["data.tokenizer: the partita decoder reads bytes", "remove it, or set"]),
        (
            "model: {huggingface: some/folder}\ndata: {format: jsonl, corpus: rows, split: test}",
            ["data.split: has no effect with data.format: jsonl"],
        ),
        (
            "model: {huggingface: some/folder}\ndata: {format: hf, corpus: rows, pattern: '*.json'}",
            ["data.pattern: has no effect with data.format: hf"],
        ),
        ("data: {format: csv}", ["data.format: expected one of text, jsonl, parquet, hf", "got 'csv'"]),
        (
            "train: {steps: 5, epochs: 2}",
            ["train.epochs: 2 epochs and train.steps: 5 both set the length", "remove one of them"],
        ),
        (
            "model: {lora: {r: 4}}",
            ["model.lora: adapters change a model that has weights", "set model.huggingface to the folder of a model"],
        ),
        ("train: {sample: {temperature: -1}}", ["train.sample.temperature: expected a number", "got -1"]),
        ("- 1", ["expected sections (key: value) at the top level"]),
        (
            "engine: {communication: {gradients: fp8}}",
            ["communication.gradients: expected one of full", "got 'fp8'"],
        ),
    ],
)
def test_mistakes_are_said_with_key_place_and_remedy(tmp_path: Path, text: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(written(tmp_path, text))
    for message in messages:
        assert message in str(caught.value)


def test_epochs_replace_steps_once_they_are_known() -> None:
    job = load_job({"train": {"epochs": 2}, "engine": {"schedule": {"name": "cosine", "warmup_steps": 5}}})
    known = job.with_steps(70)
    assert (known.train.steps, known.train.epochs, known.engine.schedule.total_steps) == (70, None, 70)
    assert known == load_job({"train": {"steps": 70}, "engine": {"schedule": {"name": "cosine", "warmup_steps": 5}}})
    given = load_job({"train": {"epochs": 2}, "engine": {"schedule": {"name": "cosine", "total_steps": 9}}})
    assert given.with_steps(70).engine.schedule.total_steps == 9
    with pytest.raises(ConfigError, match=r"set schedule.warmup_steps to at most 4"):
        resolve(job.with_steps(4).engine, 1, "cpu")


def test_the_cache_is_in_the_folder_of_results_unless_it_is_set() -> None:
    sections = {"model": {"huggingface": "folder"}, "data": {"format": "jsonl", "corpus": "rows"}}
    assert load_job(sections, ["train.out=there"]).data.cache == "there/tokens"
    assert load_job(sections, ["data.cache=shared"]).data.cache == "shared"
    assert load_job({}).data.cache is None


def test_a_wrong_override_is_named() -> None:
    with pytest.raises(ConfigError, match=r"train\.stepz: unknown key; did you mean train\.steps\?.*override"):
        load_job({}, ["train.stepz=3"])


def test_a_schedule_of_no_steps_is_not_replaced() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.total_steps.*0"):
        load_job({"engine": {"schedule": {"name": "cosine", "total_steps": 0}}})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere\.yaml' does not exist"):
        load_job("nowhere.yaml")


@pytest.mark.parametrize("name", ["train_stdlib", "train_hf"])
def test_the_examples_are_jobs(name: str) -> None:
    assert load_job(EXAMPLES / f"{name}.yaml").out == Path("runs", name)


def test_the_job_in_the_documentation_is_one() -> None:
    text = (EXAMPLES.parent / "docs" / "data.md").read_text()
    (block,) = re.findall(r"^```\n(model:.*?)^```$", text, re.MULTILINE | re.DOTALL)
    job = load_job(yaml.safe_load(block) | {"train": {"epochs": 3, "out": "runs/job"}})
    assert job.model.lora.r == 16
    assert (job.data.format, job.train.epochs, job.data.cache) == ("jsonl", 3, "runs/job/tokens")


def test_metrics_are_shown_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_job({}).sinks == ("tensorboard",)
    assert load_job({"train": {"metrics": []}}).sinks == ()
    assert load_job({"train": {"metrics": ["mlflow", "tensorboard"]}}).sinks == ("mlflow", "tensorboard")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert load_job({}).sinks == ()
    with pytest.raises(ConfigError, match=r"train\.metrics: wandb is not installed: pip install wandb"):
        load_job({"train": {"metrics": ["wandb"]}})
    with pytest.raises(ConfigError, match="expected auto or a list out of tensorboard, wandb, mlflow; got 'neptune'"):
        load_job({"train": {"metrics": "neptune"}})
