"""A family that is saved and loaded goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import CheckpointError
from tests.helpers.nested_sizes import SIZES, cnn, images, same, state_of

X = images(seed=9)


def started(family: outgrow.Family | None = None) -> tuple[outgrow.Family, Any, torch.Generator]:
    family = outgrow.Family(cnn(), images(), *SIZES[:2], outgrow.Deepen("2")) if family is None else family
    return family, torch.optim.AdamW(family.parameters(), lr=0.01), torch.Generator().manual_seed(7)


def trained(family: outgrow.Family, optimizer: Any, generator: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for member in family.train().sandwich(generator):
            nn.functional.dropout(member(X), 0.3).square().mean().backward()
        optimizer.step()


def test_a_resumed_family_is_the_one_that_was_not_interrupted(tmp_path: Path) -> None:
    family, optimizer, generator = started()
    trained(family, optimizer, generator, 3)
    family.save(tmp_path / "family.pt", optimizer=optimizer, also={"sizes": generator}, extra={"step": 3})
    trained(family, optimizer, generator, 3)
    family.grow(SIZES[2], optimizer=optimizer)
    trained(family, optimizer, generator, 2)

    model, again = cnn(3), torch.Generator()
    resumed = torch.optim.AdamW(model.parameters(), lr=0.5)
    other = outgrow.Family.load(model, tmp_path / "family.pt", example=images(), optimizer=resumed, also={"sizes": again})
    assert other.extra == {"step": 3}
    assert other[-1] is model
    trained(other, resumed, again, 3)
    other.grow(SIZES[2], optimizer=resumed)
    trained(other, resumed, again, 2)
    assert same(state_of(family, optimizer), state_of(other, resumed))
    assert repr(family) == repr(other)
    for number in range(5):
        assert same(state_of(family.extract(number)), state_of(other.extract(number)))


def test_a_family_of_a_model_that_had_grown_before(tmp_path: Path) -> None:
    model = nn.Sequential(cnn(), nn.ReLU(), nn.Linear(3, 2).double())
    outgrow.widen(model[0], images(), "0", by=2)
    outgrow.widen(model, images(), "0.3", by=2)
    family = outgrow.Family(model, images(), outgrow.Widen("*", by=2), outgrow.Widen("0.3", by=2))
    family.save(tmp_path / "family.pt")
    again = outgrow.Family.load(nn.Sequential(cnn(2), nn.ReLU(), nn.Linear(3, 2).double()), tmp_path / "family.pt")
    for member, other in zip(family.eval(), again.eval(), strict=True):
        assert torch.equal(member(X), other(X))
    with pytest.raises(outgrow.GrowthError, match="has no example"):
        again.grow(outgrow.Widen("0.0", by=2))
    again.grow(outgrow.Widen("0.0", by=2), example=images())


def test_the_largest_member_and_extracts_are_plain_models(tmp_path: Path) -> None:
    family, *_ = started()
    family.save(tmp_path / "family.pt")
    assert torch.equal(outgrow.load(cnn(1), tmp_path / "family.pt").eval()(X), family.eval()[-1](X))
    outgrow.save(family.extract(1), tmp_path / "one.safetensors")
    assert torch.equal(outgrow.load(cnn(1), tmp_path / "one.safetensors").eval()(X), family.extract(1).eval()(X))


def test_files_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    family, optimizer, _ = started()
    path = tmp_path / "family.pt"
    family.save(path, optimizer=optimizer)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    before = state_of(model)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        outgrow.Family.load(model, path, optimizer=torch.optim.AdamW(model.parameters()))
    assert same(before, state_of(model))
    small = cnn(1)
    before = state_of(small)
    with pytest.raises(CheckpointError, match="0 optimizers, and the checkpoint has 1"):
        outgrow.Family.load(small, path)
    assert same(before, state_of(small))
    assert not outgrow.cohorts(small).growths
    run = outgrow.Run(small, images(), torch.optim.AdamW(small.parameters()), [], quiet=True)
    with pytest.raises(CheckpointError, match=r"outgrow\.Family\.load"):
        run.load(path)
    run.save(tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="holds a run, and no family"):
        outgrow.Family.load(cnn(), tmp_path / "run.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        outgrow.Family.load(small, tmp_path / "damaged.pt", optimizer=torch.optim.AdamW(small.parameters()))
    assert same(before, state_of(small))


def test_a_diverged_family_does_not_replace_its_file(tmp_path: Path) -> None:
    family, *_ = started()
    family.save(tmp_path / "family.pt")
    before = (tmp_path / "family.pt").read_bytes()
    family[0][1].running_mean[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"1\.running_mean"):
        family.save(tmp_path / "family.pt")
    assert (tmp_path / "family.pt").read_bytes() == before
    with pytest.raises(CheckpointError, match=r"name it family\.pt"):
        family.save(tmp_path / "family.safetensors")


def test_what_can_not_be_saved_is_named_with_the_way_out_and_the_old_file_stays(tmp_path: Path) -> None:
    family, *_ = started()
    family.save(tmp_path / "family.pt")
    before = (tmp_path / "family.pt").read_bytes()
    with pytest.raises(CheckpointError, match=r"also= holds the type int, which can't be saved"):
        family.save(tmp_path / "family.pt", also={"step": 3})
    with torch.no_grad():
        next(family.parameters()).fill_(float("nan"))
    with pytest.raises(CheckpointError, match=r"not finite: go back .*; family\.save\(path, finite=False\)"):
        family.save(tmp_path / "family.pt")
    assert (tmp_path / "family.pt").read_bytes() == before
