"""``save_pretrained`` of sharded models, and the dtype in ``config.json`` of a model that computes in another dtype."""

import inspect
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from partita.errors import PartitaError
from partita.inspection.modules import further_names, persistent_buffers, state_dict_names
from partita.integrations.huggingface.prepared import PreparedModel

_NAME = "save_pretrained"


def hook_saving(prepared: PreparedModel) -> None:
    """Make every ``save_pretrained`` in an engine's model write full weights in their original dtypes.

    It becomes a collective, unless the model's parameters are these weights.
    """
    engine = prepared.engine
    if all(unit.always_unsharded for unit in engine.units) and prepared.has_original_dtypes:
        return
    for module in engine.module.modules():
        if callable(getattr(type(module), _NAME, None)):
            setattr(module, _NAME, SavePretrained(prepared, module))


class SavePretrained:
    """The ``save_pretrained`` of a module of an engine: all ranks call it, and rank 0 writes.

    With ``state_dict``, it writes these values and is not a collective.
    """

    def __init__(self, prepared: PreparedModel, module: nn.Module) -> None:
        self._prepared = prepared
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the module gets its own ``save_pretrained``
        return getattr, (self._module, _NAME)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = getattr(type(self._module), _NAME)
        given = inspect.signature(own).bind(self._module, *args, **kwargs).arguments
        values = given.get("state_dict", kwargs.get("state_dict"))
        if values is not None:
            with _parameters_replaced(self._module, values):  # save_pretrained records the parameters' dtype
                return own(self._module, *args, **kwargs)
        engine, result, error = self._prepared.engine, None, None
        try:
            engine.check_synchronized(_NAME)
        except PartitaError as alone:
            raise PartitaError(
                f"{_NAME} must be called on every rank, because all of them take part in gathering the weights of the "
                f"{type(self._module).__name__}: call it outside 'if accelerator.is_main_process:' (only rank 0 "
                f"writes), or pass state_dict=accelerator.get_state_dict(model), called on every rank\n{alone}"
            ) from alone
        with saved_weights(self._prepared, self._module) as found:
            if engine.mesh.rank == 0:
                adapters = {"state_dict": found} if _saved_adapters(self._module) else {}
                try:
                    result = own(self._module, *args, **kwargs | adapters)
                except Exception as raised:  # the other ranks must not wait for this one
                    error = raised
        if engine.any(error is not None):
            raise error or PartitaError(f"{_NAME}: rank 0 failed to write; see its own error")
        return result


@contextmanager
def saved_weights(prepared: PreparedModel, submodule: nn.Module | None = None) -> Iterator[dict[str, Any]]:
    """Yield the full weights that ``save_pretrained`` saves on rank 0; an empty mapping on other ranks.

    Inside this block, ``save_pretrained`` on rank 0 is that of the modules' classes, and the modules have these weights
    as their parameters. On other ranks it does nothing.

    If PEFT saves adapters instead of the model, only the weights that it saves are gathered. Inside this block, the
    modules that PEFT reads while saving are unsharded: prompt encoders, which it runs, and copies that it trains.

    Args:
        submodule: the module of the model to save (None: the model); names are relative to it.
    """
    engine = prepared.engine
    model: Any = submodule if submodule is not None else engine.module
    path = next(path for path, module in engine.module.named_modules() if module is model)
    prefix = f"{path}." if path else ""

    def gathered(names: Iterable[str]) -> dict[str, Any]:
        found = prepared.state_dict(prefix + name for name in names)
        return {name.removeprefix(prefix): value for name, value in found.items()}

    adapters, peft = _saved_adapters(model), sys.modules.get("peft")
    with _saving_on_rank_0(model, engine.mesh.rank):
        if not adapters:
            found = gathered(state_dict_names(model))
            with _parameters_replaced(model, found) if engine.mesh.rank == 0 else nullcontext():
                yield found
            return
        assert peft is not None
        copies = [one.modules_to_save for one in model.modules() if isinstance(one, peft.utils.ModulesToSaveWrapper)]
        with engine.gathered(getattr(model, "prompt_encoder", nn.ModuleDict()), *copies):
            chosen = [_chosen_by_peft(model, adapters, peft) if engine.mesh.rank == 0 else None]
            names = broadcast_object_list(chosen)[0]
            yield gathered(state_dict_names(model) if names is None else names)


@contextmanager
def _saving_on_rank_0(model: nn.Module, rank: int) -> Iterator[None]:
    """Undo :func:`hook_saving` inside the block: only rank 0 saves, and other ranks write nothing."""
    hooked = [module for module in model.modules() if isinstance(module.__dict__.get(_NAME), SavePretrained)]
    before = [module.__dict__.pop(_NAME) for module in hooked]
    for module in hooked if rank else ():
        setattr(module, _NAME, _write_nothing)
    try:
        yield
    finally:
        for module, own in zip(hooked, before, strict=True):
            setattr(module, _NAME, own)


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of ``save_pretrained`` on a rank that does not write."""


@contextmanager
def _parameters_replaced(model: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace the modules' parameters by these values, by name, inside the block; tied parameters stay tied."""
    made, before = dict[int, nn.Parameter](), list[tuple[nn.Module, str, nn.Parameter]]()
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            name = f"{path}.{key}" if path else key
            if param is not None and name in values:
                before.append((module, key, param))
                made.setdefault(id(param), nn.Parameter(values[name], requires_grad=param.requires_grad))
    try:
        for module, key, param in before:
            module._parameters[key] = made[id(param)]
        yield
    finally:
        for module, key, param in before:
            module._parameters[key] = param


def _saved_adapters(model: Any) -> list[str]:
    """Return the adapters that are saved instead of the model; empty if the model itself is saved.

    These are all adapters of a PEFT model, or the active ones that ``add_adapter`` put into a transformers model.
    """
    peft: Any = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return list(model.peft_config)
    return list(model.active_adapters()) if getattr(model, "_hf_peft_config_loaded", False) else []


def _chosen_by_peft(model: Any, adapters: list[str], peft: Any) -> set[str] | None:
    """Return the names in a model's state dict that PEFT saves.

    Returns None if PEFT computes the saved values (AdaLoRA's ranks, VB-LoRA's best vectors) and may need any value.
    """
    tensors = (*model.named_parameters(remove_duplicate=False), *persistent_buffers(model))
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors}
    shapes |= {name: torch.empty_like(shapes[first]) for name, first in further_names(model) if first in shapes}
    names = {id(value): name for name, value in shapes.items()}
    chosen = set[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns again when it saves
        for adapter in adapters:
            try:
                found = peft.get_peft_model_state_dict(model, dict(shapes), adapter)
            except (NotImplementedError, RuntimeError):  # computing with meta tensors fails
                return None
            saved = [value for value in found.values() if value.is_meta]
            if not all(id(value) in names for value in saved):
                return None
            chosen.update(names[id(value)] for value in saved)
    return chosen


def unhook_saving(model: nn.Module) -> None:
    """Restore the ``save_pretrained`` of the modules' classes."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_NAME), SavePretrained):
            del module.__dict__[_NAME]


def keep_dtype(folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    """Set the dtype in a folder's ``config.json`` to that of the first floating-point parameter in ``dtypes``.

    transformers also records the dtype of the first parameter.
    """
    path = folder / "config.json"
    dtype = next((str(dtype).removeprefix("torch.") for dtype in dtypes.values() if dtype.is_floating_point), None)
    if dtype is None or not path.is_file():
        return
    content = json.loads(path.read_text())
    if content.get("dtype", dtype) != dtype:
        path.write_text(json.dumps(content | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")
