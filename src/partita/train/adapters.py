"""Low-rank adapters of a Hugging Face model, by peft: added to the model, and saved without it."""

import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from partita.engine.engine import Engine
from partita.errors import ConfigError, PartitaError
from partita.huggingface.export import files_of_weights
from partita.train.job import LoraSection

_MODEL_CARD = "README.md"


def add_lora(module: nn.Module, lora: LoraSection) -> nn.Module:
    """Return the model with trainable adapters; its own parameters are frozen.

    Raises:
        ConfigError: peft is missing, or finds no layers to adapt.
    """
    peft = _peft()
    targets = list(lora.target_modules) if isinstance(lora.target_modules, tuple) else lora.target_modules
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.r, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=lora.dropout
    )
    try:
        with _without_deprecations():
            adapted: Any = peft.get_peft_model(module, settings)
    except ValueError as error:
        linear = sorted({path.rpartition(".")[2] for path, one in module.named_modules() if isinstance(one, nn.Linear)})
        raise ConfigError(
            f"model.lora.target_modules: peft cannot adapt {type(module).__name__}: {str(error).splitlines()[0]}; name "
            f"layers of the model ({', '.join(linear)}), or set it to all-linear"
        ) from error
    config = adapted.peft_config["default"]
    config.base_model_name_or_path = str(Path(config.base_model_name_or_path).resolve())
    return adapted  # type: ignore[no-any-return]  # peft has no types


def read_lora(module: nn.Module, folder: Path) -> nn.Module:
    """Return the model with the adapters in a folder, frozen.

    Raises:
        ConfigError: peft is missing, or the folder does not have adapters of this model.
    """
    peft = _peft()
    try:
        with _without_deprecations():
            adapted: nn.Module = peft.PeftModel.from_pretrained(module, str(folder))
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"model.lora: '{folder}' has no adapters of {type(module).__name__}: {str(error).splitlines()[0]}; "
            "name the folder of a run with this model"
        ) from error
    return adapted


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Silence warnings about names of transformers that peft still uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
        yield


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("model.lora needs the package peft: pip install peft") from None
    return peft


def is_adapted(module: nn.Module) -> bool:
    """Return True if a model has adapters of :func:`add_lora`."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def export_adapters(engine: Engine, folder: Path) -> None:
    """Write the adapters of an engine's model into ``folder``, for ``from_pretrained``. A collective; rank 0 writes.

    Raises:
        PartitaError: on all ranks: the folder cannot be written.
    """
    values, problem = engine.state_dict(trainable=True), None
    if engine.is_main:
        try:
            _write(engine.module, values, folder)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"cannot write the adapters into '{folder}': {reason}; free disk space, or set train.out"
    if engine.any(problem is not None):
        raise PartitaError(problem or "rank 0 cannot write the adapters: see its error")


def _write(module: Any, values: Mapping[str, Any], folder: Path) -> None:
    """Write adapters in place of the weights in ``folder``, which stay if writing fails."""
    temporary, card = folder / ".adapters", folder / _MODEL_CARD
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    try:
        if card.exists():
            shutil.copyfile(card, temporary / _MODEL_CARD)  # peft updates it
        module.save_pretrained(str(temporary), state_dict=values, save_embedding_layers=False)
        written = {path.name: path for path in temporary.iterdir()}
        for name, path in written.items():
            path.rename(folder / name)
        for stale in (*files_of_weights(folder), folder / "config.json"):
            if stale.name not in written:
                stale.unlink(missing_ok=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_adapters(folder: Path) -> None:
    """Remove adapters that an earlier run wrote into a folder of weights: ``from_pretrained`` would prefer them."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def no_values() -> Iterator[None]:
    """Build models of transformers without values inside the block.

    Their memory is not written, so it occupies no physical memory. An engine gives all ranks rank 0's values.
    """
    from transformers import initialization

    with initialization.no_init_weights():
        yield
