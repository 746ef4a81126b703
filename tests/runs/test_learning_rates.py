"""A factor on learning rates: every later rate is the factor times the rate of a copy without it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import SWALR

from outgrow.errors import OptimizerError
from outgrow.model.journal import Journal
from outgrow.runs.learning_rates import scale_decay, scale_rates
from tests.helpers.metrics import metric

Make = Callable[[Optimizer], Any]
LENGTH = 60
OLD = torch.__version__.startswith("2.6")


class Decay:
    """A user's rule with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.97**step


SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: s.LambdaLR(o, [lambda t: 0.95**t, lambda t: 1 / (1 + t)]),
    "LambdaLR of an object": lambda o: s.LambdaLR(o, Decay()),
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda t: 0.95),
    "StepLR": lambda o: s.StepLR(o, 7, 0.5),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [5, 21, 40], 0.3),
    "ConstantLR": lambda o: s.ConstantLR(o, 0.25, 20),
    "LinearLR": lambda o: s.LinearLR(o, 0.1, 1.0, 30),
    "ExponentialLR": lambda o: s.ExponentialLR(o, 0.93),
    "PolynomialLR": lambda o: s.PolynomialLR(o, 50, 2.0),
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 17, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 7, 2, 1e-3),
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, factor=0.4, patience=2, min_lr=1e-3),
    "ReduceLROnPlateau with small steps": lambda o: s.ReduceLROnPlateau(o, factor=0.9, patience=0, eps=5e-3),
    "ReduceLROnPlateau up": lambda o: s.ReduceLROnPlateau(o, "max", patience=1, cooldown=3, min_lr=[1e-4, 2e-3]),
    "CyclicLR triangular": lambda o: s.CyclicLR(o, [0.01, 0.02], [0.1, 0.3], 5, 9, cycle_momentum=False),
    "CyclicLR triangular2": lambda o: s.CyclicLR(o, 0.01, 0.1, 6, mode="triangular2", cycle_momentum=True),
    "CyclicLR exp_range": lambda o: s.CyclicLR(o, 0.01, 0.1, 6, mode="exp_range", gamma=0.98, cycle_momentum=True),
    "CyclicLR of a function": lambda o: s.CyclicLR(o, 0.01, 0.1, 6, scale_fn=lambda t: 0.9**t, cycle_momentum=False),
    "OneCycleLR cos": lambda o: s.OneCycleLR(o, [0.3, 0.1], LENGTH + 1),
    "OneCycleLR linear": lambda o: s.OneCycleLR(o, 0.3, LENGTH + 1, anneal_strategy="linear", cycle_momentum=False),
    "OneCycleLR in three phases": lambda o: s.OneCycleLR(o, 0.3, LENGTH + 1, three_phase=True),
    "SWALR cos": lambda o: SWALR(o, 0.03, 20),
    "SWALR linear": lambda o: SWALR(o, [0.03, 0.001], 20, "linear"),
    "SequentialLR": lambda o: s.SequentialLR(
        o, [s.LinearLR(o, 0.1, 1.0, 10), s.CosineAnnealingLR(o, 20, 1e-3), s.ExponentialLR(o, 0.9)], [10, 33]
    ),
    "ChainedScheduler": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 12), s.ExponentialLR(o, 0.95)]),
    "schedulers in schedulers": lambda o: s.ChainedScheduler(
        [s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 9), s.CosineAnnealingWarmRestarts(o, 8)], [15]), s.StepLR(o, 4, 0.9)]
    ),
}


def make_optimizer(kind: type[Optimizer] = SGD, tensor: bool = False) -> Optimizer:
    rates = [torch.tensor(0.2), torch.tensor(0.05)] if tensor else [0.2, 0.05]
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return kind(groups, momentum=0.9) if kind is SGD else kind(groups)


