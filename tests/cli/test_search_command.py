"""The command `outgrow search`: workers and reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.commands import Run

pytest.importorskip("optuna")


def test_a_worker_and_a_report(run: Run, tmp_path: Path) -> None:
    study = ("--study", "small", "--storage", str(tmp_path / "search.log"))
    code, text, said = run("search", "worker", "tests.helpers.searches:describe", *study, "--most", "2")
    assert code == 0
    assert "2 trials complete, 0 without a result" in text
    assert [line.split(":")[0].split(" · ")[0] for line in said.splitlines()] == [
        "1/8 trial 0 the parent itself",
        "2/8 trial 1 from 0",
    ]
    code, text, said = run("search", "worker", "tests.helpers.searches:describe", *study, "--most", "1", "--quiet")
    assert (code, said) == (0, "")
    assert "3 trials complete" in text
    code, text, _ = run("search", "report", "--storage", str(tmp_path / "search.log"), "--out", str(tmp_path / "r.html"))
    assert code == 0
    assert "3 trials complete" in text
    assert "<title>Search small</title>" in (tmp_path / "r.html").read_text(encoding="utf-8")
    code, text, _ = run("search", "report", *study, "--json")
    facts = json.loads(text)
    assert facts["objectives"] == {"error": "minimize", "parameters": "minimize"}
    assert [trial["slot"] for trial in facts["trials"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("worker", "given_models:chain", "--study", "a"), "returns a Sequential: it must return an outgrow.Search"),
        (("worker", "nowhere:describe", "--study", "a"), "can't import nowhere"),
        (("worker", "given_models", "--study", "a"), "write MODULE:CALLABLE"),
        (("worker", "given_models:chain", "--study", "a", "--most", "0"), "is not a number of trials"),
        (("report", "--study", "a"), "there is no file"),
        (("report",), "there is no file"),
    ],
)
def test_mistakes(run: Run, arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, _, error = run("search", *arguments, "--storage", str(tmp_path / "search.log"))
    assert code == 2
    assert said in error


def test_a_storage_that_is_not_there(run: Run, tmp_path: Path) -> None:
    code, _, error = run("search", "report", "--storage", str(tmp_path / "nowhere" / "search.log"))
    assert code == 2
    assert "there is no file" in error
    assert not (tmp_path / "nowhere").exists()
