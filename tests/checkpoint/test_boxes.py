"""Parameters split over tensor ranks and flat-sharded over data ranks are saved as global tensors, which load under
any other split. There is no process group: one process plays each rank in turn.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from partita import PartitaError
from partita.checkpoint.format.backend import FileBackend
from partita.checkpoint.offline import verify
from partita.inspection.full_tensors import FullTensors
from partita.table.mesh_shape import MeshShape
from tests.checkpoint.ranks import BY_COLUMNS, BY_ROWS, SHAPES, STATES, Cut, check_loaded, random_values, rank_of, save

MESHES = [
    (MeshShape(data=2, tensor=2), BY_ROWS, MeshShape(data=3), {}),
    (MeshShape(data=3), {}, MeshShape(data=2, tensor=2), BY_COLUMNS),
    (MeshShape(data=1, tensor=2), BY_ROWS, MeshShape(data=2, tensor=2), BY_COLUMNS),
]


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@pytest.mark.parametrize(("mesh", "cut", "other_mesh", "other_cut"), MESHES)
def test_global_tensors_are_saved_and_load_under_another_cut(
    mesh: MeshShape, cut: Cut, other_mesh: MeshShape, other_cut: Cut, stage: str, tmp_path: Path
) -> None:
    values = random_values()
    ranks = [rank_of(number, mesh, cut, values, stage) for number in range(mesh.num_ranks)]
    backends = [FileBackend(rank.mesh) for rank in ranks]
    save(ranks, backends, tmp_path)
    stored = backends[0].open(tmp_path)
    assert list(verify(stored)) == []
    for name in SHAPES:
        assert torch.equal(stored.value(f"model.{name}"), values[name]), name
        for state in STATES:
            assert torch.equal(stored.value(f"optimizer.state.{name}.{state}"), values[f"{name} {state}"]), name
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for number in range(other_mesh.num_ranks):
        expected = rank_of(number, other_mesh, other_cut, values, stage)
        check_loaded(rank_of(number, other_mesh, other_cut, zeros, stage), expected, stored)


def test_whole_tensors_are_put_together() -> None:
    """Full tensors are sums of the tensor ranks' parts. Rank 1 runs first; rank 0 then adds what rank 1 sent."""
    mesh, values, sent = MeshShape(data=1, tensor=2), random_values(), list[Tensor]()
    found = dict[str, Tensor]()
    for number in (1, 0):
        rank = rank_of(number, mesh, BY_ROWS, values)
        runtime: Any = rank.content.runtime
        received = iter(sent)
        runtime.collectives.all_ranks.all_reduce = lambda flat: (
            sent.append(flat.clone()) if number else flat.add_(next(received))
        )
        for info, weight in FullTensors(runtime, rank.content.updater).weights(master=False):
            found[info.fqns[0]] = weight.clone()
    assert found.keys() == SHAPES.keys()
    assert all(torch.equal(found[name], values[name]) for name in SHAPES)
    assert len(sent) == len(BY_ROWS)


def test_8_bit_states_of_a_part_are_refused(tmp_path: Path) -> None:
    rank = rank_of(0, MeshShape(tensor=2), BY_ROWS, random_values())
    for view in rank.content.updater.views:
        rank.optimizer.state[view.tensor] = {"exp_avg_scale": torch.zeros(4)}
    with pytest.raises(PartitaError, match=r"'rows' is a part of a larger .* set precision\.moments to fp32"):
        rank.content.segments()