def advance(optimizer: Optimizer, schedulers: Any, t: int) -> list[float]:
    optimizer.step()
    for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
        scheduler.step(metric(t)) if isinstance(scheduler, s.ReduceLROnPlateau) else scheduler.step()
    return [float(group["lr"]) for group in optimizer.param_groups]


def momenta(optimizer: Optimizer) -> list[Any]:
    return [group.get("momentum", group.get("betas")) for group in optimizer.param_groups]


def facts(optimizer: Optimizer, *schedulers: Any) -> str:
    """The state of an optimizer and of schedulers, as text."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return repr((groups, [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]))


@pytest.mark.parametrize("moment", [0, 1, 4, 10, 13, 33, 55])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_rate_from_then_on(name: str, moment: int) -> None:
    kind = SGD if moment % 2 else Adam
    one, other = make_optimizer(kind), make_optimizer(kind)
    plain, scaled = SCHEDULERS[name](one), SCHEDULERS[name](other)
    for t in range(LENGTH):
        if t == moment:
            before = [float(group["lr"]) for group in other.param_groups]
            scale_rates([other], [scaled], 0.2, Journal())
            assert [group["lr"] for group in other.param_groups] == pytest.approx([0.2 * rate for rate in before], rel=1e-12)
            assert scaled.get_last_lr() == pytest.approx([0.2 * rate for rate in plain.get_last_lr()], rel=1e-12)
        factor = 0.2 if t >= moment else 1.0
        wanted = [factor * rate for rate in advance(one, plain, t)]
        assert advance(other, scaled, t) == pytest.approx(wanted, rel=1e-9, abs=1e-15), t
        assert scaled.get_last_lr() == pytest.approx(wanted, rel=1e-9, abs=1e-15)
        assert momenta(one) == momenta(other)


def keeps_tensors(make: Make) -> bool:
    """Whether a scheduler by itself leaves rates in the tensors that they were given in."""
    optimizer = make_optimizer(Adam, tensor=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = make(optimizer)
    for t in range(30):
        advance(optimizer, scheduler, t)
    return all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_that_are_tensors_stay_the_same_tensors(name: str) -> None:
    if OLD and not keeps_tensors(SCHEDULERS[name]):
        pytest.skip("this scheduler of torch 2.6 replaces rates that are tensors")
    one, other = make_optimizer(Adam, tensor=True), make_optimizer(Adam, tensor=True)
    plain, scaled = SCHEDULERS[name](one), SCHEDULERS[name](other)
    rates = [group["lr"] for group in other.param_groups]
    journal = Journal()
    for t in range(30):
        if t == 8:
            known = facts(other, scaled)
            scale_rates([other], [scaled], 3.0, journal)
            journal.undo()
            assert facts(other, scaled) == known
            scale_rates([other], [scaled], 3.0, journal)
        wanted = [(3.0 if t >= 8 else 1.0) * rate for rate in advance(one, plain, t)]
        assert advance(other, scaled, t) == pytest.approx(wanted, rel=1e-4, abs=1e-7), t
    assert all(group["lr"] is rate for group, rate in zip(other.param_groups, rates, strict=True))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_undone_by_the_journal_and_nothing_else_is_touched(name: str) -> None:
    one, other = make_optimizer(), make_optimizer()
    plain, scaled = SCHEDULERS[name](one), SCHEDULERS[name](other)
    for t in range(11):
        advance(one, plain, t)
        advance(other, scaled, t)
    known, journal = facts(other, scaled), Journal()
    scale_rates([other], [scaled], 0.5, journal)
    assert facts(other, scaled) != known
    journal.undo()
    assert facts(other, scaled) == known
    assert [advance(other, scaled, t) for t in range(11, 40)] == [advance(one, plain, t) for t in range(11, 40)]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_saved_and_loaded_into_fresh_objects(name: str) -> None:
    optimizer = make_optimizer()
    scheduler = SCHEDULERS[name](optimizer)
    for t in range(14):
        advance(optimizer, scheduler, t)
    scale_rates([optimizer], [scheduler], 0.2, Journal())
    advance(optimizer, scheduler, 14)
    states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    again = make_optimizer()
    fresh = SCHEDULERS[name](again)
    again.load_state_dict(states[0])
    fresh.load_state_dict(states[1])
    for t in range(15, 50):
        assert advance(again, fresh, t) == advance(optimizer, scheduler, t)


def test_several_schedulers_on_one_optimizer_and_one_that_is_passed_twice() -> None:
    one, other = make_optimizer(), make_optimizer()
    plain, scaled = ([s.LinearLR(o, 0.1, 1.0, 20), s.StepLR(o, 6, 0.5), s.ReduceLROnPlateau(o)] for o in (one, other))
    for t in range(40):
        if t == 9:
            scale_rates([other, other], [*scaled, scaled[0]], 2.0, Journal())
        wanted = [(2.0 if t >= 9 else 1.0) * rate for rate in advance(one, plain, t)]
        assert advance(other, scaled, t) == pytest.approx(wanted, rel=1e-9)


def test_no_scheduler_at_all_and_a_rate_that_groups_share() -> None:
    rate = torch.tensor(0.5)
    shared = Adam([{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))]}], lr=rate)
    assert shared.param_groups[0]["lr"] is shared.param_groups[1]["lr"]
    plain = make_optimizer()
    scale_rates([shared, plain], [], 0.5, Journal())
    assert [float(group["lr"]) for group in (*shared.param_groups, *plain.param_groups)] == [0.25, 0.25, 0.1, 0.025]


def test_several_optimizers_with_a_scheduler_each() -> None:
    optimizers = [make_optimizer(), make_optimizer(AdamW)]
    schedulers = [s.StepLR(optimizers[0], 3, 0.5), s.ExponentialLR(optimizers[1], 0.9)]
    scale_rates(optimizers, schedulers, 0.1, Journal())
    for t in range(3):
        rates = [advance(optimizer, scheduler, t) for optimizer, scheduler in zip(optimizers, schedulers, strict=True)]
    assert rates[0] == pytest.approx([0.01, 0.0025])
    assert rates[1] == pytest.approx([0.02 * 0.9**3, 0.005 * 0.9**3])


def test_a_schedule_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    one, other = make_optimizer(), make_optimizer()
    plain, scaled = (transformers.get_cosine_schedule_with_warmup(o, 10, LENGTH) for o in (one, other))
    for t in range(LENGTH):
        if t == 5:
            scale_rates([other], [scaled], 0.3, Journal())
        wanted = [(0.3 if t >= 5 else 1.0) * rate for rate in advance(one, plain, t)]
        assert advance(other, scaled, t) == pytest.approx(wanted, rel=1e-9)


def test_wrappers_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.4)
    scheduler = s.StepLR(optimizer, 2, 0.5)
    accelerator = accelerate.Accelerator(cpu=True)
    _, wrapped, schedule = accelerator.prepare(model, optimizer, scheduler)
    assert not isinstance(schedule, s.LRScheduler)
    scale_rates([wrapped], [schedule], 0.5, Journal())
    assert optimizer.param_groups[0]["lr"] == 0.2
    for _ in range(2):
        wrapped.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.1


class Elsewhere(s.LRScheduler):
    """Stores its largest rate in an attribute of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.peak, self.seen = 0.5, deque[int](maxlen=3)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.seen.append(self.last_epoch)
        return [min(base, self.peak / (1 + self.last_epoch)) for base in self.base_lrs]


