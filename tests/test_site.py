"""Tests of the documentation site: it builds without warnings and without a network, its pages fetch nothing from other
hosts, and its reference pages agree with the source.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

import partita
from partita.cli.main import app
from partita.config.deepspeed_keys import RULES
from partita.config.messages import key_paths
from partita.config.schema import Config
from partita.table.state_plan import PRESETS
from partita.train.job import Job
from tests.kit.site import built_site

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_site(tmp_path_factory)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Import the modules in docs/ that mkdocs imports."""
    names = ("generated", "hooks")
    monkeypatch.syspath_prepend(ROOT / "docs")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


@pytest.fixture
def hooks(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["hooks"]


@pytest.fixture
def generated(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["generated"]


def page_of(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text()


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", "", html)).split())


def folder_of(page: str) -> str:
    """Return the folder in the site of a page's Markdown file."""
    return Path(page).with_suffix("").as_posix()


def pages_of(site: Path) -> set[str]:
    return {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}


def written_pages() -> set[str]:
    return {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_every_page_is_there_and_fetches_nothing(site: Path, generated: ModuleType) -> None:
    made = {folder_of(page) for page in generated.pages()}
    of_the_root = {"architecture", "contributing", "security", "changelog", "benchmarks"}
    assert pages_of(site) == written_pages() - {"index"} | {"."} | of_the_root | made
    for path in site.rglob("*.html"):
        html = path.read_text()
        fetched = re.findall(r'<(?:script|img|link rel="(?:stylesheet|preconnect|preload|icon)")[^>]*', html)
        assert fetched
        assert [tag for tag in fetched if "://" in tag] == [], path
        assert 'data-md-component="source"' not in html, f"{path}: this link asks the repository's host for its stars"


def test_the_index_by_task_is_the_home_and_leads_to_every_written_page(site: Path) -> None:
    home = page_of(site, ".")
    article = home[home.index("<article") : home.index("</article>")]
    linked = {href.split("#")[0].strip("/") for href in re.findall(r'href="([^"]+)"', article)}
    # The one page that is reached from other pages only.
    assert written_pages() - {"index"} - linked == {"deepspeed"}
    assert "architecture" in linked


def test_every_page_is_in_one_of_the_parts(site: Path) -> None:
    navigation = page_of(site, "limitations")
    tabs = re.findall(r'<a href="[^"]*" class="md-tabs__link">\s*(.*?)\s*</a>', navigation)
    assert tabs == ["Home", "Tutorials", "How-to", "Reference", "Explanation"]
    listed = navigation[navigation.index('class="md-nav md-nav--primary') : navigation.index("<article")]
    hrefs = re.findall(r'href="((?!https?:)[^"#]+)"', listed)
    reached = {(site / "limitations" / href).resolve().relative_to(site.resolve()).as_posix() for href in hrefs}
    assert pages_of(site) <= reached | {"limitations"}


def test_readers_can_page_through_and_reach_the_repository(site: Path) -> None:
    html = page_of(site, "reference/config/zero")
    assert 'rel="prev"' in html
    assert 'rel="next"' in html
    assert 'href="https://github.com/partita-project/partita"' in html


def test_every_picture_is_on_a_page(site: Path) -> None:
    shown = {
        Path(src).name
        for page in site.rglob("index.html")
        for src in re.findall(r'<img[^>]* src="([^"]+)"', page.read_text())
    }
    assert shown == {path.name for path in (ROOT / "docs" / "images").iterdir()}


# ---------------------------------------------------------------------------------------------------------- reference


def description(path: tuple[str, ...], owner: type) -> str:
    for part in path[:-1]:
        owner = owner.model_fields[part].annotation  # type: ignore[attr-defined]
    return str(owner.model_fields[path[-1]].description)  # type: ignore[attr-defined]


def assert_explained(html: str, path: tuple[str, ...], owner: type) -> None:
    assert re.search(rf"<h\d id=[^>]*><code>{re.escape('.'.join(path))}</code>", html), f"{path} has no heading"
    words = text_of(html)
    assert description(path, owner)[1:].rstrip(".").replace("`", "") in words, f"{path} has another description"


def test_every_key_is_in_the_reference(site: Path) -> None:
    overview = page_of(site, "configuration")
    for path in key_paths(Config):
        is_section = hasattr(Config.model_fields[path[0]].annotation, "model_fields")
        if not is_section:
            assert_explained(overview, path, Config)
        elif len(path) == 1:
            assert f'href="../reference/config/{path[0]}/"' in overview
            assert description(path, Config) in text_of(overview)
        else:
            assert_explained(page_of(site, f"reference/config/{path[0]}"), path, Config)


def test_every_key_of_a_job_is_in_the_reference(site: Path) -> None:
    html = page_of(site, "reference/job")
    paths = [path for path in key_paths(Job) if path[0] != "engine" and len(path) > 1]
    assert len(paths) > 20
    for path in paths:
        assert_explained(html, path, Job)


def test_every_key_of_deepspeeds_is_said_with_what_becomes_of_it(site: Path) -> None:
    rows = re.findall(r"<tr>\n<td><code>(.+?)</code></td>\n<td>(\w+)</td>", page_of(site, "reference/deepspeed_keys"))
    assert dict(rows) == {key: str(rule.kind) for key, rule in RULES.items()}


def test_every_public_name_has_a_page_with_its_signature(site: Path, generated: ModuleType) -> None:
    named = {name for names in generated.PYTHON.values() for name in names}
    assert {f"partita.{name}" for name in partita.__all__} <= named
    for names in generated.PYTHON.values():
        for name, others in names.items():
            html = page_of(site, folder_of(generated.python_page(name)))
            for shown in (name, *others):
                assert f'id="{shown}"' in html
            assert not re.search(r":(func|class|meth|mod|data):", html)
    engine = page_of(site, "reference/python/engine")
    for method in ("backward", "step", "train_batch", "gathered", "save", "load", "export", "close"):
        assert f'id="partita.Engine.{method}"' in engine
        parameters = list(inspect.signature(getattr(partita.Engine, method)).parameters)[1:]
        signature = engine.split(f'id="partita.Engine.{method}"', 1)[1].split("<pre>", 1)[1].split("</pre>", 1)[0]
        assert set(parameters) <= set(re.findall(r"\w+", text_of(signature)))


def commands(command: object, name: str) -> Iterator[tuple[str, object]]:
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        yield name, command
    for subname, subcommand in subcommands.items():
        yield from commands(subcommand, f"{name} {subname}")


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    html = page_of(site, "cli")
    for name, command in commands(typer.main.get_command(app), "partita"):
        section = html.split(f"<code>{name}</code><a", 1)[1].split("<h3", 1)[0]
        for param in command.params:  # type: ignore[attr-defined]
            shown = param.opts if param.param_type_name == "option" else [param.metavar or param.name.upper()]
            for word in shown:
                assert f"<code>{word}" in section, f"{name}: {word}"
            assert " ".join((param.help or "").split()) in text_of(section), f"{name}: {param.name}"


def test_every_row_of_the_state_table_is_explained(site: Path) -> None:
    rows = re.findall(r"<tr>\n(.*?)</tr>", page_of(site, "explanation/zero"), re.DOTALL)
    cells = [[text_of(cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in rows if "<td>" in row]
    assert len(cells) == len(PRESETS)
    assert cells[0] == ["stage: 0", "full", "full", "local sums", "full", "full"]
    assert cells[2] == ["stage: 2", "full", "full", "shard", "shard", "shard"]
    assert cells[-1][1:] == ["shard within the node"] * 5


def test_messages_of_errors_are_in_the_reference(site: Path, generated: ModuleType) -> None:
    html = page_of(site, "reference/errors")
    assert html.count("<li>") > 300
    words = text_of(html)
    for message in (
        "expected a scalar loss that depends on the parameters",
        "does not exist; correct the path, or pass a dict",
    ):
        assert message in words
    for area in generated.AREAS.values():
        assert area in words


def test_messages_are_read_from_the_source(generated: ModuleType) -> None:
    source = """
def check(a, folder):
    if a:
        raise ConfigError(f"zero.stage: expected {', '.join(sorted(a.known_stages))}; got <{a!r}>" + a.hint)
    raise PartitaError("x")
    raise ValueError("a defect of the library, not of its user")
"""
    assert list(generated.messages(source)) == [
        "zero.stage: expected <var>known stages</var>; got &lt;<var>a</var>&gt;<var>hint</var>"
    ]


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
        ("[rules](../../SECURITY.md)", "docs/reference/errors.md", "[rules](../security.md)"),
    ],
)
def test_links_between_documents_are_links_between_pages(
    hooks: ModuleType, text: str, document: str, linked: str
) -> None:
    assert hooks.linked(text, document) == linked
