"""transformers and accelerate with tensor, sequence and pipeline ranks: ranks of one replica get the same samples."""

from typing import Any

import accelerate
import pytest
import torch
import torch.distributed
import transformers
from torch.optim.lr_scheduler import LambdaLR

from partita import ConfigError, PartitaError
from partita.integrations.huggingface import Accelerator, on_partita
from tests.integrations.huggingface.runs import (
    VOCABULARY,
    Run,
    alone,
    arguments,
    end,
    histories,
    llama,
    reset,
    rows_of,
    samples,
    scratch,
    trainer_of,
)
from tests.kit.ranks import on_ranks

TIMEOUT_S = 300
AXES: dict[str, dict[str, int]] = {
    "tensor": {"tensor": 2},
    "sequence": {"sequence": 2},
    "pipeline": {"pipeline": 2},
}
ARGUMENTS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "include_num_input_tokens_seen": "all"}


def test_a_trainer_is_the_plain_one_on_as_many_data_ranks() -> None:
    """Four ranks at two data coordinates log the same as two plain ranks, with evaluation and a short last batch."""
    per_rank = ARGUMENTS | {"average_tokens_across_devices": False}
    balanced = ARGUMENTS | {"train_sampling_strategy": "batch_rebalance"}
    plain = on_ranks(2, histories, [Run(None, each, num_samples=18) for each in (ARGUMENTS, per_rank, balanced)])[0]
    runs = [
        Run({"zero": {"stage": stage}, "parallel": AXES[axis]}, arguments, num_samples=18)
        for axis, stage, arguments in (
            ("tensor", 1, ARGUMENTS),
            ("tensor", 3, per_rank),
            ("sequence", 2, ARGUMENTS),
            ("pipeline", 1, ARGUMENTS),
            ("pipeline", 3, per_rank),
            ("tensor", 2, balanced),
        )
    ]
    for found in on_ranks(4, histories, runs, timeout=TIMEOUT_S):
        for rows, expected in zip(found, (*plain[:2], plain[0], *plain), strict=True):
            assert len(rows) == len(expected) > 6
            for row, wanted in zip(rows, expected, strict=True):
                assert row == pytest.approx(wanted, rel=2e-5), row["step"]


