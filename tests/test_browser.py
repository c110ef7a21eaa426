"""Tests of the documentation site in a real browser, at the width of a phone and of a laptop.

Pages fit, pictures load, links resolve, and the search finds the expected pages. The browser can reach only the site.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.kit.site import built_site

# Widths of a phone and of a laptop, in CSS pixels.
WIDTHS = (390, 1280)
BROWSERS, DRIVER = ("chromium", "google-chrome"), "chromedriver"
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # containers of continuous integration run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

# The page that each search must find.
SEARCHES = {
    "limitations": "limitations/",
    "EMA": "howto/evaluation/",
    "resume": "checkpoints/",
    "gradient clipping": "howto/optimizers/",
    "fully_shard": "howto/fsdp/",
    "out of memory": "howto/out_of_memory/",
    "NCCL timeout": "failures/",
    "Slurm": "howto/clusters/",
    "activation checkpointing": "activations/",
    "DPO": "howto/trl/",
}
FIRST_RESULTS = 3

LOOK = """
const finished = arguments[arguments.length - 1];
const images = [...document.images];
const loaded = Promise.all(images.map(image => {
  image.loading = "eager";
  return image.decode().catch(() => null);
}));
loaded.then(() => finished({
  title: document.title,
  ids: [...document.querySelectorAll("[id]")].map(element => element.id),
  links: [...document.querySelectorAll("a[href]")].map(link => link.href),
  pictures: images.map(image => ({address: image.src, width: image.naturalWidth, words: image.alt})),
  fetched: performance.getEntriesByType("resource").map(entry => entry.name),
}));
"""
WIDER = """
const limit = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth <= limit) return [];
return [...document.querySelectorAll("article *")]
  .filter(element => element.getBoundingClientRect().right > limit + 1)
  .map(element => element.outerHTML.slice(0, 120))
  .slice(0, 3).concat(`the page is ${document.documentElement.scrollWidth} pixels wide`);
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@dataclass(frozen=True)
class Site:
    """A built site's folder and the address at which it is served."""

    folder: Path
    address: str

    @property
    def pages(self) -> list[str]:
        """The paths of all pages; the home page's path is empty."""
        found = (path.parent.relative_to(self.folder).as_posix() for path in self.folder.rglob("index.html"))
        return sorted("" if path == "." else f"{path}/" for path in found)


@contextmanager
def served(folder: Path) -> Iterator[Site]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Site(folder, f"http://127.0.0.1:{server.server_port}/")
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def opened() -> Iterator[Chrome]:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    program = shutil.which(DRIVER)
    if browser is None or program is None:
        missing = "chromium" if browser is None else DRIVER
        if "CI" in os.environ:
            pytest.fail(f"{missing} must be on the path in continuous integration: .ci/run installs it")
        pytest.skip(f"{missing} was not found on the path: the site was not opened in a browser")
    options = ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS:
        options.add_argument(flag)
    driver = Chrome(options=options, service=Service(program))
    try:
        driver.set_script_timeout(20)
        yield driver
    finally:
        driver.quit()


