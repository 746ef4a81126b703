"""A growth that fails at any stage leaves no trace on the model, its optimizer, its averaged copy and the random state.

Faults are injected at the n-th call of a function, for every n that a growth reaches.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import GrowthError, VerifyError
from outgrow.verify import outputs as verify
from tests.helpers.judging import random_states


class Block(nn.Module):
    """Everything that could be left behind: statistics, caches, a table that is not saved, containers that are shared."""

    def __init__(self, shared: dict[str, int]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.mix, self.layer_norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 2)
        self.register_buffer("table", torch.rand(8), persistent=False)
        self.calls, self.shared, self.last, self.width = [0], shared, None, 8

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        self.shared["calls"] = self.shared.get("calls", 0) + 1
        self.last = x
        x = self.norm(self.stem(x)).relu().mean((2, 3)).view(-1, self.width)
        x = x + self.layer_norm(self.mix(x * self.table))
        return self.head(self.drop(x).tanh())


@dataclass
class Scene:
    """A model in the middle of training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: torch.optim.swa_utils.AveragedModel
    x: Tensor

    def grow(self) -> outgrow.Growth:
        return outgrow.widen(self.model, self.x, "*", factor=1.5, optimizer=self.optimizer, average=self.average)

    def state(self) -> Any:
        hooks = torch.nn.modules.module
        number = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
        return frozen(vars(self.optimizer)), modules(self.model), modules(self.average), number, random_states()


def frozen(thing: Any) -> Any:
    """Plain data that is equal only if the thing is the same, bit for bit and object for object."""
    if isinstance(thing, Tensor):
        gradient = frozen(thing.grad) if thing.is_leaf else None
        return id(thing), thing.dtype, tuple(thing.shape), thing.stride(), thing.detach().numpy().tobytes(), gradient
    if isinstance(thing, Mapping):
        return [(id(key), frozen(value)) if isinstance(key, Tensor) else (key, frozen(value)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple)):
        return [frozen(item) for item in thing]
    return copy.copy(thing) if isinstance(thing, set) else thing


def modules(model: nn.Module) -> Any:
    """All modules with all their attributes, hooks, tensors and modes; containers by identity and contents."""
    return [
        (path, id(module), type(module), [(name, id(value), frozen(value)) for name, value in vars(module).items()])
        for path, module in model.named_modules()
    ]


def scene() -> Scene:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shared: dict[str, int] = {}
        model = nn.Sequential(Block(shared))
        model[0].other = nn.Identity()
        model[0].other.shared = shared
        model[0].register_forward_hook(lambda module, args, output: None)
        optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
        average = torch.optim.swa_utils.AveragedModel(model)
        x = torch.randn(4, 3, 5, 5)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
        model[0].norm.eval()  # modes need not be alike
    return Scene(model, optimizer, average, x)


class Fault:
    """Replaces a function; raises at its n-th call."""

    def __init__(self, function: Callable[..., Any], at: int = 0, error: BaseException | None = None) -> None:
        self.function, self.at, self.error, self.calls = function, at, error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at and self.error is not None:
            raise self.error
        return self.function(*args, **kwargs)

    def __get__(self, owner: Any, kind: Any) -> Any:
        return lambda *args, **kwargs: self(owner, *args, **kwargs)


STAGES = {
    "trace": "outgrow.analysis.analyse.record",
    "volumes": "outgrow.analysis.analyse.find_volumes",
    "sensitivity": "outgrow.verify.outputs.sensitivity",
    "choose": "outgrow.transforms.widen.settle_sizes.choose",
    "plan": "outgrow.transforms.widen.settle_sizes.make_plan",
    "fit": "outgrow.transforms.widen.settle_sizes.fit",
    "flops": "outgrow.engine.grow.count_flops",
    "model and copy": "outgrow.engine.carry_out.apply_plan",
    "values": "outgrow.apply.apply_plan.fill_values",
    "gradients": "outgrow.apply.apply_plan.grown_moment",
    "set_": "torch.Tensor.set_",
    "settings": "outgrow.apply.apply_plan._set",
    "optimizer": "outgrow.engine.carry_out.grow_optimizers",
    "moments": "outgrow.optimizers.grow_optimizers.grown_state",
    "comparison": "outgrow.verify.outputs.error",
}


