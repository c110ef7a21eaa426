"""The models of jobs: how they are built, their inputs, and the conversion between text and tokens."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partita.config.messages import shown
from partita.errors import ConfigError
from partita.train.data import bytes_to_tokens
from partita.train.decoder import Decoder, DecoderShape
from partita.train.job import DataSection, ModelSection

NUM_BYTES = 256
# Code that comes with a model is never run, and the user is not asked to allow it.
_NO_CODE = {"trust_remote_code": False}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class ByteDecoder:
    """The decoder of :mod:`partita.train.decoder`, on bytes."""

    token = "byte"

    def __init__(self, model: ModelSection) -> None:
        self.module = Decoder(decoder_shape(model))

    def inputs(self, windows: Tensor) -> dict[str, Tensor]:
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.module(tokens)
        return logits

    def encode(self, text: bytes) -> Tensor:
        return bytes_to_tokens(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def save_config(self, folder: Path) -> None:
        """Do nothing, because the job file that the loop writes has all sizes."""


class HuggingFaceModel:
    """A causal language model of transformers, with its folder's tokenizer, or on bytes if there is none."""

    def __init__(self, module: nn.Module, tokenizer: Any = None) -> None:
        self.module = module
        self._tokenizer = tokenizer
        self.token = "token" if tokenizer else "byte"

    def inputs(self, windows: Tensor) -> dict[str, Tensor]:
        return {"input_ids": windows, "labels": windows}  # the model shifts the labels

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.module(input_ids=tokens, use_cache=False).logits
        return logits

    def encode(self, text: bytes) -> Tensor:
        if self._tokenizer is None:
            return bytes_to_tokens(text)
        ids = self._tokenizer(text.decode(errors="replace"), add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32, device="cpu")

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")
        return str(self._tokenizer.decode(tokens))

    def save_config(self, folder: Path) -> None:
        self.module.config.save_pretrained(folder)  # type: ignore[operator, union-attr]  # transformers' own attribute
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)


# A causal language model. `inputs` turns windows, tokens [micro, sequence + 1], into arguments with which the forward
# returns the mean loss of micro x sequence predictions; `logits` turns tokens [batch, length] into
# [batch, length, vocab].
ReadyModel = ByteDecoder | HuggingFaceModel


def build_model(model: ModelSection, data: DataSection, *, reads_weights: bool = True) -> ReadyModel:
    """Build the model of a job, with weights drawn from ``model.seed``.

    With ``reads_weights``, they are read from the model's folder, if it has some.

    Raises:
        ConfigError: no such folder, not a causal language model, or a context shorter than ``data.sequence``.
    """
    torch.manual_seed(model.seed)
    return (
        ByteDecoder(model) if model.huggingface is None else _build_huggingface(model.huggingface, data, reads_weights)
    )


def decoder_shape(model: ModelSection) -> DecoderShape:
    """Return the sizes of the partita decoder; the feed-forward width is rounded up to a multiple of 16."""
    return DecoderShape(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.heads if model.kv_heads == "auto" else model.kv_heads,
        ffn_width=-(-int(model.width * model.ffn_multiple) // 16) * 16,
        vocab=NUM_BYTES,
        tied=model.tied,
    )


def _build_huggingface(source: str | Mapping[str, Any], data: DataSection, reads_weights: bool) -> ReadyModel:
    transformers = _transformers()
    path = Path(source) if isinstance(source, str) else None
    if path is not None and not path.exists():
        raise ConfigError(
            f"model.huggingface: no file or folder '{path}' (looked in {Path.cwd()}); correct the path. A model of the "
            "hub is downloaded first: hf download NAME --local-dir FOLDER"
        )
    tokenizer = _attempt(lambda: _tokenizer(path), source) if path is not None and path.is_dir() else None
    config = _attempt(lambda: _config(source, on_bytes=tokenizer is None), source)
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and context <= data.sequence:
        raise ConfigError(
            f"data.sequence: {data.sequence} and one token to predict are more than the {context} positions of the "
            f"model (max_position_embeddings); set data.sequence to at most {context - 1}, or give the model more"
        )
    auto = transformers.AutoModelForCausalLM
    if reads_weights and path is not None and path.is_dir() and _has_weights(path):
        module = _attempt(lambda: auto.from_pretrained(path, config=config, dtype=torch.float32, **_NO_CODE), source)
    else:
        module = _attempt(lambda: auto.from_config(config, dtype=torch.float32, **_NO_CODE), source)
    return HuggingFaceModel(module, tokenizer)


def _attempt(build: Callable[[], Any], source: str | Mapping[str, Any]) -> Any:
    """Return the result of ``build``; an error of transformers is raised as the user's error."""
    try:
        return build()
    except Exception as error:  # transformers raises whatever its many parts raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"model.huggingface {shown(source)}: transformers cannot build it: {lines[0]}; name a causal language model"
        ) from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError("model.huggingface needs the package transformers: pip install transformers") from None
    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    return library


def _config(source: str | Mapping[str, Any], *, on_bytes: bool) -> Any:
    transformers = _transformers()
    if isinstance(source, str):
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=True, **_NO_CODE)
    else:  # no tokenizer, so no special tokens either
        no_specials = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config = transformers.AutoConfig.for_model(**{"vocab_size": NUM_BYTES, **no_specials, **source})
    if on_bytes and getattr(config, "vocab_size", NUM_BYTES) < NUM_BYTES:
        raise ValueError(f"vocab_size {config.vocab_size} is less than the {NUM_BYTES} bytes, and it has no tokenizer")
    return config


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    return _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True, **_NO_CODE)


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
