"""The documentation site: it is built without complaints, complete, self-contained, and works in a browser as files.

Links are checked here by reading the built HTML, independently of the program that builds it.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import outgrow
from outgrow import extending
from tests.helpers.browser import Browser, chromium

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PUBLIC_MODULES = ("accelerate", "dcp", "lightning", "ray", "recipes", "transformers")

pytest.importorskip("zensical", reason="the site is built by Zensical: pip install -e '.[docs]'")


def build(out: Path, docs: Path = DOCS) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(docs / "tools" / "build_site.py"), str(out)], capture_output=True, text=True)


def test_long_names_in_tables_may_break_where_their_words_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    breakable = importlib.import_module("build_site").breakable
    code = "<td><code>src/outgrow/methods/net2net.py</code> 9e-16</td>"
    broken = "<td><code>src/<wbr>outgrow/<wbr>methods/<wbr>net2net.py</code>"
    assert breakable(f"<p>src/outgrow/methods/net2net.py</p>{code}") == (
        f'<p>src/outgrow/methods/net2net.py</p>{broken} <span style="white-space: nowrap">9e-16</span></td>'
    )
    assert breakable('<td><a href="a/long_enough/path_to.html">a/b_c</a></td>') == (
        '<td><a href="a/long_enough/path_to.html">a/b_c</a></td>'
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    ran = build(out)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out


class Page(HTMLParser):
    """The identifiers of a page, what it links to, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link":
            self.loads.append(found["href"])
        elif found.get("src"):
            self.loads.append(found["src"])


@cache
def parsed(path: Path) -> Page:
    return Page(path)


