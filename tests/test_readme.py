"""Checks of the README: its length, its commands, its figures, and its links on PyPI."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from scikit_build_core.metadata.fancy_pypi_readme import dynamic_metadata

from benchmarks import _terminal, pictures

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAX_LINES, MAX_WORDS = 150, 1200

BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
INLINE = re.findall(
    r"`((?:make|pip|partita|python|torchrun) [^`]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.M)
)
COMMANDS = [
    line.partition("#")[0].strip() for language, block in BLOCKS if not language for line in block.splitlines() if line
] + INLINE
# A file in which each command of the README is run, and the text there that runs it. Benchmarks have their own test.
RUN_BY = {
    "make train": (".ci/run", "make train"),
    "make test": (".ci/run", "make test"),
    "pip install .": ("Makefile", "pip install --quiet --editable"),
    "partita doctor": ("tests/cli/test_main.py", '"doctor"'),
    "torchrun --nproc-per-node 2 examples/plain_script.py": ("tests/test_readme.py", "plain_script.py"),
    "partita plan llama-3-8b --gpus 8 --gpu h100": ("tests/test_readme.py", "llama-3-8b"),
    "partita run --config config.yaml train.py": ("tests/cli/test_run.py", '"--config"'),
    "partita run --deepspeed ds_config.json train.py": ("tests/cli/test_run.py", '"--deepspeed"'),
}
MEASURED = [line for line in README.splitlines() if "| `python -m benchmarks." in line]


def run(*command: str | Path, folder: Path, timeout_s: int = 280) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MAX_LINES
    assert len(README.split()) <= MAX_WORDS


@pytest.mark.parametrize("command", [command for command in COMMANDS if "benchmarks." not in command])
def test_every_command_runs_in_a_test_or_in_ci(command: str) -> None:
    path, text = RUN_BY[command]
    assert text in (ROOT / path).read_text()


def test_the_plan_is_computed(tmp_path: Path) -> None:
    plan = run(
        sys.executable, "-m", "partita.cli.main", *"plan llama-3-8b --gpus 8 --gpu h100".split(), folder=tmp_path
    )
    assert "llama-3-8b: 8.03B parameters, on 8 x h100" in plan


def test_the_example_runs_on_two_processes(tmp_path: Path) -> None:
    script = ROOT / "examples" / "plain_script.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert "ranks 2" in run(*launcher, script, folder=tmp_path)


PRELUDE = """
import torch
from torch.nn import functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
loader = [(torch.randn(4, 8), torch.randint(4, (4,))) for _ in range(3)]
DistributedDataParallel = lambda model: model
"""


@pytest.mark.parametrize(("kept", "result"), [(" +", "weights/model.safetensors"), (" -", ".")])
def test_both_sides_of_the_diff_train(kept: str, result: str, tmp_path: Path) -> None:
    diff = next(block for language, block in BLOCKS if language == "diff")
    script = "\n".join(line[1:] for line in diff.splitlines() if line[0] in kept)
    run(sys.executable, "-c", PRELUDE + script, folder=tmp_path)
    assert (tmp_path / result).exists()


@pytest.mark.parametrize("row", MEASURED)
def test_measured_figures_are_those_of_the_result_file(row: str) -> None:
    (name,) = re.findall(r"`python -m benchmarks\.(\w+)`", row)
    assert f"benchmarks/results/{name}.md" in row
    result = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text()
    assert f"python -m benchmarks.{name}" in result
    _, partita, peer = row.split("|")[1:4]
    for figure in re.findall(r"\d[\d.,]*", f"{partita} {peer}".replace(", ", " ")):
        # Reports have more digits than the README: a figure is the rounding of one in the report.
        value, digits = float(figure.replace(",", "")), len(figure.partition(".")[2])
        found = {round(float(number), digits) for number in re.findall(r"(?<![\d.])\d+(?:\.\d+)?(?![\d.])", result)}
        assert value in found, f"{figure} is not in {name}.md"


def test_there_are_six_measured_rows() -> None:
    assert len(MEASURED) == 6


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", sorted({re.findall(r"python -m [\w.]+", row)[0] for row in MEASURED}))
def test_every_benchmark_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    run(sys.executable, *command.split()[1:], "--quick", folder=ROOT, timeout_s=800)


def texts_of(svg: str) -> list[str]:
    return re.findall(r"<dc:description>(.*?)</dc:description>|<text[^>]*>([^<]*)", svg)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_every_picture_is_drawn_from_the_results(name: str, tmp_path: Path) -> None:
    pictures.PICTURES[name](tmp_path / f"{name}.svg")
    drawn, kept = (tmp_path / f"{name}.svg").read_text(), (pictures.IMAGES / f"{name}.svg").read_text()
    assert len(kept) < pictures.MAX_BYTES
    assert "http" not in re.sub(r'(xmlns(:\w+)?|rdf:\w+)="[^"]*"|<!DOCTYPE[^>]*>', "", kept)  # it fetches nothing
    assert texts_of(drawn) == texts_of(kept)


def test_a_recording_keeps_the_last_state_of_each_line(tmp_path: Path) -> None:
    path = tmp_path / "x.cast"
    code = r"import time; print('50%', end='\r', flush=True); time.sleep(.01); print('100%\n\033[32mdone\033[0m')"
    _terminal.record([sys.executable, "-c", code], "run it", path)
    recording = _terminal.load(path)
    assert [line.text.plain for line in _terminal.screen(recording)] == ["100%", "done"]
    picture = _terminal.picture(recording)
    assert "$ run it" in picture
    assert "50%" not in picture


def test_links_are_absolute_on_pypi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shown = dynamic_metadata("readme", {}, project)["text"]
    assert len(re.findall(r"\]\(https://", shown)) == len(re.findall(r"\]\(", README))
    assert "![Peak memory per rank: DDP" in shown
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", shown)
    assert all(image.startswith("https://raw.") for image in images)
