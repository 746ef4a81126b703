"""The search study at tiny size: every arm, in pieces, as it is run on CIFAR-10."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.search.__main__ import ARMS, GOES_ON, main
from experiments.search.network import Parent
from experiments.search.training import changed

pytest.importorskip("optuna")


def test_images_are_moved_and_flipped_but_not_mixed() -> None:
    x = torch.arange(2 * 3 * 16 * 16, dtype=torch.float32).view(2, 3, 16, 16) + 1
    y = changed(x)
    assert y.shape == x.shape
    for number in range(2):
        for channel in range(3):
            assert set(y[number, channel].unique().tolist()) <= {0.0, *x[number, channel].unique().tolist()}
    inside = y[0, :, 8, 8] - y[0, 0, 8, 8]
    assert torch.equal(inside, torch.tensor([0.0, 256.0, 512.0]))  # the channels of a pixel stay together


@pytest.mark.exhaustive
def test_the_study_goes_on_in_pieces(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    options = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    codes = [main([*options, "--minutes", "0.02"]) for _ in range(3)]
    assert codes[0] == GOES_ON
    assert main(options) == 0
    found = {arm: json.loads((tmp_path / "out" / f"tiny-{arm}-0.json").read_text()) for arm in ARMS}
    assert found["growth"]["search"] == found["scratch"]["search"] != found["fresh"]["search"]
    assert found["growth"]["parameters"] == found["scratch"]["parameters"]
    assert abs(found["growth"]["flops"] / found["scratch"]["flops"] - 1) < 0.3
    assert all(0 <= one["test_error"] < 0.95 for one in found.values())
    smallest = sum(parameter.numel() for parameter in Parent(4, 1).parameters())
    assert found["growth"]["search"]["trials"][0]["parameters"] == smallest
