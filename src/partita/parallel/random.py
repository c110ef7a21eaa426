"""Random numbers that do not depend on the mesh: dropout has the same masks however a model is split.

Each forward seeds torch's generators from a key: (seed, step, micro-batch, forward, data coordinate). Every block, and
every outermost module outside the blocks, derives its own seed from that one and from its name. So its random numbers
do not depend on the rank that runs it, or on the modules that ran there before. Every dropout module inside a block
also has its own seed: the numbers that attention draws for a rank's heads do not shift those of later modules.

Ranks that compute the same values draw the same numbers. Where each rank has a slice of a tensor (of the sequence,
inside the blocks), the rank's slice is part of the key, and each slice has its own masks. After each module, the states
of torch's generators are restored.

A forward that is recomputed in backward draws its numbers again, in any order of recomputations.
"""

import hashlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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

    Attributes:
        seed: the seed that all modules' seeds are derived from. It may change between two steps.

    Args:
        data: this rank's coordinate on the data axis.
        slice_key: the slice that this rank has of each tensor in the blocks (``"sequence 1"``); empty: the full tensor.
    """

    def __init__(self, model: nn.Module, seed: int, data: int, device: torch.device, slice_key: str = "") -> None:
        self.seed = seed
        self._data = data
        self._device = device
        self._step = self._micro_batch = self._forwards = 0
        self._calls = defaultdict[int, Counter[str]](Counter)  # by the enclosing module's seed and the module's name
        self._task = -1  # the backward whose recomputed calls are counted; -1: a forward
        self._has_gradients = False  # of the running forward
        self._regions = dict[tuple[int, str], Callable[[], object]]()  # of each module's first call in the forward
        self._repeated = set[str]()  # names of modules that a forward calls in several checkpointed regions
        self._counted = list[int]()  # seeds of the running modules, whose calls are counted from the right number
        self._active = list[tuple[nn.Module, States]]()  # the running modules, and the states to restore
        self._handles = list[RemovableHandle]()
        self._registered = set[int]()  # modules with a seed of their own, by id
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

    def has_seeds(self, module: nn.Module) -> bool:
        """Return whether a module contains modules with a seed of their own."""
        return any(id(each) in self._registered for each in module.modules() if each is not module)

    def recomputation(self) -> Callable[[], AbstractContextManager[None]]:
        """Return the context of each recomputation of the code that runs next: modules have the same seeds in it."""
        self._follow_task()
        enclosing = torch.initial_seed()
        return partial(self._recount, enclosing, self._calls[enclosing].copy())

    @contextmanager
    def _recount(self, enclosing: int, calls: Counter[str]) -> Iterator[None]:
        """Count the calls in the module with the seed ``enclosing`` from ``calls`` in the ``with`` block."""
        self._follow_task()
        before = self._calls[enclosing]
        self._calls[enclosing] = calls.copy()
        self._counted.append(enclosing)
        try:
            yield
        finally:
            self._counted.pop()
            self._calls[enclosing] = before

    def remove(self) -> None:
        """Remove the hooks: modules draw from torch's generators as they are."""
        for handle in self._handles:
            handle.remove()

    def _register(self, name: str, module: nn.Module, slice_key: str) -> None:
        self._registered.add(id(module))
        self._handles.append(module.register_forward_pre_hook(Hook(partial(self._begin, name, slice_key))))
        self._handles.append(module.register_forward_hook(Hook(self._end), always_call=True))

    @eager
    def _begin(self, name: str, slice_key: str, module: nn.Module, args: Any) -> None:
        if module.training and (number := self._number(name, slice_key)) is not None:
            self._active.append((module, _start(number, self._device)))
            self._counted.append(number)

    @eager
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._active and self._active[-1][0] is module:
            self._counted.pop()
            _restore(self._active.pop()[1], self._device)

    def _number(self, name: str, slice_key: str) -> int | None:
        """Return the seed of a module's call; None if no forward of the model is running.

        When a forward is recomputed in backward, the generators have the states from before its first run, so their
        seed is again that of the enclosing module.

        Raises:
            PartitaError: the model's own checkpoint recomputes a module that one forward calls several times.
        """
        enclosing, is_forward = torch.initial_seed(), torch._C._current_graph_task_id() == -1
        if not name and is_forward:
            self._calls.clear()
            self._regions.clear()
            self._has_gradients = torch.is_grad_enabled()
            self._forwards += 1
            return _hash(self.seed, self._step, self._micro_batch, self._forwards, self._data)
        if enclosing >> _MARK_AT != _MARK:
            return None
        self._follow_task()
        if is_forward and self._has_gradients:
            self._note_region(enclosing, name)
        if not is_forward and name in self._repeated and self._counted[-1:] != [enclosing]:
            raise PartitaError(
                f"seed: '{name}' is called several times in one forward, and the model's own activation checkpointing "
                "recomputes one of these calls in backward, whose random numbers are unknown: switch that "
                "checkpointing off (gradient_checkpointing_disable) and set activations.checkpoint"
            )
        call = self._calls[enclosing][name]
        self._calls[enclosing][name] += 1
        number = _hash(enclosing, name, call, slice_key)
        self._calls.pop(number, None)  # counted by an earlier recomputation
        return number

    def _follow_task(self) -> None:
        """Count calls from 0 if another backward runs than at the last call."""
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task = task
            self._calls.clear()

    def _note_region(self, enclosing: int, name: str) -> None:
        """Note a module whose calls in one forward are not all in the same checkpointed region."""
        region, key = _checkpointed_region(), (enclosing, name)
        if key in self._regions and self._regions[key]() is not region():
            self._repeated.add(name)
        self._regions.setdefault(key, region)


def _checkpointed_region() -> Callable[[], object]:
    """Return a weak reference to the innermost checkpoint that runs: to its hook on saved tensors.

    A reentrant checkpoint has no hook; the forward in it runs without gradients.
    """
    if not torch.is_grad_enabled():
        return object  # differs from every region
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return _outside if hooks is None else weakref.ref(hooks[0])


def _outside() -> None:
    pass


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
