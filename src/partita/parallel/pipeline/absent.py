"""Values that this rank does not have: what computing with another stage's parameters gives.

A stage runs the model's own forward. Before its first block that computes nothing: tensors that depend on parameters of
earlier stages have a shape, a dtype and a device, and no data (:class:`Absent`). When the value arrives, what was made
of the tensor's object later on uses it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partita.errors import PartitaError
from partita.planner.elsewhere import Elsewhere, is_elsewhere
from partita.sharding.placeholder import METADATA, asked_for, is_access


class DataNeededError(PartitaError):
    """A forward asks for the data of a tensor that another stage computes."""


class Absent(Tensor):
    """A tensor without data. ``origin``: what its value depends on; ``value``: what has arrived for it."""

    _form: Tensor
    origin: str
    value: Tensor | None

    @staticmethod
    def __new__(cls, form: Tensor, device: torch.device, origin: str) -> "Absent":
        """``form`` is a tensor on ``meta``."""
        absent: Absent = Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), dtype=form.dtype, device=device
        )
        absent._form, absent.origin, absent.value = form, origin, None
        return absent

    def __init__(self, form: Tensor, device: torch.device, origin: str) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.shape)}, {self.dtype}, depends on '{self.origin}')"

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
        if any(is_elsewhere(leaf) or arrived(leaf) is not leaf for leaf in leaves):
            args, kwargs = tree_map(lambda leaf: arrived(_read(leaf)), (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Absent)]
        device, origin = found[0].device, found[0].origin
        if isinstance(kwargs.get("device"), torch.device):
            device, kwargs["device"] = kwargs["device"], torch.device("meta")
        forms = tree_map(_form_of, (args, kwargs))
        try:
            output = func(*forms[0], **forms[1])
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, DataNeededError):
                raise
            raise DataNeededError(
                f"{func} asks for the data of a tensor that depends on '{origin}', which another stage of the pipeline "
                "computes: shapes and branches of the forward may depend on the inputs alone, outside the blocks"
            ) from error
        same = {id(leaf._form): leaf for leaf in found}  # what an operation changes in place it returns

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return same[id(leaf)] if id(leaf) in same else Absent(leaf, device, origin)

        return tree_map(wrapped, output)


def _form_of(leaf: Any) -> Any:
    if isinstance(leaf, Absent):
        return leaf._form
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def arrived(leaf: Any) -> Any:
    """What has arrived for an absent tensor; anything else as it is."""
    return leaf if not isinstance(leaf, Absent) or leaf.value is None else leaf.value


def is_missing(value: object) -> bool:
    """Whether this is a tensor without data, for which nothing has arrived."""
    return isinstance(value, Absent) and value.value is None


def without_data(tensor: Tensor, origin: str) -> Absent:
    """An absent tensor like this one."""
    form = tensor._form if isinstance(tensor, Absent) else torch.empty_like(tensor, device="meta")
    return Absent(form, tensor.device, origin)


# -- parameters --------------------------------------------------------------------------------------------------------


class AbsentParameter(Elsewhere):
    """The class of a parameter that another stage holds: computing with it gives what is absent."""

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
        if name in ("device", "dtype") and is_access(func):  # its own are those of its values, which are gone
            return getattr(_known[id(args[0])], name)
        if name not in METADATA:
            args, kwargs = tree_map(_read, (args, kwargs))
            return args[0] if name in ("data", "detach") else func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter of another stage: {tuple(self.shape)}, {self.dtype}, {self.device}"


class _Known:
    """Of an absent parameter: its class, its name, the device and the dtype it is computed with, and who is told when
    it is read.
    """

    def __init__(self, kind: type[nn.Parameter], name: str, device: torch.device, dtype: torch.dtype) -> None:
        self.kind, self.name, self.device, self.dtype = kind, name, device, dtype
        self.note: Callable[[Tensor], None] = lambda param: None


# By the id of an absent parameter: only a tensor is at hand when it is computed with. A weak reference to it would keep
# its data from being moved to another device.
_known = dict[int, _Known]()


def _read(leaf: Any) -> Any:
    if type(leaf) is not AbsentParameter:
        return leaf
    known = _known[id(leaf)]
    known.note(leaf)
    with torch._C.DisableTorchFunctionSubclass():
        form = torch.empty_like(leaf, device="meta", dtype=known.dtype, requires_grad=False)
    return Absent(form, known.device, known.name)


def send_away(param: nn.Parameter, name: str, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Mark a parameter as held by other stages, which compute with it in a ``dtype`` (None: its own). Its values stay,
    for whoever gives them to those.
    """
    _known[id(param)] = _Known(type(param), name, device, dtype or param.dtype)
    param.__class__ = AbsentParameter


def bring_back(param: nn.Parameter) -> None:
    """Undo :func:`send_away`: the parameter has its values still."""
    param.__class__ = _known.pop(id(param)).kind


def forget(params: Iterable[int]) -> None:
    """The model that had these absent parameters (ids) is gone."""
    for key in params:
        _known.pop(key, None)


@contextmanager
def all_away(
    module: nn.Module, device: torch.device, note: Callable[[Tensor], None] = lambda param: None
) -> Iterator[None]:
    """Inside the block all parameters of a module are absent; ``note`` is told of each read of one that was there."""
    there = [(name, param) for name, param in module.named_parameters() if not is_elsewhere(param)]
    for name, param in there:
        send_away(param, name, device)
        _known[id(param)].note = note
    try:
        yield
    finally:
        for _, param in there:
            bring_back(param)
