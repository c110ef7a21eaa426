"""Placeholders for tensors that depend on parameters of another pipeline stage.

A stage runs the model's own forward. Before the stage's first block, tensors that depend on parameters of earlier
stages are not computed: they have a shape, a dtype and a device, but no data (:class:`OffStageTensor`). After the
value has been received, operations on the same tensor object use it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partita.errors import PartitaError
from partita.layout.off_stage import OffStageParameter, is_off_stage
from partita.memory.autocast import autocast_dtype
from partita.sharding.half import HalfParameter
from partita.sharding.placeholder import METADATA, asked_for, is_access


class DataNeededError(PartitaError):
    """A forward needs the data of a tensor that another stage computes."""


@dataclass
class Trial:
    """A run that finds the shapes and dtypes of a block's output. During the run, the block may write placeholders into
    tensors that it creates.

    Attributes:
        has_data: placeholders have zeros as their data.
        is_over: the run has ended.
    """

    has_data: bool
    is_over: bool = False


class OffStageTensor(Tensor):
    """Placeholder for a tensor whose value depends on another stage.

    Attributes:
        origin: the name of a parameter or module of another stage on which the value depends.
        value: the value, once it has been received.
        trial: the trial run in which the tensor was created, if any.
    """

    _form: Tensor
    origin: str
    value: Tensor | None
    trial: "Trial | None"

    @staticmethod
    def __new__(cls, form: Tensor, device: torch.device, origin: str, trial: "Trial | None" = None) -> "OffStageTensor":
        """Create a placeholder with the shape, strides and dtype of ``form``.

        Args:
            form: a tensor on ``meta``, or a tensor of zeros in a trial with data.
        """
        placeholder: OffStageTensor = Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), dtype=form.dtype, device=device
        )
        placeholder._form = form
        placeholder.origin = origin
        placeholder.value = None
        placeholder.trial = trial
        return placeholder

    def __init__(self, form: Tensor, device: torch.device, origin: str, trial: "Trial | None" = None) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, depends on '{self.origin}')"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = () if is_access(func) else tree_leaves((args, kwargs))
        if any(is_off_stage(leaf) or received_value(leaf) is not leaf for leaf in leaves):
            args, kwargs = tree_map(lambda leaf: received_value(_read(leaf)), (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OffStageTensor)]
        device, origin = found[0].device, found[0].origin
        trial = next((leaf.trial for leaf in found if leaf.trial is not None and not leaf.trial.is_over), None)
        has_data = trial is not None and trial.has_data
        if trial is None and func._schema.is_mutable:
            _refuse_writes(func, args, kwargs, origin)
        if isinstance(kwargs.get("device"), torch.device):
            device = kwargs["device"]
            kwargs["device"] = device if has_data else torch.device("meta")
        forms = tree_map(_with_data if has_data else _form_of, (args, kwargs))
        try:
            output = func(*forms[0], **forms[1])
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, DataNeededError):
                raise
            raise DataNeededError(
                f"{func} needs the data of a tensor that depends on '{origin}', which another stage of the pipeline "
                "computes: outside the blocks, shapes and branches of the forward may depend only on the model's inputs"
            ) from error
        same = {id(leaf._form): leaf for leaf in found}  # an in-place operation returns its input

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return same[id(leaf)] if id(leaf) in same else OffStageTensor(leaf, device, origin, trial)

        return tree_map(wrapped, output)


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], origin: str) -> None:
    """Raise an error if an operation writes a placeholder into a tensor with data, which would then be wrong."""
    for at, argument in enumerate(func._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, Tensor) and not isinstance(value, OffStageTensor):
            raise DataNeededError(
                f"{func} writes a value that depends on '{origin}', which another stage of the pipeline computes, into "
                "a tensor of this stage: between the blocks, build the tensor by torch.cat, torch.where or another "
                "out-of-place operation"
            )


def _form_of(leaf: Any) -> Any:
    if isinstance(leaf, OffStageTensor):
        leaf = leaf._form
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _with_data(leaf: Any) -> Any:
    if not isinstance(leaf, OffStageTensor):
        return leaf
    return torch.zeros_like(leaf._form, device=leaf.device) if leaf._form.is_meta else leaf._form


def received_value(leaf: Any) -> Any:
    """Return the received value of a placeholder. Return anything else unchanged."""
    return leaf if not isinstance(leaf, OffStageTensor) or leaf.value is None else leaf.value


def is_missing(value: object) -> bool:
    """Return whether this is a placeholder whose value has not been received."""
    return isinstance(value, OffStageTensor) and value.value is None


def without_data(tensor: Tensor, origin: str) -> OffStageTensor:
    """Return a placeholder with the shape, dtype and device of a tensor."""
    form = _form_of(tensor) if isinstance(tensor, OffStageTensor) else torch.empty_like(tensor, device="meta")
    return OffStageTensor(form, tensor.device, origin)


# -- parameters --------------------------------------------------------------------------------------------------------


class OffStagePlaceholder(OffStageParameter):
    """The class of a parameter that only other stages store. Operations on it return placeholders."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = asked_for(func)
        if name in ("device", "dtype") and is_access(func):  # those of the tensor itself may differ
            return getattr(_known[id(args[0])], name)
        if name not in METADATA:
            args, kwargs = tree_map(_read, (args, kwargs))
            return args[0] if name in ("data", "detach") else func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter of another stage: {tuple(self.shape)}, {self.dtype}, {self.device}"