def drawn(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate rows, with random tokens in place of a third of theirs."""
    batch: dict[str, torch.Tensor] = transformers.default_data_collator(rows)
    tokens = batch["input_ids"]
    chosen = torch.rand(tokens.shape) < 1 / 3
    return batch | {"input_ids": torch.where(chosen, torch.randint(3, VOCABULARY, tokens.shape), tokens)}


def drawn_by_rank(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    return drawn(rows)


def trained_on_drawn(config: dict[str, Any] | None, by_rank: bool) -> list[dict[str, float]]:
    """Train on random tokens, which two workers draw; with ``by_rank``, each rank itself, by its number."""
    workers = {} if by_rank else {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"}
    run = Run(config, {"num_train_epochs": 1, **workers}, num_samples=9)
    with alone(), scratch() as folder:
        trainer = trainer_of(run, folder, data_collator=drawn_by_rank if by_rank else drawn)
        try:
            trainer.train()
            return rows_of(trainer)
        finally:
            end(trainer)


def test_workers_draw_the_same_numbers_for_ranks_that_share_a_model() -> None:
    (plain,) = on_ranks(1, trained_on_drawn, None, False, timeout=120)
    for rows in on_ranks(2, trained_on_drawn, {"parallel": {"tensor": 2}}, False, timeout=120):
        assert len(rows) == len(plain) > 2
        for row, wanted in zip(rows, plain, strict=True):
            assert row == pytest.approx(wanted, rel=2e-5), row["step"]


def test_different_samples_on_ranks_that_share_a_model_are_refused() -> None:
    with pytest.raises(PartitaError, match=r"one data coordinate \(0\) got different batches: 'input_ids' of ranks 0"):
        on_ranks(2, trained_on_drawn, {"parallel": {"tensor": 2}}, True)


Seen = tuple[list[tuple[float, float]], list[int], float, list[int]]


def loop(parallel: dict[str, int] | None) -> Seen:
    """Train; return the loss and learning rate of each update, the gathered sample numbers, their sum, and the numbers
    gathered as objects.
    """
    with alone():
        plain = accelerate.Accelerator(cpu=True)
        made = plain if parallel is None else Accelerator(cpu=True, partita_config={"parallel": parallel})
        model: Any = llama()
        numbered = [{**sample, "number": torch.tensor(number)} for number, sample in enumerate(samples(10, 1))]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler: Any = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        data: Any = torch.utils.data.DataLoader(numbered, batch_size=2)
        model, optimizer, data, scheduler = made.prepare(model, optimizer, data, scheduler)
        rows, numbers, total, objects = [], list[int](), 0.0, list[int]()
        for batch in data:
            number = batch.pop("number")
            loss = model(**batch).loss
            made.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = made.reduce(loss.detach(), "mean")
            rows.append((float(mean), scheduler.get_last_lr()[0]))
            numbers += made.gather_for_metrics(number).tolist()
            objects += made.gather_for_metrics(number.tolist(), use_gather_object=True)
            total += float(made.reduce(number.sum().float(), "sum"))
        if isinstance(made, Accelerator):
            made.engines.close()
        return rows, numbers, total, objects


def test_an_accelerator_counts_each_sample_once() -> None:
    plain = on_ranks(2, loop, None)[0]
    assert plain[1] == plain[3] == list(range(10))
    for rows, *others in on_ranks(4, loop, {"tensor": 2}):
        assert others == list(plain[1:])
        assert [value for row in rows for value in row] == pytest.approx([v for row in plain[0] for v in row], rel=2e-5)


def refused() -> list[str]:
    said = []
    for config, kwargs in (
        ({"parallel": {"pipeline": 2}}, {}),
        ({"parallel": {"tensor": 2}}, {"dispatch_batches": True}),
    ):
        with alone(), pytest.raises(ConfigError) as caught:
            loader = accelerate.utils.DataLoaderConfiguration(**kwargs)
            made = Accelerator(cpu=True, partita_config=config, dataloader_config=loader)
            made.prepare(torch.utils.data.DataLoader(range(VOCABULARY)))  # type: ignore[arg-type]
        said.append(str(caught.value))
    return said


def test_what_the_loop_cannot_feed_is_refused() -> None:
    pipeline, dispatched = on_ranks(2, refused)[0]
    assert "parallel.pipeline: 2 under accelerate's loop, which calls forward and backward itself" in pipeline
    assert "write the loop with partita.initialize and engine.train_batch" in pipeline
    assert "set dispatch_batches=False" in dispatched


def generated(stage: int) -> tuple[list[int], list[int]]:
    """Return tokens that the unmodified model generates, and those that it generates after `prepare`."""
    prompt = {"input_ids": torch.arange(5, 12)[None], "max_new_tokens": 4, "do_sample": False}
    with alone():
        made = Accelerator(cpu=True, partita_config={"parallel": {"sequence": 2}, "zero": {"stage": stage}})
        model: Any = llama()
        expected = model.generate(**prompt)[0].tolist()
        model, _ = made.prepare(model, torch.optim.AdamW(model.parameters()))
        found = model.generate(**prompt)[0].tolist()
        made.engines.close()
        return expected, found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_on_slices_of_the_sequence_generates_as_in_one_process(stage: int) -> None:
    for expected, found in on_ranks(2, generated, stage):
        assert len(found) == 11
        assert found == expected


def resumed(stage: int) -> tuple[list[dict[str, float]], list[dict[str, float]], bool]:
    """Train a two-stage pipeline. Return its logs, those of a run resumed in its middle, and True if the resumed model
    generates the same text as the saved one in one process.
    """
    run = Run({"zero": {"stage": stage}, "parallel": {"pipeline": 2}}, {"save_strategy": "steps", "save_steps": 2})
    prompt = {"input_ids": torch.arange(5, 9)[None], "max_new_tokens": 4, "do_sample": False}
    with alone(), scratch() as folder:
        trainer = trainer_of(run, folder / "whole")
        trainer.train()
        whole = rows_of(trainer)
        end(trainer)
        reset()
        again = trainer_of(run, folder / "again")
        again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
        text = again.model.generate(**prompt)
        again.save_model(str(folder / "model"))
        end(again)
        torch.distributed.barrier()
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        same = torch.equal(text, plain.generate(**prompt))
        torch.distributed.barrier()
        return whole, rows_of(again), same


@pytest.mark.parametrize("stage", [1, 3])
def test_a_trainer_s_pipeline_saves_resumes_and_generates(stage: int) -> None:
    for whole, again, same in on_ranks(2, resumed, stage, timeout=TIMEOUT_S):
        assert same
        assert again == whole
        assert len(whole) > 3


class OwnLoss(transformers.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def without_predictions() -> None:
    config = {"parallel": {"pipeline": 2}}
    message = (
        r"parallel.pipeline: 2: OwnLoss.compute_loss may read what only the last stage has: pass compute_loss_func"
    )
    with alone(), scratch() as folder, pytest.raises(ConfigError, match=message):
        on_partita(OwnLoss, config)(model=llama(), args=arguments(folder))
    with alone(), scratch() as folder:
        trainer = trainer_of(Run(config), folder, compute_metrics=lambda found: {})
        with pytest.raises(
            PartitaError, match="set prediction_loss_only=True in TrainingArguments, without compute_met"
        ):
            trainer.evaluate()
        end(trainer)


def test_what_only_the_last_stage_has_is_refused() -> None:
    on_ranks(2, without_predictions)
