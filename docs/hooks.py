"""Hooks of mkdocs: add the repository's documents as pages, and generate the references of configurations."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

from partita.config.deepspeed_keys import RULES
from partita.config.messages import expectation, section_of, shown
from partita.config.schema import Config

ROOT = Path(__file__).parents[1]
# Documents of the repository, and the pages that show them.
DOCUMENTS = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_ROLE = re.compile(r":\w+:(?=<code>)|(?<=<code>)~")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for document, page in DOCUMENTS.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    document = next((name for name, uri in DOCUMENTS.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")
    for mark, lines in TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(lines()))
    return linked(markdown, document)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove roles of docstrings, such as :func:, which other tools use."""
    return _ROLE.sub("", html)


def linked(text: str, document: str) -> str:
    """Return the text with links to documents turned into links to their pages.

    A link to a file that is no page keeps only its words.
    """
    own = PurePosixPath(DOCUMENTS.get(document, document.removeprefix("docs/"))).parent

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        name, _, heading = target.partition("#")
        if re.match(r"\w+:", target) or not name:
            return match[0]
        path = os.path.normpath(PurePosixPath(document).parent / name)
        page = DOCUMENTS.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page is None:
            return words
        return f"[{words}]({os.path.relpath(page, own)}{'#' * bool(heading)}{heading})"

    return _LINK.sub(link, text)


def reference() -> Iterator[str]:
    """Yield Markdown: a table of the keys of each section."""
    yield from _table(Config, "")
    yield from _sections(Config, "")


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name in model.model_fields:
        section = section_of(model, name)
        if section is not None:
            yield from ("", f"## {prefix}{name}", "", str(section.__doc__), "")
            yield from _table(section, f"{prefix}{name}.")
            yield from _sections(section, f"{prefix}{name}.")


def _table(model: type[BaseModel], prefix: str) -> Iterator[str]:
    schemas: dict[str, Any] = model.model_json_schema(mode="serialization")["properties"]
    yield from ("| key | takes | default | meaning |", "|---|---|---|---|")
    for name, field in model.model_fields.items():
        if section_of(model, name):
            yield f"| [`{name}`](#{(prefix + name).replace('.', '')}) | a section | | {field.description} |"
        else:
            schema = schemas[name]
            yield f"| `{name}` | {expectation(schema)} | `{shown(schema['default'])}` | {field.description} |"


def deepspeed_keys() -> Iterator[str]:
    """Yield Markdown: a table of DeepSpeed's keys and how each is converted."""
    yield from ("| key | here | |", "|---|---|---|")
    for key, rule in RULES.items():
        yield f"| `{key}` | {rule.kind} | {rule.text} |"


# Marks in pages, and the tables that replace them.
TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "<!-- every key -->": reference,
    "<!-- every key of DeepSpeed -->": deepspeed_keys,
}
