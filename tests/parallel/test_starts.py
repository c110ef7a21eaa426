"""Errors of ``partita.initialize`` under the parallel axes, and the state of a model after a failed start."""

import pytest
import torch

import partita
from partita import ConfigError
from partita.checkpoint.checkpoints import Checkpoints
from partita.comm.simulated import Requests
from partita.layout import blueprint
from partita.table.planned_bucket import PlannedBucket
from tests.kit.ranks import on_ranks
from tests.kit.training import rank
from tests.parallel import stages, zoo


def fails_late(axis: str) -> tuple[bool, str]:
    """Fail a start after sharding; return whether the modules are restored, and the error of the next start."""
    model = stages.build("llama")
    own = {name: type(module).forward for name, module in model.named_modules()}
    config = {"parallel": {axis: 2}, "zero": {"stage": 3}}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no room"):
        patch.setattr(Checkpoints, "__init__", _no_room)
        partita.initialize(model, config)
    found = all(module.forward.__func__ is own[name] for name, module in model.named_modules())
    try:
        partita.initialize(model, config)
    except ConfigError as error:
        return found, str(error)
    return found, ""


def _no_room(*_: object) -> None:
    raise RuntimeError("no room")


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_model_cut_by_a_start_that_failed_is_not_taken_for_a_whole_one(axis: str) -> None:
    for restored, message in on_ranks(2, fails_late, axis):
        assert restored
        assert "or failed to start after sharding it): close that one first, or build the" in message


def closed_and_opened() -> None:
    config = {"parallel": {"tensor": 2}}
    for whole in (True, False):
        model = zoo.build("llama")
        partita.initialize(model, config).close(whole=whole)
        if whole:
            partita.initialize(model, config).close()
        with pytest.raises(ConfigError, match="was closed while the parameter was sharded"):
            partita.initialize(model, config)


def test_shares_of_a_closed_engine_are_not_taken_for_whole_parameters() -> None:
    on_ranks(2, closed_and_opened)


def differing_buckets() -> str:
    """Return the error of a start in which rank 0 has larger buckets, as it may if its shards are smaller."""
    config = {"parallel": {"tensor": 2}, "precision": {"gradients": "in_backward"}}
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 0:
            patch.setattr(blueprint, "share_buckets", lambda found: [PlannedBucket(tuple(found))])
        try:
            partita.initialize(zoo.build("llama"), config)
        except ConfigError as error:
            return str(error)
    return ""


def test_updates_in_backward_need_the_same_buckets_on_all_ranks() -> None:
    for message in on_ranks(2, differing_buckets):
        assert "in_backward: parallel.tensor splits parameters unevenly" in message


def course_of_meta() -> list[float]:
    """Return the losses of a model on the meta device, which the engine initializes."""
    with torch.device("meta"):
        model = stages.build("decoder")
    config = {"parallel": {"pipeline": 2}, "zero": {"stage": 3}, "batch": {"accumulate": 2}}
    with partita.initialize(model, config) as engine:
        batch = stages.batch("decoder", 0)
        return [engine.train_batch([batch] * 2).item() for _ in range(3)]


def test_stages_of_a_model_without_values_are_initialized() -> None:
    first, second = on_ranks(2, course_of_meta)
    assert first == second
    assert 4.0 < first[0] < 6.0
    assert first[2] < first[0]


def test_a_simulated_stage_is_asked_for_what_the_next_one_lacks() -> None:
    requests, first, second = Requests(), torch.tensor([1, 0, 0]), torch.tensor([0, 1, 1])
    requests.note(2, second)
    requests.note(1, first)
    for index, expected in ((2, second), (1, first), (0, second)):
        found = requests.find(index, 3)
        assert found is not None
        assert torch.equal(found, expected)
    assert requests.find(1, 4) is None
