"""Cohorts show the growth that each entry came with.

The truth is found by marking: before each growth every value of the model is made distinct, and afterwards a value that is
found again in the same parameter is an old one (r2r and netmorph do not change old values).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import GrowthError
from outgrow.growth_plan.plan import Insert, Plan
from outgrow.history.cohorts import Cohorts, cohorts
from outgrow.history.growths_on_model import ATTRIBUTE, growths, history


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Marked:
    """A model whose births are recorded by brute force, growth by growth."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model.double().eval(), x.double() if x.is_floating_point() else x
        self.births = {id(p): np.zeros(tuple(p.shape), dtype=int) for p in model.parameters()}
        self.kept = list(model.parameters())  # so that ids are not used again
        self.count = 0

    @torch.no_grad()
    def mark(self) -> None:
        total = sum(p.numel() for p in self.model.parameters())
        values = (torch.randperm(total, generator=torch.Generator().manual_seed(self.count)).double() + 1.377) / total
        for p in self.model.parameters():
            p.copy_(values[: p.numel()].view_as(p))
            values = values[p.numel() :]

    def grow(self, call: Callable[[], object]) -> None:
        self.mark()
        before = {
            id(p): dict(zip(p.flatten().tolist(), self.births[id(p)].flatten().tolist(), strict=True))
            for p in self.model.parameters()
        }
        call()
        self.count += 1
        for p in self.model.parameters():
            known = before.get(id(p), {})
            births = [known.get(number, self.count) for number in p.flatten().tolist()]
            self.births[id(p)] = np.array(births).reshape(tuple(p.shape))
        self.kept += list(self.model.parameters())

    def widen(self, where: str, by: int = 2, method: str = "r2r") -> None:
        self.grow(lambda: outgrow.widen(self.model, self.x, where, by=by, method=method))

    def check(self, model: nn.Module | None = None) -> Cohorts:
        found = cohorts(self.model if model is None else model)
        assert found.count == self.count
        for name, parameter in self.model.named_parameters():
            wanted = self.births[id(parameter)]
            assert found[name].ndim == parameter.ndim
            assert np.array_equal(np.broadcast_to(found[name].numpy(), wanted.shape), wanted), name
        return found


def mlp() -> Marked:
    return Marked(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 3))


def cnn() -> Marked:
    layers = (nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1), nn.Flatten())
    return Marked(nn.Sequential(*layers, nn.Linear(48, 2)), torch.randn(4, 2, 4, 4))


def stack() -> Marked:
    return Marked(nn.Sequential(nn.Linear(3, 4), Block(4), Block(4), nn.Linear(4, 2)), torch.randn(4, 3))


def test_a_model_that_has_not_grown_is_one_cohort() -> None:
    found = mlp().check()
    assert found.count == 0
    assert found.entries() == {0: 46}


@pytest.mark.parametrize("method", ["r2r", "netmorph"])
def test_new_units(method: str) -> None:
    marked = cnn()
    marked.widen("0", 2, method)
    marked.widen("3", 4, method)  # its columns in the linear layer stand in between the old ones
    marked.widen("0", 2, method)
    found = marked.check()
    assert found["3.weight"].shape == (7, 8, 1, 1)  # expanded along those axes alone that grew
    assert set(found["3.weight"].flatten().tolist()) == {0, 1, 2, 3}


def test_larger_kernels() -> None:
    marked = cnn()
    marked.grow(lambda: outgrow.kernel(marked.model, marked.x, "0", (5, 3)))
    marked.widen("0")
    marked.grow(lambda: outgrow.kernel(marked.model, marked.x, "0", 7))
    marked.check()


def test_ten_growths_with_blocks_that_are_renamed() -> None:
    marked = stack()
    model, x = marked.model, marked.x
    for turn in range(3):
        marked.widen("1.f.0")
        marked.grow(lambda: outgrow.deepen(model, x, "1", count=2))
        marked.widen(f"{3 + 2 * turn}.f.0")
        marked.check()
    marked.grow(lambda: outgrow.widen(model, x, "*", factor=1.5))
    found = marked.check()
    assert len(model) == 10
    assert str(found).splitlines()[3].endswith("1.f.0 6 → 8")


@pytest.mark.parametrize("method", ["r2r", "netmorph"])
def test_layers_behind_layers(method: str) -> None:
    """A layer that is split keeps its cohort, although its values change: so values can't mark old entries here."""
    model, x = mlp().model, torch.randn(4, 3).double()
    outgrow.widen(model, x, "2", by=2)
    growth = outgrow.deepen(model, x, "2", method=method)
    found = growth.cohorts
    assert found["2.bias"].tolist() == [0] * 4 + [1] * 2
    new = [name for name, _ in model.named_parameters() if name.startswith("3.")]
    assert new
    assert all(set(found[name].flatten().tolist()) == {2} for name in new)
    assert set(found[growth.plan.renamed("4.weight")].flatten().tolist()) == {0, 1}


def test_modules_that_are_put_into_containers() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x)))

    marked = Marked(Plain(), torch.randn(4, 3))
    marked.widen("one")
    marked.grow(lambda: outgrow.deepen(marked.model, marked.x, "one"))
    marked.grow(lambda: outgrow.branch(marked.model, marked.x, "two", hidden=6))
    marked.widen("one.0")
    found = marked.check()
    assert set(found["two.0.weight"].flatten().tolist()) == {0, 1, 4}


def test_tied_weights_have_one_birth_under_both_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mix(self.embed(x)))

    marked = Marked(Tied(), torch.randint(7, (2, 5)))
    marked.grow(lambda: outgrow.widen(marked.model, marked.x, "*", by=2))
    found = marked.check()
    assert torch.equal(found["head.weight"], found["embed.weight"])
    assert found.entries() == found_by_hand(marked)


