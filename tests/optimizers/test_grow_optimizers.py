"""Optimizers go on after a growth as if the grown network had been trained from the start.

The truth for moments is made by brute force: the network of every past step is grown by the same plan, the batch of that step
gives its gradients by autograd, and a new optimizer of the same class gathers them.
"""

from __future__ import annotations

import copy
import gc
import importlib
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._pytree import tree_flatten_with_path

import outgrow
from outgrow.apply.apply_plan import apply_plan
from outgrow.apply.grow_tensor import grown_moment
from outgrow.errors import OptimizerError, StaleOptimizerError, VerifyError
from outgrow.growth_plan.plan import Insertion, Plan, Rescaling
from outgrow.model.journal import Journal
from outgrow.optimizers.grow_optimizers import check_optimizers
from outgrow.optimizers.stale import _WATCH

TINY = 1e-30
CASES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5},
    "SGD nesterov": {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "maximize": True},
    "Adam": {"eps": TINY},
    "Adam amsgrad": {"eps": TINY, "amsgrad": True, "maximize": True},
    "AdamW": {"eps": TINY},
    "NAdam": {"eps": TINY, "decoupled_weight_decay": True},
    "RAdam": {"eps": TINY},
    "Adamax": {"eps": TINY},
    "Adagrad": {"eps": TINY},
    "Adadelta": {"eps": TINY},
    "RMSprop": {"lr": 1e-3, "eps": TINY},
    "RMSprop centered": {"lr": 1e-3, "eps": TINY, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 1e-3},
    "Muon": {"weight_decay": 0.0},
    "Adafactor": {"lr": 1e-3},
    "SparseAdam": {"eps": TINY},
    "ASGD": {"lr": 1e-3, "t0": 0.0, "lambd": 0.0},
}
PLAIN = {"Muon", "SparseAdam"}  # no choice of implementation
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
ZERO = {"exp_avg", "momentum_buffer", "grad_avg", "prev"}
MEAN = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf", "step_size", "variance"}
CASES = {case: options for case, options in CASES.items() if hasattr(torch.optim, case.split()[0])}  # Muon is from torch 2.9 on
HOWS = {case: ["", *["foreach"] * (case not in PLAIN), *["fused"] * (case.split()[0] in FUSED)] for case in CASES}
each_optimizer = pytest.mark.parametrize(("case", "how"), [(case, how) for case, hows in HOWS.items() for how in hows])
Batch = tuple[Tensor, Tensor]


