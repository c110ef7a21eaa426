"""``deepspeed.zero``: construction of models before the engine exists, and unsharding of parameters afterwards."""

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
from partita.integrations.deepspeed.unsupported import ZERO, missing

# GatheredParameters receives only parameters, which do not reference their engine.
_engines = weakref.WeakSet[Engine]()


def made(engine: Engine) -> None:
    """Register an engine, so that :func:`GatheredParameters` finds its parameters."""
    _engines.add(engine)


def ended(engine: Engine) -> None:
    """Unregister an engine that is being closed."""
    _engines.discard(engine)


class Init:
    """A context for building models in which only rank 0 of the job computes values; all ranks get these values later.

    Other ranks build on the ``meta`` device. At the end of the block their parameters get uninitialized memory, which
    occupies no physical memory until ``initialize`` copies each rank's shard. Code that loads weights from files
    (``from_pretrained``) needs a real device: do not use the context there.

    Args:
        module: an existing model, which does not change.
        enabled: False: do nothing. The configuration given to ``initialize`` replaces the other arguments.
    """

    def __init__(self, module: nn.Module | None = None, *_: Any, enabled: bool = True, **others: Any) -> None:
        if others.get("data_parallel_group") is not None or others.get("mpu") is not None:
            raise PartitaError(
                "zero.Init(data_parallel_group=) and (mpu=): parameters are sharded over all data-parallel ranks; "
                "leave them out, or set zero_hpz_partition_size in the configuration to gather within a node"
            )
        on_meta = launch_environment(running=world.running()).rank > 0
        self._enabled = enabled and module is None and on_meta
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
        values = dict[int, tuple[Tensor, Tensor]]()  # tied parameters stay tied
        tensors: Any
        for module in self._built.values():
            for tensors in (module._parameters, module._buffers):
                for name, value in tensors.items():
                    if value is not None and value.is_meta:
                        if id(value) not in values:
                            values[id(value)] = value, _unwritten(value)
                        tensors[name] = values[id(value)][1]
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
    """Unshard parameters inside a ``with`` block; no effect before ``initialize``.

    Args:
        params: parameters; those without an engine are ignored.
        modifier_rank: None: the parameters are only read; 0: rank 0's values are broadcast to all ranks at the end.
        fwd_module: has no effect: the engine finds parameters that a forward reads from other modules by itself.
        enabled: False: do nothing.

    Raises:
        PartitaError: ``modifier_rank`` is another rank than 0, or a parameter was written without ``modifier_rank``.
    """
    if modifier_rank not in (None, 0):
        raise PartitaError(
            f"GatheredParameters(modifier_rank={modifier_rank}): only rank 0 can modify parameters: write there, with "
            "modifier_rank=0"
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
