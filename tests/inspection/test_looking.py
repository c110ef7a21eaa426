"""Tests of full gradients and optimizer states by name, state dicts, exported weights, and the two reports."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import partita
from partita import PartitaError
from partita.huggingface import export as export_module
from partita.layout.state_bytes import model_state_bytes
from partita.table.planned import PlannedUnit
from tests.kit import seeds
from tests.kit.models import CASES, WIDTH, Stack, square_loss
from tests.kit.plans import ZERO, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import ADAMW, Recipe, rank, train_plain
from tests.kit.training import world as num_ranks
from tests.sharding.test_visits import Tied, freeze


def gradients_and_states() -> None:
    """Gradients and optimizer states agree with those of one process that trains on all samples."""
    plain = train_plain(Recipe(Stack, num_steps=1))
    for name, zero in ZERO.items():
        seeds.start()
        with partita.initialize(Stack(), {"zero": zero, "optimizer": ADAMW}) as engine:
            assert engine.gradient("first.weight") is None
            assert engine.optimizer_state("first.weight") == {}
            engine.backward(square_loss(engine, rank(), 0))
            for key, expected in plain.gradients[0].items():
                got = engine.gradient(key)
                assert got is not None
                assert expected is not None
                assert got.dtype == torch.float32
                assert got.is_contiguous()
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7, msg=f"{name}: {key}")
            engine.step()
            assert engine.gradient("first.weight") is None
            for key, expected in plain.gradients[0].items():
                state = engine.optimizer_state(key)
                assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
                assert state["step"] == 1
                assert expected is not None
                torch.testing.assert_close(state["exp_avg"], 0.1 * expected, rtol=1e-4, atol=1e-8, msg=key)
                assert state["exp_avg_sq"].shape == expected.shape
            with pytest.raises(PartitaError, match=r"no parameter 'frist.weight'; did you mean 'first.weight'\?"):
                engine.gradient("frist.weight")
            with pytest.raises(PartitaError, match="no parameter 'zzz'$"):
                engine.optimizer_state("zzz")


def tied_names() -> None:
    """A tied parameter is found under each of its names."""
    for zero in ZERO.values():
        with partita.initialize(Tied(), {"zero": zero}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            one, other = engine.gradient("encode.weight"), engine.gradient("decode.weight")
            assert one is not None
            assert torch.equal(one, other)
            engine.step()
            assert engine.optimizer_state("decode.weight").keys() == {"step", "exp_avg", "exp_avg_sq"}
            state = engine.state_dict()
            if rank() == 0:
                assert torch.equal(state["encode.weight"], state["decode.weight"])
                Tied().load_state_dict(state)


class WithBuffers(Stack):
    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class AtTwoPlaces(WithBuffers):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH, affine=False)] * 2)


def state_dicts() -> None:
    for zero in ZERO.values():
        seeds.start()
        model = AtTwoPlaces()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        with partita.initialize(model, {"zero": zero, "precision": {"compute": "bf16"}}) as engine:
            state = engine.state_dict()
        if rank():
            assert state == {}
            continue
        assert list(state) == list(expected)
        for name, value in state.items():
            assert value.dtype == expected[name].dtype
            assert value.is_contiguous()
            torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=0)
        AtTwoPlaces().load_state_dict(state)


def trained_states() -> None:
    """state_dict(trainable=True) returns only trainable parameters, and gathers only units that have some."""
    names = ["blocks.0.up.weight", "blocks.1.norm.bias", "last.bias"]
    for name, zero in ZERO.items():
        seeds.start()
        model = freeze(AtTwoPlaces(), names.__contains__)
        with partita.initialize(model, {"zero": zero, "precision": {"compute": "bf16"}}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            expected = engine.state_dict()
            state = engine.state_dict(trainable=True)
            assert list(state) == (names if rank() == 0 else [])
            assert all(torch.equal(value, expected[key]) for key, value in state.items())
            model.blocks[1].requires_grad_(False)
            model.last.requires_grad_(False)
            chosen = ["seen", "blocks.0.up.weight", "norms.1.running_mean"]
            state = engine.state_dict(names=chosen)
            assert state.keys() == (set(chosen) if rank() == 0 else set())
            assert all(torch.equal(value, expected[key]) for key, value in state.items())
            with pytest.raises(PartitaError, match=r"no parameter or buffer 'sen'; did you mean 'seen'\?"):
                engine.state_dict(names=["last.bias", "sen"])
            before = engine.traffic_report()
            assert list(engine.state_dict(names=names[:1])) == (names[:1] if rank() == 0 else [])
            sent_by_name = engine.traffic_report().since(before).sent_bytes("parameters")
            before = engine.traffic_report()
            assert list(engine.state_dict(trainable=True)) == (names[:1] if rank() == 0 else [])
            sent = engine.traffic_report().since(before).sent_bytes("parameters")
            assert sent == sent_by_name
            block = next(unit for unit in engine.units if unit.name == "blocks.0")
            masters = [s.layout.padded * 4 for s in block.segments if s.trains]  # fp32
            assert sent * num_ranks() == (num_ranks() - 1) * (
                sum(masters) * (zero["stage"] > 0) + gathered_bytes(block)
            ), name


def gathered_bytes(unit: PlannedUnit) -> int:
    return 0 if unit.always_unsharded else unit.num_bytes


def exports(folder: Path) -> None:
    for name, zero in ZERO.items():
        seeds.start()
        model = freeze(WithBuffers(), lambda key: not key.startswith("blocks.1"))
        target = folder / name
        with partita.initialize(model, {"zero": zero}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
            engine.export(target)
            weights = {key: p.detach().clone() for key, p in _whole(engine).items()}
        if rank() == 0:
            files = sorted(path.name for path in target.iterdir())
            assert files == ["model.safetensors"]
            loaded = load_file(target / "model.safetensors")
            assert loaded.keys() == {*weights, "seen"}
            assert all(torch.equal(loaded[key], value) for key, value in weights.items())
        seeds.start(1)
        with partita.initialize(WithBuffers(), {"zero": {"stage": 3}}, weights=target) as engine:
            again = _whole(engine)
        assert all(torch.equal(again[key], value) for key, value in weights.items())


def _whole(engine: partita.Engine) -> dict[str, Tensor]:
    with engine.gathered():
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def exports_in_parts(folder: Path) -> None:
    """A large model is exported as several files with Hugging Face's index; earlier files are replaced."""
    seeds.start()
    with partita.initialize(Stack(), {"zero": {"stage": 3}}) as engine:
        engine.export(folder)
        export_module.export(engine._parts.whole, engine.module, folder, file_bytes=4096)
        weights = _whole(engine)
    if rank():
        return
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    for key, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[key], weights[key])