class _Known:
    """Metadata of an off-stage parameter.

    Attributes:
        kind: its original class.
        name: its name in the model.
        device: its device on the stages that store it.
        dtype: its dtype on the stages that store it.
        is_half: under autocast it is read like an fp32 parameter (:mod:`partita.sharding.half`).
        on_read: called with the parameter when it is read.
    """

    def __init__(
        self, kind: type[nn.Parameter], name: str, device: torch.device, dtype: torch.dtype, *, is_half: bool
    ) -> None:
        self.kind = kind
        self.name = name
        self.device = device
        self.dtype = dtype
        self.is_half = is_half
        self.on_read: Callable[[Tensor], None] = lambda param: None

    @property
    def read_dtype(self) -> torch.dtype:
        """The dtype in which functions read the parameter. Functions that autocast runs in 16 bits cast it
        themselves.
        """
        return torch.float32 if self.is_half and autocast_dtype(self.device) is not None else self.dtype


# By the id of an off-stage parameter, because ``__torch_function__`` gets only the tensor. Weak references to the
# parameters would prevent `module.to` from swapping them to another device.
_known = dict[int, _Known]()


def _read(leaf: Any) -> Any:
    if type(leaf) is not OffStagePlaceholder:
        return leaf
    known = _known[id(leaf)]
    known.on_read(leaf)
    with torch._C.DisableTorchFunctionSubclass():
        form = torch.empty_like(leaf, device="meta", dtype=known.read_dtype, requires_grad=False)
    return OffStageTensor(form, known.device, known.name)


def mark_off_stage(
    param: nn.Parameter, name: str, device: torch.device, dtype: torch.dtype | None = None, *, is_half: bool = False
) -> None:
    """Mark a parameter as stored by other stages only. It keeps its values, which can still be sent to those stages.

    Args:
        dtype: its dtype on those stages; None: its current dtype.
        is_half: on those stages it is a 16-bit parameter that is read under autocast like an fp32 parameter.
    """
    _known[id(param)] = _Known(type(param), name, device, dtype or param.dtype, is_half=is_half)
    param.__class__ = OffStagePlaceholder


def restore(param: nn.Parameter) -> None:
    """Undo :func:`mark_off_stage`, for a parameter that still has its values."""
    param.__class__ = _known.pop(id(param)).kind


def discard(params: Iterable[int]) -> None:
    """Drop the metadata of the off-stage parameters with these ids, when their model has been freed."""
    for key in params:
        _known.pop(key, None)


@contextmanager
def all_off_stage(
    module: nn.Module, device: torch.device, on_read: Callable[[Tensor], None] = lambda param: None
) -> Iterator[None]:
    """Treat all parameters of a module as off-stage in the ``with`` block. ``on_read`` is called at each read of a
    parameter that was not off-stage before.
    """
    marked = [(name, param) for name, param in module.named_parameters() if not is_off_stage(param)]
    for name, param in marked:
        mark_off_stage(param, name, device, is_half=isinstance(param, HalfParameter))
        _known[id(param)].on_read = on_read
    try:
        yield
    finally:
        for _, param in marked:
            restore(param)
