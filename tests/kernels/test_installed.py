"""The installed package: it has its kernels, uses torch's OpenMP runtime, and runs outside of the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def done(*arguments: str | Path, folder: Path, timeout_s: float = 250) -> str:
    """Run a command that must succeed, and return its standard output."""
    ended = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def trained(python: Path, folder: Path) -> str:
    """Train with the package that ``python`` imports; return its path, and the name of its extension module."""
    return done(python, "-I", ROOT / "tests" / "installed.py", folder=folder).rpartition(" [")[0]


def test_the_kernels_use_torchs_openmp_runtime(compiled: None, tmp_path: Path) -> None:
    assert "_native" in trained(Path(sys.executable), tmp_path)


@pytest.mark.thorough
def test_a_wheel_trains_in_a_fresh_environment(compiled: None, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
    done(*pip, "wheel", ROOT, "--no-deps", "--no-build-isolation", "-w", tmp_path, folder=tmp_path)
    (wheel,) = tmp_path.glob("partita-*.whl")
    assert f"-{'cp312-abi3' if sys.version_info >= (3, 12) else 'cp311-cp311'}-linux_" in wheel.name
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "gomp" in name]

    python = tmp_path / "venv" / "bin" / "python"
    done(sys.executable, "-m", "venv", "--without-pip", "venv", folder=tmp_path)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join(shared))
    done(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    assert trained(python, tmp_path).startswith(f"{packages / 'partita'} _native.")
