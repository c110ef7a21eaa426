"""The precision of a forward: autocast, casts of arguments and outputs, and modules that stay in fp32."""

import inspect
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from traceback import walk_tb
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from partita.config.resolve import Resolved
from partita.errors import PartitaError
from partita.layout.dtypes import dtype_of
from partita.layout.full_precision import FullPrecision, outermost
from partita.memory.autocast import autocast, no_autocast
from partita.sharding.compiler import eager_itself
from partita.sharding.half import HalfParameters
from partita.sharding.hooks import Hook
from partita.sharding.parameter import Member
from partita.sharding.pytree import map_tensors
from partita.table.residence import ENCODINGS
from partita.transforms.modules import Level, ModuleTransforms, Order, Wrapper

Store = Callable[[list[tuple[Member, Tensor]]], None]


class ExactLoads:
    """Hooks on modules whose ``load_state_dict`` would round the loaded values.

    Args:
        members: parameters whose master weights have a higher precision.
        store: stores loaded fp32 values, of the parameters' shapes, after the parameters have got the rounded ones.
    """

    def __init__(self, members: Iterable[Member], store: Store) -> None:
        self._store = store
        self._by_module = dict[nn.Module, list[tuple[str, Member]]]()
        for member in members:
            for module, name in member.info.owners:
                self._by_module.setdefault(module, []).append((name, member))
        self._loaded = dict[nn.Module, list[tuple[Member, Tensor]]]()
        self._handles = list[RemovableHandle]()
        for module in self._by_module:
            self._handles.append(module.register_load_state_dict_pre_hook(Hook(self._before)))
            self._handles.append(module.register_load_state_dict_post_hook(Hook(self._after)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        found = [(member, state_dict.get(prefix + name)) for name, member in self._by_module[module]]
        self._loaded[module] = [(m, v) for m, v in found if isinstance(v, Tensor) and _is_rounded(m, v)]

    def _after(self, module: nn.Module, _: Any) -> None:
        if loaded := self._loaded.pop(module, []):
            self._store(loaded)


def _is_rounded(member: Member, values: Tensor) -> bool:
    """Return whether a parameter would round the values."""
    param = member.param
    with torch._C.DisableTorchFunctionSubclass():
        fits = param.shape == values.shape and not member.span.place.is_part
        is_exact = values.dtype == param.dtype or values.itemsize < param.itemsize
        return fits and values.is_floating_point() and not is_exact


# Modules with base classes, whose methods every model inherits.
_BASES = re.compile(
    r"(torch|transformers\.(modeling_utils|generation|utils|integrations)|huggingface_hub|peft|lightning"
    r"|pytorch_lightning)(\.|$)"
)


# Text in torch's errors about tensors of different dtypes.
_ABOUT_DTYPES = re.compile(
    r"(?i)dtype|scalar type|'(BFloat16|Half)'|(input|weight|bias|mat\d) type|\b(BFloat16|Half)\b"
)


class Mode(ABC):
    """A way to compute in a 16-bit dtype (``precision.mode``).

    Attributes:
        name: its name in the config.
        remedy: advice for a forward that fails in it.
    """

    name: str
    remedy: str

    def __init__(self, compute: torch.dtype) -> None:
        self.compute = compute

    @abstractmethod
    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""

    @abstractmethod
    def arguments(self, value: Any) -> Any:
        """Return the model's arguments in this mode."""

    @abstractmethod
    def fp32_context(self) -> AbstractContextManager[Any]:
        """Return the context of a module that stays in fp32."""

    @abstractmethod
    def from_fp32(self, output: Any) -> Any:
        """Return the output of a module that stays in fp32 as the rest of the model gets it."""


class Autocast(Mode):
    """The forward runs under autocast, which casts the operands of each operator. Arguments are not cast."""

    def __init__(self, compute: torch.dtype, device: torch.device, name: str) -> None:
        super().__init__(compute)
        self._device = device
        self.name = name
        self.remedy = "set precision.mode: autocast (fp32 parameters)," if name == "mixed" else "compute in fp32,"

    def forward_context(self) -> AbstractContextManager[Any]:
        return autocast(self._device, self.compute)

    def arguments(self, value: Any) -> Any:
        return value

    def fp32_context(self) -> AbstractContextManager[Any]:
        return no_autocast(self._device)

    def from_fp32(self, output: Any) -> Any:
        return output


class Cast(Mode):
    """Arguments are cast to the compute dtype, as parameters and buffers are, except 0-dim tensors."""

    name, remedy = "cast", "set precision.mode: mixed, whose operators cast their operands,"

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def arguments(self, value: Any) -> Any:
        return map_tensors(value, self._narrowed)

    def fp32_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def from_fp32(self, output: Any) -> Any:
        return map_tensors(output, self._narrowed)

    def _narrowed(self, tensor: Tensor) -> Tensor:
        # A number, such as a loss or a count of tokens, does not decide the dtype of what is computed from it.
        return tensor if tensor.dim() == 0 else map_floats(tensor, self.compute)


class InFp32:
    """Runs the forward of a module that stays in fp32, with fp32 arguments and outputs."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def __call__(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.mode.fp32_context():
            output = own(*map_floats(args, torch.float32), **map_floats(kwargs, torch.float32))
        return self.mode.from_fp32(output)


class ForwardPrecision:
    """Runs the forward of a model, and its other public methods, in a precision mode.

    Args:
        outputs: the dtype that 16-bit outputs of the model are cast to.
        kept: modules that stay in fp32.
    """

    def __init__(self, model: nn.Module, mode: Mode, outputs: torch.dtype, kept: FullPrecision, changes: Level) -> None:
        self._mode = mode
        self._outputs = outputs
        self._names = {id(module): name for name, module in model.named_modules()}
        self._runs = False
        self._half: HalfParameters | None = None
        for module in outermost(model, kept.modules):
            changes.wrap_forward(module, InFp32(mode))
        if isinstance(mode, Cast):
            for module in model.modules():
                if id(module) in kept.batch_norms:
                    changes.wrap_forward(module, partial(_run_batch_norm, mode))
        changes.wrap_forward(model, self._run)
        for name in _methods(model):
            changes.set_attribute(model, name, _wrapped_method(model, name, self._run))

    def remove(self) -> None:
        """Restore the classes of the parameters."""
        if self._half is not None:
            self._half.restore_all()

    def widen(self, model: nn.Module, members: Iterable[Member]) -> None:
        """Make 16-bit parameters readable in fp32 by the operators that autocast runs in fp32."""
        if isinstance(self._mode, Autocast):
            self._half = HalfParameters(model, members, self._mode.compute)

    def _run(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._runs:  # called by another method of the model, which uses the output
            return own(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._run_around_graphs(own, *args, **kwargs)
        if self._half is not None:
            self._half.restore_compiled()
        return self._run_in_mode(own, *args, **kwargs)

    @eager_itself  # it changes state and classes of parameters, which a graph cannot
    def _run_around_graphs(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._half is not None:
            self._half.restore_all()
        return self._run_in_mode(own, *args, **kwargs)

    def _run_in_mode(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._runs = True
        try:
            with self._mode.forward_context():
                output = own(*self._mode.arguments(args), **self._mode.arguments(kwargs))
        except RuntimeError as error:
            self._explain(error)
            raise
        finally:
            self._runs = False
        return map_tensors(output, self._widened)

    def _explain(self, error: RuntimeError) -> None:
        """Add to torch's errors about dtypes the module and a remedy."""
        if not _ABOUT_DTYPES.search(str(error)) or isinstance(error, PartitaError):
            return
        frames = (frame for frame, _ in walk_tb(error.__traceback__))
        modules = [found for frame in frames if isinstance(found := frame.f_locals.get("self"), nn.Module)]
        inside = next((self._names[id(module)] for module in reversed(modules) if self._names.get(id(module))), "")
        where, kept = (f"in '{inside}'", f'["{inside}"]') if inside else ("in the model's own forward", "its name")
        error.add_note(
            f"{where}, under precision.compute {str(self._mode.compute).removeprefix('torch.')} and precision.mode "
            f"{self._mode.name}: {self._mode.remedy} or list the module in precision.keep_fp32 ({kept})"
        )

    def _widened(self, tensor: Tensor) -> Tensor:
        # Both 16-bit dtypes: under autocast in bf16, cuDNN's recurrent networks return fp16.
        if tensor.dtype not in (torch.bfloat16, torch.float16) or isinstance(tensor, nn.Parameter):
            return tensor
        return tensor.to(self._outputs)


def forward_precision(
    model: nn.Module, resolved: Resolved, device: torch.device, kept: FullPrecision, transforms: ModuleTransforms
) -> ForwardPrecision | None:
    """Apply the precision mode of the config to a model. Returns None in fp32, which needs nothing."""
    if resolved.compute_dtype == "fp32":
        return None
    compute, precision = dtype_of(ENCODINGS[resolved.compute_dtype]), resolved.config.precision
    outputs = torch.float32 if precision.outputs == "fp32" else compute
    mode = Cast(compute) if precision.mode == "cast" else Autocast(compute, device, precision.mode)
    return ForwardPrecision(model, mode, outputs, kept, transforms.at(Order.PRECISION))


def cast_buffers(model: nn.Module, compute: torch.dtype, kept: FullPrecision) -> None:
    """Cast the persistent floating-point buffers of modules that do not stay in fp32.

    Non-persistent buffers are tables that the model computes from its config, such as the frequencies of rotary
    embeddings: rounded, they would be wrong, and a model written for 16 bits casts the values that it reads.
    """
    for module in model.modules():
        if id(module) in kept.modules or id(module) in kept.batch_norms:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(compute)


def map_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors cast to ``dtype``; finite values stay finite."""

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        largest = torch.finfo(dtype).max
        if torch.finfo(tensor.dtype).max > largest:  # a mask value, the smallest number, would become infinite
            tensor = torch.where(tensor.isinf(), tensor, tensor.clamp(-largest, largest))
        return tensor.to(dtype)

    return map_tensors(value, cast)


def _run_batch_norm(mode: Mode, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return mode.from_fp32(own(*args, **kwargs))


def _wrapped_method(model: nn.Module, name: str, wrapper: Wrapper) -> MethodType:
    """Return a bound method that calls ``wrapper(own, ...)``. Copies of the model call the unwrapped method."""
    to_model, function = weakref.ref(model), getattr(model, name).__func__

    @wraps(function)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not to_model():
            return function(self, *args, **kwargs)
        return wrapper(partial(function, self), *args, **kwargs)

    return MethodType(run, model)


def _methods(model: nn.Module) -> Iterator[str]:
    """Yield the names of public methods that the model's own classes define and other modules do not have."""
    found = dict[str, Any]()
    for kind in reversed(type(model).__mro__):
        if not _BASES.match(kind.__module__):
            found.update(vars(kind))
    for name, function in found.items():
        if name.startswith("_") or hasattr(nn.Module, name) or not inspect.isfunction(function):
            continue
        if name in vars(model):  # the user has replaced it
            continue
        if not (inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)):
            yield name
