"""Detection of a thread that is blocked in a collective of ``torch.distributed`` that the user's code called."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_TORCH, _PARTITA = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_C10D = distributed_c10d.__file__
# Prefixes of function names: in the first kind every rank waits for every other rank, in the second for the source.
_SYMMETRIC = ("barrier", "monitored_barrier", "all_", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base")
_FROM_SOURCE = ("broadcast", "scatter")


@dataclass(frozen=True)
class Blocked:
    """A thread that is inside ``torch.distributed.<name>``.

    Attributes:
        ranks: the ranks that the call waits for, as global ranks of the default group.
        caller: the file, line and function that called it.
    """

    name: str
    ranks: tuple[int, ...]
    caller: str


def blocked_in(frame: FrameType | None) -> Blocked | None:
    """Return the collective that blocks the thread whose innermost frame is ``frame``. None if the thread does
    something else, if partita made the call, or if it is not certain which ranks the call waits for.
    """
    if frame is None or frame.f_code.co_filename != _C10D:
        return None
    name, ranks = frame.f_code.co_name, _awaited(frame)
    outer = next((each for each in _caller_frames(frame) if not each.f_code.co_filename.startswith(_TORCH)), None)
    if not ranks or outer is None or outer.f_code.co_filename.startswith(_PARTITA):
        return None
    return Blocked(name, ranks, place_of(outer))


def place_of(frame: FrameType) -> str:
    """Format the file, line and function of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _awaited(frame: FrameType) -> tuple[int, ...]:
    name, values = frame.f_code.co_name, frame.f_locals
    group = values.get("group") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or values.get("async_op"):
        return ()
    ranks = dist.get_process_group_ranks(group)
    if name.startswith(_SYMMETRIC):
        return tuple(ranks)
    source = values.get("group_src")
    return (ranks[source],) if name.startswith(_FROM_SOURCE) and isinstance(source, int) else ()


def _caller_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