def resize(driver: Chrome, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def too_wide(driver: Chrome, width: int) -> list[str]:
    """Return the elements that do not fit into a window of this width."""
    resize(driver, width)
    return list(driver.execute_script(WIDER))


def problems_of(address: str, seen: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the problems of each page, from the browser's findings."""
    for page, found in seen.items():
        if not found["title"]:
            yield f"{page}: no title"
        for picture in found["pictures"]:
            if not picture["width"] or not picture["words"]:
                yield f"{page}: {picture['address']} does not load, or has no description"
        for name in found["fetched"]:
            if not name.startswith((address, "data:")):
                yield f"{page}: fetches {name}"
        for link in set(found["links"]):
            yield from (f"{page}: {problem}" for problem in _problems_of_link(address, link, seen))


def _problems_of_link(address: str, link: str, seen: dict[str, dict[str, Any]]) -> Iterator[str]:
    if not link.startswith(address):
        return
    parts = urlsplit(link)
    target = parts.path.removeprefix("/").removesuffix("index.html")
    if target not in seen:
        yield f"{link} is no page"
    elif parts.fragment and parts.fragment not in seen[target]["ids"]:
        yield f"{link} is no place on that page"


@pytest.mark.timeout(600)  # includes building the site on a busy machine
def test_every_page_fits_its_pictures_load_and_its_links_resolve(tmp_path_factory: pytest.TempPathFactory) -> None:
    with opened() as driver, served(built_site(tmp_path_factory)) as site:
        # The search index is blocked: on every page, reading it would take longer than opening the page.
        driver.execute_cdp_cmd("Network.enable", {})
        driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/search_index.json"]})
        seen, wide = dict[str, dict[str, Any]](), list[str]()
        for page in site.pages:
            resize(driver, WIDTHS[0])
            driver.get(site.address + page)
            seen[page] = driver.execute_async_script(LOOK)
            wide += [f"{page} at {width}: {found}" for width in WIDTHS for found in too_wide(driver, width)]
        assert not wide, "\n".join(wide)
        problems = list(problems_of(site.address, seen))
        assert not problems, "\n".join(problems)
        assert sum(len(found["pictures"]) for found in seen.values()) > 10
        assert sum(len(found["links"]) for found in seen.values()) > 1000


ASK = """
const box = document.querySelector("input.md-search__input");
box.focus();
box.value = arguments[0];
box.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
"""
FOUND = """
return [...document.querySelectorAll(".md-search-result__item > a.md-search-result__link")].map(link => link.href);
"""


def results(driver: Chrome, query: str) -> list[str]:
    """Return the paths of the pages that the site's search finds, best match first."""
    driver.execute_script(ASK, query)
    # Each link lists the query's words that its page contains: results of an earlier query lack the last word.
    last = query.lower().split()[-1]
    links = WebDriverWait(driver, 20).until(lambda _: _links_with(driver, last), f"nothing is found for {query}")
    return list(dict.fromkeys(urlsplit(link).path.removeprefix("/") for link in links))


def _links_with(driver: Chrome, word: str) -> list[str]:
    links = list[str](driver.execute_script(FOUND))
    words = {word for link in links for words in parse_qs(urlsplit(link).query).get("h", []) for word in words.split()}
    return links if word in words else []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_search_finds_the_page_that_explains(width: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    with opened() as driver, served(built_site(tmp_path_factory)) as site:
        resize(driver, width)
        driver.get(site.address)
        driver.execute_script("document.querySelector('#__search').checked = true")
        for query, page in SEARCHES.items():
            found = results(driver, query)
            assert page in found[:FIRST_RESULTS], f"{query}: expected {page}, found {found}"
            says = query.lower() in (site.folder / page / "index.html").read_text().lower()
            assert says, f"{page} does not say {query}"


@pytest.mark.timeout(400)
def test_readers_choose_light_or_dark(tmp_path_factory: pytest.TempPathFactory) -> None:
    scheme = "return document.body.getAttribute('data-md-color-scheme')"
    with opened() as driver, served(built_site(tmp_path_factory)) as site:
        driver.get(site.address)
        before = driver.execute_script(scheme)
        (switch,) = [
            label for label in driver.find_elements(By.CSS_SELECTOR, "label[for^=__palette_]") if label.is_displayed()
        ]
        switch.click()
        WebDriverWait(driver, 10).until(lambda _: driver.execute_script(scheme) != before)
        assert {before, driver.execute_script(scheme)} == {"default", "slate"}


# ------------------------------------------------------------------------------------------------- tests of the checks

BROKEN = """<!doctype html><title>broken</title><article>
<p style="width: 500px">wide</p>
<img src="missing.png" alt="none"><a href="nowhere/">no page</a><a href="#nowhere">no place</a>
<script src="http://127.0.0.1:9/outside.js"></script></article>"""


def test_a_broken_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(BROKEN)
    with opened() as driver, served(tmp_path) as site:
        driver.get(site.address)
        assert too_wide(driver, 390)
        assert not too_wide(driver, 1280)
        found = list(problems_of(site.address, {"": driver.execute_async_script(LOOK)}))
        for problem in ("missing.png does not load", "nowhere/ is no page", "#nowhere is no place", "fetches http"):
            assert any(problem in text for text in found), found


def test_without_a_browser_ci_fails_and_others_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="chromium was not found on the path"), opened():
        pass
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="must be on the path"), opened():
        pass