def html(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_every_page_is_in_the_navigation_and_in_llms_txt(site: Path) -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert {str(path.relative_to(site).with_suffix(".md")) for path in html(site)} == pages
    home = parsed(site / "index.html")
    for page in pages:
        assert page == "index.md" or any(Path(link) == Path(page).with_suffix(".html") for link in home.links), page
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# outgrow\n\n> Grow PyTorch networks")
    for page in pages:
        assert f"]({page}): " in text
        assert (site / page).read_text(encoding="utf-8") == (DOCS / page).read_text(encoding="utf-8")


def test_links_lead_somewhere(site: Path) -> None:
    missing = []
    for path in html(site):
        for link in parsed(path).links:
            parts = urlsplit(link)
            if parts.scheme in ("https", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = target.is_file() and target.is_relative_to(site.resolve())
            if not known or (parts.fragment and unquote(parts.fragment) not in parsed(target).ids | {"__skip"}):
                missing.append(f"{path.relative_to(site)}: {link}")
    assert not missing


def test_pages_load_only_files_of_the_site(site: Path) -> None:
    for path in html(site):
        for load in parsed(path).loads:
            assert not urlsplit(load).netloc, f"{path.name} loads {load}"
            assert load.startswith("data:") or (path.parent / unquote(urlsplit(load).path)).is_file(), f"{path.name}: {load}"


def test_the_reference_has_every_public_name(site: Path) -> None:
    ids = set().union(*(parsed(path).ids for path in html(site) if path.parent.name == "reference"))
    top = {name.removeprefix("outgrow.") for name in ids if name.startswith("outgrow.") and name.count(".") == 1}
    assert top == set(outgrow.__all__), "a line `::: outgrow.NAME` on a page under docs/reference/ adds a name"
    for name in PUBLIC_MODULES:
        module = importlib.import_module(f"outgrow.{name}")
        public = {key for key, value in vars(module).items() if not key.startswith("_") and not isinstance(value, ModuleType)}
        shown = {one.split(".")[2] for one in ids if one.startswith(f"outgrow.{name}.")}
        assert shown == public
    shown = {one.split(".")[2] for one in ids if one.startswith("outgrow.extending.")}
    assert shown == set(extending.__all__) - {"Method"}  # which is a name of the package itself


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("[a](nowhere.md)", "page does not exist"),
        ("[a](widen.md#nowhere)", "anchor does not exist"),
        ("[a][outgrow.nothing]", "unresolved"),
    ],
)
def test_faults_end_the_build(fault: str, said: str, tmp_path: Path) -> None:
    """A dead link, a dead anchor, an unknown name; the last site stays."""
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__", "results", "transforms"))
    shutil.copytree(ROOT / "src" / "outgrow", tmp_path / "src" / "outgrow", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs" / "get-started.md").write_text(f"# A page\n\n{fault}\n", encoding="utf-8")
    (tmp_path / "docs" / "widen.md").write_text("# Another\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(only(ROOT / "mkdocs.yml", "index.md", "get-started.md", "widen.md"), encoding="utf-8")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "last.html").touch()
    for page in list((tmp_path / "docs").rglob("*.md")):
        if page.name not in ("index.md", "get-started.md", "widen.md") or page.parent.name == "reference":
            page.unlink()
    (tmp_path / "docs" / "index.md").write_text("# Home\n", encoding="utf-8")
    ran = build(tmp_path / "out", tmp_path / "docs")
    assert ran.returncode != 0
    assert said in ran.stderr
    assert (tmp_path / "out" / "last.html").exists()


def only(settings: Path, *pages: str) -> str:
    """The settings of the site with another navigation."""
    before = settings.read_text(encoding="utf-8").partition("\nnav:\n")[0]
    return before + "\nnav:\n" + "".join(f"  - {page.removesuffix('.md')}: {page}\n" for page in pages)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("Chromium is not installed (apt-get install chromium, or name one in $CHROMIUM)")
    one = Browser(tmp_path_factory.mktemp("profile"), program)
    yield one
    one.close()


def wait(browser: Browser, condition: str) -> Any:
    """What an expression is worth once it is true; pages come and go meanwhile."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with contextlib.suppress(RuntimeError):  # the page is being left
            if found := browser.js(condition):
                return found
        time.sleep(0.02)
    raise AssertionError(f"not within ten seconds: {condition}")


@pytest.mark.browser
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["one in four", "all"])
def test_every_page_opens_without_errors_on_a_phone_and_on_a_desk(browser: Browser, site: Path, stride: int) -> None:
    """No console message, no foreign request, all pictures, no horizontal overflow; light and dark."""
    browser.said.clear()
    browser.requested.clear()
    for path in html(site)[::stride]:
        browser.dark(path.name > "m")
        browser.size(390, 844, touch=True)
        browser.open(path)
        assert browser.js("document.documentElement.scrollWidth") <= 390, path.name
        browser.js("Promise.all([...document.images].map(i => { i.loading = 'eager'; return i.decode() })).then(() => 1)")
        assert all(browser.js("[...document.images].map(i => i.naturalWidth)")), path.name
        browser.size(1280, 900)
        assert browser.js("document.documentElement.scrollWidth") <= 1280, path.name
        wide = "[...document.querySelectorAll('.md-typeset__scrollwrap')].filter(one => one.scrollWidth > one.clientWidth + 1)"
        assert browser.js(f"{wide}.map(one => one.innerText.slice(0, 80))") == [], path.name
    assert browser.said == []
    assert browser.thrown == []
    assert {urlsplit(url).scheme for url in browser.requested} <= {"file", "data", "blob", "about"}


@pytest.mark.browser
def test_the_navigation_and_the_search_work_without_a_server(browser: Browser, site: Path) -> None:
    browser.size(1280, 900)
    browser.open(site / "index.html")
    link = "[...document.querySelectorAll('.md-nav a')].find(a => a.href.endsWith('/widen.html'))"
    browser.js(f"{link}.click()")
    wait(browser, "location.href.endsWith('/widen.html') && document.readyState == 'complete'")
    assert "Widen" in browser.js("document.title")
    browser.click(".md-search__button")
    wait(browser, "document.activeElement.shadowRoot != null")
    browser.call("Input.insertText", text="register_optimizer")
    found = wait(browser, "[...document.activeElement.shadowRoot.querySelectorAll('a')].map(a => a.href)")
    assert any("reference/extending.html" in url and url.endswith("#outgrow.register_optimizer") for url in found)


@pytest.mark.browser
def test_a_phone_has_the_navigation_in_a_drawer(browser: Browser, site: Path) -> None:
    browser.size(390, 844, touch=True)
    browser.open(site / "index.html")
    link = "[...document.querySelectorAll('.md-nav a')].find(a => a.href.endsWith('/widen.html')).getBoundingClientRect()"
    assert browser.js(f"{link}.right") <= 0
    browser.click(".md-header [for=__drawer]")
    wait(browser, f"{link}.left >= 0")


@pytest.mark.browser
def test_the_palette_changes(browser: Browser, site: Path) -> None:
    browser.size(1280, 900)
    colours = []
    for dark in (False, True):
        browser.dark(dark)
        browser.open(site / "index.html")
        colours.append(browser.js("getComputedStyle(document.body).backgroundColor"))
    browser.dark(False)
    assert colours[0] != colours[1]
