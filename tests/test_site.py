"""The documentation's site: it builds without a warning and without a network, fetches nothing when it is read, and has
what its sources have.
"""

import importlib.util
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest

import partita
from partita.config.deepspeed_keys import RULES
from partita.config.messages import key_paths
from partita.config.schema import Config

ROOT = Path(__file__).parents[1]
BUILD = """
import socket, sys
def refuse(*arguments): raise AssertionError(f"the build reaches for the network: {arguments}")
socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--config-file", sys.argv[1], "--site-dir", sys.argv[2]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, ROOT / "mkdocs.yml", folder], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text_of(page: Path) -> str:
    return unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_every_page_is_there_and_fetches_nothing(site: Path) -> None:
    pages = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    written = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == written - {"index"} | {".", "architecture", "contributing", "security", "changelog", "benchmarks"}
    for path in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img|link rel="(?:stylesheet|preconnect|preload|icon)")[^>]*', path.read_text()
        )
        assert fetched
        assert [tag for tag in fetched if "://" in tag] == [], path


def test_the_index_by_task_is_the_home_and_leads_to_every_page(site: Path) -> None:
    home = (site / "index.html").read_text()
    article = home[home.index("<article") : home.index("</article>")]
    linked = {href.split("#")[0].strip("/") for href in re.findall(r'href="([^"]+)"', article)}
    pages = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")} - {"."}
    assert pages - linked == {
        "benchmarks",
        "changelog",
        "deepspeed",
    }  # reached from results, contributing and DeepSpeed


def test_every_picture_is_on_a_page(site: Path) -> None:
    shown = {
        Path(src).name
        for page in site.rglob("index.html")
        for src in re.findall(r'<img[^>]* src="([^"]+)"', page.read_text())
    }
    drawn = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert drawn - shown == {"memory.svg"}  # the README's
    assert shown <= drawn


def test_every_key_is_in_the_reference(site: Path) -> None:
    page = (site / "configuration" / "index.html").read_text()
    for path in key_paths(Config):
        owner: type = Config
        for part in path[:-1]:
            owner = owner.model_fields[part].annotation  # type: ignore[attr-defined]
        assert f"<code>{path[-1]}</code>" in page
        assert str(owner.model_fields[path[-1]].description) in unescape(page)  # type: ignore[attr-defined]


def test_every_key_of_deepspeeds_is_said_with_what_becomes_of_it(site: Path) -> None:
    page = (site / "libraries" / "deepspeed" / "index.html").read_text()
    rows = re.findall(r"<tr>\n<td><code>(.+?)</code></td>\n<td>(\w+)</td>", page)
    assert dict(rows) == {key: str(rule.kind) for key, rule in RULES.items()}


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "python" / "index.html").read_text()
    for name in partita.__all__:
        assert f'id="partita.{name}"' in page
    for method in ("backward", "step", "train_batch", "gathered", "save", "load", "export", "close"):
        assert f'id="partita.Engine.{method}"' in page
    assert not re.search(r":(func|class|meth|mod|data):", page)


@pytest.fixture
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "document", "linked"),
    [
        ("[how](ARCHITECTURE.md)", "README.md", "[how](architecture.md)"),
        ("[X](CONTRIBUTING.md#to-add-x)", "README.md", "[X](contributing.md#to-add-x)"),
        ("[figures](benchmarks/README.md)", "README.md", "[figures](benchmarks.md)"),
        ("[start](../docs/start.md)", "benchmarks/README.md", "[start](start.md)"),
        ("[source](src/partita/errors.py)", "README.md", "source"),
        ("[there](https://example.org/a.md)", "README.md", "[there](https://example.org/a.md)"),
        ("[above](#measured)", "README.md", "[above](#measured)"),
        ("[start](start.md), [how](../ARCHITECTURE.md)", "docs/python.md", "[start](start.md), [how](architecture.md)"),
        ("[page](../deepspeed.md)", "docs/libraries/deepspeed.md", "[page](../deepspeed.md)"),
    ],
)
def test_links_between_documents_are_links_between_pages(
    hooks: ModuleType, text: str, document: str, linked: str
) -> None:
    assert hooks.linked(text, document) == linked
