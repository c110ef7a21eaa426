"""Tests of the core without its optional packages: its tests pass, and config keys that need a package are rejected."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.plans import sampled
from tests.test_architecture import OPTIONAL

ROOT = Path(__file__).parents[1]
TESTS = ("tests/sharding/test_gathering.py", "tests/features/test_parity.py", "tests/optim/test_updaters.py")
# A `sitecustomize` that Python imports at startup. Import hooks of an editable install would find the hidden packages.
START = """\
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "ditable" not in repr(each) and "Redirecting" not in repr(each)]
"""
# Runs with the tests to prove that pytest's own settings of the import path do not bring the packages back.
HIDDEN = """\
import importlib.util

def test_packages_are_hidden():
    assert all(importlib.util.find_spec("partita." + name) is None for name in {packages!r})
"""
REFUSED = """\
import importlib.util, pytest, torch, partita
assert all(importlib.util.find_spec("partita." + name) is None for name in {packages!r})
model = torch.nn.Linear(4, 4)
for config, needed in (
    ({{"communication": {{"gradients": "int8"}}}}, "communication.gradients: int8 needs .* partita.compression"),
    ({{"communication": {{"every": 4}}}}, "communication.every: 4 needs .* partita.compression"),
    ({{"optimizer": {{"name": "onebit_adam"}}}}, "optimizer.name: onebit_adam needs .* partita.compression"),
    ({{"attention": {{"pattern": "fixed"}}}}, "attention needs .* partita.attention"),
):
    with pytest.raises(partita.ConfigError, match=needed):
        partita.initialize(model, config)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return environment variables for a process that cannot import the optional packages."""
    core = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "src" / "partita", core / "partita", ignore=shutil.ignore_patterns("__pycache__"))
    if (kernels := importlib.util.find_spec("partita.kernels._native")) is not None and kernels.origin is not None:
        shutil.copy(kernels.origin, core / "partita" / "kernels")
    for package in OPTIONAL:
        shutil.rmtree(core / "partita" / package)
    (core / "sitecustomize.py").write_text(START)
    (core / "test_hidden_here.py").write_text(HIDDEN.format(packages=OPTIONAL))
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(core), str(ROOT)))}


def run(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def test_keys_of_a_hidden_package_are_refused(environment: dict[str, str]) -> None:
    run(environment, "-c", REFUSED.format(packages=OPTIONAL))


@pytest.mark.parametrize("tests", sampled(TESTS, TESTS[1]))
def test_the_core_passes_its_tests(environment: dict[str, str], tests: str) -> None:
    """Tests of the core pass without the optional packages, including parity of all stages with plain PyTorch."""
    core = environment["PYTHONPATH"].split(os.pathsep)[0]
    options = ("-q", "-p", "no:cacheprovider", "-o", "pythonpath=", "-c", "pyproject.toml", "--rootdir", str(ROOT))
    assert " passed" in run(environment, "-m", "pytest", *options, tests, f"{core}/test_hidden_here.py")
