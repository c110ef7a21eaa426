"""Simulated ranks, without processes, whose parameters are parts of larger ones: all that checkpoints use of a rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.checkpoint.backend import Backend, Request, Stored
from partita.checkpoint.content import Content
from partita.checkpoint.load import Loading, LoadOptions
from partita.layout.parameters import ParameterInfo
from partita.memory.ledger import Ledger
from partita.memory.tiers import StateMemory
from partita.optim.states import OptimizerStates, Views
from partita.sharding.parameter import Member
from partita.sharding.segment import Segment
from partita.sharding.sync_states import SyncStates
from partita.table.mesh_shape import MeshShape
from partita.table.place import Place, even
from partita.table.planned import PlannedSegment
from partita.table.residence import FP32
from partita.table.share import Share
from partita.table.span import Entry, build_layout
from partita.table.state_plan import Encodings, Tiers, preset

CPU = torch.device("cpu")
STATES = ("exp_avg", "exp_avg_sq")
SHAPES = {"rows": (6, 150), "columns": (3, 700), "images": (8, 4, 3, 3), "norm": (5,), "scale": ()}
# The dimension by which each parameter is split over tensor ranks; other parameters are replicated.
Cut = Mapping[str, int]
BY_ROWS: Cut = {"rows": 0, "columns": 1, "images": 0}
BY_COLUMNS: Cut = {"rows": 1, "columns": 1, "images": 1}


def share_of(name: str, cut: Cut, index: int, num: int) -> Share:
    """Return the share of tensor rank ``index`` of ``num``: every ``num``-th of ``2 * num`` ranges."""
    shape = SHAPES[name]
    if name not in cut:
        return Share(Place(shape), averaged=("tensor",))
    ranges = even(shape[cut[name]], 2 * num)
    return Share(Place(shape, cut[name], tuple(own for own in ranges[index::num] if own[0] < own[1])))


@dataclass
class Rank:
    """All that checkpoints use of a rank."""

    content: Content
    mesh: Any
    optimizer: torch.optim.Optimizer


def rank_of(number: int, mesh: MeshShape, cut: Cut, values: Mapping[str, Tensor], stage: str = "zero3") -> Rank:
    """Return rank ``number`` of a mesh.

    Args:
        values: global parameters, and their optimizer states as ``<parameter> <state>``.
    """
    shares = {name: share_of(name, cut, mesh.coordinate(number, "tensor"), mesh.tensor) for name in SHAPES}
    held = {key: shares[key.split()[0]].place.take(value) for key, value in values.items()}
    entries = [Entry(name, SHAPES[name], FP32, True, of.place, of.copies.on(mesh)) for name, of in shares.items()]
    memory = StateMemory(CPU, Ledger(), lambda: pytest.fail("nothing rests on disk here"))
    segments, members = [], []
    for layout in build_layout(entries, mesh.data, lambda copies: mesh.group_size(copies.axes)):
        row = preset(stage, Encodings(), Tiers(), mesh, layout.copies)
        segment = Segment(PlannedSegment(layout, row, mesh), number)
        segment.full = torch.zeros(layout.padded)
        for span in layout.spans:
            local = held[span.fqn]
            if span.fqn == "images" and not span.place.is_part:
                local = local.contiguous(memory_format=torch.channels_last)
            members.append(Member(ParameterInfo(nn.Parameter(local), [span.fqn]), span, segment))
            segment.full[span.offset :][: span.num_elements] = members[-1].flat(local)
        segment.keep_stored(memory)
        segments.append(segment)
    unit: Any = SimpleNamespace(segments=segments, members=members, always_unsharded=True)
    optimizer = torch.optim.AdamW([member.param for member in members])
    for member in members:
        states = {state: held[f"{member.fqn} {state}"] for state in STATES if f"{member.fqn} {state}" in held}
        if states:
            optimizer.state[member.param] = {"step": torch.tensor(3.0), **states}
    views = Views([unit], memory)
    views.attach(optimizer)
    at: Any = SimpleNamespace(shape=mesh, rank=number, num_ranks=mesh.num_ranks, device=CPU, timeout_s=1.0)
    at.is_first_replica = lambda axes=(): mesh.is_first_replica(number, axes)
    collectives = SimpleNamespace(mesh=at, all_ranks=SimpleNamespace(size=mesh.num_ranks))
    collectives.group = lambda axes: SimpleNamespace(size=mesh.group_size(axes))
    model = nn.Module()
    for member in members:
        model.register_parameter(member.fqn, member.param)
    runtime: Any = SimpleNamespace(units=[unit], model=model, collectives=collectives)
    runtime.unsharder = SimpleNamespace(hold=lambda units: None, release_hold=lambda units: None)
    runtime.gradient_group = SimpleNamespace(index=mesh.group_index(number, ("data",)))
    runtime.gradient_group.size = mesh.data
    runtime.runs_all = True
    runtime.members = lambda: [(unit, member) for member in members]
    runtime.reducer = SimpleNamespace(sync_states=SyncStates([], None))
    runtime.publisher = SimpleNamespace(deliver=lambda *_, **__: None)  # nothing reads the stored parameters
    updater: Any = SimpleNamespace(views=views, optimizer=optimizer, states=OptimizerStates(optimizer, views, memory))
    updater.listeners = ()
    updater.wait_for_updates = updater.take_written = lambda: None
    return Rank(Content(runtime, updater), at, optimizer)


def random_values() -> dict[str, Tensor]:
    torch.manual_seed(torch.seed())
    names = [*SHAPES, *(f"{name} {state}" for name in SHAPES for state in STATES)]
    return {name: torch.randn(SHAPES[name.split()[0]]) for name in names}


def save(ranks: Sequence[Rank], backends: Sequence[Backend], folder: Path) -> None:
    """Save as the ranks' savers do, in the foreground."""
    request = Request(folder, step=3, keep=1, background=False, about={}, aliases={})
    drafts = [backend.draft(request, "one") for backend in backends]
    contents = [rank.content.segments() for rank in ranks]
    for draft, found in zip(drafts, contents, strict=True):
        boxes = [box for content in found for box in content.boxes]
        draft.begin(boxes, [value for content in found for value in content.others])
    for draft in drafts:
        draft.join()
    for rank, draft, found in zip(ranks, drafts, contents, strict=True):
        draft.write(rank.content.batches(found))
    drafts[0].commit()
    for draft in drafts:
        draft.leave()


def check_loaded(rank: Rank, expected: Rank, stored: Stored) -> None:
    """Load into a rank; compare its weights and optimizer states with those of ``expected``."""
    training: Any = SimpleNamespace(own_buffers=lambda stored: {})
    loading = Loading(rank.content, training, stored, LoadOptions())
    loading.check()
    assert loading.fill_segments(loading.plan()) is None
    for mine, theirs in zip(rank.content.updater.views, expected.content.updater.views, strict=True):
        assert torch.equal(mine.tensor, theirs.tensor), mine.member.fqn
        state, right = rank.optimizer.state[mine.tensor], expected.optimizer.state[theirs.tensor]
        assert state.keys() == right.keys()
        assert all(torch.equal(state[key].view(-1), right[key].view(-1)) for key in state), mine.member.fqn
