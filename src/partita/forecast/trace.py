"""What a forward and a backward keep, compute and send, block by block: found by running the model without data.

Tensors are on the ``meta`` device: they have shapes and no memory. So any model works whose forward depends on shapes
alone. Of blocks in a row that are alike, two run and stand for the others. Attention is taken for a fused kernel's.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from partita.errors import ConfigError, PartitaError
from partita.plan.share import NO_SHARES, Shares
from partita.planner.group_units import find_blocks

# For every block of a model, its name and the block that stands for it.
Stand = list[tuple[str, nn.Module]]
# Of blocks in a row that are alike, how many run.
RUN = 2
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass
class Work:
    """``flops`` of matrix products; ``moved_bytes`` that all other operators read and write; ``sent_bytes`` to other
    ranks, while the caller waits.
    """

    flops: int = 0
    moved_bytes: int = 0
    sent_bytes: int = 0
    num_ops: int = 0


@dataclass
class Piece:
    """Of a block, or of what runs before or after all blocks.

    ``kept_bytes`` stay from its forward to its backward, its output among them; the peaks are above what was there when
    its forward began, and above what all forwards up to its own have kept. ``output_bytes``: of what it returns.
    """

    kept_bytes: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    output_bytes: int = 0
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)


@dataclass(frozen=True)
class Trace:
    """``names`` are all blocks, in order; ``piece_of`` those of them (alike ones have the same). ``before`` and
    ``after`` run around them: embeddings; output layer and loss, whose backward counts as ``after.backward`` and whose
    ``forward_peak`` is of both.
    """

    before: Piece
    names: tuple[str, ...]
    blocks: tuple[Piece, ...]
    after: Piece

    def peak(self, start: int = 0, stop: int | None = None, kept_forwards: int = 1) -> int:
        """Bytes of activations at their most, of the blocks ``[start, stop)``, with what runs before the first and
        after the last if it is among them.

        Args:
            kept_forwards: micro-batches whose forwards are kept at once.
        """
        stop = len(self.blocks) if stop is None else stop
        live = self.before.kept_bytes if start == 0 else 0
        most = self.before.forward_peak if start == 0 else 0
        kept = [live]
        for piece in self.blocks[start:stop]:
            most = max(most, live + piece.forward_peak)
            live += piece.kept_bytes
            kept.append(live)
        if stop == len(self.blocks):
            most = max(most, live + self.after.forward_peak)
        for piece, below in zip(reversed(self.blocks[start:stop]), reversed(kept), strict=False):
            most = max(most, below + piece.backward_peak)
        if start == 0:
            most = max(most, self.before.backward_peak)
        return most + (kept_forwards - 1) * live

    def scaled(self, factor: float) -> "Trace":
        """As many samples more, or fewer: what a trace of one of them says of several."""
        made = dict[int, Piece]()

        def times(piece: Piece) -> Piece:
            if id(piece) not in made:
                sizes = (piece.kept_bytes, piece.forward_peak, piece.backward_peak, piece.output_bytes)
                made[id(piece)] = Piece(
                    *(int(size * factor) for size in sizes),
                    _times(piece.forward, factor),
                    _times(piece.backward, factor),
                )
            return made[id(piece)]

        return Trace(times(self.before), self.names, tuple(map(times, self.blocks)), times(self.after))


def _times(work: Work, factor: float) -> Work:
    sizes = (work.flops, work.moved_bytes, work.sent_bytes)
    return Work(*(int(size * factor) for size in sizes), work.num_ops)


class Sends:
    """A group of ``size`` ranks on paper: this rank's part stands for every other's, and what it sends is counted."""

    def __init__(self, size: int, index: int = 0) -> None:
        self.size, self.index = size, index
        self.sent_bytes = 0

    def sum(self, tensor: Tensor, purpose: str) -> Tensor:
        self.sent_bytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        return tensor.clone()

    def gather(self, part: Tensor, shapes: Sequence[Sequence[int]], purpose: str) -> list[Tensor]:
        part = part.contiguous()
        self.sent_bytes += (self.size - 1) * part.nbytes
        return [part if at == self.index else part.new_empty(tuple(shape)) for at, shape in enumerate(shapes)]


def trace(
    model: nn.Module,
    stand: Stand,
    batch: Any,
    dtypes: Mapping[int, torch.dtype],
    shares: Shares = NO_SHARES,
    sends: Sends | None = None,
) -> Trace:
    """Run one forward and backward without data. The model is left as it was.

    Args:
        stand: of every block of the whole model, as :func:`shortened` gives them.
        batch: what the forward takes, on the ``meta`` device: a mapping or a tuple of arguments.
        dtypes: of each parameter, by id, as it is computed with.
        shares: what of each parameter this rank has, where it is a part.
        sends: counts what the model sends meanwhile.

    Raises:
        ConfigError: the forward cannot be run without data.
    """
    with _on_paper(model, dtypes, shares):
        recorder = _Recorder(list(dict.fromkeys(block for _, block in stand)), sends or Sends(1))
        compute = next(iter(dtypes.values()), torch.float32)
        given = tree_map_only(Tensor, lambda x: x.to(compute) if x.is_floating_point() else x, batch)
        try:
            with _fused_attention(), recorder:
                output = model(**given) if isinstance(given, Mapping) else model(*given)
                loss = loss_of(output)
                del output
                loss.backward()
                del loss
        except (PartitaError, KeyboardInterrupt):
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"model: the forward of {type(model).__name__} cannot be traced without data ({lines[0]}); a forward "
                "whose shapes depend on values has to be measured: partita train with memory reports"
            ) from error
        finally:
            recorder.remove()
    return recorder.result(stand)


def loss_of(output: Any) -> Tensor:
    """What backward begins with: ``output.loss``, a scalar, or the sum of all outputs."""
    named = getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        raise ConfigError("model: its forward returns no tensor with a gradient; return a loss, or outputs")
    return (
        tensors[0] if tensors[0].dim() == 0 else sum((x.float().sum() for x in tensors[1:]), tensors[0].float().sum())
    )


# ----------------------------------------------------------------------------------------------------- fewer blocks


@contextmanager
def shortened(model: nn.Module) -> Iterator[Stand]:
    """Inside it, :data:`RUN` are left of each row of blocks that are alike. Gives, for every block of the whole model,
    its name and the block that stands for it.
    """
    rows = list[list[tuple[str, nn.Module]]]()
    for name, block in find_blocks(model):
        if rows and _parent(rows[-1][0][0]) == _parent(name) and _alike(rows[-1][-1][1], block):
            rows[-1].append((name, block))
        else:
            rows.append([(name, block)])
    before = dict[int, tuple[nn.Module, dict[str, nn.Module | None]]]()
    stand: Stand = []
    try:
        for row in rows:
            container = model.get_submodule(_parent(row[0][0]))
            left = row[:RUN] if isinstance(container, nn.ModuleList | nn.Sequential) else row
            before.setdefault(id(container), (container, dict(container._modules)))
            for name, block in row[len(left) :]:
                container._modules = {key: child for key, child in container._modules.items() if child is not block}
            stand += [(name, left[min(at, len(left) - 1)][1]) for at, (name, _) in enumerate(row)]
        for container, _ in before.values():
            if isinstance(container, nn.ModuleList):  # which is indexed by position
                container._modules = {str(at): child for at, child in enumerate(container._modules.values())}
        yield stand
    finally:
        for container, modules in before.values():
            container._modules = modules


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two blocks are of one class and have parameters of the same shapes, that train alike."""
    if type(one) is not type(other):
        return False
    first, second = (
        [(name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters()] for block in (one, other)
    )
    return first == second


@contextmanager
def _on_paper(model: nn.Module, dtypes: Mapping[int, torch.dtype], shares: Shares) -> Iterator[None]:
    """The model with a rank's parameters, as they are computed with, on the ``meta`` device."""
    made, before = dict[int, Tensor](), list[tuple[dict[str, Any], dict[str, Any]]]()
    try:
        for module in model.modules():
            before += [(module._parameters, dict(module._parameters)), (module._buffers, dict(module._buffers))]
            for name, param in module._parameters.items():
                if param is None:
                    continue
                if id(param) not in made:
                    share = shares.get(id(param))
                    shape = share.place.sizes if share is not None else param.shape
                    values = torch.empty(shape, dtype=dtypes.get(id(param), param.dtype), device="meta")
                    made[id(param)] = fake = nn.Parameter(values, requires_grad=param.requires_grad)
                    if fake.requires_grad:
                        fake.register_post_accumulate_grad_hook(_drop)
                module._parameters[name] = made[id(param)]  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="meta")
        yield
    finally:
        for own, values_before in before:
            own.update(values_before)


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Attention as devices compute it: where there is no device, torch would make the whole matrix of scores.

    It is put in torch's place, as backward, which may run forwards again, has a thread in which modes are off.
    """
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = partial(_fused, own)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def _fused(
    own: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **settings: Any,
) -> Tensor:
    if query.shape[-1] != value.shape[-1] or query.dim() != 4:
        return own(query, key, value, attn_mask, dropout_p, is_causal, **settings)
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)  # what is added to the scores
    scale = settings.get("scale")
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )[0]
    return attended


def _drop(param: Tensor) -> None:
    """A gradient goes where gradients rest as soon as it is there; what that takes is another estimate's."""
    param.grad = None