def make(case: str, how: str, params: Any) -> torch.optim.Optimizer:
    choice = {"": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[how] if case not in PLAIN else {}
    return getattr(torch.optim, case.split()[0])(params, **CASES[case], **choice)


def network(case: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    if case == "SparseAdam":
        return nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 3)).double()
    head = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2, stride=2), nn.Flatten()
    return nn.Sequential(*head, nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def batches(case: str, count: int) -> list[Batch]:
    torch.manual_seed(1)
    inputs = torch.randint(0, 9, (count, 7)) if case == "SparseAdam" else torch.randn(count, 7, 2, 4, 4, dtype=torch.float64)
    return list(zip(inputs, torch.randn(count, 7, 3, dtype=torch.float64), strict=True))


def trainable(model: nn.Module, case: str) -> list[nn.Parameter]:
    """Muon takes matrices, SparseAdam what has sparse gradients."""
    return [p for p in model[: 1 if case == "SparseAdam" else None].parameters() if p.ndim == 2 or case != "Muon"]


def backward(model: nn.Module, batch: Batch) -> Tensor:
    model.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean() * 100
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> list[dict[str, Tensor]]:
    """One step a batch; the network before each step."""
    past = []
    for batch in data:
        past.append(copy.deepcopy(model.state_dict()))
        assert backward(model, batch).isfinite()
        optimizer.step()
    model.zero_grad()
    return past


def replayed(case: str, how: str, past: list[dict[str, Tensor]], data: list[Batch], plan: Plan) -> list[dict[str, Any]]:
    """The state of an optimizer that has seen the gradients of the grown networks of all past steps."""
    optimizer, reference = None, []
    for weights, batch in zip(past, data, strict=True):
        model = network(case)
        model.load_state_dict(weights)
        apply_plan(model, plan, {}, Journal())
        backward(model, batch)
        reference = reference or [nn.Parameter(p.detach().clone()) for p in trainable(model, case)]
        optimizer = optimizer or make(case, how, reference)
        for parameter, then in zip(reference, trainable(model, case), strict=True):
            parameter.grad = then.grad
        optimizer.step()
    return [optimizer.state[parameter] for parameter in reference]


def new_entries(plan: Plan, model: nn.Module, parameter: Tensor) -> Tensor:
    """Where a parameter has new entries, if each of its axes was grown once at most."""
    name = next(name for name, other in model.named_parameters() if other is parameter)
    new = torch.zeros(parameter.shape, dtype=torch.bool)
    for edit in plan.edits:
        if edit.tensor == name:
            new.index_fill_(edit.axis, torch.tensor(edit.at), True)
    return new


def close(found: Any, true: Any) -> None:
    found, true = (torch.as_tensor(value).detach() for value in (found, true))
    torch.testing.assert_close(found, true, rtol=1e-7, atol=1e-9 * float(true.abs().max()))


def snapshot(*things: Any) -> list[Any]:
    """All that is in state dicts, bit for bit, as values that can be compared."""
    leaves = tree_flatten_with_path([thing.state_dict() for thing in things if not isinstance(thing, SimpleNamespace)])[0]
    return [(path, leaf.tolist(), leaf.dtype) if isinstance(leaf, Tensor) else (path, leaf) for path, leaf in leaves]


def test_every_optimizer_of_torch_is_covered_here() -> None:
    names = {n for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    assert names == {case.split()[0] for case in CASES} | {"LBFGS", "Optimizer"}


@each_optimizer
def test_after_copying_units_the_state_is_that_of_a_replay_on_the_grown_network(case: str, how: str) -> None:
    model, data = network(case), batches(case, 5)
    optimizer = make(case, how, trainable(model, case))
    past = train(model, optimizer, data)
    whole = case == "Adafactor"  # row and column means tell all only if every unit gets the same share
    method = outgrow.Net2Net() if whole else outgrow.Net2Net(split="random", mapping="random")
    growth = outgrow.widen(model, data[0][0], "*", factor=2 if whole else 1.6, method=method, optimizer=optimizer)
    truth = replayed(case, how, past, data, growth.plan)
    for parameter, true in zip(trainable(model, case), truth, strict=True):
        state = optimizer.state[parameter]
        assert set(state) == set(true)
        for key in set(state) - {"ax"}:  # an average of parameters, not of gradients: tested below
            close(state[key], true[key])


@each_optimizer
def test_new_units_start_without_a_past_and_training_goes_on(case: str, how: str) -> None:
    model, data = network(case), batches(case, 8)
    optimizer = make(case, how, trainable(model, case))
    past = train(model, optimizer, data[:4])
    old = [dict(optimizer.state[parameter]) for parameter in trainable(model, case)]
    growth = outgrow.widen(model, data[0][0], "*", factor=1.5, method="r2r", optimizer=optimizer)
    truth = replayed(case, how, past, data[:4], growth.plan)
    seen = set()
    for parameter, before, true in zip(trainable(model, case), old, truth, strict=True):
        state, new = optimizer.state[parameter], new_entries(growth.plan, model, parameter)
        for key in set(before) & (ZERO | MEAN):
            assert state[key].shape == parameter.shape
            close(state[key][~new], true[key][~new])
            if new.any():
                seen.add(key)
                close(state[key][new], (before[key] if key in MEAN else before[key] * 0).mean().expand(int(new.sum())))
        if "row_var" in before:  # what Adafactor divides by stays for existing entries
            square, then = (s["row_var"] * s["col_var"] / s["row_var"].mean(-2, keepdim=True) for s in (state, before))
            close(square[~new], then.flatten())
            assert (square >= 0).all()
    assert seen == {key for before in old for key in before if key in ZERO | MEAN}
    twin = copy.deepcopy(model)
    other = make(case, how, trainable(twin, case))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, data[4:])
    train(twin, other, data[4:])
    for parameter, loaded in zip(model.parameters(), twin.parameters(), strict=True):
        close(parameter, loaded)  # not bit by bit: loading makes NAdam's float32 scalars float64


@pytest.mark.parametrize("method", ["r2r", "netmorph", outgrow.Net2Net(split="random"), outgrow.R2R(init="copy", scale=0.5)])
def test_asgd_averages_stay_the_network_that_they_were(method: Any) -> None:
    def averaged() -> Tensor:
        weights = {name: optimizer.state[parameter]["ax"] for name, parameter in model.named_parameters()}
        return torch.func.functional_call(copy.deepcopy(model).eval(), weights, data[0][0])

    model, data = network(), batches("", 5)
    optimizer = make("ASGD", "", model.parameters())
    train(model, optimizer, data)
    before = averaged()
    assert (before - copy.deepcopy(model).eval()(data[0][0])).abs().max() > 1e-4
    growth = outgrow.widen(model, data[0][0], "*", factor=1.5, method=method, optimizer=optimizer)
    torch.testing.assert_close(averaged(), before, rtol=1e-10, atol=1e-10)
    drawn = new_entries(growth.plan, model, model[5].weight) & (method == "r2r")
    assert torch.equal(optimizer.state[model[5].weight]["ax"][drawn], model[5].weight[drawn])


class Side(nn.Module):
    """Two volumes side by side along one axis, or on top of each other, then with one weight for both."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.tied = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3 if tied else 6, 2), tied
        self.b.weight = self.a.weight if tied else self.b.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).tanh(), self.b(x + 1).tanh()
        return self.c(a + b if self.tied else torch.cat([a, b], 1))


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_a_gradient_transforms_as_autograd_says_in_every_order_of_edits(order: list[str]) -> None:
    model, batch = Side(tied=False), (torch.randn(7, 4).double(), torch.randn(7, 2).double())
    backward(model, batch)
    outgrow.widen(model, batch[0], order, by=2, method=outgrow.Net2Net(split="random"))
    moved = [parameter.grad for parameter in model.parameters()]
    backward(model, batch)
    for parameter, gradient in zip(model.parameters(), moved, strict=True):
        close(gradient, parameter.grad)


def test_new_entries_start_at_the_mean_of_what_is_there_by_then() -> None:
    old = torch.rand(3).double().requires_grad_()
    new = (2.0 * old.detach()).requires_grad_()
    (old.pow(3).sum() + (new / 2.0).pow(3).sum()).backward()
    edits = [Rescaling("t", 2.0), Insertion("t", 0, 3, (1,), (0,), "free", (0,), (1.0,))]
    for power, fresh in ((1, "zero"), (2, "mean")):
        moment = grown_moment(old.grad**power, edits, power, fresh)
        close(moment[[0, 2, 3]], new.grad**power)
        close(moment[1], (new.grad**power).mean() * (fresh == "mean"))
    halves = (0.5, 0.5)
    copies = Insertion("t", 0, 2, (2, 3), (0, 1), "copy", (), halves, (0, 1), gradient=halves, gradient_keep=halves)
    edits, square = [copies, Insertion("t", 1, 3, (3,), (0,), "free", (0,), (1.0,))], torch.rand(2, 3).double()
    moment = grown_moment(square, edits, 2, "mean")
    close(moment[:, 3], moment[:, :3].mean().expand(4))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "LambdaLR": lambda o: schedules.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.01, total_steps=10),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "SequentialLR": lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], [3]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on(name: str) -> None:
    """Rates and momenta are the same with and without a growth on the way."""
    data, seen = batches("", 8), {False: [], True: []}
    for grows in seen:
        model = network()
        groups = [{"params": model[:5].parameters()}, {"params": model[5:].parameters(), "lr": 1e-4}]
        optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        for index, batch in enumerate(data):
            if grows and index == 4:
                outgrow.widen(model, batch[0], "*", factor=1.5, optimizer=optimizer)
            train(model, optimizer, [batch])
            schedule.step()
            seen[grows].append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
    assert seen[False] == seen[True]


def test_groups_names_frozen_and_tied_parameters_stay_in_their_places_also_of_a_wrapped_optimizer() -> None:
    def groups() -> list[dict[str, Any]]:
        return [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]

    model, batch = Side(tied=True), (torch.randn(5, 4).double(), torch.zeros(5, 2).double())
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": named[3:], "lr": 0.1}, {"params": named[:3], "weight_decay": 0.0}])
    train(model, optimizer, [batch])
    model.a.bias.requires_grad_(False)  # frozen with a past
    before, wrapped = groups(), SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    outgrow.widen(model, batch[0], "*", to=5, method="net2net", optimizer=[optimizer, wrapped, optimizer])  # grown once
    assert groups() == before
    assert before[1]["param_names"] == ["a.weight", "a.bias", "b.bias"]
    assert len(optimizer.state) == 5
    assert all(s["exp_avg"].shape == s["exp_avg_sq"].shape == p.shape for p, s in optimizer.state.items())
    train(model, optimizer, [batch])


class Odd(torch.optim.Optimizer):
    def __init__(self, model: nn.Module, make: Callable[[Tensor], Any] = torch.ones_like) -> None:
        super().__init__(model.parameters(), {})
        self.make = make

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("curvature", self.make(parameter))


class Described(Odd):
    """One whose state is described, but not the key under which it keeps something."""


class Square(Odd):
    """One whose state is described wrongly."""


outgrow.register_optimizer(Described, {"exp_avg": "first moment"})
outgrow.register_optimizer(Square, {"curvature": "second moment"})
REFUSED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "unknown": (Odd, r"Odd is none of the classes(.|\n)*outgrow.register_optimizer\(Odd"),
    "unknown key": (Described, "Described's state 'curvature' has no rule in outgrow: a tensor of shape"),
    "matrices": (lambda model: Square(model, lambda p: torch.eye(7)), r"has shape \(7, 7\) instead of"),
    "nested": (lambda model: Described(model, lambda p: {"left": [torch.eye(2)]}), "of type dict, with tensors inside"),
    "in an object": (
        lambda model: Described(model, lambda p: SimpleNamespace(left=torch.eye(2))),
        "SimpleNamespace, with tensors inside",
    ),
    "in a queue": (lambda model: Described(model, lambda p: deque([torch.ones_like(p)])), "of type deque, with tensors inside"),
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2), "flat vectors(.|\n)*make a new optimizer"),
    "foreign": (lambda model: torch.optim.Adam(network().parameters()), "belongs to another model"),
    "no optimizer": (lambda model: SimpleNamespace(step=lambda closure: None), "SimpleNamespace is no optimizer"),
    "too late": (lambda model: torch.optim.Adam(model.parameters(), amsgrad=True), "as if it were wrong"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_leaves_everything_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        assert good.state[model[5].weight]["exp_avg"].shape == model[5].weight.shape != (6, 12)
        raise VerifyError("as if it were wrong")

    model, data = network(), batches("", 2)
    good, bad = torch.optim.Adam(model.parameters()), REFUSED[name][0](model)
    train(model, good, data)
    bad.step(lambda: backward(model, data[0]))
    before, objects = snapshot(model, good, bad), {id(value) for state in good.state.values() for value in state.values()}
    monkeypatch.setattr(importlib.import_module("outgrow.verify.outputs"), "check", fail)
    with pytest.raises((OptimizerError, VerifyError), match=REFUSED[name][1]):
        outgrow.widen(model, data[0][0], "*", factor=1.5, optimizer=[good, bad])
    assert snapshot(model, good, bad) == before
    assert objects == {id(value) for state in good.state.values() for value in state.values()}
    good.step()


def test_all_problems_are_told_before_anything_changes() -> None:
    odd = Described(model := network())
    odd.step()
    plan = outgrow.widen(copy.deepcopy(model), batches("", 1)[0][0], ["5", "7"], by=2).plan
    with pytest.raises(OptimizerError) as caught:
        check_optimizers([odd], model, plan)
    assert {problem.where for problem in caught.value.problems} == {"5.weight", "5.bias", "7.weight", "7.bias", "9.weight"}


@each_optimizer
def test_an_optimizer_that_was_left_out_is_stopped_before_it_steps(case: str, how: str) -> None:
    model, data = network(case), batches(case, 2)
    optimizer = make(case, how, trainable(model, case))
    train(model, optimizer, data)
    outgrow.widen(model, data[0][0], "*", factor=2)
    backward(model, data[0])
    before, past = snapshot(model, optimizer), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StaleOptimizerError, match=r"optimizer=optimizer(.|\n)*has shape"):
        optimizer.step()
    assert snapshot(model, optimizer) == before
    fresh = make(case, how, trainable(model, case))
    train(model, fresh, data)
    right = copy.deepcopy(fresh.state_dict())
    fresh.load_state_dict(past)  # from before the growth: torch takes it without a word
    backward(model, data[0])
    with pytest.raises(StaleOptimizerError):
        fresh.step()
    optimizer.load_state_dict(right)
    train(model, optimizer, data)


def test_a_stale_lbfgs_is_stopped_and_what_is_not_stale_steps_freely() -> None:
    model, other, data = network(), network(), batches("", 1)
    bystander, head = torch.optim.Adam(other.parameters(), fused=True), torch.optim.Adam([model[9].bias], fused=True)
    plain = torch.optim.SGD(model.parameters(), lr=1e-4)
    stale, unused = (torch.optim.LBFGS(model.parameters(), max_iter=3) for _ in range(2))
    train(other, bystander, data)
    for optimizer in (head, plain, stale):
        optimizer.step(lambda: backward(model, data[0]))
    outgrow.widen(model, data[0][0], "*", factor=1.5, optimizer=unused)
    with pytest.raises(StaleOptimizerError, match="flat history"):
        stale.step(lambda: backward(model, data[0]))
    train(other, bystander, data)
    for optimizer in (head, plain, unused, torch.optim.LBFGS(model.parameters(), max_iter=3)):
        optimizer.step(lambda: backward(model, data[0]))


def test_the_watch_is_set_once_by_the_first_growth_and_keeps_nothing_alive() -> None:
    model, data = network(), batches("", 1)
    outgrow.widen(model, data[0][0], "5", by=2)
    gc.collect()  # models of other tests
    hooks, watched = len(_global_optimizer_pre_hooks), len(_WATCH.grown)
    outgrow.widen(model, data[0][0], "5", by=2)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, data)
    assert (len(_global_optimizer_pre_hooks), len(_WATCH.grown), [one for one, _ in _WATCH.checked]) == (
        hooks,
        watched,
        [optimizer],
    )
    del model, optimizer
    gc.collect()
    assert len(_WATCH.grown) <= watched - 3
    assert not len(_WATCH.checked)
    importing = "import outgrow, torch.optim.optimizer as o; assert not o._global_optimizer_pre_hooks"
    subprocess.run([sys.executable, "-c", importing], check=True)
