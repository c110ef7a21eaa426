"""The files that ``data.corpus`` names, and checks that they have the format that the job says."""

import json
from pathlib import Path

from partita.errors import ConfigError
from partita.train.job import DataSection

# Bytes from the beginning of a file that show its format.
_HEAD_BYTES = 2**16
_MAGIC = {
    b"PAR1": "parquet",
    b"ARROW1\0\0": "an Arrow file",
    b"\x1f\x8b": "a gzip archive",
    b"\x28\xb5\x2f\xfd": "a Zstandard archive",
    b"PK\x03\x04": "a zip archive",
    b"\xfd7zXZ": "an xz archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
_NAMES = {"text": "text", "jsonl": "JSON lines", "parquet": "parquet"}


def corpus_files(data: DataSection) -> list[Path]:
    """Return the file that ``data.corpus`` names, or the visible files of the folder, in the order of their paths.

    Raises:
        ConfigError: there is no such file or folder, or no file of this name in it; or a file has another format.
    """
    path = Path(data.corpus)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        found = sorted(file for file in path.rglob(data.pattern) if file.is_file())
        files = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    else:
        choice = "" if data.format != "text" else ", or set it to 'stdlib'"
        raise ConfigError(f"data.corpus: no file or folder '{path}' (looked in {Path.cwd()}); correct the path{choice}")
    for file in files:
        check_format(file, data.format)
    return files


def check_format(file: Path, expected: str) -> None:
    """Check that a file looks like the format ``expected``: text, jsonl or parquet. An empty file has every format.

    Raises:
        ConfigError: it looks like another one, which the message names; or it cannot be read.
    """
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD_BYTES)
    except OSError as error:
        raise ConfigError(
            f"data.corpus: '{file}' cannot be read: {error.strerror or error}; choose files that this user may read"
        ) from None
    found = _format_of(head, file.suffix, expected)
    if not head or found == expected:
        return
    if found in _NAMES:
        remedy = f"set data.format to {found}, or choose other files with data.corpus and data.pattern"
    else:
        remedy = "convert it, or choose other files with data.corpus and data.pattern"
    raise ConfigError(
        f"data.format: '{file}' looks like {_NAMES.get(found, found)}, not like {_NAMES[expected]}; {remedy}"
    )


def _format_of(head: bytes, suffix: str, expected: str) -> str:
    """Return the format that the beginning of a file shows: a value of ``data.format``, or a description.

    Text may begin like JSON, so without the suffix it takes two rows to see that a file has rows.
    """
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if b"\0" in head:
        return "binary data"
    lines = [line for line in head.splitlines() if line.strip()]
    is_cut = len(head) == _HEAD_BYTES and len(lines) == 1 and lines[0].startswith(b"{")
    rows = [_is_row(line) for line in lines[:2]]
    if expected == "jsonl" or suffix in (".jsonl", ".ndjson"):
        if rows[:1] == [True] or is_cut:
            return "jsonl"
        return "a JSON document of several lines" if lines and lines[0].lstrip()[:1] in (b"{", b"[") else "text"
    return "jsonl" if rows == [True, True] else "text"


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
