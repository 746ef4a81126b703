"""Records of growths, sinks of all kinds, and lines above progress bars."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import ScheduleError
from outgrow.runs.growth_log import Record, check_sinks, write
from outgrow.text.terminal import line, track

RECORD = Record(
    number=2,
    step=1200,
    what="Widen '*' × 1.5",
    sizes=(("a", 8, 12), ("b", 4, 6)),
    parameters=(1_200_000, 2_600_000),
    flops=(1000, 2100),
    error=3e-7,
    tolerance=4e-6,
    loss_before=0.512,
    loss_after=0.513,
    seconds=0.81,
)
LINE = (
    "grown at step 1,200: Widen '*' × 1.5 · 2 volumes · parameters 1.20 M → 2.60 M (× 2.2) · FLOPs × 2.1 · error 3e-07"
    " · loss 0.512, next step 0.513 · 0.8 s"
)
UNCHECKED = Record(number=3, epoch=4, what="Widen 'a' by 2", sizes=(("a", 8, 10),), parameters=(8, 16), flops=(0, 0))


def test_a_line() -> None:
    assert str(RECORD) == LINE
    assert "grown at epoch 4: " in str(UNCHECKED)
    assert "1 volume · parameters 8 → 16 (× 2) · FLOPs × 0 · error not checked · 0.0 s" in str(UNCHECKED)


def test_of_a_real_growth() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    transforms = [outgrow.Widen("0", to=16, method="random")]
    growth = outgrow.grow(model, torch.randn(5, 4), *transforms)
    record = Record.of(growth, transforms, 1, step=7, epoch=2, loss_before=1.0, loss_after=2.0)
    assert record.sizes == (("0", 8, 16),)
    assert record.parameters == (58, sum(parameter.numel() for parameter in model.parameters()))
    assert str(record).startswith("grown at step 7, epoch 2: Widen '0' to 16 · 1 volume · parameters 58 → 114 (× 2)")
    assert "(the function is NOT preserved) · loss 1, next step 2" in str(record)
    assert record.seconds == growth.seconds
    assert Record.of(growth, transforms, 1, seconds=9.0).seconds == 9.0


def test_as_metrics_and_json() -> None:
    metrics = RECORD.as_metrics()
    assert all(type(value) is float for value in metrics.values())
    assert metrics["outgrow/parameters"] == 2_600_000
    assert metrics["outgrow/volumes"] == 2
    assert metrics["outgrow/loss_after"] == 0.513
    assert not {"outgrow/error", "outgrow/loss_before"} & UNCHECKED.as_metrics().keys()
    assert json.loads(json.dumps(RECORD.to_json(), allow_nan=False))["sizes"] == [["a", 8, 12], ["b", 4, 6]]
    assert json.loads(json.dumps(UNCHECKED.to_json(), allow_nan=False))["error"] is None


def test_to_python_logger_and_function(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Record] = []
    with caplog.at_level(logging.INFO):
        write(RECORD, [logging.getLogger("run"), seen.append])
    assert caplog.messages == [LINE]
    assert seen == [RECORD]
    write(RECORD, seen.append)
    assert len(seen) == 2
    write(RECORD, None)


def test_to_csv(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for record in (RECORD, UNCHECKED):
        write(record, path)
    with open(path, newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["step"], first["what"], first["parameters"]) == ("1200", "Widen '*' × 1.5", "2600000")
    assert (second["epoch"], second["error"], second["loss_before"]) == ("4", "", "")


def test_to_jsonl_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(RECORD, str(path))
    whole = path.read_text("utf-8")
    path.write_text(whole + whole[:20], "utf-8")
    write(UNCHECKED, str(path))
    lines = path.read_text("utf-8").splitlines()
    assert json.loads(lines[0]) == RECORD.to_json()
    assert json.loads(lines[2]) == UNCHECKED.to_json()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars that TensorBoard itself reads from a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore")  # of TensorBoard's own imports
def test_to_tensorboard(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        write(RECORD, writer)
    found = scalars(tmp_path)
    assert found["outgrow/parameters"] == [(1200, 2_600_000.0)]
    assert found.keys() == RECORD.as_metrics().keys()


@pytest.mark.filterwarnings("ignore")  # of Lightning's own imports
def test_to_loggers_of_lightning(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    table, board = CSVLogger(str(tmp_path), name="csv"), TensorBoardLogger(str(tmp_path), name="board")
    table.log_metrics({"loss": 0.5}, step=1199)
    write(RECORD, [table, board])
    table.save()
    board.finalize("success")
    with open(Path(table.log_dir) / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1199", "1200"]
    assert float(rows[1]["outgrow/parameters"]) == 2_600_000
    assert scalars(Path(board.log_dir))["outgrow/flops"] == [(1200, 2100.0)]


def test_a_sink_that_fails_does_not_stop_the_run(tmp_path: Path) -> None:
    def broken(record: Record) -> None:
        raise OSError("disk full")

    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    seen: list[Record] = []
    with pytest.warns(UserWarning, match="growth 2 could not be logged to") as caught:
        write(RECORD, [broken, other, tmp_path / "missing" / "log.csv", tmp_path / "log.txt", 3, seen.append])
    texts = [str(warning.message) for warning in caught]
    assert ["disk full" in texts[0], "other columns" in texts[1], "No such file" in texts[2]] == [True] * 3
    assert ["must end in .csv or .jsonl" in texts[3], "can't be logged to a int" in texts[4], len(texts)] == [True, True, 5]
    assert seen == [RECORD]
    assert other.read_text() == "a,b\n1,2\n"


def test_sinks_are_checked_before_a_run(tmp_path: Path) -> None:
    check_sinks([tmp_path / "log.csv", print, logging.getLogger("run")])
    check_sinks(None)
    for wrong in (3, [print, "log.txt"]):
        with pytest.raises(ScheduleError):
            check_sinks(wrong)
    assert not list(tmp_path.iterdir())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def made(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as sys.stderr; called by the tests themselves, since pytest replaces sys.stderr after fixtures."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def shown(stream: Terminal) -> list[str]:
    """The lines that a terminal shows in the end, after carriage returns, cursor movements and erasing."""
    screen, row, column = [""], 0, 0
    for code, motion, plain in re.findall(r"\x1b\[([\d;?]*)([A-Za-z])|([^\x1b])", stream.getvalue()):
        if motion == "A":
            row = max(0, row - int(code or 1))
        elif motion == "K":
            screen[row] = screen[row][:column] if code in ("", "0") else ""
        elif plain == "\r":
            column = 0
        elif plain == "\n":
            row, column = row + 1, 0
            screen += [""] * (row + 1 - len(screen))
        elif plain:
            screen[row] = screen[row].ljust(column)[:column] + plain + screen[row][column + 1 :]
            column += 1
    return [text.rstrip() for text in screen if text.strip()]


def test_a_line_without_bars_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    line("grown")
    assert capsys.readouterr() == ("", "grown\n")


def test_a_line_above_bars_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = made(monkeypatch)
    from tqdm import tqdm

    for index in tqdm(range(3), desc="mine", file=terminal, mininterval=0):
        if index == 1:
            line("grown at step 1")
    found = shown(terminal)
    assert found[0] == "grown at step 1"
    assert [("mine: 100%" in text) for text in found] == [False, True]


def test_a_line_above_bars_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = made(monkeypatch)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True, width=60)) as progress:
        task = progress.add_task("mine", total=3)
        for index in range(3):
            progress.update(task, advance=1, refresh=True)
            if index == 1:
                line("grown at [step] 1")
    found = shown(terminal)
    assert found[0] == "grown at [step] 1"
    assert [("100%" in text) for text in found] == [False, True]


@pytest.mark.parametrize("without", [(), ("rich",)])
def test_tracking_with_a_text_that_changes(monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]) -> None:
    terminal = made(monkeypatch)
    for name in without:
        for module in [name, *(known for known in sys.modules if known.startswith(f"{name}."))]:
            monkeypatch.setitem(sys.modules, module, None)
    texts = []
    for item in track(range(4), lambda: f"[stage] {len(texts)}"):
        texts.append(item)
        if item == 2:
            line("grown")
    found = shown(terminal)
    assert texts == [0, 1, 2, 3]
    assert found[0] == "grown"
    assert len(found) == 2
    assert "[stage] 4" in found[1]
    assert "4/4" in found[1]


def test_tracking_is_quiet_without_terminal_or_libraries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = made(monkeypatch)
    for name in [name for name in sys.modules if name.split(".")[0] in ("rich", "tqdm")] + ["rich", "tqdm"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert list(track([1, 2], "x")) == [1, 2]
    assert terminal.getvalue() == ""
    monkeypatch.undo()
    assert list(track(iter([1, 2]), "x")) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_tracking_that_is_broken_off_ends_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = made(monkeypatch)

    def some() -> Any:
        yield 1
        raise ValueError("the loop's own")

    with pytest.raises(ValueError, match="the loop's own"):
        list(track(some(), "x"))
    assert sys.stderr is terminal  # rich had replaced it
