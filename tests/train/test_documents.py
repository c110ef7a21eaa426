"""Conversion of files and data sets to tokens, the token cache, and errors for input that cannot be read."""

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from partita.errors import ConfigError
from partita.train import token_cache
from partita.train.documents import document_encoder
from partita.train.files import check_format
from partita.train.job import DataSection
from partita.train.rows import read_documents
from partita.train.token_cache import cached_tokens
from partita.train.tokens import DocumentTokens
from tests.train.small_models import END, TEMPLATE, WITH_HEADERS, texts, tokenizer, write_rows

MESSAGES = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]


def section(folder: Path, **settings: Any) -> DataSection:
    base = {"format": "jsonl", "corpus": str(folder), "pattern": "*.jsonl", "cache": str(folder / "tokens")}
    return DataSection.model_validate(base | settings)


def documents(data: DataSection, reader: Any = None) -> list[list[int]]:
    return list(read_documents(data, document_encoder(reader or tokenizer(), data)))


def load(data: DataSection, reader: Any = None) -> DocumentTokens:
    return cached_tokens(data, document_encoder(reader or tokenizer(), data))


def test_each_row_is_a_document_with_an_end(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", ["w0 w1", "", "w2"])
    write_rows(tmp_path / "a.jsonl", ["w3 </s>", "w4"])
    (tmp_path / "c.jsonl").write_text("")
    assert documents(section(tmp_path)) == [[5, END], [6, END], [2, 3, END], [4, END]]


def test_a_document_without_a_token_to_predict_is_none(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", ["</s>", "w0", "", "</s> </s>"])
    assert documents(section(tmp_path)) == [[2, END], [END, END]]


def test_parquet_has_the_documents_of_json_lines(tmp_path: Path) -> None:
    import datasets

    rows = texts(2500)  # read in several batches
    write_rows(tmp_path / "rows.jsonl", rows)
    datasets.Dataset.from_dict({"body": rows, "other": [1] * len(rows)}).to_parquet(tmp_path / "rows.parquet")
    parquet = documents(section(tmp_path, format="parquet", pattern="*.parquet", field="body"))
    assert parquet == documents(section(tmp_path))
    assert len(parquet) == 2500


def test_a_data_set_on_disk_has_the_same_documents(tmp_path: Path) -> None:
    import datasets

    rows = texts(20)
    found = datasets.Dataset.from_dict({"text": rows})
    found.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": found.select(range(3)), "test": found}).save_to_disk(tmp_path / "splits")
    write_rows(tmp_path / "rows.jsonl", rows)
    expected = documents(section(tmp_path))
    one = DataSection(format="hf", corpus=str(tmp_path / "one"))
    splits = DataSection(format="hf", corpus=str(tmp_path / "splits"))
    assert documents(one) == expected
    assert documents(splits) == expected[:3]
    assert documents(splits.model_copy(update={"split": "test"})) == expected
    with pytest.raises(ConfigError, match="data.split: .* has no split 'valid', only 'train', 'test'; set data"):
        documents(splits.model_copy(update={"split": "valid"}))
    with pytest.raises(ConfigError, match="data.corpus: datasets cannot open .*nowhere.*; name a folder, or a da"):
        documents(DataSection(format="hf", corpus=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("own", [True, False])
def test_messages_become_documents_by_the_template(tmp_path: Path, own: bool) -> None:
    write_rows(tmp_path / "rows.jsonl", [MESSAGES, []], field="messages")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    reader = tokenizer()
    if own:
        reader.chat_template = TEMPLATE
    template = "tokenizer" if own else str(tmp_path / "chat.jinja")
    data = section(tmp_path, field="messages", chat_template=template)
    assert documents(data, reader) == [[32, 3, 4, 33, 5, END]]
    assert document_encoder(reader, data).prompt("w1") == [32, 3]
    assert reader.chat_template == TEMPLATE  # unchanged, because it is saved with the weights


TALK = [
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w3"},
    {"role": "user", "content": "w4"},
    {"role": "assistant", "content": "w5 w6"},
]
MARKED = (
    "{% for m in messages %}{{ m['role'] }} w9 {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} w8 "
    "{% endgeneration %}{% else %}{{ m['content'] }} w8 {% endif %}{% endfor %}"
)
# Omits earlier answers, as templates that remove earlier reasoning do.
FORGETFUL = "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }} {% endif %}{% endfor %}"


def answers_of(folder: Path, rows: list[Any], template: str) -> list[list[int]]:
    write_rows(folder / "rows.jsonl", rows, field="messages")
    reader = tokenizer(chat_template=template)
    return documents(section(folder, field="messages", chat_template="tokenizer", predict="answers"), reader)


@pytest.mark.parametrize("template", [WITH_HEADERS, MARKED])
def test_answers_alone_are_predicted(tmp_path: Path, template: str) -> None:
    """The tokens are those of the conversation. All except answers and their end marks are negative (``~token``)."""
    question = [~32, ~11, ~3, ~4, ~10, ~33, ~11]
    answer = [*question, 5, 10]
    more = [*answer, ~32, ~11, ~6, ~10, ~33, ~11, 7, 8, 10]
    found = answers_of(tmp_path, [TALK[:2], TALK, TALK[:3], TALK[:1], []], template)
    end = [~32, ~11, ~6, ~10, ~END]
    assert found == [[*answer, END], [*more, END], [*answer, *end], [*question[:5], ~END]]
    reader = tokenizer(chat_template=template)
    plain = documents(section(tmp_path, field="messages", chat_template="tokenizer"), reader)
    assert [[token if token >= 0 else ~token for token in document] for document in found] == plain


@pytest.mark.parametrize("template", [WITH_HEADERS, MARKED])
def test_a_conversation_may_begin_with_an_answer(tmp_path: Path, template: str) -> None:
    assert answers_of(tmp_path, [TALK[1:2]], template) == [[~33, ~11, 5, 10, END]]


def test_a_token_may_begin_with_the_space_before_an_answer(tmp_path: Path) -> None:
    names = ["[UNK]", "</s>", "Q:", " why", " A:", " so", " it", " is"]
    made = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = Split(Regex(" ?[^ ]+"), "isolated")
    reader = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="</s>")
    reader.chat_template = (
        "{% for m in messages %}{{ 'Q: ' if m['role'] == 'user' else ' A: ' }}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %} A: {% endif %}"
    )
    talk = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so it is"}]
    write_rows(tmp_path / "rows.jsonl", [talk], field="messages")
    data = section(tmp_path, field="messages", chat_template="tokenizer", predict="answers")
    assert documents(data, reader) == [[~2, ~3, ~4, 5, 6, 7, 1]]


def test_answers_that_cannot_be_found_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows 1 to 1 of .*data.predict: answers: the template writes message 2 or .*"
                       "mark the answers in the template by {% generation %}"):  # fmt: skip
        answers_of(tmp_path, [TALK], FORGETFUL)


def test_answers_need_the_place_of_each_token(tmp_path: Path) -> None:
    reader = tokenizer(chat_template=TEMPLATE)
    with (
        mock.patch.object(type(reader), "is_fast", False),
        pytest.raises(ConfigError, match="data.predict: answers needs a fast tokenizer.*set data.predict to all"),
    ):
        document_encoder(reader, section(tmp_path, chat_template="tokenizer", predict="answers"))


def test_the_largest_token_may_be_a_user_s(tmp_path: Path) -> None:
    rows = [[{"role": "user", "content": "w29"}, {"role": "assistant", "content": "w1"}]]
    write_rows(tmp_path / "rows.jsonl", rows, field="messages")
    reader = tokenizer(chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}")
    data = section(tmp_path, field="messages", chat_template="tokenizer")
    every = load(data, reader)
    answers = load(data.model_copy(update={"predict": "answers"}), reader)
    assert every.largest == answers.largest == 31
    assert every.digest != answers.digest
    tokens, is_predicted = answers.read(0, 3)
    assert (tokens.tolist(), is_predicted.tolist()) == ([31, 3, END], [False, True, True])


def test_prompts_are_begun_as_documents_are() -> None:
    assert document_encoder(tokenizer(), DataSection(format="jsonl")).prompt("w1 w2") == [3, 4]


def test_tokens_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = texts(40)
    write_rows(tmp_path / "rows.jsonl", rows)
    data = section(tmp_path)
    first = load(data)
    monkeypatch.setattr(token_cache, "read_documents", lambda data, encoder: pytest.fail("the cache is not used"))
    again = load(data)
    assert again.digest == first.digest
    flat = [token for document in documents(data) for token in document]
    assert again.stored.tolist() == flat
    assert again.ends.tolist()[-1] == len(flat)
    assert again.largest == max(flat)


def test_blocks_of_documents_are_one_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", texts(40))
    plain = load(section(tmp_path))
    monkeypatch.setattr(token_cache, "_FLUSH_TOKENS", 50)
    blocks = load(section(tmp_path, cache=str(tmp_path / "other")))
    assert blocks.stored.tolist() == plain.stored.tolist()
    assert blocks.ends.tolist() == plain.ends.tolist()


@pytest.mark.parametrize("changed", ["file", "time", "field", "tokenizer", "template"])
def test_what_changes_tokens_has_another_cache(tmp_path: Path, changed: str) -> None:
    path, template = tmp_path / "rows.jsonl", tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    row = {"text": MESSAGES} if changed == "template" else {"text": "w1", "body": "w2"}
    path.write_text(json.dumps(row) + "\n")
    reader, settings = tokenizer(), {"chat_template": str(template)} if changed == "template" else {}
    load(section(tmp_path, **settings))
    if changed == "file":
        path.write_text(2 * path.read_text())
    elif changed == "time":
        os.utime(path, ns=(0, 0))
    elif changed == "field":
        settings["field"] = "body"
    elif changed == "tokenizer":
        reader.eos_token = "w0"
    else:
        template.write_text(WITH_HEADERS)
    load(section(tmp_path, **settings), reader)
    assert len([one for one in (tmp_path / "tokens").iterdir() if one.is_dir()]) == 2


def test_an_unfinished_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", texts(5))

    def fails(data: DataSection, encoder: Any) -> Any:
        yield [3, END]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(token_cache, "read_documents", fails)
        load(section(tmp_path))
    assert not [one for one in (tmp_path / "tokens").iterdir() if one.is_dir()]
    assert len(load(section(tmp_path)).ends) == 5


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", texts(5))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data.cache: cannot write the tokens into '.*file/in'.*; set data.cache to"):
        load(section(tmp_path, cache=str(tmp_path / "file" / "in")))


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            ["w1"],
            {"field": "body"},
            "rows of '{file}' have no field 'body', only 'text'; set data.field to one",
        ),
        (["w1", 3], {}, "data.field: row 2 of '{file}' has 3 (int) in 'text', expected a text; correct the row"),
        (["w1", None], {}, "data.field: row 2 of '{file}' has nothing in 'text', expected a text"),
        ([MESSAGES], {}, "in 'text', expected a text; set data.chat_template"),
        (["w1"], {"chat_template": "{folder}/chat.jinja"}, "has 'w1' (str) in 'text', expected a list of messages"),
        (
            [["w1"]],
            {"chat_template": "{folder}/bad.jinja"},
            "in rows 1 to 1 of '{file}' do not fit the template",
        ),
        (["", ""], {}, "no document with text in '{folder}' (files '*.jsonl', field 'text'); name files with rows"),
        (["w1"], {"corpus": "{folder}/nowhere.jsonl"}, "data.corpus: no file or folder '{folder}/nowhere.jsonl'"),
        (["w1"], {"pattern": "*.json"}, "no document with text in '{folder}' (files '*.json'"),
        (
            ["w1"],
            {"chat_template": "tokenizer"},
            "the tokenizer has no chat template of its own; set data",
        ),
        (
            ["w1"],
            {"chat_template": "{folder}/no.jinja"},
            "'{folder}/no.jinja' cannot be read: No such file",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, rows: list[Any], settings: dict[str, str], message: str
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "bad.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    placed = {key: value.format(folder=tmp_path) for key, value in settings.items()}
    with pytest.raises(ConfigError) as caught:
        load(section(tmp_path, **placed))
    assert message.format(file=file, folder=tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_row_is_an_error_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "w1"}\n{"text": \n')
    with pytest.raises(ConfigError, match="data.corpus: '.*rows.jsonl' cannot be read as jsonl: .*; correct the file"):
        load(section(tmp_path))


ROWS = b'{"text": "a"}\n{"text": "b"}\n'
ZIPPED = gzip.compress(ROWS, mtime=0)  # test ids contain the bytes, and must be equal in all pytest workers


@pytest.mark.parametrize(
    ("name", "content", "file_format", "message"),
    [
        ("a.jsonl", ROWS, "text", "looks like JSON lines, not like text; set data.format to jsonl"),
        ("a.txt", ROWS, "text", "looks like JSON lines, not like text; set data.format to jsonl"),
        ("a.jsonl", b'{"text": "' + b"a" * 70_000 + b'"}\n', "text", "looks like JSON lines, not like text"),
        ("a.parquet", b"PAR1\0\0", "text", "looks like parquet, not like text; set data.format to parquet"),
        ("a.bin", b"text\0\1", "text", "looks like binary data, not like text; convert it, or choose other files"),
        ("a.gz", ZIPPED, "text", "looks like a gzip archive, not like text; convert it"),
        ("a.txt", "text".encode("utf-16"), "text", "looks like UTF-16 text, not like text; convert it"),
        ("a.txt", b"a text\n", "jsonl", "looks like text, not like JSON lines; set data.format to text"),
        ("a.json", b'{\n "text": 3\n}', "jsonl", "looks like a JSON document of several lines, not like JSON lines"),
        ("a.gz", ZIPPED, "jsonl", "looks like a gzip archive, not like JSON lines; convert it"),
        ("a.jsonl", ROWS, "parquet", "looks like JSON lines, not like parquet; set data.format to jsonl"),
    ],
)
def test_a_file_of_another_format_is_an_error_that_says_which(
    tmp_path: Path, name: str, content: bytes, file_format: str, message: str
) -> None:

    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_format(tmp_path / name, file_format)
    assert f"data.format: '{tmp_path / name}' {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "file_format"),
    [
        ("a.json", b'{\n "text": 3\n}', "text"),
        ("a.json", b'{"one": "row"}', "text"),
        ("a.md", b"{not json}\n{either}", "text"),
        ("a.txt", "naïve".encode("latin-1"), "text"),
        ("a.jsonl", b"", "text"),
        ("a.txt", ROWS, "jsonl"),
        ("a.json", b'{"text": "' + b"a" * 70_000 + b'"}\n', "jsonl"),
    ],
)
def test_files_of_the_format_are_read(tmp_path: Path, name: str, content: bytes, file_format: str) -> None:

    (tmp_path / name).write_bytes(content)
    check_format(tmp_path / name, file_format)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_rows(tmp_path / "rows.jsonl", ["w1"])

    def refused(path: Path, mode: str) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(
        ConfigError, match="data.corpus: '.*rows.jsonl' cannot be read: Permission denied; choose files"
    ):
        check_format(file, "jsonl")


def test_a_folder_of_data_files_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "library"))
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows" / "rows.jsonl", ["w1", "w2 w3"])
    assert documents(DataSection(format="hf", corpus=str(tmp_path / "rows"))) == [[3, END], [4, 5, END]]


def test_a_tokenizer_needs_an_end_of_sequence_token() -> None:
    data = DataSection(format="jsonl")
    with pytest.raises(ConfigError, match="ends each document with the tokenizer's end-of-sequence token, and it has"):
        document_encoder(tokenizer(eos_token=None), data)
    with pytest.raises(ConfigError, match="data.format: jsonl needs a tokenizer, and the model has none; set data.tok"):
        document_encoder(None, data)
