"""The search study at tiny size: every arm, in pieces, as it is run on CIFAR-10."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments.search import experiment
from experiments.search.__main__ import ARMS, main, setting_of
from experiments.search.__main__ import parser as arguments
from experiments.search.experiment import GOES_ON, Clock, by_slot
from experiments.search.images import Images
from experiments.search.keep import needed
from experiments.search.network import Parent
from experiments.search.settings import SETTINGS, expected
from experiments.search.training import DECAY, MOMENTUM, RATE, Steps, sgd
from experiments.setting.data import Data, digits
from outgrow.search.records import COMPLETE, Record

pytest.importorskip("optuna")


def coloured(number: int = 40, size: int = 16) -> Data:
    """Images whose every value is another one, as bytes."""
    images = torch.randint(1, 256, (number, 3, size, size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Data(images, torch.arange(number) % 10, images[:4], torch.arange(4), torch.zeros(3), torch.ones(3), "noise")


def test_batches_hold_images_that_are_moved_flipped_and_covered_but_not_mixed() -> None:
    data = coloured()
    images = Images.of(data, "cpu")
    plain, covered = (images.table(3, 0, covers) for covers in (False, True))
    assert torch.equal(plain[:, :4], covered[:, :4])
    for step in range(images.steps):
        x, y = images.taken(plain[step])
        for sample, (number, row, column, mirrored, _, _) in enumerate(plain[step].T.tolist()):
            padded = nn.functional.pad(data.images[number].float() / 255, (2,) * 4)
            expected = padded[:, row : row + 16, column : column + 16]
            torch.testing.assert_close(x[sample], expected.flip(2) if mirrored else expected)
            assert y[sample] == data.labels[number]
        hidden = images.taken(covered[step])[0] != x
        for sample, (*_, row, column) in enumerate(covered[step].T.tolist()):
            rows, columns = hidden[sample].any(0).nonzero().unbind(1) if hidden[sample].any() else (torch.zeros(0),) * 2
            assert (rows - row).abs().le(2).all()
            assert (columns - column).abs().le(2).all()
    assert sorted(plain[:, 0].flatten().tolist()) == list(range(40))
    assert not torch.equal(plain, images.table(3, 1, False))


def test_steps_are_those_of_torch_with_a_cosine() -> None:
    torch.manual_seed(0)
    ours = Parent(4, 1)
    images = Images.of(digits().first(64, 8), "cpu")
    twin = copy.deepcopy(ours)
    optimizer, theirs = sgd(ours), sgd(twin)
    steps, twin_steps = Steps(ours, optimizer, images), 0
    twin.train()
    for epoch in range(2):
        steps.epoch(7, epoch, 2)
        for table in images.table(7, epoch, False):
            theirs.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * twin_steps / (2 * images.steps))) / 2
            theirs.zero_grad()
            x, y = images.taken(table)
            nn.functional.cross_entropy(twin(x), y).backward()
            theirs.step()
            twin_steps += 1
    (group,) = theirs.param_groups
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (MOMENTUM, DECAY, True)
    for one, other in zip(ours.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for mine, other in zip(ours.parameters(), twin.parameters(), strict=True):
        buffers = optimizer.state[mine]["momentum_buffer"], theirs.state[other]["momentum_buffer"]
        torch.testing.assert_close(*buffers, rtol=1e-4, atol=1e-5)


def test_models_that_a_later_trial_may_grow_are_kept() -> None:
    parents = {1: 0, 2: 0, 3: 2, 4: 2, 5: 2, 6: 4}
    errors = [0.9, 0.8, 0.7, 0.75, 0.5, 0.6, 0.55]
    records = [Record(n, n, COMPLETE, parent=parents.get(n), values=(errors[n],)) for n in range(7)]
    kept = {record.number for record in needed(records[:6], trials=9, children=2)}  # trial 6, of the same generation, waits
    assert kept == {0, 2, 4}
    assert {record.number for record in needed(records, trials=9, children=2)} == {0, 2, 4}
    assert [record.number for record in needed(records, trials=7, children=2)] == [4]
    assert needed([], trials=7, children=2) == []


def test_trials_that_were_interrupted_have_the_numbers_of_their_slots() -> None:
    trials = [{"number": 0, "slot": 0}, {"number": 9, "slot": 1, "parent": 0}, {"number": 2, "slot": 2, "parent": 9}]
    found = by_slot({"study": "s", "trials": trials})["trials"]
    assert [(trial["number"], trial.get("parent")) for trial in found] == [(0, None), (1, 0), (2, 1)]


def test_settings_can_be_made_cheaper_and_then_have_other_names() -> None:
    name, setting = setting_of(arguments().parse_args(["--setting", "h200", "--trials", "9", "--each", "2"]))
    assert name == "h200-trials9-each2"
    assert setting == replace(SETTINGS["h200"], trials=9, each=2)
    whole, cheap = (expected(one, 1.0, 45_000, 50_000) for one in (SETTINGS["h200"], setting))
    assert all(cheap[arm] < whole[arm] for arm in ARMS)


def without_seconds(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: without_seconds(value) for name, value in found.items() if "seconds" not in name}
    return [without_seconds(value) for value in found] if isinstance(found, list) else found


@pytest.mark.exhaustive
def test_the_study_goes_on_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    whole = ["--work", str(tmp_path / "whole"), "--out", str(tmp_path / "out")]
    assert main(whole) == 0
    assert not list((tmp_path / "whole").iterdir())
    monkeypatch.setattr(experiment, "SAVED_EVERY", 0.0)

    class Pieces(Clock):
        """Stops each piece after a few looks at it."""

        def __init__(self, minutes: float) -> None:
            super().__init__(minutes)
            self.looks = 0

        @property
        def over(self) -> bool:
            self.looks += 1
            return self.looks > 3

    monkeypatch.setattr("experiments.search.__main__.Clock", Pieces)
    pieces = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "pieces")]
    codes = []
    while not codes or (codes[-1] == GOES_ON and len(codes) < 30):
        codes.append(main(pieces))
        (tmp_path / "work").rename(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").rename(tmp_path / "work")
    assert codes[-1] == 0
    assert len(codes) > 3
    found, again = (
        {arm: without_seconds(json.loads((tmp_path / folder / f"tiny-{arm}-0.json").read_text())) for arm in ARMS}
        for folder in ("out", "pieces")
    )
    assert found == again
    assert found["growth"]["search"] == found["scratch"]["search"] != found["fresh"]["search"]
    assert found["growth"]["parameters"] == found["scratch"]["parameters"]
    assert abs(found["growth"]["flops"] / found["scratch"]["flops"] - 1) < 0.3
    assert all(0 <= one["test_error"] < 0.95 for one in found.values())
    smallest = sum(parameter.numel() for parameter in Parent(4, 1).parameters())
    assert found["growth"]["search"]["trials"][0]["parameters"] == smallest
