"""Random numbers that do not depend on the mesh: dropout has the same masks however a model is split.

Each forward seeds torch's generators from a key: (seed, step, micro-batch, forward, data coordinate). Every block, and
every outermost module outside the blocks, derives its own seed from that one and from its name. So its random numbers
do not depend on the rank that runs it, or on the modules that ran there before. Every dropout module inside a block
also has its own seed: the numbers that attention draws for a rank's heads do not shift those of later modules.

Ranks that compute the same values draw the same numbers. Where each rank has a slice of a tensor (of the sequence,
inside the blocks), the rank's slice is part of the key, and each slice has its own masks. After each module, the states
of torch's generators are restored.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from partita.comm.group import Group
from partita.errors import PartitaError
from partita.layout.units import find_blocks
from partita.memory import accelerator
from partita.sharding.compiler import eager
from partita.sharding.hooks import Hook
from partita.table.mesh_shape import MeshShape

# A mark in the upper bits of the streams' seeds; the CPU generator uses the lower 32 bits.
_MARK, _MARK_AT = 0x5EED5, 40


class RandomStreams:
    """Seeds torch's generators around the modules of a model in training, until :meth:`remove`.

    Args:
        data: this rank's coordinate on the data axis.
        slice_key: the slice that this rank has of each tensor in the blocks (``"sequence 1"``); empty: the full tensor.
    """

    def __init__(self, model: nn.Module, seed: int, data: int, device: torch.device, slice_key: str = "") -> None:
        self._seed = seed
        self._data = data
        self._device = device
        self._step = self._micro_batch = self._forwards = 0
        self._calls = Counter[tuple[int, str]]()  # by the enclosing module's seed and the module's name
        self._task = -1  # the backward whose recomputed calls are counted; -1: a forward
        self._root = 0  # the seed of the running forward
        self._repeated = set[str]()  # names of modules that a forward calls several times
        self._active = list[tuple[nn.Module, States]]()  # the running modules, and the states to restore
        self._handles = list[RemovableHandle]()
        blocks = dict(find_blocks(model))
        for name, module in _with_streams(model, blocks):
            inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
            self._register(name, module, slice_key if inside else "")

    def begin_micro_batch(self, step: int, number: int) -> None:
        """Begin micro-batch ``number`` in the batch of a ``step``: the next forwards belong to it."""
        if (step, number) != (self._step, self._micro_batch):
            self._step = step
            self._micro_batch = number
            self._forwards = 0

    def remove(self) -> None:
        """Remove the hooks: modules draw from torch's generators as they are."""
        for handle in self._handles:
            handle.remove()

    def _register(self, name: str, module: nn.Module, slice_key: str) -> None:
        self._handles.append(module.register_forward_pre_hook(Hook(partial(self._begin, name, slice_key))))
        self._handles.append(module.register_forward_hook(Hook(self._end), always_call=True))

    @eager
    def _begin(self, name: str, slice_key: str, module: nn.Module, args: Any) -> None:
        if module.training and (number := self._number(name, slice_key)) is not None:
            self._active.append((module, _start(number, self._device)))

    @eager
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._active and self._active[-1][0] is module:
            _restore(self._active.pop()[1], self._device)

    def _number(self, name: str, slice_key: str) -> int | None:
        """Return the seed of a module's call; None if no forward of the model is running.

        When a forward is recomputed in backward, the generators have the states from before its first run, so their
        seed is again that of the enclosing module.

        Raises:
            PartitaError: a checkpoint recomputes a module that one forward calls several times.
        """
        enclosing, task = torch.initial_seed(), torch._C._current_graph_task_id()
        if not name and task == -1:
            self._calls.clear()
            self._forwards += 1
            self._root = _hash(self._seed, self._step, self._micro_batch, self._forwards, self._data)
            return self._root
        if enclosing >> _MARK_AT != _MARK:
            return None
        if task != self._task:
            self._task = task
            self._calls.clear()
        call = self._calls[enclosing, name]
        if task == -1 and call and enclosing == self._root:
            self._repeated.add(name)
        if task != -1 and name in self._repeated:
            raise PartitaError(
                f"seed: '{name}' is called several times in one forward, and the model's own activation checkpointing "
                "recomputes one of these calls in backward, whose random numbers are unknown: switch that "
                "checkpointing off (gradient_checkpointing_disable) and set activations.checkpoint"
            )
        self._calls[enclosing, name] += 1
        return _hash(enclosing, name, call, slice_key)


# The states of the CPU generator, and of the device's generator if it has one.
States = tuple[Tensor, Tensor | None]


def _start(number: int, device: torch.device) -> States:
    """Seed torch's generators, and return their previous states."""
    of_device = accelerator.random_state(device) if accelerator.has_streams(device) else None
    before = torch.get_rng_state(), of_device
    torch.default_generator.manual_seed(number)
    if of_device is not None:
        accelerator.seed(number, device)
    return before


def _restore(states: States, device: torch.device) -> None:
    of_host, of_device = states
    torch.set_rng_state(of_host)
    if of_device is not None:
        accelerator.set_random_state(of_device, device)


@contextmanager
def rank_specific_rng(slice_key: str, device: torch.device) -> Iterator[None]:
    """Draw different random numbers for each ``slice_key`` in the ``with`` block. After it the generators again have
    the same states on all ranks.
    """
    before = _start(_hash(int(torch.randint(1 << 31, (), device="cpu")), slice_key), device)
    try:
        yield
    finally:
        _restore(before, device)


def _hash(*key: object) -> int:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=5).digest()
    return (_MARK << _MARK_AT) | int.from_bytes(digest, "big")


def _with_streams(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with a seed of their own: the model, its blocks, the outermost modules outside the blocks, and
    every dropout module.
    """
    enclosing = {name[:at] for name in blocks for at, letter in enumerate(name) if letter == "."}
    for name, module in model.named_modules():
        is_outermost = name not in enclosing and name.rpartition(".")[0] in {"", *enclosing}
        if not name or name in blocks or is_outermost or (isinstance(module, _DropoutNd) and module.p > 0):
            yield name, module


def agreed_seed(seed: int | None, mesh: MeshShape, all_ranks: Group) -> int | None:
    """Return the config's seed, or else one that rank 0 draws for all ranks. All ranks must call this.

    The result is None if the config has no seed and no two ranks compute one model together: modules then draw from
    torch's generators.
    """
    if seed is not None or mesh.num_ranks == mesh.data:
        return seed
    drawn = int(torch.randint(1 << 31, (), device="cpu"))
    return int(all_ranks.exchange_objects(drawn, "partita.initialize")[0])