def exports_hugging_face(name: str, folder: Path) -> Tensor:
    """Train a step, export, and return the logits of the trained model on a fixed batch."""
    case = CASES[name]
    with partita.initialize(case.build(), {"zero": {"stage": 3}}) as engine:
        batches = case.batches(2, seed=rank())
        engine.backward(case.loss(engine(**next(batches))))
        engine.step()
        engine.export(folder)
        engine.eval()
        with torch.no_grad():
            logits: Tensor = engine(**next(case.batches(2, seed=9))).logits
    return logits


def exports_again(folder: Path, again: Path) -> None:
    """Export copies the tokenizer of the weights' folder; the model's own config replaces the folder's."""
    case = CASES["gpt2"]
    given = case.build()
    if rank() == 0:
        given.save_pretrained(folder)
        for name in ("tokenizer.json", "merges.txt", "chat_template.jinja"):
            (folder / name).write_text(name)
        (folder / "config.json").write_text("{}")
    torch.distributed.barrier()
    with partita.initialize(case.build(device="meta"), {"zero": {"stage": 3}}, weights=folder) as engine:
        engine.export(again)
        engine.export(again / "elsewhere", companions=again)
        with pytest.raises(PartitaError, match=r"engine.export: cannot write into .*No such file"):
            engine.export(again / "third", companions=again / "missing")
        for name in ("tokenizer.json", "config.json"):  # read-only files, as in a shared store
            (folder / name).chmod(0o444)
        engine.export(again)
        model: Any = engine.module
        model.generation_config.do_sample, model.generation_config.temperature = False, 0.9
        with pytest.warns(UserWarning, match="GenerationConfig was not saved") if rank() == 0 else nullcontext():
            engine.export(folder)  # the folder that the weights were loaded from


def exports_without_what_it_came_from(folder: Path) -> None:
    given = Stack()
    if rank() == 0:
        save_file(given.state_dict(), folder / "given.safetensors")
    torch.distributed.barrier()
    with partita.initialize(Stack(), {"zero": {"stage": 3}}, weights=folder) as engine:
        torch.distributed.barrier()
        if rank() == 0:
            shutil.rmtree(folder)
        engine.export(folder.with_name("out"))


def exports_to_nowhere(folder: Path) -> None:
    blocked = folder / "file"
    if rank() == 0:
        blocked.write_text("")
    with partita.initialize(Stack(), {"zero": {"stage": 3}}) as engine:
        engine.mean(0.0)
        with pytest.raises(PartitaError, match="engine.export: cannot make the folder"):
            engine.export(blocked / "inside")
        engine.backward(square_loss(engine, rank(), 0))
        assert engine.step().stepped


