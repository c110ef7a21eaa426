"""Runs under a Trainer that are interrupted and resumed, at the same or another stage and number of ranks."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from safetensors.torch import load_file
from transformers import TrainerCallback

from partita import PartitaError
from partita.checkpoint.format.backend import FileDraft
from partita.integrations.huggingface.checkpoints import newest_complete, newest_on_rank_0, why_incomplete
from tests.integrations.huggingface.runs import Run, alone, end, losses_of, trainer_of
from tests.kit.ranks import WorkerError, on_ranks

SAVING = {"save_strategy": "steps", "save_steps": 2}


def trained(run: Run, folder: Path, resume: bool | str | None = None) -> list[float]:
    """Train, and return the losses. Those of a resumed run include the ones before its checkpoint."""
    with alone():
        trainer = trainer_of(run, folder)
        try:
            trainer.train(resume_from_checkpoint=resume)
            return losses_of(trainer)
        finally:
            end(trainer)


def at(stage: int) -> dict[str, Any]:
    return {"zero": {"stage": stage}}


def killed(folder: Path) -> None:
    """Train, and kill rank 1 while it writes its second checkpoint."""
    writes = iter([FileDraft.write, lambda *_: os.kill(os.getpid(), signal.SIGKILL)])
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(FileDraft, "write", lambda *args: next(writes)(*args))
        trained(Run(at(3), SAVING), folder)


def test_a_run_that_was_killed_is_resumed(tmp_path: Path) -> None:
    """A resumed run has the losses of an uninterrupted one, bit for bit at the same stage."""
    whole = on_ranks(2, trained, Run(at(3), SAVING), tmp_path / "whole", timeout=120)[0]
    with pytest.raises(WorkerError, match="rank 1 died with exit code -9"):
        on_ranks(2, killed, tmp_path / "killed", timeout=120)
    assert newest_complete(tmp_path / "killed") == tmp_path / "killed" / "checkpoint-2"
    shutil.copytree(tmp_path / "killed", tmp_path / "copy")
    assert on_ranks(2, trained, Run(at(3), SAVING), tmp_path / "killed", True, timeout=120)[0] == whole
    assert on_ranks(2, trained, Run(at(1)), tmp_path / "copy", True, timeout=120)[0] == pytest.approx(whole, rel=1e-6)


class Rates(TrainerCallback):
    """A callback that records the learning rate of each update."""

    def __init__(self) -> None:
        self.found = list[float]()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, optimizer: Any, **kwargs: Any) -> None:
        self.found.append(optimizer.param_groups[0]["lr"])


def rates_of(rate: float, folder: Path, resume: bool) -> tuple[list[float], list[float]]:
    """Return the learning rate of each update, and those that are logged with the updates."""
    run, rates = Run(at(2), SAVING | {"learning_rate": rate}), Rates()
    with alone():
        trainer = trainer_of(run, folder, callbacks=[rates])
        try:
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
            return rates.found, [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
        finally:
            end(trainer)


def test_a_changed_learning_rate_stays(tmp_path: Path) -> None:
    whole, logged = on_ranks(2, rates_of, 1e-2, tmp_path, False)[0]
    for updates, shown in on_ranks(2, rates_of, 1e-3, tmp_path, True):
        assert updates == pytest.approx([rate / 10 for rate in whole[2:]])
        assert shown[2:] == pytest.approx([rate / 10 for rate in logged[2:]])


@pytest.mark.thorough
def test_resumed_elsewhere(tmp_path: Path) -> None:
    """A run resumes at another stage, on another number of ranks with the same batches."""
    by_ranks = {ranks: SAVING | {"per_device_train_batch_size": 4 // ranks} for ranks in (1, 2)}
    for before, now in ((1, 2), (2, 1)):
        folder = tmp_path / str(before)
        whole = on_ranks(before, trained, Run(at(3), by_ranks[before], num_samples=16), folder, timeout=120)[0]
        elsewhere, first = Run(at(2), by_ranks[now], num_samples=16), str(folder / "checkpoint-2")
        resumed = on_ranks(now, trained, elsewhere, tmp_path / "there", first, timeout=120)[0]
        assert resumed == pytest.approx(whole, rel=1e-5)


def test_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    with pytest.raises(PartitaError, match=r"none is complete \(checkpoint-N\)$"):
        newest_complete(tmp_path)
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    assert why_incomplete(folder) == "it has no trainer_state.json, which is written last"
    (folder / "trainer_state.json").write_text('{"best_global')
    assert why_incomplete(folder) == "its trainer_state.json is truncated"
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    assert "it contains only weights (save_only_model)" in str(why_incomplete(folder))
    torch.save({}, folder / "optimizer.pt")
    assert "'partita convert checkpoint" in str(why_incomplete(folder))
    (folder / "partita").mkdir()
    assert why_incomplete(folder) == "no complete states in 'partita'"
    with pytest.raises(PartitaError, match="'checkpoint-3': no complete states in 'partita'"):
        newest_complete(tmp_path)


def finds_none(folder: Path) -> str:
    with alone():
        state = PartialState(cpu=True)
        with pytest.raises(PartitaError, match="^No valid checkpoint found in output directory") as raised:
            newest_on_rank_0(folder, state.process_index)
        return str(raised.value)


def test_every_rank_says_that_there_is_none(tmp_path: Path) -> None:
    first, second = on_ranks(2, finds_none, tmp_path)
    assert first == second


def best(run: Run, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train and save the final model; return the eval losses, and the step of the best model."""
    with alone():
        trainer = trainer_of(run, folder)
        try:
            trainer.train()
            rows = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
            trainer.save_model(str(folder / "final"))
            return rows, {"best": torch.tensor(trainer.state.best_global_step)}
        finally:
            end(trainer)


