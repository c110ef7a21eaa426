"""Documents: rows of files or of a data set, as tokens.

The library ``datasets`` reads the rows in batches, so that files are never in memory as a unit.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.config.messages import shown
from partita.errors import ConfigError
from partita.train.files import corpus_files
from partita.train.job import DataSection

# Value of data.chat_template for the tokenizer's own template.
OWN_TEMPLATE = "tokenizer"
_BATCH_ROWS = 1000
# A template with this block says itself which tokens are answers (transformers' assistant mask).
_MARKED_ANSWERS = re.compile(r"\{%-?\s*generation\b")
# Files that mark the folder of a data set that was written by datasets' save_to_disk.
_SAVED = ("state.json", "dataset_dict.json")


@dataclass(frozen=True)
class DocumentEncoder:
    """Conversion of documents to tokens. Make one with :func:`document_encoder`.

    Args:
        tokenizer: a tokenizer of transformers, with an end-of-sequence token.
        template: a Jinja template for messages; None: documents are texts.
        only_answers: only tokens of the assistant's messages are predicted.
    """

    tokenizer: Any
    template: str | None
    only_answers: bool = False

    def encode(self, documents: Sequence[Any]) -> Iterator[list[int]]:
        """Yield the tokens of each document that has some. They end with the end-of-sequence token.

        A token that is not predicted is given as ``~token``, which is negative.
        """
        end = self.tokenizer.eos_token_id
        if self.only_answers:
            for messages in documents:
                if messages and (ids := self._predicted_answers(messages)):
                    is_answer = messages[-1]["role"] == "assistant"
                    yield ids if ids[-1] in (end, ~end) else [*ids, end if is_answer else ~end]
            return
        for ids in self._ids(documents):
            if ids:
                yield ids if ids[-1] == end else [*ids, end]

    def _predicted_answers(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, as ``~token`` outside the answers."""
        is_marked = _MARKED_ANSWERS.search(self.template or "") is not None
        text, spans = self._marked_answers(messages) if is_marked else self._found_answers(messages)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [
            token if any(begin < stop and end > start for start, stop in spans) else ~token
            for token, (begin, end) in zip(found["input_ids"], found["offset_mapping"], strict=True)
        ]

    def _marked_answers(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation's text, and where the template's blocks for answers begin and end."""
        # transformers' own mask of tokens extends to the end if a block ends with a space.
        from transformers.utils.chat_template_utils import render_jinja_template

        settings = {"chat_template": self.template, "return_assistant_tokens_mask": True}
        texts, spans = render_jinja_template([messages], **settings, **self.tokenizer.special_tokens_map)
        return texts[0], spans[0]

    def _found_answers(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation's text, and where each of the assistant's messages begins, and what the template
        writes after it ends.

        Raises:
            ValueError: the template writes the messages before an answer differently without the answer.
        """
        text, spans = self._as_text(messages), list[tuple[int, int]]()
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._as_text(messages[:number], add_generation_prompt=True)
            until = self._as_text(messages[: number + 1])
            if not (until.startswith(before) and text.startswith(until)):
                raise ValueError(
                    f"data.predict: answers: the template writes message {number + 1} or those before it in another "
                    "way if messages follow; mark the answers in the template by {% generation %} ... {% endgeneration "
                    "%}"
                )
            spans.append((len(before), len(until)))
        return text, spans

    def _ids(self, documents: Sequence[Any]) -> Sequence[list[int]]:
        if self.template is None:  # special tokens alone are no document
            plain: Mapping[str, list[list[int]]] = self.tokenizer(list(documents), verbose=False)
            return [ids if text else [] for text, ids in zip(documents, plain["input_ids"], strict=True)]
        texts = [self._as_text(messages) if messages else "" for messages in documents]
        found: Mapping[str, list[list[int]]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        return found["input_ids"]

    def _as_text(self, messages: Any, *, add_generation_prompt: bool = False) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, as documents that begin with it have them: of a user's message, or of text."""
        if self.template is None:
            end = self.tokenizer.eos_token_id
            ids = list(self.tokenizer(text, verbose=False)["input_ids"])
            return ids[:-1] if len(ids) > 1 and ids[-1] == end else ids
        shown_to_model = self._as_text([{"role": "user", "content": text}], add_generation_prompt=True)
        return list(self.tokenizer(shown_to_model, add_special_tokens=False, verbose=False)["input_ids"])

    @property
    def identity(self) -> str:
        """A text that differs between encoders whose tokens may differ."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        template = (self.template, "answers") if self.only_answers else self.template
        return repr((type(self.tokenizer).__name__, rules, sorted(self.tokenizer.special_tokens_map.items()), template))


def document_encoder(tokenizer: Any, data: DataSection) -> DocumentEncoder:
    """Return the encoder of a job's documents.

    Raises:
        ConfigError: there is no tokenizer, or it has no end-of-sequence token; or there is no chat template; or answers
            cannot be found with this tokenizer.
    """
    if tokenizer is None:
        raise ConfigError(
            f"data.format: {data.format} needs a tokenizer, and the model has none; set data.tokenizer to the folder "
            "of one, or model.huggingface to a folder that has tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"data.format: {data.format} ends each document with the tokenizer's end-of-sequence token, and it has "
            "none; set eos_token in its tokenizer_config.json"
        )
    template: str | None = None
    if data.chat_template == OWN_TEMPLATE:
        template = tokenizer.chat_template
        if not isinstance(template, str):
            raise ConfigError(
                "data.chat_template: the tokenizer has no chat template of its own; set data.chat_template to the path "
                "of a Jinja file"
            )
    elif data.chat_template is not None:
        try:
            template = Path(data.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(
                f"data.chat_template: '{data.chat_template}' cannot be read: {reason}; name a Jinja file, or "
                f"'{OWN_TEMPLATE}' for the tokenizer's own template"
            ) from None
        tokenizer.chat_template = template  # saved with the weights
    if data.predict == "answers" and not tokenizer.is_fast:
        raise ConfigError(
            f"data.predict: answers needs a fast tokenizer, which knows the place of each token in the text; got a "
            f"{type(tokenizer).__name__}; add a tokenizer.json to its folder, or set data.predict to all"
        )
    return DocumentEncoder(tokenizer, template, only_answers=data.predict == "answers")


def source_identity(data: DataSection) -> str:
    """Return a text that changes when the rows may have changed: paths, sizes and times of files.

    Raises:
        ConfigError: ``data.corpus`` does not exist.
    """
    path = Path(data.corpus)
    if data.format != "hf":
        files = corpus_files(data)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        return repr((data.corpus, data.split, _data_set(data)._fingerprint))
    states = [(file.resolve().as_posix(), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return repr((data.split, states))


def read_documents(data: DataSection, encoder: DocumentEncoder) -> Iterator[list[int]]:
    """Yield the tokens of each document, in the order of the rows.

    Raises:
        ConfigError: a file cannot be read, a row lacks the field or has something else in it, or the chat template
            does not accept its messages. The message names the file and the row.
    """
    if data.format == "hf":
        sources = {data.corpus: lambda: _data_set(data)}
    else:
        sources = {str(file): _rows_of(file, data.format) for file in corpus_files(data) if file.stat().st_size}
    for name, open_rows in sources.items():
        number = 0
        for batch in _batches(name, open_rows, data):
            documents = _column(batch, name, number, data)
            try:
                yield from encoder.encode(documents)
            except Exception as error:  # a template raises errors of Jinja and its own ones
                if encoder.template is None:
                    raise
                raise ConfigError(
                    f"data.chat_template: messages in rows {number + 1} to {number + len(documents)} of '{name}' do "
                    f"not fit the template: {_first_line(error)}; correct data.chat_template, or the rows"
                ) from error
            number += len(documents)


def _batches(name: str, open_rows: Callable[[], Any], data: DataSection) -> Iterator[Mapping[str, Sequence[Any]]]:
    """Yield rows in batches: the values by field. Errors of ``datasets`` are raised as the user's errors."""
    try:
        yield from open_rows().iter(batch_size=_BATCH_ROWS)
    except ConfigError:
        raise
    except Exception as error:  # datasets raises its own errors, and those of pyarrow and pandas
        cause = error.__cause__ or error
        raise ConfigError(
            f"data.corpus: '{name}' cannot be read as {data.format}: {_first_line(cause)}; correct the file, or set "
            "data.format to its format"
        ) from error


def _column(batch: Mapping[str, Sequence[Any]], name: str, first: int, data: DataSection) -> Sequence[Any]:
    """Return the documents of a batch whose first row is number ``first``, counted from 0."""
    if data.field not in batch:
        raise ConfigError(
            f"data.field: rows of '{name}' have no field '{data.field}', only {', '.join(map(repr, batch))}; set "
            "data.field to one of them"
        )
    kind, expected = (str, "a text") if data.chat_template is None else (list, "a list of messages")
    for index, value in enumerate(batch[data.field]):
        if not isinstance(value, kind):
            got = "nothing" if value is None else f"{shown(value)} ({type(value).__name__})"
            remedy = "set data.chat_template" if isinstance(value, list) else "correct the row, or set data.field"
            raise ConfigError(
                f"data.field: row {first + index + 1} of '{name}' has {got} in '{data.field}', expected {expected}; "
                f"{remedy}"
            )
    return batch[data.field]


def _rows_of(file: Path, file_format: str) -> Callable[[], Any]:
    """Return a function that opens a file's rows, as a data set that is read batch by batch."""
    builder = {"jsonl": "json", "parquet": "parquet"}[file_format]
    return lambda: _datasets().load_dataset(builder, data_files=str(file), split="train", streaming=True)


def _data_set(data: DataSection) -> Any:
    """Open the data set that ``data.corpus`` names: a folder, or a name that ``datasets`` finds."""
    library, path = _datasets(), Path(data.corpus)
    try:
        if any((path / name).exists() for name in _SAVED):
            found = library.load_from_disk(data.corpus)
            if isinstance(found, Mapping):
                if data.split not in found:
                    raise ConfigError(
                        f"data.split: '{data.corpus}' has no split '{data.split}', only "
                        f"{', '.join(map(repr, found))}; set data.split to one of them"
                    )
                return found[data.split]
            return found
        return library.load_dataset(data.corpus, split=data.split)
    except ConfigError:
        raise
    except Exception as error:  # datasets raises its own errors, and those of files and networks
        raise ConfigError(
            f"data.corpus: datasets cannot open '{data.corpus}': {_first_line(error)}; name a folder, or a data set "
            "that load_dataset finds"
        ) from error


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError("data.format: documents need the package datasets: pip install datasets") from None
    library: Any = datasets
    library.disable_progress_bars()
    return library


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
