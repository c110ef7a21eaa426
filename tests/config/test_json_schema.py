"""The JSON schema for editors: it accepts configurations, refuses wrong values and keys, and describes every key."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from typer.testing import CliRunner

from docs import schemas
from partita.cli.main import app
from partita.config.json_schema import json_schema
from partita.config.load import load_config
from partita.config.messages import key_paths, section_of
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.train.job import Job, load_job
from tests.config.test_schema import DOCUMENTED, ELABORATE

ROOT = Path(__file__).parents[2]
OF_CONFIG, OF_JOB = Draft202012Validator(json_schema(Config)), Draft202012Validator(json_schema(Job))


def problems(schema: Draft202012Validator, data: object) -> list[str]:
    return [error.message for error in schema.iter_errors(data)]


def test_it_is_a_schema() -> None:
    for schema in (OF_CONFIG, OF_JOB):
        Draft202012Validator.check_schema(schema.schema)


@pytest.mark.parametrize("data", [{}, {"zero": None}, yaml.safe_load(DOCUMENTED), json.loads(json.dumps(ELABORATE))])
def test_configurations_hold(data: dict[str, Any]) -> None:
    assert problems(OF_CONFIG, data) == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("train_*.yaml")), ids=lambda path: path.name)
def test_the_example_jobs_hold(path: Path) -> None:
    assert problems(OF_JOB, yaml.safe_load(path.read_text())) == []


def test_the_configurations_in_the_documentation_hold() -> None:
    pages = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
    blocks = [block for page in pages for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)]
    assert len(blocks) > 15
    for block in blocks:
        data = yaml.safe_load(block)
        schema = OF_CONFIG if data.keys() <= Config.model_fields.keys() else OF_JOB
        assert problems(schema, data) == [], block


@pytest.mark.parametrize(
    "attention",
    [
        {"pattern": "longformer", "window": 1024},
        {"pattern": "variable", "window": [64, 128]},
        {"pattern": "user", "layout": ["10", "11"]},
        {"pattern": "user", "layout": [[1, 0], [1, 1]]},
    ],
)
def test_patterns_of_attention_hold(attention: dict[str, Any]) -> None:
    load_config({"attention": attention})
    assert problems(OF_CONFIG, {"attention": attention}) == []


def test_a_job_written_down_holds(tmp_path: Path) -> None:
    for given in ({"train": {"metrics": ["mlflow"]}}, {"model": {"huggingface": {"model_type": "gpt2"}}}):
        assert problems(OF_JOB, load_job(given).model_dump(mode="json")) == []
    assert problems(OF_JOB, {"model": {"huggingface": "a/folder"}}) == []


def sections(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    yield ()
    for path in key_paths(model):
        owner: type[BaseModel] | None = model
        for part in path:
            owner = section_of(owner, part) if owner else None
        if owner is not None:
            yield path


@pytest.mark.parametrize("schema", [OF_CONFIG, OF_JOB], ids=["config", "job"])
def test_an_unknown_key_fails_in_every_section(schema: Draft202012Validator) -> None:
    paths = list(sections(Config if schema is OF_CONFIG else Job))
    assert len(paths) > 8
    for path in paths:
        data: object = {"stagez": 3}
        for part in reversed(path):
            data = {part: data}
        assert any("'stagez' was unexpected" in problem for problem in problems(schema, data)), path


@pytest.mark.parametrize(
    "data",
    [
        {"zero": {"stage": 4}},
        {"zero": {"stage": True}},
        {"zero": {"prefetch_bytes": "many"}},
        {"parallel": {"tensor": 0}},
        {"communication": {"parameters": "low_rank"}},
        {"communication": {"gradients": "fp8"}},
        {"precision": {"compute": "int4"}},
        {"optimizer": {"lr": -1}},
        {"optimizer": {"betas": [0.9]}},
        {"batch": {"micro": 0}},
        {"checkpoint": {"keep": "all"}},
        {"zero": [3]},
        {"zero": {"units": []}},
    ],
)
def test_what_the_loader_refuses_fails(data: dict[str, Any]) -> None:
    assert problems(OF_CONFIG, data)
    with pytest.raises(ConfigError):
        load_config(data)


@pytest.mark.parametrize("size", ["64MiB", "0.5 GiB", "10kb", "1e3B", 1000, "auto"])
def test_bytes_are_written_with_a_unit_or_without(size: object) -> None:
    data = {"zero": {"prefetch_bytes": size}}
    assert problems(OF_CONFIG, data) == []
    load_config(data)


def keys_of(schema: dict[str, Any], at: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in at["properties"].values():
        yield entry
        if "$ref" in entry:
            yield from keys_of(schema, schema["$defs"][entry["$ref"].rpartition("/")[2]])


@pytest.mark.parametrize("model", [Config, Job])
def test_every_key_has_a_description_and_a_default(model: type[BaseModel]) -> None:
    schema = json_schema(model)
    entries = list(keys_of(schema, schema))
    assert len(entries) == len(key_paths(model))
    for entry in entries:
        assert entry["description"]
        assert "default" in entry


@pytest.mark.parametrize("name", schemas.MODELS)
def test_the_schemas_of_the_package_are_up_to_date(name: str) -> None:
    assert (schemas.FOLDER / name).read_text() == schemas.text(name), "run python -m docs.schemas"


def test_the_command_imports_no_config() -> None:
    """`partita schema` does not import torch or the config classes, which would take most of its time."""
    script = "import sys; from partita.cli.main import app; app(['schema'], standalone_mode=False)"
    script += "; assert not {'partita.config', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["properties"]["zero"]


def test_the_command_prints_it() -> None:
    for arguments, model in ((["schema"], Config), (["schema", "--job"], Job)):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0
        assert json.loads(done.output) == json_schema(model)
