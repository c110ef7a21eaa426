"""transformers models with other names in their files than in their modules: read, and written as by transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import partita
from partita import ConfigError
from partita.huggingface.weights import Weights
from partita.kernels.quantize import nearest_bf16
from partita.table.box import Box
from tests.huggingface.cases import CASES, build, logits
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights


def exported(name: str, folder: Path, config: dict[str, Any]) -> None:
    """Save a model by its own ``save_pretrained``, and export an engine of it."""
    model = build(name)
    if rank() == 0:
        if "precision" in config:
            nearest = {name: nearest_bf16(param.detach()) for name, param in model.named_parameters()}
            model.bfloat16().load_state_dict(nearest, strict=False)
        model.save_pretrained(folder / "own")
    with partita.initialize(build(name), config) as engine:
        engine.export(folder / "exported")


def loaded(name: str, folder: Path) -> None:
    """Load files into a model on the meta device, compare its full weights, and export it again."""
    expected = build(name).state_dict()
    for stage in (1, 3):
        with torch.device("meta"):
            model = CASES[name]()
        with partita.initialize(model, {"zero": {"stage": stage}}, weights=folder) as engine:
            found = whole_weights(engine)
            engine.export(folder / f"again-{stage}")
        assert all(torch.equal(value, expected[key]) for key, value in found.items()), name
        if rank() == 0:
            again = load_file(folder / f"again-{stage}" / "model.safetensors")
            assert again.keys() == load_file(folder / "model.safetensors").keys()


def experts_read(folder: Path) -> int:
    """Return the number of elements that this rank reads from tensors of experts."""
    numbers, read = list[int](), Weights.read

    def count(self: Weights, name: str, box: Box | None = None) -> Tensor:
        tensor = read(self, name, box)
        numbers.append(tensor.numel() * (".experts." in name))
        return tensor

    with torch.device("meta"):
        model = CASES["mixtral"]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weights, "read", count)
        partita.initialize(model, {"zero": {"stage": 3}}, weights=folder).close()
    return sum(numbers)


def other_names(folder: Path) -> None:
    said = r"1 parameters of the model have no tensor \('lm_head.weight'\), and 1 tensors have no parameter \('head'\)"
    with pytest.raises(ConfigError, match=said):
        partita.initialize(build("llama"), {"zero": {"stage": 3}}, weights=folder / "renamed")
    with pytest.raises(
        ConfigError, match=r"the tensors 'model.*experts.0.*' cannot be converted to '.*experts.*_proj'"
    ):
        partita.initialize(build("mixtral"), {"zero": {"stage": 3}}, weights=folder / "cut")


@pytest.mark.parametrize("name", CASES)
def test_an_export_is_the_folder_that_the_model_writes(name: str, tmp_path: Path) -> None:
    for dtype, config in (("fp32", {}), ("bf16", {"precision": {"compute": "bf16"}})):
        folder = tmp_path / dtype
        on_ranks(2, exported, name, folder, {"zero": {"stage": 3}, **config})
        own, found = (load_file(folder / kind / "model.safetensors") for kind in ("own", "exported"))
        assert found.keys() == own.keys()
        assert all(torch.equal(found[key], own[key]) and found[key].dtype == own[key].dtype for key in own)
        configs = [json.loads((folder / kind / "config.json").read_text()) for kind in ("own", "exported")]
        assert configs[0] == configs[1]
        assert configs[0]["dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        kind = type(build(name))
        model, report = kind.from_pretrained(folder / "exported", output_loading_info=True)
        assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(logits(model.eval()), logits(kind.from_pretrained(folder / "own").eval()))
        assert dtype == "bf16" or torch.equal(logits(model), logits(build(name)))


@matrix(world=[1, 2], name=CASES)
def test_files_are_read_by_their_own_names(world: int, name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    on_ranks(world, loaded, name, tmp_path)


def test_a_rank_reads_its_experts_alone(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    total = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
    num_elements = on_ranks(2, experts_read, tmp_path)
    assert total < sum(num_elements) < 1.8 * total  # both ranks read a tensor of which each has a part
    assert max(num_elements) < total


def test_names_that_are_not_the_models(tmp_path: Path) -> None:
    for folder in ("renamed", "cut"):
        (tmp_path / folder).mkdir()
    build("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["head"] = tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "renamed" / "model.safetensors")
    build("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expert = next(name for name in tensors if ".experts.1.w1" in name)
    tensors[expert] = tensors[expert][:-1].clone()
    save_file(tensors, tmp_path / "cut" / "model.safetensors")
    on_ranks(2, other_names, tmp_path)
