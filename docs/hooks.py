"""Hooks of mkdocs: add the repository's documents and the generated reference as pages."""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

import generated
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

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


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the generated pages in the navigation, below the written pages that introduce them."""
    children = generated.children()

    def expanded(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        ((title, target),) = entry.items()
        if isinstance(target, list):
            return {title: [expanded(each) for each in target]}
        return {title: [{"Overview": target}, *children[target]]} if target in children else entry

    config.nav = [expanded(entry) for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {page: (ROOT / document).read_text() for document, page in DOCUMENTS.items()} | generated.pages()
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    document = next((name for name, uri in DOCUMENTS.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")
    markdown = linked(markdown, document)
    for mark, lines in generated.TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(lines()))
    if page.is_homepage:  # it has no neighbours to list beside it
        page.meta["hide"] = ["navigation", "toc"]
    return markdown


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