def found_by_hand(marked: Marked) -> dict[int, int]:
    births = np.concatenate([marked.births[id(p)].flatten() for p in marked.model.parameters()])
    return {k: int((births == k).sum()) for k in range(marked.count + 1)}


def test_a_skip_that_is_folded() -> None:
    marked = stack()
    marked.grow(lambda: outgrow.widen(marked.model, marked.x, "0", by=2, residual="fold"))
    marked.check()


def test_several_transforms_at_once_are_one_growth() -> None:
    marked = stack()
    both = outgrow.Widen("1.f.0", by=2), outgrow.Deepen(after="2", count=2)
    marked.grow(lambda: outgrow.grow(marked.model, marked.x, *both))
    marked.widen("2.f.0")
    found = marked.check()
    assert len(history(marked.model)) == 4
    assert found.count == 2


def test_parts_that_were_grown_by_themselves() -> None:
    marked = stack()
    model, x = marked.model, marked.x
    inner = torch.randn(4, 4).double()
    marked.widen("2.f.0")
    marked.grow(lambda: outgrow.widen(model[2], inner, "f.0", by=4, method="r2r"))
    marked.grow(lambda: outgrow.deepen(model, x, "1"))
    assert ATTRIBUTE in vars(model[3])
    marked.grow(lambda: outgrow.widen(model[2], inner, "f.0", by=2, method="r2r"))  # a part that came with a growth
    marked.grow(lambda: outgrow.widen(model[2], inner, "f.0", by=2, method="r2r"))
    marked.widen("3.f.0")
    found = marked.check()
    assert set(found["3.f.0.bias"].tolist()) == {0, 1, 2, 6}
    assert set(found["2.f.0.bias"].tolist()) == {3, 4, 5}


def test_growths_that_are_independent_of_each_other_are_in_the_order_of_the_history() -> None:
    model = stack().model
    outgrow.widen(model, torch.randn(4, 3).double(), "1.f.0", by=2)
    outgrow.widen(model[2], torch.randn(4, 4).double(), "f.0", by=2)
    assert set(cohorts(model)["2.f.0.bias"].tolist()) == {0, 1}


@pytest.mark.parametrize("made", [cnn, stack])
def test_the_same_after_save_and_load(made: Callable[[], Marked], path: Path) -> None:
    marked = made()
    where = "0" if made is cnn else "1.f.0"
    marked.widen(where)
    if made is stack:
        both = outgrow.Widen("2.f.0", by=2), outgrow.Deepen(after="1")
        marked.grow(lambda: outgrow.grow(marked.model, marked.x, *both))
    marked.widen(where)
    outgrow.save(marked.model, path)
    marked.check(outgrow.load(made().model, path))


def test_files_from_before_there_were_cohorts_still_read() -> None:
    plan = Plan((), (), inserts=(Insert("", 1, 0, "1", "", 0),))
    assert "continues" not in plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan
    again = Plan.from_json({**plan.to_json(), "continues": True})
    assert Plan.from_json(again.to_json()) == again
    assert [len(made) for made in growths([plan, again, plan])] == [2, 1]


def test_former_names_undo_renaming() -> None:
    inserts = [Insert("a", 2, 0, "2", "", 0), Insert("", 1, 0, "b2", "b", 1), Insert("a.1", 1, -1, "1", "", 0, wraps=True)]
    inserts.append(Insert("a", 1, 0, "x_1"))
    for insert in inserts:
        for name in ("a.0.w", "a.1.w", "a.2.w", "a.10.b.w", "b1.w", "b2", "b3.a.2.w", "a.x.w", "ab.1.w", "c"):
            assert insert.former(insert.renamed(name)) == name
        assert insert.former(f"{insert.path}.weight") is None


def test_measures_are_those_of_the_masked_values() -> None:
    marked = cnn()
    marked.widen("0", 2, "netmorph")
    marked.grow(lambda: outgrow.kernel(marked.model, marked.x, "3", 5))
    marked.mark()
    model, found = marked.model, cohorts(marked.model)
    model(marked.x).square().mean().backward()
    model[0].bias.grad = None
    for k in range(3):
        masks = {name: found.mask(name, k).expand_as(p) for name, p in model.named_parameters()}
        values = torch.cat([p.detach()[masks[name]] for name, p in model.named_parameters()])
        slopes = torch.cat([p.grad[masks[name]] for name, p in model.named_parameters() if p.grad is not None])
        assert found.norms(model)[k] == (values.numel(), pytest.approx(float(values.square().mean().sqrt())))
        assert found.gradients(model)[k] == (slopes.numel(), pytest.approx(float(slopes.square().mean().sqrt())))
    lines = found.table(model).splitlines()
    assert lines[0].split() == ["cohort", "entries", "values", "gradients", "came", "with"]
    assert len(lines) == 5
    model.zero_grad()
    assert "–" in found.table(model)


def test_cohorts_from_before_another_growth_say_so() -> None:
    marked = mlp()
    early = cohorts(marked.model)
    marked.widen("0")
    with pytest.raises(GrowthError, match=r"0\.weight has changed since"):
        early.norms(marked.model)
    with pytest.raises(KeyError, match="no such parameter"):
        early["nothing"]


def test_a_model_that_was_changed_by_hand_is_reported() -> None:
    marked = mlp()
    marked.widen("0")
    marked.model[0] = nn.Linear(3, 9)
    with pytest.raises(GrowthError, match="does not fit the model"):
        cohorts(marked.model)
