"""Figures and the report: files, the same bytes twice, and the page in a real browser."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import demo, figures, report
from experiments.reading.result_files import file_name, read_all
from tests.helpers import made_up_results as made_up
from tests.helpers.browser import Browser, chromium


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the committed results."""
    out = tmp_path_factory.mktemp("report")
    assert report.main(["--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reports of a few made-up arms with filters, made twice: in one/ and two/."""
    out = tmp_path_factory.mktemp("small")
    made_up.write(out / "results", only=("OF", "VIZ"), filters=True)
    for name in ("one", "two"):
        assert report.main(["--results", str(out / "results"), "--out", str(out / name)]) == 0
    return out


def test_the_committed_results_make_every_figure(folder: Path) -> None:
    names = {path.name for path in (folder / "figures").iterdir()}
    wanted = {name for name, *_ in figures.FIGURES} | {"final", "appendix-b"}
    assert {f"{name}.{kind}" for name in wanted for kind in ("png", "pdf")} <= names
    assert all(path.stat().st_size > 5_000 for path in (folder / "figures").iterdir())
    assert (folder / "figures" / "final.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "figures" / "final.pdf").read_bytes().startswith(b"%PDF")


def test_the_same_results_give_the_same_bytes(small: Path) -> None:
    one, two = ({p.relative_to(small / out): p.read_bytes() for p in (small / out).rglob("*.*")} for out in ("one", "two"))
    assert one == two
    names = {"figures/overfitting", "figures/filters", "figures/final"}
    assert {str(path) for path in one} == {"report.html"} | {f"{name}.{kind}" for name in names for kind in ("png", "pdf")}
    assert all(one.values())
    assert one[Path("report.html")].count(b"data:image/png;base64,") == 9  # three methods, three moments


@pytest.mark.exhaustive
def test_committed_results_give_the_same_figures_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "FIGURES", figures.FIGURES[:1])
    figures.main(["--out", str(tmp_path)])
    assert len(list(tmp_path.iterdir())) >= 6
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (folder / "figures" / path.name).read_bytes()


def test_missing_results_are_reported(tmp_path: Path) -> None:
    for main in (figures.main, report.main):
        with pytest.raises(SystemExit, match=r"there are no results in .*: run `python -m experiments` first"):
            main(["--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_page_is_one_small_file_that_asks_for_nothing(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 3_000_000
    assert "{{" not in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    assert "default-src 'none'" in page
    assert page.count("<noscript>") == page.count('<figure class="plot') > 0
    for link in re.findall(r'href="(figures/[^"]+)"', page):
        assert (folder / link).exists()


def test_missing_filters_are_reported(folder: Path) -> None:
    has = (figures.RESULTS / "filters.safetensors").exists()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert ("are not among these results" in page) == (not has)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("Chromium is not installed (apt-get install chromium, or name one in $CHROMIUM)")
    one = Browser(tmp_path_factory.mktemp("profile"), program)
    yield one
    one.close()


@pytest.fixture
def page(browser: Browser, folder: Path) -> Browser:
    """The committed report on a desktop, freshly loaded, with all folds open."""
    browser.size(1280, 900)
    browser.dark(False)
    browser.open(folder / "report.html")
    unfold(browser)
    return browser


def unfold(browser: Browser) -> None:
    browser.js("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    browser.settle()
    browser.settle()


def tip(page: Browser, group: str) -> dict[str, dict[str, str]]:
    """The rows of the box that shows values, by arm."""
    rows = f"[...document.querySelectorAll('#{group} .tip:not([hidden]) tr')]"
    return {row["arm"]: row for row in page.js(f"{rows}.map(row => ({{...row.dataset, text: row.textContent}}))")}


def values(arm: str, stage: int, place: int) -> list[float]:
    """The accuracies of all seeds at an entry, from the raw file."""
    content = json.loads((figures.RESULTS / file_name(arm)).read_text())
    return [100 * pieces[stage]["accuracy"][place] for pieces in content["curves"].values()]


@pytest.mark.browser
def test_it_loads_without_errors_or_requests(page: Browser, folder: Path) -> None:
    assert page.said == []
    assert page.thrown == []
    assert {url for url in page.requested if not url.startswith("data:")} == {(folder / "report.html").resolve().as_uri()}
    groups = page.js(
        "[...document.querySelectorAll('figure.plot')].map(f => [f.id, f.querySelectorAll('path[data-arm]').length])"
    )
    assert dict(groups)["nct-widen"] == 6
    assert {"nct-widen", "nct-deepen", "ftt-widen", "ftt-deepen", "of", "bi"} <= set(dict(groups))
    assert all(count >= 2 for _, count in groups)


def ruler(page: Browser, group: str, anchor: str) -> tuple[float, float]:
    """An axis read off its printed labels: the place of 0 in pixels of the drawing, and pixels for one unit."""
    labels = f"[...document.querySelectorAll('#{group} text.tick[text-anchor={anchor}]')]"
    coordinate = "x" if anchor == "middle" else "y"
    marks = page.js(f"{labels}.map(t => [Number(t.textContent), Number(t.getAttribute('{coordinate}'))])")
    (low, at_low), (high, at_high) = marks[0], marks[-1]
    unit = (at_high - at_low) / (high - low)
    return at_low - low * unit - (0 if anchor == "middle" else 4), unit  # labels stand 4 below their lines


@pytest.mark.browser
def test_pointing_shows_the_values_of_the_result_files(page: Browser) -> None:
    page.click("#ftt-widen label:has(input[value=whole])")
    page.settle()
    x, y, width, _ = page.middle("#ftt-widen .stage svg")
    zero, unit = ruler(page, "ftt-widen", "middle")
    for epoch in (10, 40, 200):
        page.move(x - width / 2 + zero + epoch * unit, y)
        page.settle()
        shown = tip(page, "ftt-widen")
        assert set(shown) == {"FTT-R2WiderR", "FTT-NetMorph", "FTT-Net2WiderNet", "FTT-RandPadWiden", "FTT-RandomWide"}
        for arm, row in shown.items():
            measured = values(arm, 0, epoch) if epoch <= 25 else values(arm, 1, epoch - 25)
            assert float(row["mean"]) == pytest.approx(statistics.mean(measured), abs=6e-4)
            assert float(row["sd"]) == pytest.approx(statistics.stdev(measured), abs=6e-4)
            assert f"{statistics.mean(measured):.1f} ± {statistics.stdev(measured):.1f} %" in row["text"]
    page.move(5, 5)
    page.settle()
    assert tip(page, "ftt-widen") == {}


@pytest.mark.browser
def test_curves_are_drawn_where_the_axes_say(page: Browser) -> None:
    page.click("#nct-deepen .smooth")
    page.click("#nct-deepen label:has(input[value=flops])")
    page.settle()
    (left, across), (foot, up) = ruler(page, "nct-deepen", "middle"), ruler(page, "nct-deepen", "end")
    path = page.js("document.querySelector('#nct-deepen path[data-arm=\"NCT-R2DeeperR\"]').getAttribute('d')")
    points = [tuple(map(float, point.split())) for point in path[1:].split("L")]
    content = json.loads((figures.RESULTS / file_name("NCT-R2DeeperR")).read_text())
    assert len(points) == 251
    for place in (0, 1, 100, 250):
        flops = content["curves"]["0"][0]["flops"][place] / 1e12
        assert (points[place][0] - left) / across == pytest.approx(flops, abs=0.2 / across)
        accuracy = statistics.mean(values("NCT-R2DeeperR", 0, place))
        assert (points[place][1] - foot) / up == pytest.approx(accuracy, abs=0.2 / -up)


@pytest.mark.browser
def test_without_scripts_there_are_tables(browser: Browser, folder: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.size(360, 740, touch=True)
        browser.open(folder / "report.html", settle=False)
        assert browser.js("document.querySelectorAll('#ftt-widen noscript table tbody tr').length") == 5
        assert browser.js("document.documentElement.scrollWidth") == 360
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.browser
def test_keys_walk_along_the_curves(page: Browser) -> None:
    page.js("document.querySelector('#of .stage svg').focus()")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.key(key)
    row = tip(page, "of")["OF-Student"]
    assert row["index"] == "2"
    assert float(row["mean"]) == pytest.approx(statistics.mean(values("OF-Student", 0, 2)), abs=6e-4)
    page.key("Escape")
    assert tip(page, "of") == {}


@pytest.mark.browser
def test_switches_move_the_curves(page: Browser) -> None:
    path = "document.querySelector('#ftt-deepen path[data-arm=\"FTT-R2DeeperR\"]').getAttribute('d')"
    label = "document.querySelector('#ftt-deepen .stage svg').getAttribute('aria-label')"
    drawn = [page.js(path)]
    for value, word in (("flops", "TFLOP"), ("seconds", "seconds"), ("reuse", "reuse"), ("whole", "reuse")):
        page.click(f"#ftt-deepen label:has(input[value={value}])")
        page.settle()
        drawn.append(page.js(path))
        assert word in page.js(label)
    assert len(set(drawn)) == len(drawn)
    # Under reuse the curve begins with the growth, at the seconds that the growth itself took.
    left = float(drawn[-1][1:].split()[0])
    assert 44 < left < 120


@pytest.mark.browser
def test_a_name_in_the_legend_hides_its_curve(page: Browser) -> None:
    button = '#bi button[data-arm="BI-He"]'
    count = "document.querySelectorAll('#bi path[data-arm=\"BI-He\"]').length"
    assert page.js(count) == 1
    page.click(button)
    assert page.js(count) == 0
    assert page.js(f"document.querySelector('{button}').ariaPressed") == "false"
    page.js(f"document.querySelector('{button}').focus()")
    page.key("Enter")
    assert page.js(count) == 1


TOO_WIDE = """[...document.querySelectorAll('.scroll, table.claims, .stage')].filter(box => box.checkVisibility())
    .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.getAttribute('aria-label') || box.className)"""
BROKEN = """(() => {
    const found = [], range = document.createRange(), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const node = walk.currentNode, parent = node.parentElement;
        if (!parent.checkVisibility() || parent.closest('script, style, svg, pre')) continue;
        for (const word of node.data.matchAll(/[\\p{L}\\p{N}]{2,}/gu)) {
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) found.push(word[0]);
        }
    }
    return found;
})()"""
CUT = """(() => {{
    const svg = document.querySelector('[data-group={plot}] .stage svg'), box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    return texts.filter(([, one]) => one.left < box.left || one.right > box.right + 4).map(([text]) => text);
}})()"""


@pytest.mark.browser
def test_it_is_short_and_no_table_is_wider_than_its_box(browser: Browser, folder: Path) -> None:
    browser.size(1280, 900)
    browser.open(folder / "report.html")
    assert browser.js("document.documentElement.scrollHeight") < 14_500
    unfold(browser)
    assert browser.js("document.querySelectorAll('.scroll').length") > 25
    assert browser.js(TOO_WIDE) == []
    assert browser.js("document.documentElement.scrollWidth") == 1280


@pytest.mark.browser
def test_no_word_is_broken_on_a_phone(browser: Browser, folder: Path) -> None:
    browser.size(390, 844, touch=True)
    browser.open(folder / "report.html")
    assert browser.js("document.documentElement.scrollHeight") < 14_500
    unfold(browser)
    assert browser.js(BROKEN) == []
    assert browser.js("document.documentElement.scrollWidth") == 390


@pytest.mark.browser
def test_it_opens_with_one_sentence_and_one_figure(page: Browser) -> None:
    assert page.js("document.querySelectorAll('h1').length") == 1
    names = page.js("[...document.querySelectorAll('#opening text.end')].map(name => [name.textContent, name.dataset.arm])")
    assert sorted(map(tuple, names)) == [("from scratch", "scratch"), ("grown", "r2r"), ("trained on", "alone")]
    first = page.js("[...document.querySelectorAll('#pays-widen path[data-arm]')].map(path => path.dataset.arm)")
    assert sorted(first) == ["alone", "r2r", "random", "scratch"]
    assert page.js("document.querySelector('#pays-widen input[value=reuse]').checked")
    ends = "[...document.querySelectorAll('#pays-widen text.end')].map(name => name.getBoundingClientRect().right)"
    edge = page.js("document.querySelector('#pays-widen .stage').getBoundingClientRect().right")
    assert all(end <= edge for end in page.js(ends))


@pytest.mark.browser
def test_a_way_with_one_budget_is_a_point(page: Browser) -> None:
    """From nothing, random padding that is tuned for itself was trained at a budget of 8 alone."""
    plot = "#pays-widen"
    page.click(f"{plot} label:has(input[value=nothing])")
    for name in ("scratch", "alone", "r2r"):
        page.click(f'{plot} .legend button[data-arm="{name}"]')
    page.settle()
    assert page.js(f"document.querySelectorAll('{plot} circle.run').length") == 1
    assert "NaN" not in page.js(f"document.querySelector('{plot} .stage svg').innerHTML")
    page.click(f'{plot} .legend button[data-arm="r2r"]')
    for steps, shown in ((0, {"r2r"}), (2, {"r2r", "random"}), (3, {"r2r"})):  # budgets of 2, 8 and 16
        page.js(f"document.querySelector('{plot} .stage svg').focus()")
        for key in ("Home", *["ArrowRight"] * steps):
            page.key(key)
        assert set(tip(page, "pays-widen")) == shown
    assert page.js(f"document.querySelector('{plot} .legend button[data-arm=r2r-flops]').checkVisibility()")
    page.click(f"{plot} label:has(input[value=reuse])")  # where other schedules were not tried
    assert not page.js(f"document.querySelector('{plot} .legend button[data-arm=r2r-flops]').checkVisibility()")


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_demo_names_its_lines_at_their_ends(browser: Browser, tmp_path: Path, width: int) -> None:
    (tmp_path / "demo.html").write_text(demo.page(read_all(figures.RESULTS.parent / "demo")), encoding="utf-8")
    browser.thrown.clear()
    browser.size(width, 844, touch=width < 500)
    browser.open(tmp_path / "demo.html")
    assert browser.thrown == []
    for plot, lines in (("budgets", 4), ("losses", 3)):
        stage = f"document.querySelector('[data-group={plot}] .stage').getBoundingClientRect().right"
        ends = f"[...document.querySelectorAll('[data-group={plot}] text.end')].map(name => name.getBoundingClientRect().right)"
        assert len(browser.js(ends)) == lines
        assert max(browser.js(ends)) <= browser.js(stage)
        assert browser.js(CUT.format(plot=plot)) == []
    assert browser.js(BROKEN) == []
    cells = browser.js("[...document.querySelectorAll('td')].map(cell => cell.firstChild.data)")
    assert not [cell for cell in cells if re.search(r"[±▲▼·] ", cell)], "a sign that may end a line without its number"
    assert browser.js("document.documentElement.scrollWidth") == width


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, folder: Path, dark: bool) -> None:
    browser.size(360, 740, touch=True)
    browser.dark(dark)
    browser.open(folder / "report.html")
    unfold(browser)
    assert browser.js("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    assert browser.js("document.querySelector('#of .stage svg').getBoundingClientRect().right") <= 360
    back, ink = browser.js("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    light = [sum(map(int, re.findall(r"\d+", colour))) for colour in (back, ink)]
    assert (light[0] < light[1]) == dark


@pytest.mark.browser
def test_made_up_results_with_filters_make_a_page_too(browser: Browser, small: Path) -> None:
    browser.thrown.clear()
    browser.open(small / "one" / "report.html")
    unfold(browser)
    assert browser.thrown == []
    assert browser.js("[...document.querySelectorAll('.filters img')].map(i => i.naturalWidth)") == [63] * 9