# -------------------------------------------------------------------------------------------------------- recording


class _Recorder(TorchDispatchMode):
    """Follows live bytes and work through the pieces of a forward and a backward.

    Where it is: ``(phase, number of the block)``; before the first block's forward the number is -1, from the last
    one's end to its backward it is the number of blocks.
    """

    def __init__(self, blocks: Sequence[nn.Module], sends: Sends) -> None:
        super().__init__()
        self._blocks, self._sends = blocks, sends
        self._alive: dict[int, int] = {}
        self._live, self._seen_sent = 0, 0
        self._at: tuple[str, int] = ("forward", -1)
        self._peaks = defaultdict[tuple[str, int], int](int)
        self._work = defaultdict[tuple[str, int], Work](Work)
        self._entered, self._left, self._outputs = (dict[int, int]() for _ in range(3))
        self._handles = [
            handle
            for number, block in enumerate(blocks)
            for handle in (
                block.register_forward_pre_hook(self._entering(number), with_kwargs=True),
                block.register_forward_hook(self._leaving(number)),
            )
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _entering(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if number in self._entered:
                raise ConfigError(
                    f"model: the block {type(module).__name__} (number {number}) runs twice in one forward: blocks that "
                    "are used several times cannot be told apart in a trace"
                )
            self._entered[number] = self._live
            self._go("forward", number)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                    leaf.register_hook(lambda _: self._back_out_of(number))
                    break

        return hook

    def _leaving(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._left[number] = self._live
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._outputs[number] = sum(leaf.nbytes for leaf in leaves)
            self._go("forward", len(self._blocks) if number == len(self._blocks) - 1 else number)
            for leaf in leaves:
                if leaf.requires_grad:
                    leaf.register_hook(lambda _: self._go("backward", number))
                    break

        return hook

    def _back_out_of(self, number: int) -> None:
        self._go("backward", number - 1)

    def _go(self, phase: str, number: int) -> None:
        self._count_sent()
        self._at = (phase, number)
        self._peaks[self._at] = max(self._peaks[self._at], self._live)

    def _count_sent(self) -> None:
        self._work[self._at].sent_bytes += self._sends.sent_bytes - self._seen_sent
        self._seen_sent = self._sends.sent_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {leaf.untyped_storage()._cdata for leaf in given}
        result = func(*args, **kwargs)
        made = 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self._alive:
                    made += storage.nbytes()
                    self._add(storage)
        self._note(func, args, kwargs, result, given, made)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._alive[key] = num_bytes
        self._live += num_bytes
        self._peaks[self._at] = max(self._peaks[self._at], self._live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._live -= self._alive.pop(key)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, given: Sequence[Tensor], made: int) -> None:
        work = self._work[self._at]
        packet = func._overloadpacket
        name = packet.__name__
        if name == _ATTENTION:
            work.flops += sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
        elif name == f"{_ATTENTION}_backward":
            work.flops += sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)
        elif packet in flop_registry:
            work.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        elif made or name.endswith("_"):
            work.moved_bytes += made + sum(leaf.nbytes for leaf in given)
        else:
            return
        work.num_ops += 1

    def result(self, stand: Stand) -> Trace:
        """What was recorded, for every block of the whole model: (its name, the block that stands for it)."""
        self._count_sent()
        num, pieces = len(self._blocks), dict[nn.Module, Piece]()
        for number, block in enumerate(self._blocks):
            entered = self._entered[number]
            left = self._entered[number + 1] if number + 1 < num else self._left[number]
            peaks = self._peaks["forward", number] - entered, self._peaks["backward", number] - left
            work = self._work["forward", number], self._work["backward", number]
            pieces[block] = Piece(left - entered, *peaks, self._outputs[number], *work)
        peaks, work = (self._peaks["forward", -1], self._peaks["backward", -1]), self._work
        before = Piece(self._entered.get(0, 0), *peaks, 0, work["forward", -1], work["backward", -1])
        after = Piece(0, self._peaks["forward", num] - self._left.get(num - 1, 0), 0, 0, work["forward", num], Work())
        return Trace(before, tuple(name for name, _ in stand), tuple(pieces[block] for _, block in stand), after)
