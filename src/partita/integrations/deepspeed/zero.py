"""``deepspeed.zero``: models built before the engine exists, and gathered parameters while it exists."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from partita.comm import world
from partita.config.launchers import launch_environment
from partita.engine.engine import Engine
from partita.errors import PartitaError
from partita.integrations.deepspeed.elsewhere import ZERO, missing

# Parameters do not know their engine, and GatheredParameters is given nothing else.
_engines = weakref.WeakSet[Engine]()


def made(engine: Engine) -> None:
    """Register an engine, so that :func:`GatheredParameters` finds its parameters."""
    _engines.add(engine)


def ended(engine: Engine) -> None:
    """Unregister an engine that is being closed."""
    _engines.discard(engine)


class Init:
    """A context for building models in which only rank 0 of the job computes values; all ranks get these values later.

    Other ranks build on the ``meta`` device. At the end of the block their parameters get memory that is never written
    (which takes no physical memory), until ``initialize`` gives each its shard. Weights that are read from files inside
    (``from_pretrained``) need a real device: leave the context out there.

    Args:
        module: a model that is built already; it stays as it is.
        enabled: False: do nothing. The configuration given to ``initialize`` replaces the other arguments.
    """

    def __init__(self, module: nn.Module | None = None, *_: Any, enabled: bool = True, **others: Any) -> None:
        if others.get("data_parallel_group") is not None or others.get("mpu") is not None:
            raise PartitaError(
                "zero.Init(data_parallel_group=) and (mpu=): parameters are split over all data-parallel ranks; leave "
                "them out, or set zero_hpz_partition_size in the configuration to gather within a node"
            )
        elsewhere = launch_environment(running=world.running()).rank > 0
        self._enabled = enabled and module is None and elsewhere
        self._built = dict[int, nn.Module]()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._enabled:
            self._stack.enter_context(torch.device("meta"))
            for register in (
                torch_module.register_module_parameter_registration_hook,
                torch_module.register_module_buffer_registration_hook,
            ):
                self._stack.callback(register(self._note).remove)
        return self

    def _note(self, module: nn.Module, name: str, value: Tensor | None) -> None:
        self._built[id(module)] = module

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        values = dict[int, tuple[Tensor, Tensor]]()  # a tied parameter stays one
        held: Any
        for module in self._built.values():
            for held in (module._parameters, module._buffers):
                for name, value in held.items():
                    if value is not None and value.is_meta:
                        if id(value) not in values:
                            values[id(value)] = value, _unwritten(value)
                        held[name] = values[id(value)][1]
        self._built.clear()


def _unwritten(value: Tensor) -> Any:
    """Return an uninitialized parameter or buffer of the same kind, on the host."""
    made = torch.empty_like(value, device="cpu")
    if not isinstance(value, nn.Parameter):
        return made
    param = nn.Parameter(made, value.requires_grad)
    param.__dict__.update(value.__dict__)
    return param


@contextmanager
def GatheredParameters(  # noqa: N802  # DeepSpeed's name
    params: Tensor | Iterable[Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Unshard parameters inside a ``with`` block; before ``initialize`` they are unsharded anyway.

    Args:
        params: parameters; those that belong to no engine are left alone.
        modifier_rank: None: the parameters are only read; 0: the values that rank 0 writes become the values on every
            rank.
        fwd_module: has no effect: the engine finds parameters that a forward reads from other modules by itself.
        enabled: False: do nothing.

    Raises:
        PartitaError: ``modifier_rank`` is another rank than 0, or a parameter was written without ``modifier_rank``.
    """
    if modifier_rank not in (None, 0):
        raise PartitaError(
            f"GatheredParameters(modifier_rank={modifier_rank}): what rank 0 writes becomes the value on every rank; "
            "write there, with modifier_rank=0"
        )
    given = [params] if isinstance(params, Tensor) else list(params)
    with ExitStack() as stack:
        for engine in list(_engines) if enabled else ():
            known = {id(param) for param in engine.module.parameters()}
            if own := [param for param in given if isinstance(param, nn.Parameter) and id(param) in known]:
                stack.enter_context(engine.gathered(*own, modify=modifier_rank == 0))
        yield


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Do nothing: the engine finds parameters that a module reads from another module by itself."""


def __getattr__(name: str) -> NoReturn:
    raise missing("deepspeed.zero", name, ZERO)
