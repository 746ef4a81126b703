"""The examples run as they are, grow what they say, and learn."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from outgrow.search.search import run_search

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.chdir(folder)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_a_plain_loop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = run("plain_run.py", capsys, monkeypatch, tmp_path)
    found = re.search(r"after 10 epochs and 2 growths: ([\d.]+)% of the digits held out are right", said)
    assert found is not None
    assert float(found[1]) > 85
    assert len(re.findall(r"^grown at step", said, re.MULTILINE)) == 2


def test_grow_and_freeze(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = run("grow_and_freeze.py", capsys, monkeypatch, tmp_path)
    assert "21 old tensors, 21 of the 39 in the file have the same values" in said
    before, after = re.findall(r"loss on the second text: ([\d.]+) → ([\d.]+)", said)[0]
    assert float(after) < float(before) - 0.1


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = run("lightning_run.py", capsys, monkeypatch, tmp_path)
    assert re.search(r"^[\d,]+ parameters became [\d,]+$", said, re.MULTILINE)
    found = re.search(r"held out: ([\d.]+)%", said)
    assert found is not None
    assert float(found[1]) > 90


def test_a_search_in_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setenv("TRIALS", "3")
    search = runpy.run_path(str(EXAMPLES / "search_digits.py"))["describe"]()
    result = run_search(search, "digits", tmp_path / "search.log", quiet=True)
    assert [record.state for record in result.records] == ["COMPLETE"] * 3
    assert result.best.values[0] < 0.5


@pytest.mark.exhaustive
def test_a_search(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three trials by two workers; the example has more."""
    pytest.importorskip("optuna")
    monkeypatch.setenv("TRIALS", "3")
    monkeypatch.setattr("sys.argv", ["search_digits.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "search_digits.py"), run_name="__main__")
    captured = capfd.readouterr()
    assert "3 trials complete, 0 without a result" in captured.out
    assert sorted(re.findall(r"^\d/3 trial (\d)", captured.err, re.MULTILINE)) == ["0", "1", "2"]
    assert (tmp_path / "report.html").exists()


def test_the_transformers_trainer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = run("transformers_run.py", capsys, monkeypatch, tmp_path)
    assert "3 blocks, 128 hidden units each" in said
    found = re.findall(r": ([\d.]+) → ([\d.]+)$", said, re.MULTILINE)
    before, after = map(float, found[-1])
    assert after < before - 2
