"""Random numbers that do not depend on how a model is split: dropout has the same masks on every mesh.

Each forward starts a stream of torch's generators from a key: (seed, step, micro-batch, forward, data coordinate).
Every block, and every outermost module outside the blocks, derives a stream of its own from it, by its name. So it does
not matter which rank runs a block, and what ran before it there. Every dropout module in a block has its own stream,
too: what attention draws for a rank's heads does not shift what later modules draw.

Ranks that compute the same values draw the same numbers. Where each rank has a part of a tensor (in the blocks, a slice
of the sequence), the part is in the key, and each part has masks of its own. After each module, the states of torch's
generators are restored.
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
from partita.memory import accelerator
from partita.plan.mesh_shape import MeshShape
from partita.planner.group_units import find_blocks
from partita.sharding.compiler import eager
from partita.sharding.hooks import Hook

# A mark in the upper bits of the streams' seeds; the CPU generator uses the lower 32 bits.
_MARK, _MARK_AT = 0x5EED5, 40


class RandomStreams:
    """Streams of random numbers from which a model's modules draw in training, until :meth:`remove`.

    Args:
        data: this rank's coordinate on the data axis.
        part: the part that this rank has of each tensor in the blocks (``"sequence 1"``); empty: all of it.
    """

    def __init__(self, model: nn.Module, seed: int, data: int, device: torch.device, part: str = "") -> None:
        self._seed = seed
        self._data = data
        self._device = device
        self._step = self._micro_batch = self._forwards = 0
        self._calls = Counter[tuple[int, str]]()  # by the surrounding stream's seed and the module's name
        self._task = -1  # the backward whose recomputed calls are counted; -1: a forward
        self._root = 0  # the seed of the model's stream
        self._repeated = set[str]()  # names of modules that a forward calls several times
        self._before = list[tuple[nn.Module, States]]()  # the running modules, and the states to restore
        self._handles = list[RemovableHandle]()
        blocks = dict(find_blocks(model))
        for name, module in _with_streams(model, blocks):
            inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
            self._follow(name, module, part if inside else "")

    def begin_micro_batch(self, step: int, number: int) -> None:
        """Begin micro-batch ``number`` in the batch of a ``step``: the next forwards belong to it."""
        if (step, number) != (self._step, self._micro_batch):
            self._step = step
            self._micro_batch = number
            self._forwards = 0

    def remove(self) -> None:
        """Have the modules draw from torch's generators again."""
        for handle in self._handles:
            handle.remove()

    def _follow(self, name: str, module: nn.Module, part: str) -> None:
        self._handles.append(module.register_forward_pre_hook(Hook(partial(self._begin, name, part))))
        self._handles.append(module.register_forward_hook(Hook(self._end), always_call=True))

    @eager
    def _begin(self, name: str, part: str, module: nn.Module, args: Any) -> None:
        if module.training and (number := self._number(name, part)) is not None:
            self._before.append((module, _start(number, self._device)))

    @eager
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._before and self._before[-1][0] is module:
            _go_back(self._before.pop()[1], self._device)

    def _number(self, name: str, part: str) -> int | None:
        """Return the seed of a module's stream; None if no forward of the model is running.

        A forward that is recomputed in backward finds the generators in their states before the first run. Their seed
        is that of the surrounding stream.

        Raises:
            PartitaError: a checkpoint recomputes a module that one forward calls several times.
        """
        around, task = torch.initial_seed(), torch._C._current_graph_task_id()
        if not name and task == -1:
            self._calls.clear()
            self._forwards += 1
            self._root = _hashed(self._seed, self._step, self._micro_batch, self._forwards, self._data)
            return self._root
        if around >> _MARK_AT != _MARK:
            return None
        if task != self._task:
            self._task = task
            self._calls.clear()
        call = self._calls[around, name]
        if task == -1 and call and around == self._root:
            self._repeated.add(name)
        if task != -1 and name in self._repeated:
            raise PartitaError(
                f"seed: '{name}' is called several times in one forward, and a checkpoint of the model's own calls it "
                "again in backward, for one of them: switch that off (gradient_checkpointing_disable) and set "
                "activations.checkpoint"
            )
        self._calls[around, name] += 1
        return _hashed(around, name, call, part)


# The states of the CPU generator, and of the device's generator if it has one.
States = tuple[Tensor, Tensor | None]


def _start(number: int, device: torch.device) -> States:
    """Seed torch's generators, and return their earlier states."""
    of_device = accelerator.random_state(device) if accelerator.has_streams(device) else None
    before = torch.get_rng_state(), of_device
    torch.default_generator.manual_seed(number)
    if of_device is not None:
        accelerator.seed(number, device)
    return before


def _go_back(states: States, device: torch.device) -> None:
    of_host, of_device = states
    torch.set_rng_state(of_host)
    if of_device is not None:
        accelerator.set_random_state(of_device, device)


@contextmanager
def drawn_apart(part: str, device: torch.device) -> Iterator[None]:
    """Have torch's generators draw other numbers for each ``part`` inside the block. After it they continue alike for
    all parts.
    """
    before = _start(_hashed(int(torch.randint(1 << 31, (), device="cpu")), part), device)
    try:
        yield
    finally:
        _go_back(before, device)


def _hashed(*key: object) -> int:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=5).digest()
    return (_MARK << _MARK_AT) | int.from_bytes(digest, "big")


def _with_streams(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have a stream: the model, its blocks, the outermost modules outside the blocks, and every
    module that only applies dropout.
    """
    around = {name[:at] for name in blocks for at, letter in enumerate(name) if letter == "."}
    for name, module in model.named_modules():
        beside = name not in around and name.rpartition(".")[0] in {"", *around}
        if not name or name in blocks or beside or (isinstance(module, _DropoutNd) and module.p > 0):
            yield name, module


def agreed_seed(seed: int | None, mesh: MeshShape, all_ranks: Group) -> int | None:
    """Return the config's seed, or a seed that all ranks share. All ranks must call this.

    Without a seed in the config, rank 0 draws one if several ranks compute one model together. Otherwise the result is
    None: the ranks draw from torch's generators.
    """
    if seed is not None or mesh.num_ranks == mesh.data:
        return seed
    drawn = int(torch.randint(1 << 31, (), device="cpu"))
    return int(all_ranks.exchange_objects(drawn, "partita.initialize")[0])