BEST = {
    **SAVING,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "learning_rate": 3e-1,
}


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    for only_model in (False, True):
        folder = tmp_path / str(only_model)
        rows, state = on_ranks(2, best, Run(at(3), BEST | {"save_only_model": only_model}), folder, timeout=120)[0]
        number = int(state["best"])
        assert number == 2 * (1 + rows.index(min(rows)))
        wanted, found = (load_file(folder / name / "model.safetensors") for name in (f"checkpoint-{number}", "final"))
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)


class Watch(TrainerCallback):  # type: ignore[misc]
    """Callback that records what each checkpoint lacks when the Trainer reports it saved.

    With ``held``, no checkpoint is published before that.
    """

    def __init__(self, held: bool) -> None:
        self.lacks, self.freed, self.held = list[str | None](), threading.Semaphore(0), held

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.lacks.append(why_incomplete(Path(args.output_dir) / f"checkpoint-{state.global_step}"))
        self.freed.release()

    def publish(self, draft: FileDraft) -> None:
        assert not self.held or self.freed.acquire(timeout=60)
        FileDraft.publish_now(draft)  # type: ignore[attr-defined]


def watched(limit: int, folder: Path) -> tuple[list[str | None], list[float]]:
    """Train with background checkpoints, load the best model and save it.

    Return what each checkpoint lacked when the Trainer reported it saved, and the eval losses.
    """
    run = Run(at(3) | {"checkpoint": {"background": True}}, BEST | {"save_total_limit": limit})
    watch = Watch(held=limit > 1)
    with alone(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileDraft, "publish_now", FileDraft.commit, raising=False)
        patch.setattr(FileDraft, "commit", lambda draft: watch.publish(draft))
        trainer = trainer_of(run, folder, callbacks=[watch])
        try:
            trainer.train()
            rows = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
            trainer.save_model(str(folder / "final"))
            return watch.lacks, rows
        finally:
            end(trainer)


def test_checkpoints_in_the_background(tmp_path: Path) -> None:
    """The remaining checkpoints are complete and include the best. With a limit of 1, each is complete at once."""
    for limit, lacks in ((2, "no complete states in 'partita'"), (1, None)):
        folder = tmp_path / str(limit)
        found, rows = on_ranks(2, watched, limit, folder, timeout=120)[0]
        assert found == [lacks] * 3
        number = 2 * (1 + rows.index(min(rows)))
        left = {path.name for path in folder.glob("checkpoint-*")}
        assert left == {f"checkpoint-{step}" for step in ((number, 4 if number == 6 else 6)[:limit])}
        assert [why_incomplete(folder / name) for name in left] == [None] * len(left)
        wanted, saved = (load_file(folder / name / "model.safetensors") for name in (f"checkpoint-{number}", "final"))
        assert all(torch.equal(wanted[name], saved[name]) for name in wanted)
