"""The distinct parameters of a model, and checks that they can be stored in flat buffers."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.layout.off_stage import is_off_stage


@dataclass
class ParameterInfo:
    """One parameter: the object, all its names, and all modules (with the attribute) that refer to it."""

    param: nn.Parameter
    fqns: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)


def find_stage_parameters(model: nn.Module) -> list[ParameterInfo]:
    """Return the distinct parameters in units of this rank, in the order of ``named_parameters``."""
    return [info for info in find_all_parameters(model) if not is_off_stage(info.param)]


def find_all_parameters(model: nn.Module) -> list[ParameterInfo]:
    """Return the distinct parameters in units of any rank, including other pipeline stages, in the same order."""
    return [info for info in _find_all(model) if not is_quantized(info.param)]


def find_quantized_params(model: nn.Module) -> list[ParameterInfo]:
    """Return the quantized parameters, which are in no unit, in the same order."""
    return [info for info in _find_all(model) if is_quantized(info.param)]


def is_quantized(param: Tensor) -> bool:
    """Return True if a frozen parameter stores its values in a format of its own class, which cannot be split.

    Examples are the parameters of bitsandbytes, which are bytes, and tensors that consist of several tensors (torchao).
    """
    if param.requires_grad or nn.parameter.is_lazy(param) or is_off_stage(param):
        return False
    # Plain parameters and sharded ones have classes of torch and partita.
    own_class = not type(param).__module__.startswith(("torch.", "partita."))
    return own_class and (bool(inner_names(param)) or not param.is_floating_point())


def inner_names(param: Tensor) -> list[str]:
    """Return the attributes of the tensors that a tensor subclass consists of; none for a plain tensor."""
    flatten = getattr(param, "__tensor_flatten__", None)
    return [] if flatten is None else list(flatten()[0])


def check_quantized(infos: Sequence[ParameterInfo], device: torch.device) -> None:
    """Check that quantized parameters are on the compute device.

    Raises:
        ConfigError: a parameter is not; the message names the first one.
    """
    for info in infos:
        if info.param.device != device:
            raise ConfigError(
                f"parameter '{info.fqns[0]}' is quantized ({type(info.param).__name__}) and on "
                f"'{info.param.device}': partita does not move quantized parameters; load the model onto "
                f"'{device}' (from_pretrained(..., device_map={{'': '{device}'}})) before partita.initialize"
            )


_SHARDED = frozenset({"FullyShardedDataParallel", "FSDPModule"})
_WRAPPERS = _SHARDED | {"DistributedDataParallel", "DataParallel"}


def check_modules(model: nn.Module) -> None:
    """Check that no module is distributed by a wrapper of torch's, or compiled by TorchScript.

    Raises:
        ConfigError: one is; the message names it.
    """
    for name, module in model.named_modules():
        title = f"module '{name}'" if name else "the model"
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")} & _WRAPPERS
        if kinds:
            remedy = "pass the module inside it: " + (f"{name}.module" if name else "model.module")
            if kinds & _SHARDED:
                remedy = "pass the model before it is sharded"
            raise ConfigError(f"{title} is a {min(kinds)}, which distributes it by itself: {remedy}")
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{title} is a TorchScript module, whose parameters, buffers and calls cannot be observed: pass the "
                "model before torch.jit.script or torch.jit.trace (timm: scriptable=False); torch.compile is supported"
            )


def _find_all(model: nn.Module) -> list[ParameterInfo]:
    found: dict[int, ParameterInfo] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            info = found.setdefault(id(param), ParameterInfo(param))
            info.fqns.append(f"{path}.{attribute}" if path else attribute)
            if all(owner is not module or name != attribute for owner, name in info.owners):
                info.owners.append((module, attribute))
    return list(found.values())


def check_supported(info: ParameterInfo) -> None:
    """Check that a parameter's memory can be a view of a flat buffer.

    Raises:
        ConfigError: it cannot.
    """
    param, name = info.param, info.fqns[0]
    if nn.parameter.is_lazy(param):
        raise ConfigError(f"parameter '{name}' has no shape before the model's first forward: run one, then initialize")
    plain = type(param) in (nn.Parameter, nn.parameter.Buffer) or isinstance(param, nn.Parameter)
    if not plain or type(param.data) is not Tensor:
        raise ConfigError(
            f"parameter '{name}' is a {type(param.data).__name__}: its memory cannot be split; "
            "pass the model before it is distributed; freeze quantized parameters (requires_grad_(False))"
        )
    if param.layout is not torch.strided:
        raise ConfigError(f"parameter '{name}' is sparse ({param.layout}); use a dense parameter")
    if param.is_complex() and param.requires_grad:
        raise ConfigError(
            f"parameter '{name}' is complex; use a real parameter of shape [..., 2] instead, and "
            "torch.complex(p[..., 0], p[..., 1]) of it in forward"
        )


def check_no_shared_memory(infos: Sequence[ParameterInfo]) -> None:
    """Check that no two parameters share memory: each would be trained separately.

    Raises:
        ConfigError: two parameters share memory; the message names both.
    """
    by_storage = defaultdict[int, list[ParameterInfo]](list)
    for info in infos:
        if info.param.numel():
            by_storage[info.param.untyped_storage()._cdata].append(info)
    for sharing in by_storage.values():
        overlapping = list[ParameterInfo]()  # earlier parameters that end after the next one begins
        for info in sorted(sharing, key=lambda info: _reach(info.param).start):
            overlapping = [other for other in overlapping if _reach(other.param).stop > _reach(info.param).start]
            for other in overlapping:
                if _overlap(info.param, other.param):
                    raise ConfigError(
                        f"parameters '{other.fqns[0]}' and '{info.fqns[0]}' share memory but are two objects, "
                        "which would be trained separately: tie them by assigning the Parameter itself "
                        "(module.weight = other.weight), or give one its own memory (param.data = param.data.clone())"
                    )
            overlapping.append(info)


def _reach(tensor: Tensor) -> range:
    """Return the range of bytes in its storage from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, itemsize = tensor.storage_offset(), tensor.element_size()
    return range(first * itemsize, (first + last + 1) * itemsize)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors with overlapping ranges of memory share an element: strides may interleave.

    Tensors with different element sizes are assumed to share one.
    """
    if one.element_size() != other.element_size():
        return True
    first = min(one.storage_offset(), other.storage_offset())
    num = max(_reach(one).stop, _reach(other).stop) // one.element_size() - first
    is_used = torch.zeros(num, dtype=torch.bool, device="cpu")
    is_used.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(is_used.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())
