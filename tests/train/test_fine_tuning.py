"""``partita train`` on documents: LoRA and full fine-tuning, interruption, evaluation, loading by other libraries."""

import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from partita.config.launchers import launch_environment
from partita.engine import micro_batches
from partita.errors import ConfigError, PartitaError
from partita.observe.metrics import METRICS_FILE, HeldOutRow, TrainRow, read_metrics
from partita.train import corpus, loop, trained
from partita.train.interrupt import StopRequest
from partita.train.job import Job, SampleSection, load_job
from partita.train.models import HuggingFaceModel, build_model
from partita.train.packing import PackedCorpus, Sample, shuffled
from partita.train.position import Completed
from partita.train.stream import StreamedCorpus
from tests.kit import seeds
from tests.kit.ranks import on_ranks
from tests.train.small_models import END, WITH_HEADERS, job_sections, model_folder, texts, write_rows
from tests.train.test_loop import wishing

LORA = "model.lora={r: 4, alpha: 8, target_modules: [q_proj, v_proj, up_proj], dropout: 0.1}"
QUIET = Console(quiet=True)


def job(folder: Path, *overrides: str, **data: Any) -> Job:
    return load_job(job_sections(folder, **data), overrides)


def losses(of: Job) -> tuple[list[float], list[float]]:
    train, held_out = read_metrics(of.out / METRICS_FILE)
    return [row.loss for row in train], [row.held_out_loss for row in held_out]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # raised by peft
