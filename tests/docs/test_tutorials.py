"""Tests that run each tutorial's blocks in order, as a reader does, and compare their output with the page.

A code block with a title is written to a file. A bash block is run. A text block after it is the expected standard
output, in which ``...`` matches anything.
"""

import doctest
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r'^```(\w+)(?: title="([\w./]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
INSTALLATION = re.compile(r"pip install [^`\n]+")
PROGRAMS = {
    "python": '"$@"',
    "torchrun": '-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0 "$@"',
    "partita": '-m partita.cli.main "$@"',
}
MATCHES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BASH_TIMEOUT_S = 500

each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def with_programs(folder: Path) -> dict[str, str]:
    """Write python, torchrun and partita of this process to ``folder``; return an environment with them on its path."""
    folder.mkdir()
    for name, arguments in PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\nexec {sys.executable} {arguments}\n")
        program.chmod(0o755)
    modules = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "src")]))
    return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": modules}


def bash(commands: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run commands in bash; return their standard output."""
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=BASH_TIMEOUT_S,
    )
    assert done.returncode == 0, f"{commands}{done.stdout}{done.stderr}"
    return done.stdout


def follow(page: str, folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Run the blocks of a page in ``folder``; yield (expected, printed) for each output on the page."""
    printed = ""
    for language, title, text in BLOCK.findall(page):
        if title:
            (folder / title).write_text(text)
        elif language == "bash":
            printed = bash(text, folder, environment)
        elif language == "text":
            yield text, printed


def assert_page_is_right(page: str, folder: Path, environment: Mapping[str, str]) -> None:
    num_compared = 0
    for expected, printed in follow(page, folder, environment):
        assert doctest.OutputChecker().check_output(expected, printed, MATCHES), f"{expected}--- but:\n{printed}"
        num_compared += 1
    assert num_compared >= 2


@pytest.mark.timeout(600)
@each_tutorial
def test_a_tutorial_does_what_it_says(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "followed"
    folder.mkdir()
    assert_page_is_right(path.read_text(), folder, with_programs(tmp_path / "programs"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Create a virtual environment with only the Makefile's version of torch; return its environment variables."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    made = {**kept, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "SKBUILD_WHEEL_CMAKE": "0"}
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    bash(f"pip install --quiet {torch}\n", folder, made)
    return made


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@each_tutorial
def test_a_tutorial_in_a_fresh_environment(path: Path, fresh: dict[str, str], tmp_path: Path) -> None:
    page = path.read_text()
    (installation,) = INSTALLATION.findall(page)
    bash(f"{installation} --quiet\n", ROOT, fresh)
    assert_page_is_right(page, tmp_path, fresh)


def test_what_a_page_shows_is_compared(tmp_path: Path) -> None:
    page = '```python title="x.py"\nprint("loss 0.5 in 3 s")\n```\n```bash\npython x.py\n```\n```text\nloss {}\n```\n'
    for number, (shown, is_right) in enumerate({"0.5 in ... s": True, "0.4 in ... s": False}.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        ((expected, printed),) = follow(page.format(shown), folder, with_programs(tmp_path / f"programs-{number}"))
        assert doctest.OutputChecker().check_output(expected, printed, MATCHES) == is_right