WRAPPED = ("trace", "sensitivity", "comparison")  # the model's own code runs there: its errors are reported as refusals
TRIED = ("settings",)  # they are tried first: an error there means that the model's code does not follow, which is a refusal


def target(path: str) -> tuple[Any, str]:
    owner, _, name = path.rpartition(".")
    classes = {"torch.Tensor": torch.Tensor, "torch.nn.LayerNorm": nn.LayerNorm}
    return classes.get(owner) or importlib.import_module(owner), name


def reached(path: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of calls of a function in a whole growth."""
    owner, name = target(path)
    it, count = scene(), Fault(getattr(owner, name))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, count)
        it.grow()
    return count.calls


@pytest.mark.parametrize("error", [RuntimeError("thrown in"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_at_any_call_of_a_stage(stage: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = target(STAGES[stage])
    if stage == "sensitivity":
        monkeypatch.setattr(verify, "FLOOR", 0.0)  # or it would not be measured
    total = reached(STAGES[stage], monkeypatch)
    assert total, "the growth never comes here"
    for at in sorted({1, 2, total // 2, total} & set(range(1, total + 1))):
        it = scene()
        before = it.state()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Fault(getattr(owner, name), at, error))
            with pytest.raises(BaseException) as raised:  # noqa: PT011
                it.grow()
        wrapped = stage in WRAPPED and raised.value.__cause__ is error
        refused = stage in TRIED and isinstance(raised.value, outgrow.GrowthError)
        assert raised.value is error or wrapped or refused
        assert it.state() == before, f"call {at} of {total}"


@pytest.mark.parametrize("error", [RuntimeError("thrown in"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_fault_in_the_models_own_code(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    total = reached("torch.nn.LayerNorm.forward", monkeypatch)
    for at in range(1, total + 1):
        it = scene()
        before = it.state()
        fault = Fault(nn.LayerNorm.forward, at, error)
        with monkeypatch.context() as patch:
            patch.setattr(nn.LayerNorm, "forward", fault)
            try:
                it.grow()
            except (GrowthError, KeyboardInterrupt):
                grown = False
            else:
                grown = True
        assert not (grown and isinstance(error, KeyboardInterrupt))
        if not grown:  # an error is overcome where there is another way: a trace on real tensors, say
            assert it.state() == before, f"call {at} of {total}"


@pytest.mark.parametrize("wrong", [lambda tensor: tensor * (1 + 1e-3), lambda tensor: tensor * torch.nan], ids=["moved", "nan"])
@pytest.mark.parametrize("mode", ["evaluated", "trained"])
def test_wrong_outputs_are_undone(mode: str, wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = verify.run, []

    def run(*args: Any) -> Any:
        calls.append(1)
        found = real(*args)
        if len(calls) < 2:  # before
            return found
        return verify.Outputs(**{**vars(found), mode: tuple(wrong(tensor) for tensor in getattr(found, mode))})

    it = scene()
    before = it.state()
    monkeypatch.setattr(verify, "run", run)
    with pytest.raises(VerifyError, match="put back"):
        it.grow()
    assert it.state() == before


@pytest.mark.parametrize("transform", ["zzz", "0.head", "0.stem"])
def test_refusals_leave_no_trace(transform: str) -> None:
    it = scene()
    stranger = torch.optim.Adam(nn.Linear(2, 2).parameters())
    before = it.state()
    with pytest.raises(GrowthError):
        outgrow.widen(it.model, it.x, transform, factor=1.5, optimizer=stranger, average=it.average)
    assert it.state() == before


def test_a_success_keeps_what_is_shared_and_random_numbers() -> None:
    it = scene()
    dice, block = random_states(), it.model[0]
    calls, shared, contents = block.calls, block.shared, (list(block.calls), dict(block.shared))
    it.grow()
    assert random_states() == dice
    assert block.calls is calls
    assert block.shared is shared is block.other.shared
    assert (calls, shared) == contents
    assert block.last.shape == it.x.shape
    assert block.training
    assert not block.norm.training
    it.model(it.x).square().mean().backward()
    it.optimizer.step()
    it.average.update_parameters(it.model)
