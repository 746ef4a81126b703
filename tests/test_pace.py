"""Updates by cohort, against twins by hand.

The truth for optimizers that treat every number by itself: all entries of a cohort are one long parameter of a twin, in a group
with a learning rate of its own. For the others: a copy makes each step unscaled, and the two ends are combined by hand.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel

import outgrow
from outgrow.errors import OptimizerError, ScheduleError
from outgrow.training.cohorts import cohorts
from outgrow.training.pace import Pace

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(1)).double()
FACTORS = {0: 0.25, 1: 1.3, 2: 0.0}
GAP = {0: 0.25, 1: 1.0, 2: 0.0}  # what is scaled stands on both sides of what is not
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Block(), nn.Linear(4, 2)).double()


def twice_grown() -> nn.Module:
    model = small()
    outgrow.widen(model, X, "*", by=4)
    outgrow.grow(model, X, outgrow.Widen("1.f.0", by=2), outgrow.Deepen(after="1"))
    return model


def backward(model: nn.Module) -> Tensor:
    model.zero_grad()
    loss = (model(X) - Y).square().mean()
    loss.backward()
    return loss


def step(model: nn.Module, *optimizers: Optimizer) -> None:
    backward(model)
    for optimizer in optimizers:
        optimizer.step()


def numbers(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def hooks(optimizer: Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


class ByCohort:
    """A twin that trains one long parameter for each cohort, each in a group with its own rate."""

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
    start = numbers(model)
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


@pytest.mark.parametrize("case", ["Rprop", "Adafactor", "Muon", "AdamW"])
def test_any_optimizer_makes_the_step_it_would_make_scaled(case: str) -> None:
    model = twice_grown()
    matrices = [p for p in model.parameters() if p.ndim == 2 or case != "Muon"]
    optimizer = getattr(torch.optim, case)(matrices, lr=0.01)
    pace = Pace(model, optimizer)
    pace.set(GAP)
    found = cohorts(model)
    for _ in range(3):
        backward(model)
        before = numbers(model)
        plain, alone = copy.deepcopy((model, optimizer))
        for p, twin in zip(model.parameters(), plain.parameters(), strict=True):
            twin.grad = p.grad.clone()  # which copies of parameters leave out
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
    before = numbers(model)["embed.weight"]
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
        step(model, optimizer)  # from large numbers to small ones: w₀ + (w − w₀) is not w there
    assert same(numbers(models[0]), numbers(models[1]))
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
    found, start = cohorts(model), numbers(model)
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
    for told in (True, False):
        outgrow.widen(model, X, "1.f.0", by=2, method="r2r", optimizer=optimizer)
        pace.grown(train="new")
        start = numbers(model)
        for _ in range(5):
            step(model, optimizer)
        assert torch.equal(model[2].weight, start["2.weight"])
        assert torch.equal(model[1].f[0].bias[:6], start["1.f.0.bias"][:6])
        outgrow.deepen(model, X, "1", optimizer=optimizer)
        if told:
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
    start = numbers(model)["2.weight"]
    step(model, optimizer)
    outgrow.widen(model, X, "1.f.0", by=2, optimizer=optimizer)
    pace.grown(new_lr=2.0)
    for number in (2, 3, 4):
        step(model, optimizer)
        assert torch.equal(model[2].weight, start) == (number <= 3)


def test_every_growth_counts_from_its_own_start() -> None:
    model = small()
    optimizer = Told(model.parameters(), lr=0.5)
    optimizer.seen = []
    pace = Pace(model, optimizer)
    for growth in range(2):
        outgrow.widen(model, X, "1.f.0", by=2, optimizer=optimizer)
        pace.grown(train="new", hold=2, warmup=4)
        start = numbers(model)["2.weight"]
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
    start = numbers(models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    mine, plain = numbers(models[0]), numbers(models[1])
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
    start = numbers(model)
    for _ in range(4):
        step(model, optimizer)
        step(frozen, still)
    assert same(numbers(model), numbers(frozen))
    assert not torch.equal(model[1].f[2].weight, start["1.f.2.weight"])
    assert torch.equal(model(X), frozen(X))


class Told(SGD):
    """Tells the rates that it steps with."""

    seen: list[Any]

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        self.seen.append([float(group["lr"]) for group in self.param_groups])
        return super().step()


@pytest.mark.parametrize("tensor", [False, True])
def test_a_warm_up_is_seen_by_steps_alone(tensor: bool) -> None:
    rate = torch.tensor(0.5) if tensor else 0.5
    model = small()
    one, two = list(model[0].parameters()), list(model[1:].parameters())
    optimizer, twin = (Told([{"params": one}, {"params": two}], lr=rate) for rate in (rate, 0.5))
    scheduler, other = (schedules.ExponentialLR(o, 0.9) for o in (optimizer, twin))
    optimizer.seen, twin.seen = [], []
    pace = Pace(model, optimizer)
    pace.grown(warmup=4)
    for _ in range(7):
        step(model, optimizer)
        scheduler.step()
        twin.step()
        other.step()
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(other.get_last_lr(), rel=1e-6)
        assert tensor or scheduler.get_last_lr() == other.get_last_lr()
    levels = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1]
    for level, mine, plain in zip(levels, optimizer.seen, twin.seen, strict=True):
        assert mine == pytest.approx([level * rate for rate in plain], rel=1e-6)
    assert not tensor or optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"] is rate
    pace.set({})
    assert not hooks(optimizer)


def test_a_step_that_fails_leaves_no_trace() -> None:
    models = [twice_grown(), twice_grown()]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        Pace(model, optimizer).grown(new_lr=0.5, warmup=5)

    def fails() -> float:
        raise MemoryError("none left")

    for number in range(6):
        if number in (0, 2):
            with pytest.raises(MemoryError):
                optimizers[0].step(fails)
            assert optimizers[0].state_dict()["param_groups"][0]["lr"] == 0.1
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
            assert optimizer.param_groups[0]["lr"] == 0.1
    assert same(numbers(models[0]), numbers(models[1]))


def test_closures() -> None:
    models = [twice_grown(), twice_grown()]
    optimizers = [Adam(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        Pace(model, optimizer).grown(new_lr=0.5, train="new", hold=2, warmup=3)
    for _ in range(4):
        optimizers[0].step(lambda: backward(models[0]))
        step(models[1], optimizers[1])
    assert same(numbers(models[0]), numbers(models[1]))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_do_not_count(fused: bool) -> None:
    model = small().float()
    optimizer = SGD(model.parameters(), lr=0.05, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    outgrow.widen(model, X.float(), "1.f.0", by=2, optimizer=optimizer)
    pace = Pace(model, optimizer)
    pace.grown(train="new", hold=2, warmup=9)
    for finite in (True, False, True):
        optimizer.zero_grad()
        scaler.scale((model(X.float()) - Y).square().mean()).backward()
        if not finite:
            model[0].bias.grad[0] = float("inf")
        before = numbers(model)
        scaler.step(optimizer)
        scaler.update()
        assert same(before, numbers(model)) != finite
        assert optimizer.param_groups[0]["lr"] == 0.05
    assert pace.state_dict()["made"] == [[2, 2]]


def test_an_optimizer_built_on_another_is_scaled_once() -> None:
    Adam([nn.Parameter(torch.ones(1))])  # from now on torch calls hooks around Adam's own step too

    class Mine(Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    models = [twice_grown(), twice_grown()]
    optimizers = [Mine(models[0].parameters(), lr=0.1), Adam(models[1].parameters(), lr=0.1)]
    for model, optimizer in zip(models, optimizers, strict=True):
        Pace(model, optimizer).grown(new_lr=0.5, train="new", hold=2, warmup=4)
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
    assert same(numbers(models[0]), numbers(models[1]))


def test_several_optimizers_count_by_themselves_and_frozen_parameters_stay() -> None:
    model = small()
    model[2].weight.requires_grad_(False)
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[1:].parameters(), lr=0.1)
    average = AveragedModel(model)
    pace = Pace(model, [first, second])
    outgrow.widen(model, X, "*", by=2, optimizer=[first, second], average=average)
    pace.grown(train="new", hold=2)
    start, mean = numbers(model), numbers(average)
    for _ in range(3):
        step(model, second)
    assert not torch.equal(model[2].bias, start["2.bias"])
    assert torch.equal(model[2].weight, start["2.weight"])
    backward(model)
    first.step()
    assert torch.equal(model[0].weight[:4], start["0.weight"][:4])
    assert not torch.equal(model[0].weight[4:], start["0.weight"][4:])
    assert same(numbers(average), mean)


def test_a_part_that_grows_untold_keeps_factors_right() -> None:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.05)
    pace = Pace(model, optimizer)
    pace.set({0: 0.0})
    outgrow.widen(model[1], torch.randn(4, 4).double(), "f.0", by=2, optimizer=optimizer)
    start = numbers(model)
    step(model, optimizer)
    assert (model[1].f[0].bias == start["1.f.0.bias"]).tolist() == [True] * 6 + [False] * 2
    assert torch.equal(model[0].weight, start["0.weight"])


def test_low_precision_and_updates_that_are_not_finite() -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = SGD(model.parameters(), lr=0.1)
    pace = Pace(model, optimizer)
    pace.set({0: 0.5})
    before = model.weight.detach().clone().float()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert torch.allclose(model.weight.float(), before - 0.05, atol=0.004)
    pace.set({0: 0.0})
    kept = numbers(model)
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    optimizer.step()
    assert same(numbers(model), kept)


def make_run(path: Path | None = None, state: Any = None) -> tuple[nn.Module, Optimizer, Any, Pace]:
    """A run that has just grown, or one that is taken up from what was saved."""
    model = small() if path is None else outgrow.load(small(), path)
    optimizer = AdamW(model.parameters(), lr=0.02)
    scheduler = schedules.OneCycleLR(optimizer, 0.05, 40)
    pace = Pace(model, optimizer)
    if path is None:
        for event in ({"new_lr": 1.3}, {"new_lr": 0.7, "train": "new", "hold": 6, "warmup": 8}):
            outgrow.grow(model, X, outgrow.Widen("1.f.0", by=2), outgrow.Deepen(after="1"), optimizer=optimizer)
            pace.grown(**event)
    else:
        optimizer.load_state_dict(state[0])
        scheduler.load_state_dict(state[1])
        pace.load_state_dict(json.loads(state[2]))
    return model, optimizer, scheduler, pace


@pytest.mark.parametrize("moment", [0, 3, 6, 7, 9])
def test_a_run_that_is_taken_up_again_is_the_same_to_the_last_bit(moment: int, path: Path) -> None:
    model, optimizer, scheduler, pace = make_run()
    for number in range(14):
        if number == moment:
            outgrow.save(model, path)
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict())), json.dumps(pace.state_dict())
        step(model, optimizer)
        scheduler.step()
    again, resumed, schedule, taken = make_run(path, (*saved[0], saved[1]))
    for _ in range(moment, 14):
        step(again, resumed)
        schedule.step()
    assert same(numbers(model), numbers(again))
    assert taken.state_dict() == pace.state_dict()
    assert taken.factors == {0: 1.0, 1: 1.3, 2: 0.7}


def test_line_searches_are_refused_and_all_is_as_before() -> None:
    model = twice_grown()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    pace = Pace(model, optimizer)
    known = pace.state_dict()
    for change in (lambda: pace.set({0: 0.5}), lambda: pace.grown(new_lr=2.0, warmup=3)):
        with pytest.raises(OptimizerError, match=r"(?s)LBFGS.*remembers its own steps.*leave new_lr="):
            change()
        assert pace.state_dict() == known
        assert not hooks(optimizer)
    pace.grown(warmup=3)
    before = backward(model)
    optimizer.step(lambda: backward(model))
    assert backward(model) < before


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda pace: pace.set({3: 1.0}), OptimizerError, "no cohort 3: the model grew 2 times"),
        (lambda pace: pace.set({0: -1.0}), OptimizerError, "from 0 on"),
        (lambda pace: pace.set({0: float("nan")}), OptimizerError, "from 0 on"),
        (lambda pace: pace.grown(train="old"), ScheduleError, "train='old'"),
        (lambda pace: pace.grown(hold=3), ScheduleError, "write that too"),
        (lambda pace: pace.grown(warmup=0), ScheduleError, "warmup=0"),
        (lambda pace: pace.grown(new_lr=-2.0), OptimizerError, "a factor of -2.0 for cohort 2"),
        (lambda pace: pace.load_state_dict({**pace.state_dict(), "made": []}), OptimizerError, "of 0 optimizers"),
        (lambda pace: pace.load_state_dict({**pace.state_dict(), "held_before": 4}), OptimizerError, "grew 4 times"),
        (lambda pace: pace.load_state_dict({**pace.state_dict(), "factors": {"7": 2.0}}), OptimizerError, "no cohort 7"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[Pace], None], error: type[Exception], reason: str) -> None:
    model = twice_grown()
    pace = Pace(model, SGD(model.parameters(), lr=0.1))
    pace.set({1: 2.0})
    known = pace.state_dict()
    with pytest.raises(error, match=reason):
        call(pace)
    assert pace.state_dict() == known
