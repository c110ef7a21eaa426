"""The training loop with the real engine, on one process."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from partita.checkpoint.checkpoints import Checkpoints
from partita.checkpoint.format.folder import complete_checkpoints
from partita.engine import micro_batches
from partita.errors import ConfigError, PartitaError
from partita.observe.metrics import METRICS_FILE, read_metrics
from partita.train import loop
from partita.train.data import Batches, load_corpus
from partita.train.decoder_files import read_decoder_files
from partita.train.interrupt import Interruption, StopRequest
from partita.train.job import DataSection, Job, ModelSection, load_job
from partita.train.loop import Outcome
from partita.train.models import build_model
from tests.kit.plans import sampled


def tiny(folder: Path, overrides: list[str] | None = None) -> Job:
    (folder / "text.txt").write_bytes(b"to be or not to be, that is the question. " * 400)
    settings: dict[str, Any] = {
        "model": {"layers": 1, "width": 32, "heads": 2},
        "data": {"corpus": str(folder / "text.txt"), "sequence": 16, "held_out": 0.1},
        "train": {"steps": 30, "eval_every": 10, "eval_batches": 2, "log_every": 5, "out": str(folder / "out")},
        "engine": {"zero": {"stage": 3}, "batch": {"total": 8}, "optimizer": {"lr": 1e-2}, "clip_grad_norm": 1.0},
    }
    return load_job(settings, ["train.sample.tokens=5", *(overrides or [])])


def run(job: Job) -> tuple[Outcome, str]:
    out = io.StringIO()
    outcome = loop.train(job, Console(file=out, width=120))
    return outcome, out.getvalue()


def test_it_learns_and_leaves_everything_behind(tmp_path: Path) -> None:
    job = tiny(tmp_path)
    outcome, shown = run(job)
    assert (outcome.steps, outcome.interrupted, outcome.out) == (30, False, tmp_path / "out")
    train, held_out = read_metrics(outcome.out / METRICS_FILE)
    assert [row.step for row in train] == [5, 10, 15, 20, 25, 30]
    assert [row.step for row in held_out] == [0, 10, 20, 30]
    assert [row.tokens for row in held_out] == [0, 1280, 2560, 3840]
    assert held_out[0].held_out_loss == pytest.approx(5.6, abs=0.3)
    assert held_out[-1].held_out_loss == outcome.held_out_loss < 2.5
    assert all(row.grad_norm and row.grad_norm > 0 and row.lr == pytest.approx(1e-2) for row in train)
    assert all(len(row.memory_bytes) == 1 and row.memory_bytes[0] > 1e7 for row in train)
    assert {"job.yaml", "loss.png", "sample.txt", "tensorboard"} <= {path.name for path in outcome.out.iterdir()}
    assert load_job(outcome.out / "job.yaml") == job
    sample = (outcome.out / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert sample in shown
    assert len([line for line in shown.splitlines() if line.startswith("step")]) == len(train) + len(held_out)


def test_the_utilization_is_shown_where_the_peak_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny(tmp_path, ["train.steps=5", "engine.batch.accumulate=4"])
    plain, shown = run(job)
    assert "MFU" not in shown
    assert read_metrics(plain.out / METRICS_FILE)[0][0].mfu is None
    monkeypatch.setattr(loop, "peak_flops", lambda device, dtype: 1e12)
    outcome, shown = run(tiny(tmp_path, ["train.steps=5", "engine.batch.accumulate=4", "train.overwrite=true"]))
    assert "MFU" in shown
    assert outcome.held_out_loss == plain.held_out_loss
    (row,), _ = read_metrics(outcome.out / METRICS_FILE)
    matrices = 32 * 32 * 4 + 3 * 32 * 96 + 32 * 256
    per_token = 6 * matrices + 12 * 32 * 16
    assert row.mfu == pytest.approx(per_token * 8 * 16 / (1e12 * row.step_s), rel=1e-6)


def test_metrics_are_shown_where_the_job_says(tmp_path: Path) -> None:
    outcome, _ = run(tiny(tmp_path, ["train.steps=1", "train.metrics=[]"]))
    assert not (outcome.out / "tensorboard").exists()
    outcome, shown = run(tiny(tmp_path, ["train.steps=1", "train.metrics=[tensorboard]", "train.overwrite=true"]))
    assert (outcome.out / "tensorboard").exists()
    assert "TensorBoard is not installed" not in shown


def test_exported_weights_give_the_loss_that_was_measured(tmp_path: Path) -> None:
    job = tiny(tmp_path)
    outcome, _ = run(job)
    ready = build_model(ModelSection(layers=1, width=32, heads=2, seed=99), DataSection())
    read_decoder_files(outcome.out / "model", ready.module, tied=False)
    with (
        loop.initialize(ready.module, {"batch": {"micro": 8}}) as engine,
        loop.open_batches(load_corpus(job.data), job.data, engine) as batches,
    ):
        again = loop._Run(tiny(tmp_path, ["train.overwrite=true"]), ready, batches, engine, Console(quiet=True))
        again._evaluate(0)
        again._writer.close()  # type: ignore[union-attr]
    assert again._last_held_out == pytest.approx(outcome.held_out_loss, rel=1e-5)


def test_the_same_job_gives_the_same_losses(tmp_path: Path) -> None:
    first, _ = run(tiny(tmp_path, ["train.steps=10"]))
    torch.manual_seed(123)
    again, _ = run(
        tiny(tmp_path, ["train.steps=10", "train.log_every=3", "train.eval_every=7", "train.overwrite=true"])
    )
    assert again.held_out_loss == first.held_out_loss


def test_accumulation_changes_nothing_but_rounding(tmp_path: Path) -> None:
    whole, _ = run(tiny(tmp_path, ["train.steps=5"]))
    parts, _ = run(tiny(tmp_path, ["train.steps=5", "engine.batch.accumulate=4", "train.overwrite=true"]))
    assert parts.held_out_loss == pytest.approx(whole.held_out_loss, rel=1e-4)


def test_hugging_face_model_is_trained_and_saved_with_its_config(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    huggingface = (
        "{model_type: gpt2, n_embd: 32, n_layer: 1, n_head: 2, n_positions: 64, resid_pdrop: 0, embd_pdrop: 0, "
        "attn_pdrop: 0}"
    )
    job = load_job(
        tiny(tmp_path).model_dump(mode="json") | {"model": {}}, [f"model.huggingface={huggingface}", "train.steps=12"]
    )
    outcome, _ = run(job)
    assert outcome.held_out_loss < 4.5
    model = AutoModelForCausalLM.from_pretrained(outcome.out / "model", local_files_only=True)
    windows = torch.tensor(list(b"to be or not to be"))[None]
    assert model(windows, labels=windows).loss.item() < 4.5


def wishing(request: StopRequest, in_step: int) -> type[Interruption]:
    """Return an ``Interruption`` that has ``request`` during step ``in_step``, as if a signal had arrived."""

    class Wishing(Interruption):
        steps = 0

        @property
        def request(self) -> StopRequest:
            self.steps += 1
            return request if self.steps == in_step else StopRequest.NOTHING

        @request.setter
        def request(self, value: StopRequest) -> None:
            assert value is StopRequest.NOTHING

        def saved(self) -> None:
            pass

    return Wishing


def test_ctrl_c_finishes_the_step_and_keeps_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Interruption", wishing(StopRequest.STOP, 3))
    outcome, shown = run(tiny(tmp_path))
    assert (outcome.steps, outcome.interrupted) == (3, True)
    train, held_out = read_metrics(outcome.out / METRICS_FILE)
    assert [row.step for row in train] == [3]
    assert [row.step for row in held_out] == [0]
    assert (outcome.out / "model" / "model.safetensors").exists()
    assert (outcome.out / "loss.png").exists()
    assert not (outcome.out / "sample.txt").exists()
    assert "stopped by a signal after step 3" in shown


@pytest.mark.parametrize("stopped_in", sampled([7, 10], 7))
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    stopped_in: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run(tiny(tmp_path))
    rows = read_metrics(expected.out / METRICS_FILE)
    job = tiny(tmp_path, [f"train.out={tmp_path}/again", f"engine.checkpoint.dir={tmp_path}/saved"])
    with monkeypatch.context() as patched:
        patched.setattr(loop, "Interruption", wishing(StopRequest.STOP, stopped_in))
        assert run(job)[0].steps == stopped_in
    assert list(complete_checkpoints(tmp_path / "saved")) == [stopped_in]
    outcome, shown = run(job)
    assert f"of step {stopped_in} from" in shown
    assert (outcome.steps, outcome.interrupted) == (30, False)
    assert outcome.held_out_loss == expected.held_out_loss
    train, held_out = read_metrics(outcome.out / METRICS_FILE)
    assert [row.held_out_loss for row in held_out] == [row.held_out_loss for row in rows[1]]
    assert [row.loss for row in train][-4:] == [row.loss for row in rows[0]][-4:]
    assert [row.step for row in train] == sorted({*range(5, 31, 5), stopped_in})
    again, _ = run(job)  # no step is left to train
    assert again.held_out_loss == expected.held_out_loss


def test_results_of_another_run_are_not_replaced_unasked(tmp_path: Path) -> None:
    short = ["train.steps=2", "train.log_every=1", "train.sample.tokens=0"]
    first, _ = run(tiny(tmp_path, short))
    kept = {path: path.read_bytes() for path in first.out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"earlier run \(model, job.yaml, metrics.jsonl\); pass --overwrite"):
        run(tiny(tmp_path, [*short, "data.seed=1"]))
    assert all(path.read_bytes() == content for path, content in kept.items())
    run(tiny(tmp_path, [*short, "data.seed=1", "train.overwrite=true"]))
    assert (first.out / METRICS_FILE).read_bytes() != kept[first.out / METRICS_FILE]
    assert not load_job(first.out / "job.yaml").train.overwrite


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process that torchrun has started for the second time."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("saves", [False, True])
def test_a_restart_does_not_replace_the_results_of_another_run(
    saves: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """torchrun also restarts processes that ended because the folder holds results."""
    short = ["train.steps=2", "train.log_every=1", "train.sample.tokens=0", "train.metrics=[tensorboard]"]
    first, _ = run(tiny(tmp_path, short))
    kept = {path: path.read_bytes() for path in first.out.rglob("*") if path.is_file()}
    request.getfixturevalue("restarted")
    folder = [f"engine.checkpoint.dir={tmp_path}/saved"] if saves else []
    with pytest.raises(ConfigError, match=r"earlier run \(model, job.yaml, metrics.jsonl\); pass --overwrite"):
        run(tiny(tmp_path, [*short, *folder, "data.seed=1"]))
    assert {path: path.read_bytes() for path in first.out.rglob("*") if path.is_file()} == kept


@pytest.mark.usefixtures("restarted")
def test_a_restart_replaces_the_metrics_of_its_own_run(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / METRICS_FILE).write_text("the process before wrote this\n")
    assert run(tiny(tmp_path, ["train.steps=2", "train.sample.tokens=0"]))[0].steps == 2
    assert [row.step for row in read_metrics(tmp_path / "out" / METRICS_FILE)[0]] == [2]


def test_a_run_that_goes_on_with_another_text_says_so(tmp_path: Path) -> None:
    short = ["train.sample.tokens=0", f"engine.checkpoint.dir={tmp_path}/saved"]
    _, shown = run(tiny(tmp_path, ["train.steps=1", *short]))
    assert "has changed since" not in shown
    _, shown = run(tiny(tmp_path, ["train.steps=2", *short]))
    assert "has changed since" not in shown
    (tmp_path / "other.txt").write_bytes(b"all the world is a stage, and all of us play on it. " * 400)
    _, shown = run(tiny(tmp_path, ["train.steps=3", f"data.corpus={tmp_path}/other.txt", *short]))
    assert "data: the text or its split has changed since" in " ".join(shown.split())


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Checkpoints, folder: str | Path | None) -> Path:
        raise KeyError("ends here")

    job = tiny(tmp_path, ["train.steps=2", "train.log_every=1", f"engine.checkpoint.dir={tmp_path}/saved"])
    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(Checkpoints, "save", fail)
        run(job)
    assert (tmp_path / "out" / METRICS_FILE).exists()
    assert run(job)[0].steps == 2


@pytest.mark.filterwarnings("ignore:.*is not finite:UserWarning")
def test_a_run_goes_back_and_on_with_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a NaN loss on batch 7, training rewinds to step 4 and continues with batch 8."""
    seen = list[int]()
    real = Batches.train

    def watched(self: Batches, number: int) -> Any:
        seen.append(number)
        return real(self, number)

    def spoilt(output: Any, batch: Any, loss_fn: object) -> torch.Tensor:
        loss = output if isinstance(output, torch.Tensor) else output.loss
        return loss * float("nan") if torch.is_grad_enabled() and seen[-1] == 7 else loss

    monkeypatch.setattr(Batches, "train", watched)
    monkeypatch.setattr(micro_batches, "loss_of", spoilt)
    overrides = ["train.steps=9", "engine.precision.nonfinite=rewind", "engine.checkpoint.every_steps=4"]
    overrides += ["train.log_every=2", "train.eval_every=3", f"engine.checkpoint.dir={tmp_path}/saved"]
    outcome, _ = run(tiny(tmp_path, overrides))
    assert outcome.steps == 9
    train, held_out = read_metrics(outcome.out / METRICS_FILE)  # the undone steps are removed
    assert [row.step for row in train] == [2, 3, 4, 6, 8, 9]
    assert [row.step for row in held_out] == [0, 3, 6, 9]
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]  # after the rewind, step 5 trains on batch 8


