"""Each tutorial does what it says: its blocks run as a reader runs them, in order, and print what the page shows.

A block of code with a title is a file. A block of bash is run. A block of text after it is what it prints on standard
output, where ``...`` stands for anything.
"""

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r'^```(\w+)(?: title="([\w./]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
PROGRAMS = {
    "python": '"$@"',
    "torchrun": '-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0 "$@"',
    "partita": '-m partita.cli.main "$@"',
}
MATCHES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def add_programs(folder: Path) -> None:
    """Write this environment's python, torchrun and partita into a folder, as an activated environment has them."""
    folder.mkdir()
    for name, arguments in PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\nexec {sys.executable} {arguments}\n")
        program.chmod(0o755)


def follow(page: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Do what the page says in ``folder``. Yield (commands, expected output, output) of each run."""
    programs = folder / ".programs"
    add_programs(programs)
    environment = os.environ | {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "src")]).strip(os.pathsep),
        "OMP_NUM_THREADS": "1",
    }
    commands, printed = "", ""
    for language, title, text in BLOCK.findall(page):
        if title:
            (folder / title).write_text(text)
        elif language == "bash":
            done = subprocess.run(
                ["bash", "-euc", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
            )
            assert done.returncode == 0, f"{text}{done.stdout}{done.stderr}"
            commands, printed = text, done.stdout
        elif language == "text":
            yield commands, text, printed


def check(page: str, folder: Path) -> int:
    """Follow the page and compare; return the number of compared outputs."""
    num = 0
    for commands, expected, printed in follow(page, folder):
        assert doctest.OutputChecker().check_output(expected, printed, MATCHES), f"{commands}{expected}---\n{printed}"
        num += 1
    return num


@pytest.mark.parametrize("name", sorted(path.name for path in TUTORIALS.glob("*.md")))
def test_a_tutorial_does_what_it_says(name: str, tmp_path: Path) -> None:
    assert check((TUTORIALS / name).read_text(), tmp_path) > 0