@pytest.mark.parametrize(
    ("adapters", "data"), [((LORA,), {}), ((), {}), ((), {"stream": 7})], ids=["lora", "full", "stream"]
)
def test_an_interrupted_run_is_resumed_evaluated_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: tuple[str, ...], data: dict[str, Any]
) -> None:
    whole = job(tmp_path, *adapters, "train.out=" + str(tmp_path / "whole"), **data)
    expected = loop.train(whole, QUIET)
    stopped = job(tmp_path, *adapters, f"engine.checkpoint.dir={tmp_path}/saved", **data)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "Interruption", wishing(StopRequest.STOP, 4))
        assert loop.train(stopped, QUIET).interrupted
    outcome = loop.train(stopped, QUIET)
    assert (outcome.steps, outcome.interrupted) == (6, False)
    assert losses(stopped)[0] == losses(whole)[0]
    assert outcome.held_out_loss == expected.held_out_loss
    assert losses(whole)[1][-1] < losses(whole)[1][0]

    found = trained.evaluate(trained.load_trained(stopped.out), QUIET)
    assert found.loss == pytest.approx(outcome.held_out_loss, rel=1e-5)
    assert (found.token, found.num_tokens > 10) == ("token", True)
    assert (stopped.out / "tokens").exists() == (not data)

    written = stopped.out / "model"
    assert (written / "adapter_config.json").exists() == bool(adapters)
    assert (written / "model.safetensors").exists() != bool(adapters)
    reader = AutoTokenizer.from_pretrained(written)
    batch = reader(texts(1, seed=9)[0], return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(written).eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    logits = loaded(batch["input_ids"]).logits
    assert not torch.allclose(logits, base(batch["input_ids"]).logits, atol=1e-3)
    if adapters:
        adapted = PeftModel.from_pretrained(base, written).eval()
        torch.testing.assert_close(adapted(batch["input_ids"]).logits, logits)
        assert adapted.peft_config["default"].r == 4

    prompt = SampleSection(prompt="w3 w4 w5", tokens=4, temperature=0)
    text = trained.continue_prompt(trained.load_trained(stopped.out), prompt)
    assert text.startswith("w3 w4 w5 ")
    likeliest = loaded(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax().item()
    assert reader(text)["input_ids"][3] == likeliest


def trained_on_ranks(sections: dict[str, Any], overrides: list[str]) -> float:
    return loop.train(load_job(sections, overrides), QUIET).held_out_loss


@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_two_ranks_train_on_a_stream_as_one(tmp_path: Path, axis: str) -> None:
    sections = job_sections(tmp_path, stream=7)
    sections["engine"] |= {"zero": {"stage": 1}, "batch": {"total": 4, "accumulate": 2}}
    first = loop.train(load_job(sections), QUIET)
    overrides = [f"train.out={tmp_path}/two", *(["engine.parallel.pipeline=2"] if axis == "pipeline" else [])]
    one, other = on_ranks(2, trained_on_ranks, sections, overrides, with_group=False)
    assert one == other == pytest.approx(first.held_out_loss, rel=1e-4)


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """Two ranks have the held-out loss of one rank, and only one of them writes the token cache."""
    sections = job_sections(tmp_path, cache=str(tmp_path / "cache"))
    first = loop.train(load_job(sections), QUIET)
    one, other = on_ranks(2, trained_on_ranks, sections, [f"train.out={tmp_path}/two"], with_group=False)
    assert one == other == pytest.approx(first.held_out_loss, rel=1e-5)
    assert len([folder for folder in (tmp_path / "cache").iterdir() if folder.is_dir()]) == 1


@pytest.mark.filterwarnings("ignore:.*is not finite:UserWarning")
def test_a_stream_continues_after_a_rewind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN loss in step 5 rewinds to step 4. No sample is drawn twice, and the next checkpoint has the position."""
    drawn, batch, loss_of = list[list[bytes]](), StreamedCorpus.batch, micro_batches.loss_of

    def watched(self: StreamedCorpus, step: int, total: int) -> list[Sample]:
        chosen = batch(self, step, total)
        drawn.append([sample.samples.row(sample.number, 32).tokens.tobytes() for sample in chosen])
        return chosen

    def spoilt(*args: Any) -> torch.Tensor:
        return loss_of(*args) * (float("nan") if torch.is_grad_enabled() and len(drawn) == 5 else 1.0)

    write_rows(tmp_path / "rows.jsonl", texts(200))
    monkeypatch.setattr(StreamedCorpus, "batch", watched)
    monkeypatch.setattr(micro_batches, "loss_of", spoilt)
    settings = ["engine.precision.nonfinite=rewind", "engine.checkpoint.every_steps=2"]
    settings += [f"engine.checkpoint.dir={tmp_path}/saved"]
    with monkeypatch.context() as patched:
        patched.setattr(loop, "Interruption", wishing(StopRequest.STOP, 5))  # directly after the rewind
        loop.train(job(tmp_path, *settings, stream=60), QUIET)
    outcome = loop.train(job(tmp_path, *settings, stream=60), QUIET)
    assert outcome.steps == 6
    assert len(drawn) == 5 + 6 - 4
    samples = [sample for step in drawn for sample in step]
    assert len(set(samples)) == len(samples)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list to which each training batch adds the numbers of its samples."""
    batches, batch = list[list[int]](), PackedCorpus.batch

    def watched(self: PackedCorpus, first: int, total: int) -> list[Sample]:
        chosen = batch(self, first, total)
        batches.append([sample.number for sample in chosen])
        return chosen

    monkeypatch.setattr(PackedCorpus, "batch", watched)
    return batches


@pytest.mark.parametrize("total", [2, 4, 6])
def test_a_run_resumed_with_another_batch_draws_each_sample_once_per_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[list[int]], total: int
) -> None:
    sections = job_sections(tmp_path)
    del sections["train"]["steps"]
    settings = ["train.epochs=2", "engine.schedule={name: linear}", f"engine.checkpoint.dir={tmp_path}/saved"]
    with monkeypatch.context() as patched:
        patched.setattr(loop, "Interruption", wishing(StopRequest.STOP, 3))
        loop.train(load_job(sections, settings), QUIET)
    outcome = loop.train(load_job(sections, [*settings, f"engine.batch.total={total}"]), QUIET)
    assert [len(batch) for batch in drawn] == [4] * 3 + [total] * (outcome.steps - 3)
    samples = [number for batch in drawn for number in batch]
    num = max(samples) + 1
    assert sorted(samples[:num]) == sorted(samples[num : 2 * num]) == list(range(num))
    assert len(samples) - 2 * num < total, "the run ends with the second epoch"
    train, _ = read_metrics(outcome.out / METRICS_FILE)
    assert train[-1].lr == pytest.approx(1e-2 / outcome.steps)  # it is 0 after the last step


def train_after_other_checkpoints(sections: dict[str, Any]) -> None:
    """Train for an epoch on ranks that have found different checkpoints."""

    def found(folder: str | None, total: int) -> Completed:
        return Completed(launch_environment().rank, 0)

    with mock.patch.object(loop, "completed", found):
        loop.train(load_job(sections), QUIET)


def test_ranks_that_find_different_checkpoints_end(tmp_path: Path) -> None:
    sections = job_sections(tmp_path)
    sections["train"] = {"epochs": 1, "out": str(tmp_path / "out")}
    with pytest.raises(PartitaError, match=r"train.epochs: \d+ steps on rank 0 and \d+ on rank 1, which finds another"):
        on_ranks(2, train_after_other_checkpoints, sections, with_group=False)


@pytest.mark.filterwarnings("ignore:.*is not finite:UserWarning")
def test_documents_of_undone_steps_are_not_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[list[int]]
) -> None:
    """A NaN loss in step 4 rewinds to step 2; after it, the run is stopped and resumed with another batch."""
    loss_of = micro_batches.loss_of

    def spoilt(*args: Any) -> torch.Tensor:
        return loss_of(*args) * (float("nan") if torch.is_grad_enabled() and len(drawn) == 4 else 1.0)

    write_rows(tmp_path / "rows.jsonl", texts(200))
    monkeypatch.setattr(micro_batches, "loss_of", spoilt)
    settings = ["engine.precision.nonfinite=rewind", "engine.checkpoint.every_steps=2"]
    settings += [f"engine.checkpoint.dir={tmp_path}/saved"]
    with monkeypatch.context() as patched:
        patched.setattr(loop, "Interruption", wishing(StopRequest.STOP, 4))  # directly after the rewind
        loop.train(job(tmp_path, *settings), QUIET)
    outcome = loop.train(job(tmp_path, *settings, "engine.batch.total=6"), QUIET)
    assert outcome.steps == 6
    assert [len(batch) for batch in drawn] == [4] * 4 + [6] * (6 - 2)
    data = job(tmp_path).data
    num = corpus.load_data(data, build_model(job(tmp_path).model, data)).samples_per_epoch(32)
    samples = [number for batch in drawn for number in batch]
    assert samples == shuffled(data.seed, 0, num)[: len(samples)].tolist()


