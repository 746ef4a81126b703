"""The benchmark of growths on a GPU runs on tiny models without one, and keeps what it has measured."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cuda
from benchmarks.cuda_page import page


@pytest.fixture
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "REPETITIONS", 1)
    monkeypatch.setattr(cuda, "STALLS", 1)
    monkeypatch.setattr(cuda, "SMALL_MODELS", {"small": cuda.SMALL_MODELS["small"]})


@pytest.mark.usefixtures("_brief")
def test_results_and_page_are_written_after_every_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, shown = tmp_path / "cuda.json", tmp_path / "cuda.md"
    monkeypatch.setattr(sys, "argv", ["cuda", "--small", "--results", str(results), "--page", str(shown)])
    seen: list[dict[str, Any]] = []
    write = cuda.write

    def noted(path: Path, text: str) -> None:
        write(path, text)
        seen.append(json.loads(results.read_text(encoding="utf-8")))

    monkeypatch.setattr(cuda, "write", noted)
    cuda.main()
    counts = [len(found["plans"]) + len(found["apply"]) + len(found["stalls"]) for found in seen]
    assert counts == [*range(1, 14), 13, 13]  # the last two: complete, and the page
    assert [found["complete"] for found in seen] == [False] * 13 + [True] * 2
    last = seen[-1]
    for arm in last["stalls"]:
        assert arm["parameters"][0] < arm["parameters"][1]
        assert (not math.isnan(arm["error"])) == arm["check"]
    assert shown.read_text(encoding="utf-8") == page(last)
    assert {arm["growth"] for arm in last["stalls"]} == set(cuda.GROWTHS)
    assert all(page(part) for part in seen)


def test_the_committed_page_shows_the_committed_results() -> None:
    results = json.loads(cuda.RESULTS.read_text(encoding="utf-8"))
    assert cuda.PAGE.read_text(encoding="utf-8") == page(results)