class Floor(s.LRScheduler):
    """Follows a factor at first, until its rates reach a constant minimum."""

    def get_lr(self) -> list[Any]:
        return [max(1e-4, base * 0.8**self.last_epoch) for base in self.base_lrs]


class Needy(s.LRScheduler):
    def step(self, loss: float | None = None) -> None:  # type: ignore[override]
        if self.last_epoch >= 0 and loss is None:
            raise TypeError("step() needs the loss")
        super().step()

    def get_lr(self) -> list[Any]:
        return list(self.base_lrs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Elsewhere, "it stores rates in an unknown place"), (Floor, r"would become 0\.0001"), (Needy, "needs the loss")],
)
def test_a_scheduler_that_does_not_follow_is_refused(kind: Any, reason: str) -> None:
    optimizer = make_optimizer()
    fine, odd = s.StepLR(optimizer, 3), kind(optimizer)
    known = facts(optimizer, fine, odd)
    random = torch.get_rng_state()
    journal = Journal()
    with pytest.raises(OptimizerError, match=f"(?s){kind.__name__}.*{reason}.*by hand"):
        scale_rates([optimizer], [fine, odd], 0.2, journal)
    assert facts(optimizer, fine, odd) == known
    assert not journal._undo
    assert torch.equal(torch.get_rng_state(), random)


