"""``partita checkpoint`` on checkpoints that two ranks saved."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import partita
from partita.cli.main import app
from tests.kit import seeds
from tests.kit.models import Stack, square_loss
from tests.kit.ranks import on_ranks
from tests.kit.training import rank


def save_two(folder: str) -> dict[str, torch.Tensor]:
    seeds.start()
    with partita.initialize(Stack(2), {"zero": {"stage": 3}, "precision": {"compute": "bf16"}}) as engine:
        for step in range(2):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
            engine.save(folder)
        return engine.state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, on_ranks(2, save_two, str(folder))[0]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def test_inspect(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    shown = run("inspect", saved[0], "--all")
    assert shown.exit_code == 0
    text = " ".join(shown.output.split())
    assert "step 2" in text
    assert "saved by 2 ranks, partita" in text
    assert "partita.random.1" in text
    assert "model.blocks.0.up.weight [32, 16] torch.float32 in " in text


def test_verify(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    shown = run("verify", saved[0] / "step-1")
    assert (shown.exit_code, shown.output) == (0, f"{saved[0]}/step-1: all checksums match\n")
    for path in (saved[0] / "step-1").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = bytearray((tmp_path / "__1_0.distcp").read_bytes())
    (tmp_path / "__1_0.distcp").write_bytes(content + b"more")
    shown = run("verify", tmp_path)
    assert shown.exit_code == 1
    assert f"__1_0.distcp' is damaged: {len(content) + 4} bytes, but {len(content)} were written" in shown.output
    content[5000] ^= 1
    (tmp_path / "__1_0.distcp").write_bytes(content)
    shown = run("verify", tmp_path)
    assert shown.exit_code == 1
    assert f"'{tmp_path}/__1_0.distcp' is damaged: bytes" in shown.output
    (tmp_path / "__0_0.distcp").unlink()
    assert "__0_0.distcp': No such file or directory" in run("verify", tmp_path).output
    (tmp_path / ".metadata").write_bytes(b"")
    assert "torch.distributed.checkpoint would not read it" in run("verify", tmp_path).output


@pytest.mark.parametrize("dtype", ["stored", "bf16"])
def test_export(dtype: str, saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    shown = run("export", saved[0], tmp_path, "--dtype", dtype)
    assert shown.output == f"{len(saved[1])} tensors are in {tmp_path}\n"
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == saved[1].keys()
    for name, value in saved[1].items():
        assert torch.equal(found[name], value if dtype == "stored" else value.bfloat16())


def test_export_replaces_no_other_model_unasked(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    shown = run("export", saved[0], tmp_path)
    assert shown.exit_code == 2
    assert "already contains a model (model.safetensors); pass --overwrite" in " ".join(shown.output.split())
    assert list(load_file(tmp_path / "model.safetensors")) == ["other"]
    assert run("export", saved[0], tmp_path, "--overwrite").exit_code == 0
    assert load_file(tmp_path / "model.safetensors").keys() == saved[1].keys()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_export_of_one_of_several_copies(tmp_path: Path) -> None:
    dcp.save({name: {"a.weight": torch.ones(size)} for size, name in enumerate(("ema", "net"))}, checkpoint_id=tmp_path)
    shown = run("export", tmp_path, tmp_path / "out")
    assert shown.exit_code == 1
    assert "holds 2 copies of the weights, under 'ema', 'net': choose one" in " ".join(shown.output.split())
    assert not (tmp_path / "out").exists()
    for size, prefix in enumerate(("ema", "net")):
        assert run("export", tmp_path, tmp_path / "out", "--prefix", prefix, "--overwrite").exit_code == 0
        assert load_file(tmp_path / "out" / "model.safetensors")["a.weight"].shape == (size,)


def test_diff(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    assert run("diff", saved[0], saved[0] / "step-2").output == "the checkpoints are identical, bit by bit\n"
    shown = run("diff", saved[0], saved[0] / "step-1")
    assert shown.exit_code == 1
    assert "model.first.weight: largest difference" in shown.output
    assert "optimizer.state.first.weight.step: largest difference 1" in shown.output


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for command in ("inspect", "verify"):
        shown = run(command, tmp_path)
        assert shown.exit_code == 1
        assert f"'{tmp_path}' is not a checkpoint, and has no complete one" in " ".join(shown.output.split())
    shown = run("export", tmp_path, tmp_path, "--dtype", "int4")
    assert "--dtype: expected stored, fp32, bf16, fp16; got int4" in shown.output
