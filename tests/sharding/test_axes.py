"""States, norms, inspection and checkpoints with tensor and pipeline axes, which the test applies by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from partita.checkpoint.format.stored import open_stored
from partita.checkpoint.offline import verify
from partita.comm.collectives import Collectives
from partita.engine.engine import Engine
from partita.errors import ConfigError, PartitaError
from partita.layout.off_stage import is_off_stage
from partita.layout.traffic import StepShape, step_traffic
from partita.table.mesh_shape import MeshShape
from partita.table.place import Place
from partita.table.share import Share
from tests.kit.plans import matrix, sampled
from tests.sharding.axes import HIDDEN, WIDTH, Model, Recipe, Resettable, TrainingRun, close, run_backward, same, train

STAGES = [{"stage": stage} for stage in range(4)] + [{"stage": 3, "keep_gathered": True}]
MESHES = {
    "tensor 2": MeshShape(tensor=2),
    "tensor 2 x data 2": MeshShape(data=2, tensor=2),
    "tensor 3": MeshShape(tensor=3),
    "pipeline 2": MeshShape(pipeline=2),
    "pipeline 2 x data 2": MeshShape(pipeline=2, data=2),
    "pipeline 2 x tensor 2": MeshShape(pipeline=2, tensor=2),
    "all": MeshShape(pipeline=2, data=2, tensor=2),
}
FEW = ("tensor 2 x data 2", "all")


def alone(shape: MeshShape, **recipe: Any) -> TrainingRun:
    """Train the same steps with data parallelism only. Returns the run of rank 0."""
    return train(MeshShape(data=shape.data), Recipe(**recipe))[0]


@pytest.mark.parametrize("mesh", sampled(FEW, "all"))
def test_all_stages_have_the_same_bits(mesh: str) -> None:
    """All ZeRO stages train bitwise the same, and up to rounding as data parallelism alone does."""
    shape, first = MESHES[mesh], list[TrainingRun]()
    expected = alone(shape, tied=True)
    for zero in STAGES[:4]:
        courses = train(shape, Recipe(zero, tied=True))
        first = first or courses
        for course, other in zip(courses, first, strict=True):
            same(course, other)
            close(course, expected)


@matrix(mesh=list(MESHES), zero=STAGES, tied=[False, True], accumulate=[1, 3])
def test_any_mesh_trains_as_data_alone(mesh: str, zero: dict[str, Any], tied: bool, accumulate: int) -> None:
    shape = MESHES[mesh]
    expected = alone(shape, tied=tied, accumulate=accumulate)
    for course in train(shape, Recipe(zero, tied=tied, accumulate=accumulate)):
        close(course, expected)


@matrix(zero=STAGES, data=[1, 2, 3])
def test_stages_of_untied_parameters_change_no_bit(zero: dict[str, Any], data: int) -> None:
    shape = MeshShape(pipeline=2, data=data)
    expected = alone(shape, zero=zero)
    courses = train(shape, Recipe(zero))
    assert courses[-1].losses == train(MeshShape(data=data), Recipe(zero))[-1].losses
    for course in courses:
        same(course, expected)


# ------------------------------------------------------------------------------------------------------- checkpoints


@matrix(
    saved=list(MESHES),
    loaded=["one rank", *MESHES],
    zeros=[({"stage": 3}, {"stage": 1}), ({"stage": 0}, {"stage": 3}), ({"stage": 2}, {"stage": 0})],
    tied=[False, True],
)
def test_checkpoints_load_under_other_meshes(
    saved: str, loaded: str, zeros: tuple[dict[str, Any], ...], tied: bool, tmp_path: Path
) -> None:
    """A checkpoint restores weights and optimizer states bit for bit on every rank of another mesh."""
    there = train(MESHES[saved], Recipe(zeros[0], tied=tied, num_steps=2), save=tmp_path)
    shape = MESHES.get(loaded, MeshShape())
    for course in train(shape, Recipe(zeros[1], tied=tied, num_steps=0), load=tmp_path):
        same(TrainingRun(weights=there[0].weights, states=there[0].states), course)


@pytest.mark.parametrize("mesh", sampled(FEW, "all"))
def test_each_copy_is_saved_once(mesh: str, tmp_path: Path) -> None:
    """A checkpoint has each element once, under the same names as a checkpoint of one rank."""
    train(MESHES[mesh], Recipe({"stage": 3}, tied=True), save=tmp_path / "one")
    train(MeshShape(), Recipe(tied=True), save=tmp_path / "other")
    one, other = open_stored(tmp_path / "one"), open_stored(tmp_path / "other")
    assert one.tensors.keys() == other.tensors.keys()
    for key, tensor in one.tensors.items():
        held = sum(chunk.box.num_elements for chunk in tensor.chunks if chunk.box is not None)
        assert held == math.prod(tensor.shape), key
    assert list(verify(one)) == []
    assert one.manifest["aliases"] == other.manifest["aliases"]
    groups = [key for key in one.values if key.startswith("optimizer.param_groups.0.params")]
    assert [one.value(key) for key in groups] == [other.value(key) for key in groups]


# -------------------------------------------------------------------------------------------------------- inspection


@pytest.mark.parametrize("mesh", sampled(FEW, "all"))
def test_what_is_looked_at_is_whole(mesh: str, tmp_path: Path) -> None:
    def look(engine: Engine, collectives: Collectives) -> Any:
        engine.export(tmp_path)
        state = engine.state_dict()
        local = {name: tuple(param.shape) for name, param in engine.module.named_parameters()}
        with engine.gathered(engine.module.blocks, modify=True):
            for param in engine.module.blocks.parameters():
                if collectives.mesh.rank == 0:
                    _double(param)
        after = {name: tuple(param.shape) for name, param in engine.module.named_parameters()}
        assert local == after
        return state, engine.state_dict()

    courses = train(MESHES[mesh], Recipe({"stage": 3}), look=look)
    state, doubled = courses[0].seen
    assert all(course.seen == ({}, {}) for course in courses[1:])
    for name, weight in courses[0].weights.items():
        assert torch.equal(state[name], weight), name
        assert torch.equal(doubled[name], weight * 2 if name.startswith("blocks") else weight), name
    exported = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(exported[name], weight) for name, weight in courses[0].weights.items())


def _double(param: Tensor) -> None:
    with torch.no_grad():
        param.mul_(2)


@pytest.mark.parametrize("mesh", sampled(FEW, "all"))
def test_closing_gives_whole_parameters_back(mesh: str) -> None:
    def look(engine: Engine, collectives: Collectives) -> dict[str, Tensor]:
        engine.close(whole=True)
        assert not any(map(is_off_stage, engine.module.parameters()))
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}

    for course in train(MESHES[mesh], Recipe({"stage": 3}), look=look):
        assert all(torch.equal(course.seen[name], weight) for name, weight in course.weights.items())


# ----------------------------------------------------------------------------------------------- initial values


def test_every_rank_starts_from_its_share_of_rank_0s_values() -> None:
    """Every rank starts from rank 0's values, though each rank built a model with other values."""
    expected = Recipe().model(0)
    for course in train(MESHES["all"], Recipe({"stage": 3}, num_steps=0)):
        for name, param in expected.named_parameters():
            assert torch.equal(course.weights[name], param), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_meta_is_initialized_whole(tied: bool) -> None:
    def on_meta() -> Model:
        with torch.device("meta"):
            return Resettable(tied=tied)

    courses = train(MESHES["all"], Recipe({"stage": 3}, num_steps=0, build=on_meta))
    for course in courses:
        assert all(torch.equal(weight, courses[0].weights[name]) for name, weight in course.weights.items())
    weights = courses[0].weights
    assert torch.equal(weights["blocks.1.gain"], torch.ones(4))
    fused = weights["blocks.3.fused.weight"]
    assert fused.abs().max() > 0.9 * WIDTH**-0.5  # the bound of nn.Linear for all columns
    assert not torch.equal(fused[: len(fused) // 2], fused[len(fused) // 2 :])
    down = weights["blocks.3.down.weight"]  # split by columns: a part of them would have a larger bound
    assert 0.9 * HIDDEN**-0.5 < down.abs().max() <= HIDDEN**-0.5


@matrix(mesh=FEW, stage=[1, 3])
def test_weights_are_read_in_parts(mesh: str, stage: int, tmp_path: Path) -> None:
    expected = Recipe().model(0)
    save_file(dict(expected.state_dict()), tmp_path / "model.safetensors")

    def on_meta() -> Model:
        with torch.device("meta"):
            return Resettable()

    recipe = Recipe({"stage": stage}, num_steps=0, build=on_meta, weights=tmp_path)
    for course in train(MESHES[mesh], recipe):
        assert all(torch.equal(course.weights[name], param) for name, param in expected.named_parameters())


def test_models_that_differ_are_refused() -> None:
    sizes = iter([4, 4, 4, 5])
    with pytest.raises(PartitaError, match="the ranks' models differ: .*'blocks.4"):
        train(MESHES["tensor 2 x data 2"], Recipe(build=lambda: Model(next(sizes))))


def test_a_share_of_another_shape_is_refused() -> None:
    def halved() -> Model:
        model = Model()
        model.shares[id(model.first.weight)] = Share(Place((3, 3)))
        return model

    with pytest.raises(
        ConfigError, match=r"'first.weight' has the shape \(16, 16\), but its share is for shape \(3, 3\)"
    ):
        train(MeshShape(), Recipe(build=halved))


# ------------------------------------------------------------------------------------------------------- a step


@matrix(mesh=FEW, zero=STAGES, tied=[False, True])
def test_bytes_are_the_plans(mesh: str, zero: dict[str, Any], tied: bool) -> None:
    """The bytes sent in a step are those of the plan, except all-reduces, which include those of this test's axes."""

    def expected(engine: Engine, collectives: Collectives) -> Any:
        return step_traffic(engine.units, StepShape())

    for course in train(MESHES[mesh], Recipe(zero, tied=tied), look=expected):
        sent = {key: count for key, count in course.traffic[-1].rows.items() if key.collective != "all_reduce"}
        assert sent == course.seen.rows


@pytest.mark.parametrize("mesh", ["tensor 2 x data 2", "tensor 3"])
@pytest.mark.parametrize("stage", [1, 3])
def test_updates_in_backward_sum_copies_first(mesh: str, stage: int) -> None:
    """With updates in backward, gradients of copies are summed first, and every copy counts once in the norm."""
    shape, config = MESHES[mesh], {"precision": {"gradients": "in_backward"}, "clip_grad_norm": None}
    expected = alone(shape, zero={"stage": stage}, config=config)
    for course in train(shape, Recipe({"stage": stage}, config)):
        close(course, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_states_on_the_host_train_alike(stage: int) -> None:
    shape = MESHES["all"]
    offload = {"parameters": "host" if stage == 3 else "none", "optimizer": "host"}
    expected = train(shape, Recipe({"stage": stage}, tied=True))
    for course, other in zip(
        train(shape, Recipe({"stage": stage, "offload": offload}, tied=True)), expected, strict=True
    ):
        close(course, other)


@pytest.mark.parametrize("mesh", sampled(FEW, "all"))
def test_a_gradient_that_is_not_finite_skips_the_update_on_all_ranks(mesh: str) -> None:
    """A non-finite gradient skips the update on all ranks, which all report the same cause."""

    def look(engine: Engine, collectives: Collectives) -> Any:
        model = engine.module
        with engine.gathered(model.last, modify=True), torch.no_grad():
            model.last.weight.fill_(math.inf)
        run_backward(engine, collectives, collectives.mesh.coordinate("data"), 7)
        return engine.step(), engine._parts.updater.culprit

    with pytest.warns(UserWarning, match="the update is skipped"):
        courses = train(MESHES[mesh], Recipe({"stage": 3}, num_steps=1), look=look)
    results = {course.seen[0].skipped for course in courses}
    culprits = {course.seen[1] for course in courses}
    assert results == {True}
    assert len(culprits) == 1
    assert "is not finite" in culprits.pop()
