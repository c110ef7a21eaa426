"""Checkpoints of Lightning's ModelCheckpoint: resumed, also on other ranks, and loaded without the strategy."""

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint

from partita import PartitaError
from partita.checkpoint.format import backend
from partita.checkpoint.format.folder import complete_checkpoints
from partita.integrations.lightning import PartitaStrategy
from tests.integrations.lightning.modules import (
    BATCH,
    NOISE,
    Regression,
    loader,
    on_partita,
    quietly,
    trainer,
    worst,
)
from tests.kit.plans import sampled
from tests.kit.ranks import on_ranks

pytestmark = [pytest.mark.filterwarnings(noise) for noise in NOISE]

EPOCHS = 3


def callback(folder: str, **arguments: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", **{"save_top_k": -1, **arguments})


def fit(strategy: PartitaStrategy, folder: str, batch: int = BATCH, resumes: str | None = None) -> Regression:
    module = Regression()
    made = trainer(
        strategy,
        dist.get_world_size(),
        max_epochs=EPOCHS,
        gradient_clip_val=0.5,
        enable_checkpointing=True,
        callbacks=[callback(folder, monitor="held_out", save_last="link")],
    )
    made.fit(module, loader(batch), loader(batch), ckpt_path=resumes)
    assert made.current_epoch == EPOCHS
    return module


@quietly()
def saved_and_resumed(folder: str) -> dict[str, list[float]]:
    """Return the losses of a full run, and of runs resumed after its first epoch: at stage 3 and at stage 1, without
    and with ``checkpoint.background: false``.
    """
    strategy = on_partita(3)
    found = {"whole": fit(strategy, folder).losses}
    strategy.engine.close()
    first = f"{folder}/epoch=0.ckpt"
    for stage, background in ((3, True), (1, False)):
        strategy = on_partita(stage, checkpoint={"background": background})
        found[f"stage {stage}"] = fit(strategy, f"{folder}/again-{stage}", resumes=first).losses
        strategy.engine.close()
    return found


@quietly()
def resumed_alone(folder: str) -> list[float]:
    """Resume on one rank, with the batch size of both ranks together; return the losses."""
    strategy = on_partita(3)
    losses = fit(strategy, f"{folder}/alone", batch=2 * BATCH, resumes=f"{folder}/epoch=0.ckpt").losses
    strategy.engine.close()
    return losses


def test_a_run_resumes_at_any_stage_and_on_other_ranks(tmp_path: Path) -> None:
    of_ranks = on_ranks(2, saved_and_resumed, str(tmp_path))
    for found in of_ranks:
        num_steps = len(found["whole"]) // EPOCHS
        for stage in (3, 1):
            assert found[f"stage {stage}"] == found["whole"][num_steps:]
    assert sorted(path.name for path in (tmp_path / "epoch=2.ckpt").iterdir()) == ["step-15"]
    assert (tmp_path / "last.ckpt").is_dir()

    (alone,) = on_ranks(1, resumed_alone, str(tmp_path))
    whole = [sum(losses) / 2 for losses in zip(*(found["whole"] for found in of_ranks), strict=True)]
    steps = [number for number in range(num_steps, len(whole)) if (number + 1) % num_steps]  # all except short batches
    assert worst([alone[number - num_steps] for number in steps], [whole[number] for number in steps]) < 1e-4


@quietly()
def best_and_weights(folder: str, stage: int) -> tuple[list[float], list[float]]:
    """Return the logged held-out losses (best, last), and the test losses of checkpoints: of the best one in the same
    Trainer, then of each in a new Trainer.
    """
    world = dist.get_world_size()
    strategy, module = on_partita(stage), Regression()
    keep = callback(folder, monitor="held_out", save_top_k=1)
    made = trainer(strategy, world, max_epochs=EPOCHS, enable_checkpointing=True, callbacks=[keep])
    made.fit(module, loader(), loader())
    assert keep.best_model_score is not None
    made.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    made.save_checkpoint(f"{folder}/whole.ckpt")
    logged = [float(keep.best_model_score), float(made.callback_metrics["held_out"])]
    tested = [made.test(ckpt_path="best", verbose=False, dataloaders=loader())[0]["tested"]]
    strategy.engine.close(whole=True)
    for path in (keep.best_model_path, f"{folder}/weights.ckpt", f"{folder}/whole.ckpt"):
        strategy = on_partita(3 - stage)
        made = trainer(strategy, world)
        tested.append(made.test(Regression(), loader(), ckpt_path=path, verbose=False)[0]["tested"])
        strategy.engine.close()
    return logged, tested


@pytest.mark.parametrize("stage", sampled([0, 3], 3))
def test_checkpoints_are_evaluated_by_a_trainer_of_their_own(tmp_path: Path, stage: int) -> None:
    for (best, last), tested in on_ranks(2, best_and_weights, str(tmp_path), stage):
        assert tested == pytest.approx([best, best, last, last], rel=1e-6)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("epoch=")]) == 1

    loaded = Regression.load_from_checkpoint(tmp_path / "weights.ckpt")
    losses = [loaded.loss(batch).item() * len(batch[0]) for batch in loader()]
    assert sum(losses) / 36 == pytest.approx(last, rel=1e-6)


