"""Conversion of documents, which are texts or conversations, to tokens."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.errors import ConfigError
from partita.train.job import DataSection

# Value of data.chat_template for the tokenizer's own template.
OWN_TEMPLATE = "tokenizer"
# A template with this block says itself which tokens are answers (transformers' assistant mask).
_MARKED_ANSWERS = re.compile(r"\{%-?\s*generation\b")


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
        """Yield the tokens of each document that has some to predict. They end with the end-of-sequence token.

        A token that is not predicted is given as ``~token``, which is negative.
        """
        end = self.tokenizer.eos_token_id
        if not self.only_answers:
            ended = (ids if ids[-1] == end else [*ids, end] for ids in self._ids(documents) if ids)
        else:
            ended = (self._ended_conversation(messages) for messages in documents if messages)
        return (ids for ids in ended if len(ids) > 1)  # the first token is not predicted

    def _ended_conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation and its end, as ``~token`` outside the answers."""
        end = self.tokenizer.eos_token_id
        ids = self._predicted_answers(messages)
        if not ids or ids[-1] in (end, ~end):
            return ids
        return [*ids, end if messages[-1]["role"] == "assistant" else ~end]

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
        texts = self.tokenizer.apply_chat_template(
            [messages],  # transformers takes a conversation without messages only in a list of conversations
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return str(texts[0])

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