def test_adapters_on_two_ranks_start_from_the_weights_that_rank_0_reads(tmp_path: Path) -> None:
    sections = job_sections(tmp_path)
    no_dropout = LORA.replace("0.1}", "0.0}")
    first = loop.train(load_job(sections, [no_dropout]), QUIET)
    overrides = [no_dropout, f"train.out={tmp_path}/two"]
    one, other = on_ranks(2, trained_on_ranks, sections, overrides, with_group=False)
    assert one == other == pytest.approx(first.held_out_loss, rel=1e-5)


def fill_disk(tensors: object, path: str, metadata: object) -> None:
    Path(path).write_bytes(b"cut off")
    raise SafetensorError("I/O error: No space left on device (os error 28)")


def error_on_a_full_disk(sections: dict[str, Any], overrides: list[str]) -> str:
    with mock.patch("peft.peft_model.safe_save_file", fill_disk), pytest.raises(PartitaError) as caught:
        loop.train(load_job(sections, overrides), QUIET)
    return str(caught.value)


def test_adapters_that_cannot_be_written_leave_the_earlier_ones(tmp_path: Path) -> None:
    sections, overrides = job_sections(tmp_path), [LORA, "train.steps=1", "train.overwrite=true"]
    folder = loop.train(load_job(sections, overrides), QUIET).out / "model"
    earlier = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "adapter_model.safetensors" in earlier
    first, second = on_ranks(2, error_on_a_full_disk, sections, overrides, with_group=False)
    assert f"cannot write the adapters into '{folder}': I/O error: No space left on device" in first
    assert "rank 0 cannot write the adapters" in second
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == earlier


