"""Reports of a run: the loss continues over growths, cohorts are known, and every log gets one line per growth."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.small_runs import DEEPEN, X, at, batch, loss_of, mlp, started, train

LATER = outgrow.Widen("blocks.*", to=16)


class Digits:
    """A small convolutional network and scikit-learn's digits."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        self.x, self.y = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(labels)
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(288, 10)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def loss(self, start: int) -> Tensor:
        """The loss of a batch, in train mode."""
        pick = torch.arange(start * 64, start * 64 + 64) % len(self.x)
        return nn.functional.cross_entropy(self.model(self.x[pick]), self.y[pick])


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def test_the_loss_goes_on_over_growths_and_digits_are_learned() -> None:
    digits = Digits()
    model, optimizer = digits.model, digits.optimizer
    events = [
        outgrow.At(step=20, grow=[outgrow.Widen("*", factor=1.5)]),
        outgrow.At(step=40, grow=[outgrow.Deepen("3"), outgrow.Kernel("0", 5)]),
        outgrow.At(step=60, grow=[outgrow.Widen("3.f.0", factor=2), outgrow.Branch("3")]),
    ]
    run = outgrow.Run(model, digits.x[:16], optimizer, events, quiet=True)

    def without_dropout(step: int) -> float:
        """The training loss with batch statistics; running statistics stay unchanged."""
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        kept = [(tensor, tensor.clone()) for norm in norms for tensor in norm.buffers()]
        drop = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        for module in drop:
            module.eval()
        with torch.no_grad():
            loss = digits.loss(step).item()
            for tensor, value in kept:
                tensor.copy_(value)
        for module in drop:
            module.train()
        return loss

    grown = []
    for step in range(1, 81):
        optimizer.zero_grad()
        loss = digits.loss(step)
        loss.backward()
        optimizer.step()
        before = without_dropout(step)
        if run.step(loss) is not None:
            grown.append((before, without_dropout(step)))
    assert len(grown) == 3
    for before, after in grown:
        assert after == pytest.approx(before, abs=1e-6)
    model.eval()
    assert (model(digits.x).argmax(1) == digits.y).float().mean() > 0.9
    records = run.records
    assert [(record.number, record.step) for record in records] == [(1, 20), (2, 40), (3, 60)]
    assert all(record.loss_before is not None and record.loss_after is not None for record in records)
    sizes = [record.parameters for record in records]
    assert [after for _, after in sizes] == [*(before for before, _ in sizes[1:]), sum(p.numel() for p in model.parameters())]


def test_cohorts_of_several_growths() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = started(model, optimizer, [at(1), at(2, DEEPEN), at(3, LATER)])
    sizes = [sum(p.numel() for p in model.parameters())]
    assert run.cohorts.count == 0
    for step in range(1, 5):
        train(model, optimizer, step)
        growth = run.step()
        if growth is not None:
            sizes.append(sum(p.numel() for p in model.parameters()))
            assert growth.cohorts.entries() == run.cohorts.entries()
    counted = run.cohorts.entries()
    assert counted == {0: sizes[0], **{k: sizes[k] - sizes[k - 1] for k in (1, 2, 3)}}
    optimizer.zero_grad()
    loss_of(model, 9).backward()
    gradients = run.cohorts.gradients(model)
    assert {k: one.entries for k, one in gradients.items()} == counted
    assert all(one.rms > 0 for one in gradients.values())


def test_one_line_per_growth(capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = outgrow.Run(model, X, optimizer, [at(2), at(3, DEEPEN), outgrow.At(epoch=1, grow=[LATER])])
    losses: list[float] = []
    for step in range(1, 6):
        losses.append(train(model, optimizer, step).item())
        run.step(losses[-1])
        if step == 3:
            run.epoch()  # a second growth before the loss after the first is known
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert shown.out == ""
    assert [line.split(":")[0] for line in lines] == [
        "grown at step 2, epoch 0",
        "grown at step 3, epoch 0",
        "grown at step 3, epoch 1",
    ]
    assert f"loss {losses[1]:.4g}, next step {losses[2]:.4g}" in lines[0]
    assert "loss" not in lines[1]
    assert f"loss {losses[2]:.4g}, next step {losses[3]:.4g}" in lines[2]
    assert lines == [str(record) for record in run.records]


def test_without_losses_a_growth_is_logged_at_once_and_not_at_all_if_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = outgrow.Run(model, X, optimizer, [at(1)], quiet=quiet)
        train(model, optimizer, 1)
        run.step()
        assert len(capsys.readouterr().err.splitlines()) == (0 if quiet else 1)
        assert (run.records[0].loss_before, run.records[0].loss_after) == (None, None)
        assert list(run.track([1, 2])) == [1, 2]


def test_files_and_loggers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, received = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sinks = [tmp_path / "log.csv", str(tmp_path / "log.jsonl"), logging.getLogger("my.run"), received.append]
    run = started(model, optimizer, [at(1), at(2, DEEPEN)], log=sinks)
    with caplog.at_level(logging.INFO):
        losses = []
        for step in range(1, 4):
            losses.append(train(model, optimizer, step))
            run.step(losses[-1])
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert received == run.records
    assert [record.message for record in caplog.records] == [str(record) for record in run.records]
    for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
        assert (int(row["step"]), line["step"]) == (number + 1, number + 1)
        for given in (row, line):
            assert float(given["loss_before"]) == losses[number].item()
            assert float(given["loss_after"]) == losses[number + 1].item()
    assert int(rows[-1]["parameters"]) == sum(p.numel() for p in model.parameters()) == lines[-1]["parameters"][1]


def test_saving_right_after_a_growth_keeps_the_loss_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both the saved run, if it continues, and the resumed run log it."""

    def make() -> tuple[Any, Any, outgrow.Run]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, outgrow.Run(model, X, optimizer, [at(2), outgrow.At(epoch=1, grow=[DEEPEN])])

    def go_on(model: Any, optimizer: Any, run: outgrow.Run) -> list[str]:
        run.epoch()  # the loss before the growth is the last step's
        run.step(train(model, optimizer, 3))
        return [line.rpartition(" · ")[0] for line in capsys.readouterr().err.splitlines()]  # all but the seconds

    model, optimizer, run = make()
    for step in (1, 2):
        run.step(train(model, optimizer, step))
    run.save(tmp_path / "run.pt")
    assert capsys.readouterr().err == ""
    again = make()
    again[2].load(tmp_path / "run.pt")
    assert go_on(*again) == go_on(model, optimizer, run)
    assert again[2].records[1].loss_before == run.records[1].loss_before is not None
    assert again[2].records[1].loss_after == run.records[1].loss_after is not None


def test_a_growth_at_the_end_is_logged_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = outgrow.Run(model, X, optimizer, [at(1)])
    run.step(train(model, optimizer, 1))
    run.tell()
    run.tell()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_losses_that_are_not_numbers_are_refused_before_anything_happens() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = started(model, optimizer, [at(1)])
    for loss in (torch.ones(3), "low", batch):
        with pytest.raises(outgrow.GrowthError, match="the loss is not a number"):
            run.step(loss)
    assert (run.steps, len(run.records), model.blocks[0].up.out_features) == (0, 0, 8)
    run.step(torch.tensor([0.5]))
    assert (run.steps, run.records[0].loss_before) == (1, 0.5)
