"""16-bit parameters that autocast's fp32 operators read in fp32."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita.memory.accelerator import is_host
from partita.memory.autocast import PRODUCTS, autocast_dtype, no_autocast
from partita.sharding.parameter import Member
from partita.sharding.placeholder import METADATA, asked_for, is_access, is_sharded
from partita.sharding.pytree import map_tensors, tensors_in
from partita.transforms.modules import is_compiled

# Functions that return the same values; the function that reads the result decides on its dtype.
_VIEWS = frozenset(
    """
    __getitem__ view view_as reshape reshape_as flatten unflatten expand expand_as broadcast_to unsqueeze squeeze
    transpose swapaxes swapdims permute movedim t T mT adjoint narrow select chunk split tensor_split unbind diagonal
    contiguous detach clone
    """.split()
)
_CASTS = frozenset("to type type_as float double half bfloat16 cpu cuda numpy tolist item".split())
# Functions that do not read the values for a computation.
_NO_VALUES = METADATA | frozenset(
    """
    retain_grad backward data_ptr untyped_storage storage _typed_storage is_shared share_memory_ is_pinned is_set_to
    is_inference get_device _is_view __repr__ __format__ __reduce_ex__
    """.split()
)
_UNCHANGED = (PRODUCTS - {"lstm"}) | _CASTS | _NO_VALUES


class _ReadInFp32(Tensor):
    """A 16-bit tensor that functions read in fp32, unless autocast runs them in 16 bits."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if is_access(func) or (name := asked_for(func)) in _UNCHANGED or _is_in_place(name):
                return func(*args, **kwargs)
            half = next(leaf for leaf in tensors_in((args, kwargs)) if isinstance(leaf, _ReadInFp32))
            if name == "lstm":
                return _run_lstm(func, args, kwargs, half)
            device = half.device
            if autocast_dtype(device) is None:
                return func(*args, **kwargs)
            if name in _VIEWS:
                return map_tensors(func(*args, **kwargs), _as_view)
            if name == "embedding" and not is_host(device):
                return func(*args, **kwargs).float()  # the kernel adds up the gradients of a row in fp32
            return _run_in_fp32(func, args, kwargs)


class _HalfView(_ReadInFp32):
    """A view or copy of a 16-bit parameter."""


class HalfParameter(_ReadInFp32, nn.Parameter):
    """A 16-bit parameter for use under autocast, which expects fp32 parameters.

    Matrix products read it in 16 bits; all other functions read it in fp32. So a model computes what autocast computes
    with fp32 parameters of the same values. Outside autocast it behaves like a plain parameter.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied


class HalfParameters:
    """The parameters of a model that have class :class:`HalfParameter` while they are unsharded.

    These are all parameters in ``dtype`` except those of other classes and those of compiled modules: torch's compiler
    supports plain parameters only. A compiled module reads its parameters in 16 bits.
    """

    def __init__(self, model: nn.Module, members: Iterable[Member], dtype: torch.dtype) -> None:
        self._modules = list(model.modules())
        self._members = [
            each for each in members if each.segment.dtype == dtype and each.unsharded_kind is nn.Parameter
        ]
        for member in self._members:
            member.unsharded_kind = HalfParameter
            if not is_sharded(member.param):
                member.param.__class__ = HalfParameter

    def restore_compiled(self) -> None:
        """Restore plain parameters in modules that have been compiled since the last call."""
        if not (compiled := [module for module in self._modules if is_compiled(module)]):
            return
        inside = {id(inner) for module in compiled for inner in module.modules()}
        self._modules = [module for module in self._modules if id(module) not in inside]
        self._restore(lambda member: any(id(owner) in inside for owner, _ in member.info.owners))

    def restore_all(self) -> None:
        """Restore plain parameters everywhere."""
        self._restore(lambda member: True)

    def _restore(self, is_chosen: Callable[[Member], bool]) -> None:
        chosen = [member for member in self._members if is_chosen(member)]
        self._members = [member for member in self._members if not is_chosen(member)]
        for member in chosen:
            member.unsharded_kind = nn.Parameter
            if type(member.param) is HalfParameter:
                member.param.__class__ = nn.Parameter  # type: ignore[assignment]


def _is_in_place(name: str) -> bool:
    return name.startswith("__i") or name == "__setitem__" if name.endswith("__") else name.endswith("_")


def _as_view(value: Tensor) -> Tensor:
    return value.as_subclass(_HalfView) if value.is_floating_point() else value


def _run_lstm(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], half: Tensor) -> Any:
    """Call torch's LSTM, without autocast on CPUs that lack the 16-bit kernel."""
    kernels = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if (
        autocast_dtype(half.device) is None
        or not is_host(half.device)
        or getattr(torch.ops.mkldnn, kernels[half.dtype])()
    ):
        return func(*args, **kwargs)
    with no_autocast(half.device):
        return func(*map_tensors(args, lambda x: x.to(half.dtype) if x.is_floating_point() else x), **kwargs)


def _run_in_fp32(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function on fp32 copies. Values that it writes into a copy, as ``max_norm`` does, are copied back."""
    copies = list[tuple[Tensor, Tensor]]()

    def widened(value: Tensor) -> Tensor:
        if not isinstance(value, _ReadInFp32):
            return value
        copies.append((value, _copy_in_fp32(value)))
        return copies[-1][1]

    args, kwargs = map_tensors((tuple(args), kwargs), widened)
    result = func(*args, **kwargs)
    for tensor, copy in copies:
        if copy._version:
            with torch.no_grad():
                tensor.copy_(copy)
    return result


def _copy_in_fp32(value: Tensor) -> Tensor:
    """Return a copy that counts writes, as tensors that are created in inference mode do not."""
    if not torch.is_inference_mode_enabled():
        return value.float()
    with torch.inference_mode(False), torch.no_grad():
        return value.float()
