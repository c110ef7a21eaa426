"""Parameters of which each rank holds a box of a larger one, flat-sharded again over data: what is saved are the global
tensors, and they load under any other cut. No process group: one process is each rank in turn.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita import PartitaError
from partita.checkpoint.backend import Request
from partita.checkpoint.content import Content
from partita.checkpoint.format.backend import FileBackend
from partita.checkpoint.load import Loading, Wanted
from partita.checkpoint.offline import verify
from partita.memory.ledger import Ledger
from partita.memory.tiers import StateMemory
from partita.optim.views import Views
from partita.plan.box import Box
from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import FP32
from partita.plan.span import Entry, lay_out
from partita.plan.state_plan import Encodings, Tiers, preset
from partita.sharding.group_units import Holding
from partita.sharding.unit import Member, Segment

CPU = torch.device("cpu")
STATES = ("exp_avg", "exp_avg_sq")
SHAPES = {"rows": (6, 150), "columns": (3, 700), "images": (8, 4, 3, 3), "norm": (5,), "scale": ()}
# The dimension along which each is cut over tensor; the others are on every rank.
Cut = Mapping[str, int]
BY_ROWS: Cut = {"rows": 0, "columns": 1, "images": 0}
BY_COLUMNS: Cut = {"rows": 1, "columns": 1, "images": 1}


def box_of(name: str, cut: Cut, index: int, num: int) -> Box:
    """The box of rank ``index`` of ``num`` along tensor."""
    whole = Box.whole(SHAPES[name])
    if name not in cut:
        return whole
    offsets, sizes, dim = list(whole.offsets), list(whole.sizes), cut[name]
    sizes[dim] //= num
    offsets[dim] = index * sizes[dim]
    return Box(tuple(offsets), tuple(sizes))


@dataclass
class Rank:
    """What checkpoints see of a rank."""

    content: Content
    backend: FileBackend
    optimizer: torch.optim.Optimizer


def rank_of(number: int, mesh: MeshShape, cut: Cut, values: Mapping[str, Tensor], stage: str = "zero3") -> Rank:
    """``values``: global parameters, and their states as ``<parameter> <state>``."""
    boxes = {name: box_of(name, cut, mesh.coordinate(number, "tensor"), mesh.tensor) for name in SHAPES}
    held = {key: value[boxes[key.split()[0]].slices].clone() for key, value in values.items()}
    layout = lay_out("unit", [Entry(name, box.sizes, FP32, True) for name, box in boxes.items()], mesh.data).segments[0]
    spans = tuple(replace(span, box=boxes[span.fqn], shape=SHAPES[span.fqn]) for span in layout.spans)
    segment = Segment(replace(layout, spans=spans), preset(stage, Encodings(), Tiers(), mesh), mesh, number)
    members = []
    segment.full = torch.zeros(layout.padded)
    for span in spans:
        local = held[span.fqn]
        if span.fqn == "images":
            local = local.contiguous(memory_format=torch.channels_last)
        members.append(Member(Holding(nn.Parameter(local), [span.fqn]), span, segment))
        segment.full[span.offset :][: span.num_elements] = members[-1].flat(local)
    memory = StateMemory(CPU, Ledger(), lambda: pytest.fail("nothing rests on disk here"))
    segment.keep_rest(memory)
    unit: Any = SimpleNamespace(segments=[segment], members=members)
    optimizer = torch.optim.AdamW([member.param for member in members])
    for member in members:
        states = {state: held[f"{member.fqn} {state}"] for state in STATES if f"{member.fqn} {state}" in held}
        if states:
            optimizer.state[member.param] = {"step": torch.tensor(3.0), **states}
    views = Views([unit], memory)
    views.attach(optimizer)
    at: Any = SimpleNamespace(shape=mesh, rank=number, num_ranks=mesh.num_ranks, device=CPU, timeout_s=1.0)
    at.is_first_replica = lambda axes=(): mesh.is_first_replica(number, axes)
    runtime: Any = SimpleNamespace(units=[unit], model=nn.Module(), collectives=SimpleNamespace(mesh=at))
    runtime.gradient_group = SimpleNamespace(index=mesh.group_index(number, ("data",)))
    runtime.members = lambda: [(unit, member) for member in members]
    runtime.executor = SimpleNamespace(deliver=lambda *_: None)  # nothing looks at what rests
    updater: Any = SimpleNamespace(views=views, optimizer=optimizer)
    return Rank(Content(runtime, updater), FileBackend(at), optimizer)


def random_values() -> dict[str, Tensor]:
    torch.manual_seed(torch.seed())
    names = [*SHAPES, *(f"{name} {state}" for name in SHAPES for state in STATES)]
    return {name: torch.randn(SHAPES[name.split()[0]]) for name in names}


def save(ranks: list[Rank], folder: Path) -> None:
    request = Request(folder, step=3, keep=1, background=False, about={}, aliases={})
    drafts = [rank.backend.draft(request, "one") for rank in ranks]
    contents = [rank.content.segments() for rank in ranks]
    for draft, found in zip(drafts, contents, strict=True):
        boxes, others = ([v for c in found for v in c.boxes], [v for c in found for v in c.others])
        draft.begin(boxes, others)
    for draft in drafts:
        draft.join()
    for rank, draft, found in zip(ranks, drafts, contents, strict=True):
        draft.write(rank.content.batches(found))
        draft.leave()
    drafts[0].commit()


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
    save([rank_of(number, mesh, cut, values, stage) for number in range(mesh.num_ranks)], tmp_path)
    stored = FileBackend(SimpleNamespace(device=CPU)).open(tmp_path)  # type: ignore[arg-type]
    assert list(verify(stored)) == []
    for name in SHAPES:
        assert torch.equal(stored.value(f"model.{name}"), values[name]), name
        for state in STATES:
            assert torch.equal(stored.value(f"optimizer.state.{name}.{state}"), values[f"{name} {state}"]), name
    for number in range(other_mesh.num_ranks):
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        rank = rank_of(number, other_mesh, other_cut, zeros, stage)
        expected = rank_of(number, other_mesh, other_cut, values, stage)
        loading = Loading(rank.content, None, stored, Wanted())  # type: ignore[arg-type]
        loading.check()
        assert loading.fill_segments(loading.plan()) is None
        got, wanted = rank.content.updater.views, expected.content.updater.views
        for mine, theirs in zip(got, wanted, strict=True):
            assert torch.equal(mine.tensor, theirs.tensor), mine.member.fqn
            state, right = rank.optimizer.state[mine.tensor], expected.optimizer.state[theirs.tensor]
            assert state.keys() == right.keys()
            assert all(torch.equal(state[key].view(-1), right[key].view(-1)) for key in state), mine.member.fqn


def test_8_bit_states_of_a_part_are_refused(tmp_path: Path) -> None:
    rank = rank_of(0, MeshShape(tensor=2), BY_ROWS, random_values())
    for view in rank.content.updater.views:
        rank.optimizer.state[view.tensor] = {"exp_avg_scale": torch.zeros(4)}
    with pytest.raises(PartitaError, match=r"'rows' is a part of a larger .* set precision\.moments to fp32"):
        rank.content.segments()