@pytest.mark.parametrize("axis", ["pipeline", "tensor", "sequence"])
def test_documents_are_separated_on_other_axes(tmp_path: Path, axis: str) -> None:
    sections = job_sections(tmp_path)
    sections["model"] = {"huggingface": str(model_folder(tmp_path / "model", num_key_value_heads=2))}
    first = loop.train(load_job(sections, ["engine.batch.accumulate=2"]), QUIET)
    overrides = [f"train.out={tmp_path}/two", "engine.batch.accumulate=2", f"engine.parallel.{axis}=2"]
    overrides += ["engine.zero.stage=1"] if axis == "pipeline" else []
    one, other = on_ranks(2, trained_on_ranks, sections, overrides, with_group=False)
    assert one == other == pytest.approx(first.held_out_loss, rel=1e-4)


def test_full_weights_replace_adapters_of_an_earlier_run(tmp_path: Path) -> None:
    for overrides in ([LORA], [], [LORA]):
        outcome = loop.train(job(tmp_path, "train.steps=1", "train.overwrite=true", *overrides), QUIET)
        names = {path.name for path in (outcome.out / "model").glob("*.safetensors")}
        assert names == ({"adapter_model.safetensors"} if overrides else {"model.safetensors"})
        assert (outcome.out / "model" / "adapter_config.json").exists() == bool(overrides)


def test_adapters_keep_the_text_of_an_earlier_model_card(tmp_path: Path) -> None:
    of = job(tmp_path, "train.steps=1", "train.overwrite=true", LORA)
    card = loop.train(of, QUIET).out / "model" / "README.md"
    card.write_text(card.read_text() + "The author's own words.\n")
    loop.train(of, QUIET)
    assert "The author's own words." in card.read_text()
    assert not (card.parent / ".adapters").exists()


