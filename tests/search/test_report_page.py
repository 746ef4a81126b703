"""The page of a search: its pictures are well-formed, show every trial, and load nothing from elsewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from outgrow.search.front_svg import Axis, draw_fronts
from outgrow.search.objectives import Objectives
from outgrow.search.records import COMPLETE, FAIL, Record, pareto_front
from outgrow.search.report_page import page
from outgrow.search.tree_svg import MOST, draw_tree

TWO = Objectives.of(["error", "parameters"])
RECORDS = [
    Record(0, 0, COMPLETE, None, (), (0.5, 100.0), 100),
    Record(1, 1, COMPLETE, 0, ("Widen '0' × 2",), (0.25, 900.0), 900),
    Record(2, 2, FAIL, 1, ("Widen '<b>' × 2",), outcome="raised", error="ValueError: <script>"),
    Record(3, 3, COMPLETE, 1, (), (0.4, 950.0), 950),
    Record(4, 4, COMPLETE, 0, ("Deepen after '2' + 1",), (0.3, 400.0), 400, shrunk_from=3),
]


def shapes(svg: str, tag: str, kind: str) -> int:
    return sum(one.tag.endswith("}" + tag) and kind in one.get("class", "").split() for one in ET.fromstring(svg).iter())


def test_the_tree_has_a_mark_for_each_trial_and_a_line_to_each_child() -> None:
    svg = draw_tree(RECORDS, TWO)
    assert shapes(svg, "circle", "trial") == 4
    assert shapes(svg, "circle", "best") == len(pareto_front(RECORDS, TWO)) == 3
    assert shapes(svg, "path", "failed") == 1
    assert shapes(svg, "path", "line") == 4
    assert "(back from 3)" in svg
    rows = [re.match(r"\d+", text.text or "") for text in ET.fromstring(svg).iter() if text.tag.endswith("}text")]
    assert [row[0] for row in rows if row][1:] == ["0", "1", "2", "3", "4"]  # children below their parents; the first counts


def test_a_large_tree_shows_only_the_front_and_its_ancestors() -> None:
    many = [Record(0, 0, COMPLETE, None, (), (9.0,), 1)]
    many += [Record(n, n, COMPLETE, n - 1 if n < 5 else 0, (), (1.0 / n if n < 5 else 8.0,), 1) for n in range(1, MOST + 5)]
    svg = draw_tree(many, Objectives.of("error"))
    assert shapes(svg, "circle", "trial") == 5
    assert f"{MOST} others are not drawn" in svg


def test_objectives_are_drawn_against_the_first() -> None:
    (svg,) = draw_fronts(RECORDS, TWO)
    assert shapes(svg, "circle", "trial") == 4
    assert shapes(svg, "circle", "best") == 3
    assert len(draw_fronts([Record(0, 0, COMPLETE, values=(1.0, 2.0, 3.0))], Objectives.of(["a", "b", "c"]))) == 2
    (course,) = draw_fronts([Record(n, n, COMPLETE, values=(v,)) for n, v in enumerate((3.0, 4.0, 1.0))], Objectives.of("a"))
    assert shapes(course, "circle", "best") == 2
    assert draw_fronts([], TWO) == []


@pytest.mark.parametrize("values", [[1.0], [3.0, 3.0], [0.01, 5.0], [-2.0, 7.0], [100.0, 20_000.0], [0.0, 0.001]])
def test_axes(values: list[float]) -> None:
    axis = Axis(values, 10, 210)
    assert all(10 <= axis.at(value) <= 210 for value in (*values, *axis.ticks()))
    assert axis.at(min(values)) <= axis.at(max(values))
    assert 1 <= len(axis.ticks()) <= 6


def test_the_page_is_whole_and_loads_nothing() -> None:
    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.tags: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.tags.append(tag)
            assert not [name for name, _ in attrs if name in ("src", "href")]

    text, reader = page("digits <1>", RECORDS, TWO), Reader()
    reader.feed(text)
    assert "script" not in reader.tags
    assert "b" not in reader.tags
    assert reader.tags.count("tr") == 1 + len(RECORDS)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "digits &lt;1&gt;" in text
    assert "ValueError: &lt;script&gt;" in text
    assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)\S+", text)