def test_a_warning_of_a_pre_emption_saves_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Interruption", wishing(StopRequest.SAVE, 4))
    outcome, _ = run(tiny(tmp_path, [f"engine.checkpoint.dir={tmp_path}/saved", "engine.checkpoint.every_steps=12"]))
    assert outcome.steps == 30
    assert list(complete_checkpoints(tmp_path / "saved")) == [12, 24, 30]  # the newest three of 4, 12, 24 and the last


@pytest.mark.parametrize("every_steps", [2, 3])
def test_no_step_is_saved_twice(every_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, save = list[int](), Checkpoints.save

    def watched(self: Checkpoints, folder: str | Path | None) -> Path:
        saved.append(self._updater.steps)
        return save(self, folder)

    monkeypatch.setattr(Checkpoints, "save", watched)
    where = f"engine.checkpoint.dir={tmp_path}/saved"
    run(tiny(tmp_path, ["train.steps=4", where, f"engine.checkpoint.every_steps={every_steps}"]))
    assert saved == sorted({*range(every_steps, 5, every_steps), 4})


@pytest.mark.filterwarnings("ignore:.*is not finite:UserWarning")
def test_a_loss_that_is_not_finite_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny(tmp_path)
    broken = build_model(job.model, job.data)
    torch.nn.init.constant_(next(broken.module.parameters()), torch.nan)
    monkeypatch.setattr(loop, "build_model", lambda model, data: broken)
    with pytest.raises(PartitaError, match=r"the training loss is nan in steps 1 to 5; lower engine\.optimizer\.lr"):
        run(job)


def test_a_job_that_does_not_fit_the_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.data"):
        run(tiny(tmp_path, ["engine.parallel.data=3"]))
