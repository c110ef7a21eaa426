"""Models without weights, from a preset, sizes, a Hugging Face config, or Python code."""

import difflib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partita.config.messages import shown
from partita.errors import ConfigError
from partita.prediction.gpt import Gpt, GptShape
from partita.train.decoder import Decoder, DecoderShape

Batch = Any
_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context", "tied")
_EXPECTED_MODEL = (
    "a preset, sizes such as layers=24,hidden=2048, a folder or config.json of Hugging Face, or module:function, which "
    "returns (model, batch)"
)


@dataclass(frozen=True)
class ModelSource:
    """A ``model`` on the ``meta`` device.

    ``batch(samples, device)`` returns the arguments of its forward for that many samples: a mapping or a tuple.
    ``context``: positions of a sample; None if samples have none.
    """

    name: str
    model: nn.Module
    batch: Callable[[int, torch.device | str], Batch]
    context: int | None = None

    @property
    def num_params(self) -> int:
        return sum(param.numel() for param in self.model.parameters())


def read_source(text: str, tokens: int | None = None) -> ModelSource:
    """Build the model that ``text`` names: a preset, sizes, a file or folder of Hugging Face, or ``module:function``.

    Args:
        tokens: positions of a sample; None: the model's maximum, at most 2048.

    Raises:
        ConfigError: there is no such model, or it cannot be built.
    """
    if tokens is not None and tokens < 1:
        raise ConfigError(f"--tokens: expected at least 1 token in a sample; got {tokens}")
    if text in presets():
        return _from_sizes(text, {name: value for name, value in presets()[text].items() if name != "from"}, tokens)
    if "=" in text and not Path(text).exists():
        return _from_sizes(text, _parsed(text), tokens)
    if Path(text).exists():
        return _from_huggingface(Path(text), tokens)
    if ":" in text:
        return _from_code(text, tokens)
    near = difflib.get_close_matches(text, presets(), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; the presets are {', '.join(presets())}"
    raise ConfigError(
        f"model '{text}': there is no preset, file or folder of this name (looked in {Path.cwd()}); expected "
        f"{_EXPECTED_MODEL}{hint}"
    )


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the sizes of the presets by name, each with its source."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(files("partita.prediction").joinpath("presets.yaml").read_text())
    return found


# ------------------------------------------------------------------------------------------------------------- sizes


def _parsed(text: str) -> dict[str, Any]:
    sizes = dict[str, Any]()
    for entry in text.split(","):
        name, _, value = (each.strip() for each in entry.partition("="))
        if name == "family" and value in ("gpt", "llama"):
            sizes[name] = value
        elif name not in _SIZES or not value.isdecimal() or not int(value):
            raise ConfigError(
                f"model '{text}': '{entry.strip()}' is not understood; expected sizes above 0, each once: "
                f"{', '.join(f'{size}=..' for size in _SIZES)}, family=gpt or family=llama"
            )
        else:
            sizes[name] = int(value)
    for name in ("layers", "hidden"):
        if name not in sizes:
            raise ConfigError(f"model '{text}': {name}=.. is missing: a shape has at least layers=..,hidden=..")
    return sizes


def _from_sizes(name: str, sizes: Mapping[str, Any], tokens: int | None) -> ModelSource:
    hidden, family = sizes["hidden"], sizes.get("family", "gpt")
    heads = sizes.get("heads") or max(num for num in range(1, hidden // 64 + 2) if hidden % num == 0)
    if hidden % heads:
        raise ConfigError(f"model '{name}': hidden={hidden} cannot be divided over heads={heads}; choose a divisor")
    context = tokens or sizes.get("context", 1024 if family == "gpt" else 2048)
    tokens = tokens or min(context, 2048)
    with torch.device("meta"):
        if family == "gpt":
            model: nn.Module = Gpt(GptShape(sizes["layers"], hidden, heads, sizes.get("vocab", 50257), context))
        else:
            kv_heads, ffn = sizes.get("kv_heads", heads), sizes.get("ffn", -(-8 * hidden // 3 // 256) * 256)
            vocab, tied = sizes.get("vocab", 32000), bool(sizes.get("tied"))
            model = Decoder(DecoderShape(sizes["layers"], hidden, heads, kv_heads, ffn, vocab, tied))

    def batch(samples: int, device: torch.device | str) -> dict[str, Tensor]:
        ids = torch.zeros(samples, tokens, dtype=torch.long, device=device)
        return {"tokens": ids, "targets": ids.clone()}

    return ModelSource(name, model, batch, tokens)


# ------------------------------------------------------------------------------------------------------ Hugging Face


def _from_huggingface(path: Path, tokens: int | None) -> ModelSource:
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"model '{path}' needs the package transformers: pip install 'partita[hf]'") from None
    library: Any = transformers
    try:
        config = library.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        architecture = _architecture(library, config)
        with torch.device("meta"):
            model: nn.Module = architecture(config)
    except Exception as error:  # transformers may raise any error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"model '{path}': transformers cannot build it: {lines[0]}; expected {_EXPECTED_MODEL}"
        ) from error
    model.train()
    if model.main_input_name == "pixel_values":
        return ModelSource(str(path), model, _batch_maker(_image(config, model), path))
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"model '{path}': {type(model).__name__} takes {model.main_input_name}, whose shape its "
            "configuration does not name; pass module:function, which returns (model, batch)"
        )
    max_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if tokens is not None and isinstance(max_positions, int) and tokens > max_positions:
        raise ConfigError(
            f"--tokens: {tokens} are more than the {max_positions} positions of the model (max_position_embeddings)"
        )
    length = tokens or min(max_positions or 2048, 2048)

    def batch(samples: int, device: torch.device | str) -> dict[str, Tensor]:
        ids_of_samples = torch.zeros(samples, length, dtype=torch.long, device=device)
        return {"input_ids": ids_of_samples, **_labels(model, ids_of_samples)}

    return ModelSource(str(path), model, batch, length)


def _architecture(library: Any, config: Any) -> Callable[[Any], nn.Module]:
    """Return the class that the configuration names; without a name, its causal language model."""
    names = config.architectures or ()
    for name in names:
        if hasattr(library, name):
            return cast("Callable[[Any], nn.Module]", getattr(library, name))
    if type(config) in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        return cast("Callable[[Any], nn.Module]", library.AutoModelForCausalLM.from_config)
    raise ConfigError(
        f"its config.json names {f'no known architecture ({names[0]})' if names else 'no architecture'}, and "
        f"{config.model_type} has no causal language model; set architectures to a list with a class of transformers"
    )


def _image(config: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return the arguments of a vision model for one image of its configuration's size (224 if it names none)."""
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.zeros(1, getattr(config, "num_channels", 3), height, width, device="meta")
    return {"pixel_values": pixels, **_labels(model, pixels)}


def _labels(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Return the arguments of ``model`` from which it computes its loss: one class per sample, or one per token."""
    accepted, num_samples = inspect.signature(model.forward).parameters, len(inputs)
    classes = torch.zeros(num_samples, dtype=torch.long, device=inputs.device)
    if "start_positions" in accepted:
        return {"start_positions": classes, "end_positions": classes.clone()}
    if "labels" not in accepted:
        return {}
    if type(model).__name__.endswith(("SequenceClassification", "ImageClassification")):
        return {"labels": classes}
    return {"labels": inputs.clone()} if inputs.dtype == torch.long else {}


# -------------------------------------------------------------------------------------------------------------- code


def _from_code(text: str, tokens: int | None) -> ModelSource:
    module_name, _, name = text.rpartition(":")
    if tokens is not None:
        raise ConfigError(f"--tokens: the batch of '{text}' determines the tokens of a sample; leave the option out")
    function = getattr(_module(module_name, text), name, None)
    if not callable(function):
        raise ConfigError(f"model '{text}': '{module_name}' has no function '{name}'")
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:
        raise ConfigError(f"model '{text}': the function raised {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigError(
            f"model '{text}': expected (model, batch): a module, and its forward's arguments for one sample (a mapping "
            f"or a tuple; samples are the first dim); got {shown(type(made).__name__)}"
        )
    model, batch = made
    params = list(model.parameters())
    if not params:
        raise ConfigError(f"model '{text}': {type(model).__name__} has no parameters to train")
    return ModelSource(text, model.to("meta"), _batch_maker(batch, text))


def _module(module_name: str, text: str) -> Any:
    path = Path(module_name)
    try:
        if path.suffix == ".py":
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None or not path.exists():
                raise ConfigError(f"model '{text}': there is no file '{path}' (looked in {Path.cwd()})")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        return importlib.import_module(module_name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model '{text}': '{module_name}' cannot be imported: {error}; expected {_EXPECTED_MODEL}"
        ) from error


def _batch_maker(batch: Batch, name: object) -> Callable[[int, torch.device | str], Batch]:
    """Return a function that makes batches like ``batch`` with any number of samples, the first dim of its tensors."""
    values = dict(batch) if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else (batch,)
    sizes = {len(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1 or 0 in sizes:
        raise ConfigError(
            f"model '{name}': expected tensors of the batch with the same number of samples, above 0, in their first "
            f"dims; got {sorted(sizes)}"
        )
    num_samples = sizes.pop()

    def resized(value: Any, samples: int, device: torch.device | str) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        shape = (math.ceil(samples * len(value) / num_samples), *value.shape[1:])
        return torch.zeros(shape, dtype=value.dtype, device=device)

    return lambda samples, device: tree_map(lambda value: resized(value, samples, device), values)