def test_a_custom_scheduler_that_is_linear_follows() -> None:
    class Mine(s.LRScheduler):
        def get_lr(self) -> list[Any]:
            return [base / (1 + self.last_epoch) for base in self.base_lrs]

    optimizer = make_optimizer()
    scheduler = Mine(optimizer)
    scale_rates([optimizer], [scheduler], 0.5, Journal())
    assert advance(optimizer, scheduler, 0) == [0.05, 0.0125]


def test_trying_copies_neither_the_model_nor_its_state() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def rule(self, step: int) -> float:
            return 0.9**step

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the model was copied")

        __copy__ = __deepcopy__

    model, rule = Model(), Decay()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedulers = [s.LambdaLR(optimizer, model.rule), s.LambdaLR(optimizer, rule)]
    calls = rule.calls
    optimizer.state[model.weight]["momentum_buffer"] = model  # type: ignore[assignment]
    scale_rates([optimizer], schedulers, 0.5, Journal())
    assert rule.calls == calls
    assert model.weight.tolist() == [1, 1, 1]


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf"), "2"])
def test_meaningless_factors_are_refused(factor: Any) -> None:
    with pytest.raises(OptimizerError, match="write a number above 0"):
        scale_rates([make_optimizer()], [], factor, Journal())


def test_other_objects_and_schedulers_of_other_optimizers_are_refused() -> None:
    optimizer, other = make_optimizer(), make_optimizer()
    with pytest.raises(OptimizerError, match="SimpleNamespace is not a learning-rate scheduler"):
        scale_rates([optimizer], [SimpleNamespace(scheduler=None)], 0.5, Journal())
    with pytest.raises(OptimizerError, match="rates of an optimizer outside the run"):
        scale_rates([optimizer], [s.StepLR(other, 3)], 0.5, Journal())
    with pytest.raises(OptimizerError, match="no optimizer"):
        scale_rates([nn.Linear(1, 1)], [], 0.5, Journal())
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(OptimizerError, match="no learning rate to multiply"):
        scale_rates([optimizer], [], 0.5, Journal())


def test_weight_decay() -> None:
    one, other = make_optimizer(AdamW), make_optimizer(AdamW)
    other.param_groups[1]["weight_decay"] = 0.5
    journal = Journal()
    scale_decay([one, other], 3.0, journal)
    assert [group["weight_decay"] for group in (*one.param_groups, *other.param_groups)] == [0.03, 0.03, 0.03, 1.5]
    scale_decay([SimpleNamespace(optimizer=one)], 0.0, journal)
    assert one.param_groups[0]["weight_decay"] == 0
    journal.undo()
    assert [group["weight_decay"] for group in (*one.param_groups, *other.param_groups)] == [0.01, 0.01, 0.01, 0.5]


def test_the_floor_of_a_group_that_is_added_later() -> None:
    optimizer = make_optimizer()
    scheduler = s.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, min_lr=0.04)
    scale_rates([optimizer], [scheduler], 0.5, Journal())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.03})
    for _ in range(3):
        scheduler.step(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02, 0.02]
