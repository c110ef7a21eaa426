"""Tests of the source archive, and of wheels built from it and installed in fresh environments outside the checkout."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
BUILD = "from scikit_build_core.build import build_sdist; print(build_sdist({folder!r}))"
TRAINS = """
import warnings, torch, partita
warnings.filterwarnings("ignore", "partita runs without its compiled kernels")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
inputs = torch.randn(64, 16)
with partita.initialize(model, {"zero": {"stage": 3}, "optimizer": {"lr": 1e-2}}) as engine:
    losses = []
    for _ in range(3):
        loss = (engine(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
assert losses[2] < losses[0], losses
print(partita.__file__)
"""


def done(*arguments: str | Path, folder: Path, **environment: str) -> str:
    """Run a command, assert that it succeeds, and return its standard output."""
    import os

    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    ended = subprocess.run(arguments, cwd=folder, env=variables, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done(sys.executable, "-c", BUILD.format(folder=str(folder)), folder=ROOT)
    (path,) = folder.glob("partita-*.tar.gz")
    return path


def wheel_of(archive: Path, folder: Path, **environment: str) -> Path:
    """Build a wheel from the source archive alone, and return its path."""
    done(*PIP, "wheel", archive, "--no-deps", "--no-build-isolation", "-w", folder, folder=folder, **environment)
    (wheel,) = folder.glob("partita-*.whl")
    return wheel


def fresh_environment(folder: Path, wheel: Path) -> tuple[Path, Path]:
    """Create an environment with the wheel and this environment's other packages.

    Return its Python and its folder of packages.
    """
    python = folder / "venv" / "bin" / "python"
    done(sys.executable, "-m", "venv", "--without-pip", "venv", folder=folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join(shared))
    done(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, folder=folder)
    return python, packages


@pytest.mark.thorough
def test_the_archive_holds_what_a_build_needs(archive: Path) -> None:
    with tarfile.open(archive) as found:
        names = {name.split("/", 1)[1] for name in found.getnames() if "/" in name}
    assert {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "csrc/module.cpp", "PKG-INFO"} <= names
    assert {"src/partita/__init__.py", "src/partita/py.typed", "src/partita/prediction/presets.yaml"} <= names
    top = {name.split("/")[0] for name in names}
    assert not top & {"tests", "benchmarks", "docs", ".ci", ".github", "build", ".venv"}, top
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.thorough
def test_a_wheel_without_kernels_is_any_python_s_and_trains(archive: Path, tmp_path: Path) -> None:
    wheel = wheel_of(archive, tmp_path, SKBUILD_WHEEL_CMAKE="0")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert {"partita/py.typed", "partita/prediction/machines.yaml"} <= set(names)
    python, packages = fresh_environment(tmp_path, wheel)
    assert done(python, "-I", "-c", TRAINS, folder=tmp_path).strip() == str(packages / "partita" / "__init__.py")
    assert "train" in done(packages.parents[2] / "bin" / "partita", "--help", folder=tmp_path)


@pytest.mark.thorough
def test_a_compiled_wheel_from_the_archive_trains(archive: Path, tmp_path: Path) -> None:
    wheel = wheel_of(archive, tmp_path, PARTITA_REQUIRE_KERNELS="1")
    assert f"-{'cp312-abi3' if sys.version_info >= (3, 12) else 'cp311-cp311'}-linux_" in wheel.name
    python, packages = fresh_environment(tmp_path, wheel)
    printed = done(python, "-I", ROOT / "tests" / "installed.py", folder=tmp_path)
    assert printed.startswith(f"{packages / 'partita'} _native.")
