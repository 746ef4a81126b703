"""Updates by cohort, compared with copies that are trained by hand.

The reference for elementwise optimizers: all entries of a cohort are one long parameter of a second model, in a group with its
own learning rate. For the others: a copy makes each step unscaled, and old and new values are combined by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import outgrow
from outgrow.history.cohorts import cohorts
from outgrow.runs.cohort_rates import Pace
from tests.helpers.cohort_twins import RecordingSGD, X, backward, hooks, same, small, step, twice_grown, values_of

FACTORS = {0: 0.25, 1: 1.3, 2: 0.0}
GAP = {0: 0.25, 1: 1.0, 2: 0.0}  # scaled entries on both sides of unscaled ones
ELEMENTWISE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "SGD nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "Adam amsgrad": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Adagrad": {"lr": 0.05},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.01},
    "RMSprop centered": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "ASGD": {"lr": 0.01, "lambd": 0.0, "t0": 2.0},
}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
HOWS = [(case, how) for case in ELEMENTWISE for how in ("", "foreach", *["fused"] * (case.split()[0] in FUSED))]


class ByCohort:
    """A model with one long parameter per cohort, each in a group with its own rate."""

    def __init__(self, model: nn.Module, kind: Any, options: dict[str, Any]) -> None:
        found = cohorts(model)
        self.model = copy.deepcopy(model)
        self.masks = [
            {name: found.mask(name, k).expand_as(p) for name, p in model.named_parameters()} for k in range(found.count + 1)
        ]
        self.vectors = [nn.Parameter(self.gathered(mask, lambda p: p.detach())) for mask in self.masks]
        groups = [{"params": [vector], "lr": options["lr"] * FACTORS[k]} for k, vector in enumerate(self.vectors)]
        self.optimizer = kind(groups, **options)

    def gathered(self, masks: dict[str, Tensor], of: Callable[[nn.Parameter], Any]) -> Tensor:
        return torch.cat([of(p)[masks[name]] for name, p in self.model.named_parameters()])

    def step(self) -> None:
        backward(self.model)
        for vector, masks in zip(self.vectors, self.masks, strict=True):
            vector.grad = self.gathered(masks, lambda p: p.grad)
        self.optimizer.step()
        with torch.no_grad():
            for vector, masks in zip(self.vectors, self.masks, strict=True):
                pieces = iter(vector.split([int(mask.sum()) for mask in masks.values()]))
                for name, p in self.model.named_parameters():
                    p[masks[name]] = next(pieces)


@pytest.mark.parametrize(("case", "how"), HOWS)
def test_a_factor_is_a_learning_rate_of_its_own(case: str, how: str) -> None:
    kind, options = getattr(torch.optim, case.split()[0]), dict(ELEMENTWISE[case])
    model = twice_grown()
    twin = ByCohort(model, kind, options)
    optimizer = kind(model.parameters(), **options, **({how: True} if how else {}))
    Pace(model, optimizer).set(FACTORS)
    start = values_of(model)
    for _ in range(5):
        step(model, optimizer)
        twin.step()
    close = {"rtol": 1e-9, "atol": 1e-12 if case != "ASGD" else 1e-7}  # ASGD keeps its rate in single precision
    for name, p in model.named_parameters():
        assert torch.allclose(p, twin.model.get_parameter(name), **close), name
        held = cohorts(model).mask(name, 2).expand_as(p)
        assert torch.equal(p[held], start[name][held])
        assert not (p == start[name])[~held].any()
    if case == "ASGD":
        averages = {name: optimizer.state[p]["ax"] for name, p in model.named_parameters()}
        for vector, masks in zip(twin.vectors, twin.masks, strict=True):
            mine = torch.cat([averages[name][mask] for name, mask in masks.items()])
            assert torch.allclose(mine, twin.optimizer.state[vector]["ax"], **close)


@pytest.mark.parametrize("case", ["Rprop", "Adafactor", *["Muon"] * hasattr(torch.optim, "Muon"), "AdamW"])
def test_any_optimizer_makes_the_step_it_would_make_scaled(case: str) -> None:
    model = twice_grown()
    matrices = [p for p in model.parameters() if p.ndim == 2 or case != "Muon"]
    optimizer = getattr(torch.optim, case)(matrices, lr=0.01)
    pace = Pace(model, optimizer)
    pace.set(GAP)
    found = cohorts(model)
    for _ in range(3):
        backward(model)
        before = values_of(model)
        plain, alone = copy.deepcopy((model, optimizer))
        for p, twin in zip(model.parameters(), plain.parameters(), strict=True):
            twin.grad = p.grad.clone()  # deepcopy leaves gradients out
        assert not hooks(alone)
        alone.step()
        optimizer.step()
        for name, p in model.named_parameters():
            factor = torch.tensor([GAP[k] for k in found[name].expand_as(p).flatten().tolist()], dtype=p.dtype).view_as(p)
            wanted = before[name] + factor * (plain.get_parameter(name) - before[name])
            assert torch.allclose(p, wanted, rtol=1e-9, atol=1e-14)
        for one, other in zip(optimizer.state.values(), alone.state.values(), strict=True):
            assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


def test_sparse_gradients() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embed(x)).mean(1)

    model, words = Words().double(), torch.tensor([[1, 2], [2, 5]])
    optimizer = torch.optim.SparseAdam([model.embed.weight], lr=0.1)
    pace = Pace(model, optimizer)
    outgrow.widen(model, words, "embed", by=2, optimizer=optimizer)
    pace.grown(train="new")
    before = values_of(model)["embed.weight"]
    model(words).sum().backward()
    optimizer.step()
    changed = (model.embed.weight != before).nonzero().tolist()
    assert {row for row, _ in changed} <= {1, 2, 5}
    assert {column for _, column in changed} == {4, 5}


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_ones_change_nothing_to_the_last_bit(factor: float) -> None:
    models = [twice_grown(), twice_grown(), twice_grown()]
    optimizers = [AdamW(model.parameters(), lr=1e-3, weight_decay=999.0) for model in models]
    pace = Pace(models[1], optimizers[1])
    pace.set({0: 1.0, 1: 1, 2: 1.0})
    assert not hooks(optimizers[1])
    Pace(models[2], optimizers[2]).set({1: factor})
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)  # from large values to small ones: there, w₀ + (w − w₀) is not w
    assert same(values_of(models[0]), values_of(models[1]))
    found = cohorts(models[2])
    for (name, p), q in zip(models[0].named_parameters(), models[2].parameters(), strict=True):
        rest = (found[name] != 1).expand_as(p)
        assert torch.equal(p[rest], q[rest])


@pytest.mark.parametrize("hold", [1, 4])
def test_a_hold_ends_after_its_steps(hold: int) -> None:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    pace = Pace(model, optimizer)
    outgrow.widen(model, X, "1.f.0", by=4, method="r2r", optimizer=optimizer)
    pace.grown(train="new", hold=hold)
    found, start = cohorts(model), values_of(model)
    for number in range(1, hold + 3):
        step(model, optimizer)
        for name, p in model.named_parameters():
            old = found.mask(name, 0).expand_as(p)
            assert torch.equal(p[old], start[name][old]) == (number <= hold)
            assert not (p == start[name])[~old].any()
    pace.set({})
    assert not hooks(optimizer)


def test_a_hold_without_a_number_ends_with_the_next_growth() -> None:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.05)
    pace = Pace(model, optimizer)
    for announced in (True, False):
        outgrow.widen(model, X, "1.f.0", by=2, method="r2r", optimizer=optimizer)
        pace.grown(train="new")
        start = values_of(model)
        for _ in range(5):
            step(model, optimizer)
        assert torch.equal(model[2].weight, start["2.weight"])
        assert torch.equal(model[1].f[0].bias[:6], start["1.f.0.bias"][:6])
        outgrow.deepen(model, X, "1", optimizer=optimizer)
        if announced:
            pace.grown()
        step(model, optimizer)
        assert not torch.equal(model[3].weight, start["2.weight"])
        pace.remove()
        assert not hooks(optimizer)
        model = small()
        optimizer = SGD(model.parameters(), lr=0.05)
        pace = Pace(model, optimizer)


def test_a_hold_of_steps_goes_on_over_another_growth() -> None:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.05)
    pace = Pace(model, optimizer)
    outgrow.widen(model, X, "1.f.0", by=2, optimizer=optimizer)
    pace.grown(train="new", hold=3)
    start = values_of(model)["2.weight"]
    step(model, optimizer)
    outgrow.widen(model, X, "1.f.0", by=2, optimizer=optimizer)
    pace.grown(new_lr=2.0)
    for number in (2, 3, 4):
        step(model, optimizer)
        assert torch.equal(model[2].weight, start) == (number <= 3)


def test_every_growth_counts_from_its_own_start() -> None:
    model = small()
    optimizer = RecordingSGD(model.parameters(), lr=0.5)
    optimizer.seen = []
    pace = Pace(model, optimizer)
    for growth in range(2):
        outgrow.widen(model, X, "1.f.0", by=2, optimizer=optimizer)
        pace.grown(train="new", hold=2, warmup=4)
        start = values_of(model)["2.weight"]
        for number in range(1, 6):
            step(model, optimizer)
            assert torch.equal(model[2].weight, start) == (number <= 2), (growth, number)
    assert optimizer.seen == [[0.125], [0.25], [0.375], [0.5], [0.5]] * 2


def test_new_blocks_are_cohorts_as_a_whole() -> None:
    models = [small(), small()]
    optimizers = [SGD(model.parameters(), lr=0.05) for model in models]
    pace = Pace(models[0], optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        outgrow.deepen(model, X, "1", optimizer=optimizer)
    pace.grown(new_lr=3.0)
    assert pace.factors == {0: 1.0, 1: 3.0}
    start = values_of(models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    mine, plain = values_of(models[0]), values_of(models[1])
    for name, before in start.items():
        factor = 3.0 if name.startswith("2.") else 1.0
        assert torch.allclose(mine[name] - before, factor * (plain[name] - before), rtol=1e-9, atol=1e-14)
        assert factor != 1.0 or torch.equal(mine[name], plain[name])


def test_what_fades_in_is_not_scaled() -> None:
    def grown_model() -> tuple[nn.Module, Optimizer]:
        model = small()
        optimizer = SGD(model.parameters(), lr=0.05)
        outgrow.widen(model, X, "1.f.0", by=4, fade=3, optimizer=optimizer)
        outgrow.deepen(model, X, "1", fade=3, optimizer=optimizer)
        return model, optimizer

    (model, optimizer), (frozen, still) = grown_model(), grown_model()
    still.param_groups[0]["lr"] = 0.0
    Pace(model, optimizer).set({0: 0.0, 1: 0.0, 2: 0.0})
    start = values_of(model)
    for _ in range(4):
        step(model, optimizer)
        step(frozen, still)
    assert same(values_of(model), values_of(frozen))
    assert not torch.equal(model[1].f[2].weight, start["1.f.2.weight"])
    assert torch.equal(model(X), frozen(X))