def test_epochs_are_steps_and_the_length_of_the_schedule(tmp_path: Path) -> None:
    sections = job_sections(tmp_path)
    del sections["train"]["steps"]
    epochs = load_job(sections, ["train.epochs=1.5", "engine.schedule={name: linear}"])
    outcome = loop.train(epochs, QUIET)
    ready = build_model(epochs.model, epochs.data)
    num_samples = corpus.load_data(epochs.data, ready).samples_per_epoch(32)
    assert outcome.steps == -(-3 * num_samples // 8)  # 1.5 epochs in batches of 4
    train, _ = read_metrics(outcome.out / METRICS_FILE)
    assert train[-1].step == outcome.steps
    assert train[-1].lr == pytest.approx(1e-2 / outcome.steps)  # it is 0 after the last step
    written = load_job(outcome.out / "job.yaml")
    assert (written.train.steps, written.train.epochs) == (outcome.steps, None)
    assert written.engine.schedule.total_steps == outcome.steps


def test_a_text_has_epochs_too(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 100)
    sections = {
        "model": {"layers": 1, "width": 16, "heads": 2},
        "data": {"corpus": str(tmp_path / "text.txt"), "sequence": 16, "held_out": 0.1},
        "train": {"epochs": 2, "out": str(tmp_path / "out"), "metrics": [], "sample": {"tokens": 0}},
        "engine": {"batch": {"total": 8}},
    }
    assert loop.train(load_job(sections), QUIET).steps == -(-2 * -(-1710 // 16) // 8)


def test_documents_in_one_sample_do_not_see_each_other(tmp_path: Path) -> None:
    """The mean loss per predicted token of packed samples is that of the separate documents."""
    of = job(tmp_path, "train.steps=1", "engine.optimizer.lr=1e-30")
    loop.train(of, QUIET)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    packed = corpus.load_data(of.data, build_model(of.model, of.data))
    sums, num = 0.0, 0
    samples = packed.held_out
    assert len(samples.starts) > samples.num  # some samples have several documents
    for start, length in zip(samples.starts, samples.lengths, strict=True):
        ids = torch.tensor(packed.held_out.tokens.stored[start : start + length].tolist())[None]
        sums += model(ids, labels=ids).loss.item() * (length - 1)
        num += length - 1
    assert losses(of)[1][0] == pytest.approx(sums / num, rel=1e-5)


def test_the_loss_of_answers_is_that_of_each_conversation_on_its_own(tmp_path: Path) -> None:
    """The loss is that of the model with ``labels`` that mask the questions: packed or padded, on one rank or two."""
    words = texts(40)
    roles = ("user", "assistant")
    rows = [
        [{"role": role, "content": text} for role, text in zip(roles, words[at : at + 2], strict=True)]
        for at in range(0, 40, 2)
    ]
    write_rows(tmp_path / "rows.jsonl", rows, field="messages")
    (tmp_path / "chat.jinja").write_text(WITH_HEADERS)
    sections = job_sections(
        tmp_path, field="messages", chat_template=str(tmp_path / "chat.jinja"), predict="answers", sequence=64
    )
    sections["train"]["steps"] = 1
    sections["engine"]["optimizer"]["lr"] = 1e-30
    of = load_job(sections)
    found = loop.train(of, QUIET).held_out_loss
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    reader = AutoTokenizer.from_pretrained(tmp_path / "model")
    packed = corpus.load_data(of.data, build_model(of.model, of.data))
    assert isinstance(packed, PackedCorpus)
    sums, num = 0.0, 0
    for start, length in zip(packed.held_out.starts, packed.held_out.lengths, strict=True):
        tokens, is_answer = (
            torch.from_numpy(each)[None] for each in packed.held_out.tokens.read(int(start), int(length))
        )
        assert reader.decode(tokens[0][is_answer[0]]) in {f"{row[1]['content']} w8 </s>" for row in rows}
        labels = tokens.masked_fill(~is_answer, -100)
        count = int((labels[:, 1:] != -100).sum())
        sums += model(tokens, labels=labels).loss.item() * count
        num += count
    assert found == pytest.approx(sums / num, rel=1e-5)
    for number, overrides in enumerate((["data.pack=false"], ["engine.batch.accumulate=2"])):
        other = [f"train.out={tmp_path}/{number}", *overrides]
        assert loop.train(load_job(sections, other), QUIET).held_out_loss == pytest.approx(found, rel=1e-5)
    one, two = on_ranks(2, trained_on_ranks, sections, [f"train.out={tmp_path}/ranks"], with_group=False)
    assert one == two == pytest.approx(found, rel=1e-5)


def test_a_model_that_mixes_documents_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(PartitaError, match="data.pack: LlamaForCausalLM does not separate documents in one sample"):
        loop.train(job(tmp_path), QUIET)
    assert loop.train(job(tmp_path, "data.pack=false", "train.steps=1"), QUIET).steps == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 40},
            "data.pack: MambaForCausalLM does not take position_ids, so documents in one sample would not be separated",
        ),
        (
            {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 20},
            "data.tokenizer: token 33 of the tokenizer is not in the model's vocabulary of 20",
        ),
    ],
)
def test_models_that_documents_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    sections = job_sections(tmp_path, tokenizer=str(tmp_path / "model"))
    write_rows(tmp_path / "rows.jsonl", ["w1 assistant", "w2"])
    sections["model"] = {"huggingface": settings}
    with pytest.raises(ConfigError) as caught:
        loop.train(load_job(sections), QUIET)
    assert message in str(caught.value)


