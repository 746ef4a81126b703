"""Extra state of modules in files, and diverged runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import outgrow
from outgrow.errors import CheckpointError
from tests.helpers.saved_models import photograph
from tests.helpers.small_runs import X, at, mlp, started


class Counting(nn.Module):
    """A module with extra state of all types that files can hold."""

    def __init__(self, seen: Any = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.seen: Any = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


SEEN = {"count": 3, "shape": (2, [1, None]), 5: {"scale": 0.1, "on": True}, "values": torch.tensor([1.0, -2.0])}


def same(one: Any, other: Any) -> bool:
    return {**one, "values": 0} == {**other, "values": 0} and torch.equal(one["values"], other["values"])


def test_extra_state_is_saved_before_and_after_a_growth(tmp_path: Path) -> None:
    model = Counting(SEEN)
    for number in range(2):
        path = tmp_path / f"{number}.safetensors"
        outgrow.save(model, path)
        again = outgrow.load(Counting(), path)
        assert same(again.seen, SEEN)
        assert isinstance(again.seen["shape"], tuple)
        outgrow.widen(model, torch.randn(3, 4), "up", by=2)
    outgrow.widen(again, torch.randn(3, 4), "up", by=2)
    assert same(again.seen, SEEN)


def test_a_run_with_extra_state_is_saved_after_a_growth(tmp_path: Path) -> None:
    x, path = torch.randn(3, 4), tmp_path / "run.pt"
    schedule = [outgrow.At(step=1, grow=[outgrow.Widen("up", to=8)])]

    def make(seen: Any) -> outgrow.Run:
        model = Counting(seen)
        return outgrow.Run(model, x, SGD(model.parameters(), lr=0.1), schedule, quiet=True)

    run = make(SEEN)
    run.step()
    run.save(path)
    other = make(None)
    other.load(path)
    assert same(other.model.seen, SEEN)  # type: ignore[arg-type]
    assert torch.equal(other.model(x), run.model(x))
    assert same(outgrow.load(Counting(), path).seen, SEEN)


def test_extra_state_that_can_not_be_loaded_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = Counting(SEEN)
    outgrow.widen(model, torch.randn(3, 4), "up", to=8)
    outgrow.save(model, path)
    fresh = Counting({"own": 1})
    hook = fresh.down.register_load_state_dict_pre_hook(lambda *args: (_ for _ in ()).throw(RuntimeError("broken")))
    before = photograph(fresh)
    with pytest.raises(CheckpointError, match="broken"):
        outgrow.load(fresh, path)
    assert (photograph(fresh), fresh.seen) == (before, {"own": 1})
    hook.remove()
    plain = nn.Module()
    plain.up, plain.down = nn.Linear(4, 6), nn.Linear(6, 2)
    with pytest.raises(CheckpointError, match="_extra_state: the model has no such extra state"):
        outgrow.load(plain, path)
    outgrow.save(plain, path)
    with pytest.raises(CheckpointError, match="_extra_state: the file has no such extra state"):
        outgrow.load(Counting(), path)


def test_a_diverged_run_does_not_overwrite_a_good_one(tmp_path: Path) -> None:
    model, path = mlp(), tmp_path / "run.pt"
    run = started(model, SGD(model.parameters(), lr=0.1), [at(3)])
    run.save(path)
    good = path.read_bytes()
    with torch.no_grad():
        model.blocks[0].up.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"(?s)not written.*not finite.*finite=False.*blocks\.0\.up\.weight.*nan"):
        run.save(path)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]
    run.save(tmp_path / "diverged.pt", finite=False)
    run.load(tmp_path / "diverged.pt")
    assert bool(model(X).isnan().any())
    run.load(path)
    assert bool(model(X).isfinite().all())