class Scaled(Regression):
    """A regression whose learning rates are multiplied by ``factor``."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2 * self.factor)
        parts = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 + 1 / (1 + step)) for _ in range(2)]
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [7])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@quietly()
def rates_of(folder: str, factor: float, resumes: bool) -> list[float]:
    """Return the learning rate after each batch of a run, or of its second epoch with changed rates."""
    strategy, module = on_partita(2), Scaled(factor)
    keep = callback(folder)
    made = trainer(strategy, dist.get_world_size(), enable_checkpointing=True, callbacks=[keep])
    made.fit(module, loader(), ckpt_path=f"{folder}/epoch=0.ckpt" if resumes else None)
    strategy.engine.close()
    return module.rates


@pytest.mark.filterwarnings("ignore:engine.load. the optimizer is configured differently", "ignore:.*epoch parameter.*")
def test_a_changed_learning_rate_stays(tmp_path: Path) -> None:
    whole = on_ranks(2, rates_of, str(tmp_path), 1.0, False)[0]
    for rates in on_ranks(2, rates_of, str(tmp_path), 0.125, True):
        assert rates == pytest.approx([0.125 * rate for rate in whole[5:]])


class Removing(PartitaStrategy):
    """A strategy that records, when a checkpoint is removed, the names in the folders of the remaining ones."""

    remaining: list[list[str]]

    def remove_checkpoint(self, filepath: str | Path) -> None:
        others = [path for path in Path(filepath).parent.iterdir() if path != Path(filepath)]
        self.remaining.append([name.name for path in others for name in path.iterdir()])
        super().remove_checkpoint(filepath)


@quietly()
def replaced(folder: str) -> list[list[str]]:
    """Keep one checkpoint, while files become visible late; return the remaining names at each removal."""
    publish = backend.publish

    def late(*args: Any) -> Path:
        threading.Event().wait(0.5)
        return publish(*args)

    strategy = Removing({"zero": {"stage": 2}}, cluster_environment=TorchElasticEnvironment())
    strategy.remaining = []
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=1)
    made = trainer(strategy, dist.get_world_size(), max_epochs=EPOCHS, enable_checkpointing=True, callbacks=[keep])
    with mock.patch.object(backend, "publish", late):
        made.fit(Regression(), loader())
    strategy.engine.close()
    return strategy.remaining


def test_a_checkpoint_is_complete_when_the_previous_one_is_removed(tmp_path: Path) -> None:
    for remaining in on_ranks(2, replaced, str(tmp_path)):
        assert remaining == [["step-10"], ["step-15"]]
    assert [len(complete_checkpoints(path)) for path in tmp_path.iterdir()] == [1]


@quietly()
def wrong_ways(folder: str) -> None:
    strategy, module = on_partita(3), Regression()
    made = trainer(strategy, dist.get_world_size(), max_epochs=1)
    made.fit(module, loader())
    made.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    with pytest.raises(PartitaError, match="storage_options: not available for PartitaStrategy"):
        made.save_checkpoint(f"{folder}/other.ckpt", storage_options={})
    strategy.engine.save(f"{folder}/bare")
    strategy.engine.wait_for_checkpoint()
    strategy.engine.close()
    refused = {"weights.ckpt": "is not a folder that PartitaStrategy saved", "bare": "saved without Lightning"}
    for path, said in refused.items():
        with pytest.raises(PartitaError, match=said):
            trainer(on_partita(3), dist.get_world_size()).fit(Regression(), loader(), ckpt_path=f"{folder}/{path}")


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    on_ranks(2, wrong_ways, str(tmp_path))
    found = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert found["state_dict"].keys() == Regression().state_dict().keys()
