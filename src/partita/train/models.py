"""The models of jobs: how they are built, their inputs, and the conversion between text and tokens."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partita.config.launchers import launch_environment
from partita.config.messages import shown
from partita.errors import ConfigError
from partita.train import adapters
from partita.train.data import bytes_to_tokens
from partita.train.decoder import Decoder, DecoderShape
from partita.train.decoder_files import read_decoder_files, write_decoder_files
from partita.train.documents import OWN_TEMPLATE, DocumentEncoder, document_encoder
from partita.train.job import DataSection, ModelSection

NUM_BYTES = 256
# Code that comes with a model is never run, and the user is not asked to allow it.
_NO_CODE = {"trust_remote_code": False}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class ByteDecoder:
    """The decoder of :mod:`partita.train.decoder`, on bytes."""

    token = "byte"
    end_token: int | None = None
    weights: Path | None = None

    def __init__(self, model: ModelSection) -> None:
        self._shape = decoder_shape(model)
        self.module = Decoder(self._shape)

    def inputs(self, windows: Tensor) -> dict[str, Tensor]:
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.module(tokens)
        return logits

    def encode(self, text: bytes) -> Tensor:
        return bytes_to_tokens(text)

    def prompt(self, text: str) -> Tensor:
        return self.encode(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def save_config(self, folder: Path) -> None:
        write_decoder_files(folder, self._shape)


class HuggingFaceModel:
    """A causal language model of transformers, with a tokenizer, or on bytes if there is none.

    Args:
        weights: the folder that the engine reads the weights from; None: ``module`` has its values.
        documents: the encoder of the job's documents; None: the job has one text.
    """

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any = None,
        weights: Path | None = None,
        documents: DocumentEncoder | None = None,
    ) -> None:
        self.module = module
        self.weights = weights
        self.documents = documents
        self._tokenizer = tokenizer
        self.token = "token" if tokenizer else "byte"

    @property
    def end_token(self) -> int | None:
        """The token that ends a document; None if the job has no documents."""
        return None if self.documents is None else int(self._tokenizer.eos_token_id)

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

    def prompt(self, text: str) -> Tensor:
        if self.documents is None:
            return self.encode(text.encode())
        return torch.tensor(self.documents.prompt(text), dtype=torch.int32, device="cpu")

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")
        return str(self._tokenizer.decode(tokens))

    def save_config(self, folder: Path) -> None:
        if not adapters.is_adapted(self.module):  # the folder of adapters names the model that has the configuration
            self.module.config.save_pretrained(folder)  # type: ignore[operator, union-attr]  # transformers' attribute
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)


# A causal language model. `inputs` turns windows, tokens [micro, sequence + 1], into arguments with which the forward
# returns the mean loss of micro x sequence predictions; `logits` turns tokens [batch, length] into
# [batch, length, vocab]; `prompt` turns the beginning of a sample into tokens [length]. If `weights` is a folder,
# `module` is on the meta device, and the engine reads its values from there.
ReadyModel = ByteDecoder | HuggingFaceModel


def build_model(model: ModelSection, data: DataSection, *, reads_weights: bool = True) -> ReadyModel:
    """Build the model of a job, with weights drawn from ``model.seed``, and its adapters.

    With ``reads_weights``, weights are those of the model's folder, if it has some.

    Raises:
        ConfigError: no such folder, not a causal language model, a context shorter than ``data.sequence``, no tokenizer
            for documents, a model that cannot be trained on packed documents, or no layers to adapt.
    """
    torch.manual_seed(model.seed)
    if model.huggingface is None:
        return ByteDecoder(model)
    adapt = partial(adapters.add_lora, lora=model.lora) if model.lora.r else None
    ready = _build_huggingface(model.huggingface, data, adapt, reads_weights=reads_weights)
    ready.module.train()  # from_pretrained turns dropout off
    return ready


def build_trained(model: ModelSection, data: DataSection, folder: Path) -> ReadyModel:
    """Build the model of a job with the weights and the tokenizer that a run has written into ``folder``.

    Raises:
        ConfigError: as for :func:`build_model`.
    """
    if model.huggingface is None:
        decoder = ByteDecoder(model)
        read_decoder_files(folder, decoder.module, tied=model.tied)
        return decoder
    template = None if data.chat_template is None else OWN_TEMPLATE  # it was saved with the tokenizer
    tokenizer = str(folder) if _has_tokenizer(folder) else None
    data = data.model_copy(update={"tokenizer": tokenizer, "chat_template": template})
    if not model.lora.r:
        return _build_huggingface(str(folder), data)
    return _build_huggingface(model.huggingface, data, partial(adapters.read_lora, folder=folder))


def vocabulary_size(module: nn.Module) -> int:
    """Return the number of tokens that a model of transformers knows."""
    config: Any = module.config
    return int(config.vocab_size)


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


def _build_huggingface(
    source: str | Mapping[str, Any],
    data: DataSection,
    adapt: Callable[[nn.Module], nn.Module] | None = None,
    *,
    reads_weights: bool = True,
) -> ReadyModel:
    """Build a causal language model of transformers. ``adapt`` adds adapters to it, which takes its values."""
    auto = _transformers().AutoModelForCausalLM
    path = Path(source) if isinstance(source, str) else None
    if path is not None and not path.exists():
        raise ConfigError(
            f"model.huggingface: no file or folder '{path}' (looked in {Path.cwd()}); correct the path. A model of the "
            "hub is downloaded first: hf download NAME --local-dir FOLDER"
        )
    tokenizer = _attempt(lambda: _tokenizer(path), source) if path is not None and path.is_dir() else None
    if data.tokenizer is not None:
        tokenizer = _tokenizer_of_data(Path(data.tokenizer))
    documents = None if data.format == "text" else document_encoder(tokenizer, data)
    config = _attempt(lambda: _config(source, on_bytes=tokenizer is None), source)
    _check_context(config, data)

    def fresh() -> nn.Module:
        module: nn.Module = auto.from_config(config, dtype=torch.float32, **_NO_CODE)
        return module

    def pretrained() -> nn.Module:
        module: nn.Module = auto.from_pretrained(path, config=config, dtype=torch.float32, **_NO_CODE)
        return module

    weights = path if reads_weights and path is not None and path.is_dir() and _has_weights(path) else None
    if weights is None:
        if adapt is not None and reads_weights:
            raise ConfigError(
                f"model.lora: '{path}' has no weights for adapters to change; set model.huggingface to a folder with "
                "safetensors files"
            )
        module = _attempt(fresh, source)
    elif adapt is None and any(weights.glob("*.safetensors")):
        with torch.device("meta"):
            module = _attempt(fresh, source)
    else:
        with nullcontext() if launch_environment().rank == 0 else adapters.no_values():
            module = _attempt(pretrained if launch_environment().rank == 0 else fresh, source)
        weights = None
    if documents is not None:
        _check_takes_documents(module, data)
    return HuggingFaceModel(adapt(module) if adapt is not None else module, tokenizer, weights, documents)


def _check_context(config: Any, data: DataSection) -> None:
    context = getattr(config, "max_position_embeddings", None)
    needed = data.sequence + (data.format == "text")  # samples of a text have one more token to predict
    if isinstance(context, int) and context < needed:
        samples = f"{data.sequence}{' and one token to predict' * (data.format == 'text')}"
        raise ConfigError(
            f"data.sequence: {samples} are more than the {context} positions of the "
            f"model (max_position_embeddings); set data.sequence to at most {context - needed + data.sequence}, or "
            "give the model more"
        )


def _check_takes_documents(module: nn.Module, data: DataSection) -> None:
    """Check that a model takes what samples of documents need, by the signature of its forward.

    Raises:
        ConfigError: it does not.
    """
    parameters = inspect.signature(module.forward).parameters
    name = type(module).__name__
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any or getattr(module, "accepts_loss_kwargs", True) is False:
        raise ConfigError(
            f"data.format: {name} does not take num_items_in_batch, so micro-batches with different numbers of "
            "predicted tokens would count alike; set data.format to text, or use another model"
        )
    if data.pack and "position_ids" not in parameters:
        raise ConfigError(
            f"data.pack: {name} does not take position_ids, so documents in one sample would not be separated; set "
            "data.pack to false"
        )


def _tokenizer_of_data(folder: Path) -> Any:
    found = _attempt(lambda: _tokenizer(folder), str(folder)) if folder.is_dir() else None
    if found is None:
        raise ConfigError(
            f"data.tokenizer: no tokenizer in '{folder}' (looked in {Path.cwd()} for {', '.join(_TOKENIZER_FILES)}); "
            "correct the path"
        )
    return found


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
    if not _has_tokenizer(folder):
        return None
    return _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True, **_NO_CODE)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
