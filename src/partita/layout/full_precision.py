"""The parameters and modules that stay in fp32 in 16-bit training."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from partita.config.resolve import Resolved
from partita.layout.parameters import ParameterInfo, find_all_parameters
from partita.layout.units import modules_like

_HALF = (torch.bfloat16, torch.float16)
_KERNELS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


@dataclass(frozen=True)
class FullPrecision:
    """The parameters and modules that stay in fp32, by ``id``.

    Attributes:
        params: parameters that are stored and sent in fp32.
        modules: modules that compute in fp32, with all their submodules.
        batch_norms: batch norms of torch's own classes, whose kernels compute in fp32 for every input dtype.
    """

    params: frozenset[int]
    modules: frozenset[int]
    batch_norms: frozenset[int]


def find_full_precision(model: nn.Module, resolved: Resolved) -> FullPrecision:
    """Find the parameters and modules that stay in fp32.

    These are the modules that ``precision.keep_fp32`` names; batch norms; the modules that a transformers model lists
    in ``_keep_in_fp32_modules`` (fp16) and ``_keep_in_fp32_modules_strict`` (fp16 and bf16); and the fp32 parameters of
    a model whose other parameters are in 16 bits (a router). PEFT's adapters are excluded: PEFT creates them in fp32
    for the optimizer, which has fp32 master weights here.

    Raises:
        ConfigError: a pattern of ``precision.keep_fp32`` matches no module.
    """
    infos = [info for info in find_all_parameters(model) if info.param.is_floating_point()]
    modules = {id(inner) for module in _named(model, resolved) for inner in module.modules()}
    listed = {id(info.param) for info in _listed(model, resolved.compute_dtype, infos)}
    listed |= {id(info.param) for info in _fp32_in_16_bit_model(model, infos)}
    batch_norms = set[int]()
    for module in model.modules():
        ids = [id(param) for param in module.parameters() if param.is_floating_point()]
        if ids and listed.issuperset(ids):
            modules.add(id(module))
        elif isinstance(module, _BatchNorm):
            (batch_norms if type(module).forward in _KERNELS else modules).add(id(module))
    params = {
        id(info.param)
        for info in infos
        if any(id(owner) in modules or id(owner) in batch_norms for owner, _ in info.owners)
    }
    return FullPrecision(frozenset(params | listed), frozenset(modules), frozenset(batch_norms - modules))


def outermost(model: nn.Module, modules: frozenset[int]) -> list[nn.Module]:
    """Return the outermost of ``modules``.

    A ``ModuleList`` or ``ModuleDict`` has no forward, so its children are returned instead.
    """

    def search(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in modules and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield module
        else:
            for child in module.children():
                yield from search(child)

    return list({id(module): module for module in search(model)}.values())


def _named(model: nn.Module, resolved: Resolved) -> Iterator[nn.Module]:
    for pattern in resolved.config.precision.keep_fp32:
        yield from modules_like(model, pattern, "precision.keep_fp32")


def _listed(model: nn.Module, compute: str, infos: Iterable[ParameterInfo]) -> Iterator[ParameterInfo]:
    """Yield the parameters that a transformers model lists to stay in fp32."""
    names = set[str](getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if compute == "fp16":
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not names:
        return
    patterns = (re.escape(name).replace(r"\*", ".*") for name in names)
    matches = re.compile(rf"(^|\.)({'|'.join(patterns)})(\.|$)")
    yield from (info for info in infos if any(matches.search(fqn) for fqn in info.fqns))


def _fp32_in_16_bit_model(model: nn.Module, infos: Iterable[ParameterInfo]) -> Iterator[ParameterInfo]:
    """Yield the fp32 parameters, except adapters, of a model that also has parameters in 16 bits."""
    with torch._C.DisableTorchFunctionSubclass():  # the dtype in the model, also for parameters of other stages
        if not any(info.param.dtype in _HALF for info in infos):
            return
        adapters = {id(param) for param in _adapter_params(model)}
        for info in infos:
            if info.param.dtype == torch.float32 and id(info.param) not in adapters:
                yield info


def _adapter_params(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of PEFT's adapters: PEFT's layers list the attributes that hold them."""
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            found = getattr(module, name, None)
            if isinstance(found, nn.Parameter):
                yield found
            elif isinstance(found, nn.Module):
                yield from found.parameters()