def other_documents(sections: dict[str, Any], folder: str) -> str:
    """Train on documents that differ between ranks, and return the error."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else loop.launch_environment().rank
    place = Path(folder, str(rank))
    place.mkdir()
    write_rows(place / "rows.jsonl", texts(30, seed=rank))
    try:
        loop.train(load_job(sections, [f"data.corpus={place}/rows.jsonl"]), QUIET)
    except PartitaError as error:
        return str(error)
    return "trained"


def test_ranks_with_other_documents_are_named(tmp_path: Path) -> None:
    found = on_ranks(2, other_documents, job_sections(tmp_path), str(tmp_path), with_group=False)
    assert all(message.startswith("data.corpus: rank 1 has other documents than rank 0") for message in found)


def test_evaluations_report_the_perplexity(tmp_path: Path) -> None:
    out = io.StringIO()
    of = job(tmp_path, "train.steps=3")
    loop.train(of, Console(file=out, width=200))
    (_, last) = losses(of)[1]
    assert f"held-out loss {last:.4f}  perplexity {HeldOutRow(0, 0, last).perplexity:.2f}" in out.getvalue()
    assert "perplexity" in str(trained.evaluate(trained.load_trained(of.out), QUIET))


def test_a_run_without_results_cannot_be_evaluated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*' has no results of a run \(job.yaml and model/\); train first, or"):
        trained.load_trained(tmp_path)


def test_a_sample_ends_with_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = job(tmp_path)
    fresh = of.model.model_copy(update={"huggingface": f"{tmp_path}/model/config.json"})
    ready = build_model(fresh, of.data.model_copy(update={"tokenizer": f"{tmp_path}/model"}))
    assert isinstance(ready, HuggingFaceModel)
    assert ready.end_token == END
    monkeypatch.setattr(ready, "logits", lambda tokens: torch.eye(40)[torch.full_like(tokens, END)])
    section = SampleSection(prompt="w1", tokens=9, temperature=0)
    assert trained.write_sample(ready, section, 32) == "w1 </s>"
    text = HuggingFaceModel(ready.module, ready._tokenizer)
    monkeypatch.setattr(text, "logits", ready.logits)
    assert trained.write_sample(text, section, 32) == "w1" + " </s>" * 9


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            "{r: 4, target_modules: [nothing]}",
            "peft cannot adapt LlamaForCausalLM: .*; name layers .*q_proj",
        ),
        ("{r: -1}", "model.lora.r: expected a whole number"),
        ("{alpha: 8}", "model.lora: without model.lora.r there are no adapters"),
    ],
)
def test_adapters_that_cannot_be_made_are_refused(tmp_path: Path, lora: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of = job(tmp_path, f"model.lora={lora}")
        build_model(of.model, of.data)


def test_adapters_need_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    of = job(tmp_path, "model.lora.r=4", f"model.huggingface={folder}/config.json", tokenizer=str(folder))
    with pytest.raises(ConfigError, match="model.lora: '.*config.json' has no weights for adapters to change; set m"):
        build_model(of.model, of.data)


def test_all_linear_layers_can_be_adapted(tmp_path: Path) -> None:
    of = job(tmp_path, "model.lora={target_modules: all-linear, r: 2}")
    seeds.start()
    module = build_model(of.model, of.data).module
    adapted = {name.split(".")[-4] for name, param in module.named_parameters() if param.requires_grad}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_rows_are_means_over_predicted_tokens(tmp_path: Path) -> None:
    """Accumulation changes only rounding, although micro-batches predict different numbers of tokens."""
    whole = loop.train(job(tmp_path), QUIET)
    parts = loop.train(job(tmp_path, "engine.batch.accumulate=4", "train.overwrite=true"), QUIET)
    assert parts.held_out_loss == pytest.approx(whole.held_out_loss, rel=1e-4)
    rows: list[TrainRow] = read_metrics(parts.out / METRICS_FILE)[0]
    assert all(row.loss > 0 for row in rows)