def wrong_weights(folder: Path) -> None:
    seeds.start()
    with partita.initialize(Stack(2), {"zero": {"stage": 1}}) as engine:
        engine.export(folder)
    model = Stack(3)
    kept = model.blocks[2].up.weight.detach().clone()
    with (
        pytest.warns(UserWarning, match=r"no values for 6 parameters \('blocks.2.norm.weight', "),
        partita.initialize(model, {"zero": {"stage": 3}}, weights=folder) as engine,
        engine.gathered(),
    ):
        torch.testing.assert_close(model.blocks[2].up.weight, kept) if rank() == 0 else None
    with torch.device("meta"):
        unknown: Any = Stack(2)
    unknown.extra = nn.Parameter(torch.ones(3, device="meta"))
    with (
        pytest.raises(PartitaError, match="'extra' is on the meta device"),
        pytest.warns(UserWarning, match=r"no values for 1 parameters \('extra'\)"),
    ):
        partita.initialize(unknown, {"zero": {"stage": 3}}, weights=folder)
    wider: Any = Stack(2)
    wider.last = nn.Linear(WIDTH, 3)
    with pytest.raises(
        PartitaError, match=r"'last.weight' has shape \(16, 16\), but the model's parameter has \(3, 16\)"
    ):
        partita.initialize(wider, {"zero": {"stage": 3}}, weights=folder)
    with pytest.raises(PartitaError, match="no tensor is a parameter of Linear"):
        partita.initialize(nn.Linear(2, 2), {"zero": {"stage": 3}}, weights=folder)
    with pytest.raises(PartitaError, match="is not a safetensors file"):
        partita.initialize(Stack(), weights=folder / "nothing")
    damaged = folder / "damaged"
    damaged.mkdir(exist_ok=True)
    (damaged / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(PartitaError, match="cannot be read as safetensors"):
        partita.initialize(Stack(), weights=damaged)


def memory() -> None:
    for config in ({}, {"precision": {"compute": "bf16"}}, {"precision": {"compute": "bf16", "gradients": "bf16"}}):
        for name, zero in ZERO.items():
            with partita.initialize(Stack(), {"zero": zero, **config}) as engine:
                empty = engine.memory_report()
                assert empty.held.get(("moments", "device"), 0) == 0
                engine.backward(square_loss(engine, rank(), 0))
                at_peak = engine.memory_report()
                engine.step()
                report = engine.memory_report()
                planned = model_state_bytes(engine.units, rank())
                for key, num_bytes in planned.items():
                    assert report.peak[key] == num_bytes, f"{name}: {key}"
                assert at_peak.process_bytes > 0
                assert report.process_peak_bytes >= report.process_bytes > 0
                assert report.model_state_bytes <= report.total_bytes
                text = str(report)
                assert all(word in text for word in ("state", "tier", "MB now", "MB peak", "parameters", "process"))
                assert len(text.splitlines()) <= 12


def traffic() -> None:
    with partita.initialize(Stack(), {"zero": {"stage": 3}}) as engine:
        start = engine.traffic_report()
        assert {key.purpose for key in start.rows} <= {"start", "control"}
        engine.backward(square_loss(engine, rank(), 0))
        engine.step()
        report = engine.traffic_report().since(start)
        assert report.sent_bytes() == sum(row.sent_bytes for row in report.rows.values())
        assert report.sent_bytes("parameters") > report.sent_bytes("gradients") > report.sent_bytes("control") > 0
        assert all(key.axes == ("data",) and row.calls > 0 for key, row in report.rows.items())
        text = str(engine.traffic_report())
        assert all(word in text for word in ("collective", "axes", "purpose", "calls", "MB sent", "all_gather", "data"))


@pytest.mark.parametrize("world", sampled([1, 2, 4], 2))
def test_gradients_and_optimizer_states(world: int) -> None:
    on_ranks(world, gradients_and_states)


def test_tied_parameters_have_all_their_names() -> None:
    on_ranks(2, tied_names)


def test_state_dict() -> None:
    on_ranks(2, state_dicts)


@pytest.mark.parametrize("world", [1, 2])
def test_state_dict_of_what_trains(world: int) -> None:
    on_ranks(world, trained_states)


@pytest.mark.parametrize("world", [1, 2])
def test_export_and_weights(world: int, tmp_path: Path) -> None:
    on_ranks(world, exports, tmp_path)


def test_export_in_several_files(tmp_path: Path) -> None:
    on_ranks(2, exports_in_parts, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_loads_the_export(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    logits = on_ranks(2, exports_hugging_face, name, tmp_path)[0]
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        got = model.eval()(**next(CASES[name].batches(2, seed=9))).logits
    assert torch.equal(got, logits)
    exported = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in exported) == (name == "llama"), "a tied weight is written once"


def test_export_brings_the_tokenizer_along(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    on_ranks(2, exports_again, tmp_path / "given", tmp_path / "again")
    for folder in (tmp_path / "again", tmp_path / "again" / "elsewhere"):
        for name in ("tokenizer.json", "merges.txt", "chat_template.jinja"):
            assert (folder / name).read_text() == name
        assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "gpt2"


def test_export_when_the_weights_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    on_ranks(2, exports_without_what_it_came_from, tmp_path / "given")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_export_to_nowhere(tmp_path: Path) -> None:
    on_ranks(2, exports_to_nowhere, tmp_path)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    on_ranks(1, wrong_weights, tmp_path)


@pytest.mark.parametrize("world", [1, 2])
def test_memory_report_is_the_plan(world: int) -> None:
    on_ranks(world, memory)


def test_traffic_report() -> None:
    on_ranks(2, traffic)
