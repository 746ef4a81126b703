"""Whatever stack of blocks, and whatever deepening, fade or kernel: refused without a trace, or exact, named and followed."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import outgrow
from outgrow.errors import ApplyError, TraceError, VerifyError
from tests.helpers.judging import (
    assert_learns,
    assert_same_function,
    distance,
    names_and_kinds,
    outputs,
    random_states,
    state_of,
    without_dropout,
)
from tests.helpers.network_programs import one_of, programs, stacked
from tests.helpers.random_networks import Program, build, inputs

ORDINARY, EXHAUSTIVE = 20, 2_000
METHODS = ("auto", "r2r", "r2r-paper", "residual", "net2net", "netmorph")
BEHIND_A_FADE = ("auto", "copy", "random", "residual", "net2net", "netmorph")
OWN = 3  # the first of either are those that put a block of the model's own kind there

Transform = outgrow.Widen | outgrow.Deepen | outgrow.Kernel


@dataclass(frozen=True)
class Deeper:
    """Blocks behind a module: its number among those of a kind, modulo how many there are.

    Kinds are all modules of the model, the places that are offered (of these the method is one that is promised), and those
    where a block of the model's own kind is.
    """

    among: str
    place: int
    method: int
    count: int
    fade: int | None = None

    def of(self, model: nn.Module, example: Tensor) -> Transform | None:
        methods: Sequence[str] = METHODS if self.fade is None else BEHIND_A_FADE
        paths = [path for path, _ in model.named_modules() if path]
        if self.among != "modules":
            promised = {place.name: place.methods for place in outgrow.places(model, example) if place.growable}
            paths = [name for name, found in promised.items() if self.among == "offered" or "r2r-paper" in found]
            methods = methods[:OWN]
        if not paths:
            return None
        after = paths[self.place % len(paths)]
        methods = promised[after] if self.among == "offered" else methods
        return outgrow.Deepen(after, self.count, methods[self.method % len(methods)], self.fade)


@dataclass(frozen=True)
class Larger:
    """A larger kernel for a convolution, by its number; how much larger along each axis."""

    place: int
    more: tuple[int, int, int]

    def of(self, model: nn.Module, example: Tensor) -> Transform | None:
        kernels = {path: m.kernel_size for path, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
        if not kernels:
            return None
        where = list(kernels)[self.place % len(kernels)]
        return outgrow.Kernel(where, tuple(k + more for k, more in zip(kernels[where], self.more, strict=False)))


@dataclass(frozen=True)
class Wider:
    factor: float

    def of(self, model: nn.Module, example: Tensor) -> Transform | None:
        return outgrow.Widen("*", factor=self.factor)


number = st.integers(0, 60)
anywhere = st.builds(Deeper, one_of("modules", "blocks"), number, number, one_of(1, 2, 3), one_of(None, None, 1, 3))
offered = st.builds(Deeper, st.just("offered"), number, number, one_of(1, 2, 3))
larger = st.builds(Larger, number, st.tuples(one_of(2, 0, 1, 4), one_of(2, 0, 1, 4), one_of(2, 0)))
wider = st.builds(Wider, one_of(1.5, 2.0))
alone = st.one_of(anywhere, anywhere, anywhere, offered, offered, larger, wider)
single = alone.map(lambda one: (one,))
growths = st.one_of(single, single, st.lists(alone, min_size=2, max_size=3).map(tuple))


@dataclass(frozen=True)
class Training:
    """How a model is trained on between its growths: optimizer, its groups, and whether it is averaged."""

    optimizer: str
    groups: int
    average: bool
    training: bool

    def of(self, model: nn.Module) -> Following:
        named = list(model.named_parameters())
        groups = [named] if self.groups == 1 else [[(n, p) for n, p in named if (p.ndim > 1) == big] for big in (True, False)]
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[self.optimizer]
        options: dict[str, Any] = {"momentum": 0.9} if self.optimizer == "sgd" else {}
        optimizer = kind([{"params": group} for group in groups if group], lr=1e-3, **options)
        average = torch.optim.swa_utils.AveragedModel(model) if self.average else None
        return Following(model.train(self.training), optimizer, average)


@dataclass(frozen=True, eq=False)
class Following:
    """A model and all that follows its growths."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: nn.Module | None

    def step(self, x: Tensor) -> None:
        training = self.model.training
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model.train()
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        self.model.train(training)
        if isinstance(self.average, torch.optim.swa_utils.AveragedModel):
            self.average.update_parameters(self.model)

    def state(self) -> Any:
        """All that a refusal must leave alone, and the order of names."""
        groups = [(list(map(id, group["params"])), group["param_names"]) for group in self.optimizer.param_groups]
        memory = [
            {key: value.tolist() if isinstance(value, Tensor) else value for key, value in self.optimizer.state[p].items()}
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p in self.optimizer.state
        ]
        models = [self.model, *([] if self.average is None else [self.average])]
        return [(state_of(model), names_and_kinds(model)) for model in models], groups, memory


def examples_for(program: Program, old: nn.Module) -> list[Tensor]:
    """Fresh inputs of another batch size, and of another image or sequence size where the old model takes them."""
    fresh = [inputs(program, batch=4, seed=1)]
    other = inputs(program, batch=2, seed=2, size=8)
    try:
        with torch.no_grad():
            copy.deepcopy(old).eval()(other)
    except RuntimeError:
        return fresh
    return [*fresh, other]


def assert_exact(program: Program, old: nn.Module, new: nn.Module, requested: Sequence[Transform], example: Tensor) -> None:
    """On inputs that the growth never saw; an identity layer's batch norm is the identity on the example's statistics only."""
    fresh = examples_for(program, old)
    if any(isinstance(one, outgrow.Deepen) and one.method == "net2net" for one in requested):
        assert_same_function(old, new, fresh, modes=(False,))
        fresh = [example]
    assert_same_function(old, new, fresh)


def learns(model: nn.Module, x: Tensor) -> bool:
    try:
        assert_learns(without_dropout(model), x)
        return True
    except AssertionError:
        return False


def assert_new_parts_learn(
    old: nn.Module, transforms: Sequence[Transform], model: nn.Module, growth: outgrow.Growth, program: Program
) -> None:
    """Once a fade has begun, a part of the new modules' weights gets a gradient within a few steps, if others do.

    A part only: of a few ReLU units on a few samples, most may be dead; by bad luck all. With more samples, or grown with
    another seed, they are not. An identity layer (`net2net`) learns from living units alone what it writes to living ones.
    """
    least = 0.01 if any(isinstance(one, outgrow.Deepen) and one.method == "net2net" for one in transforms) else 0.1
    shares = [shares_that_learn(model, growth, inputs(program, batch=4, seed=3))]
    for seed in (0, 1, 2, 3):
        if shares[-1][0] >= least or shares[-1][1] < 0.5:
            return
        again = copy.deepcopy(old)
        twin = outgrow.grow(again, inputs(program, batch=3, seed=0), *transforms, seed=seed)
        shares.append(shares_that_learn(again, twin, inputs(program, batch=256, seed=3)))
    raise AssertionError(f"shares of the new and the old weights that learn, seed by seed: {shares}")


def shares_that_learn(model: nn.Module, growth: outgrow.Growth, x: Tensor) -> list[float]:
    """Of the weights in new modules, and of all others."""
    twin = without_dropout(model).train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-2)
    moved = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in twin.named_parameters()}
    with torch.random.fork_rng(devices=[]):
        for _ in range(4):
            optimizer.zero_grad()
            output = twin(x)
            (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).mean().backward()
            for name, parameter in twin.named_parameters():
                moved[name] |= parameter.grad != 0
            optimizer.step()
    inside = tuple(f"{path}." for path in growth.plan.new_blocks)
    shares = []
    for new in (True, False):
        flags = [flag.flatten() for name, flag in moved.items() if name.startswith(inside) == new] or [torch.ones(1)]
        shares.append(float(torch.cat(flags).double().mean()))
    return shares


def assert_named(old: nn.Module, new: nn.Module, growth: outgrow.Growth, requested: Sequence[Transform]) -> None:
    """Every old name has a new one, of the same tensor; what no edit has touched has the same numbers."""
    before, after = old.state_dict(), new.state_dict()
    split = [one.after for one in requested if isinstance(one, outgrow.Deepen) and one.method == "netmorph"]
    edited = {edit.tensor for edit in growth.plan.edits if hasattr(edit, "at") or hasattr(edit, "factor")}
    edited |= {f"{path}.{name}" for path in split for name in ("weight", "bias")}
    storages = {before[name].data_ptr() for name in edited & set(before)}  # one for all names of a tied tensor
    changed = {name for name, value in before.items() if value.data_ptr() in storages}
    names = {name: growth.plan.renamed(name) for name in before}
    assert len(set(names.values())) == len(names)
    for name, value in before.items():
        assert names[name] in after, f"{name} should be called {names[name]} now"
        assert name in changed or torch.equal(after[names[name]], value), name
    for path, module in old.named_modules():
        assert type(new.get_submodule(growth.plan.renamed(path))) is type(module) or not path, path


def assert_followed(trained: Following) -> None:
    """The optimizer holds each parameter once, in the model's order within each group, and has state of its shape."""
    place = {id(p): (index, name) for index, (name, p) in enumerate(trained.model.named_parameters())}
    held = [[place[id(p)] for p in group["params"]] for group in trained.optimizer.param_groups]
    assert sorted(entry for group in held for entry in group) == sorted(place.values())
    for found, group in zip(held, trained.optimizer.param_groups, strict=True):
        assert found == sorted(found)
        assert group["param_names"] == [name for _, name in found]


def assert_saved(program: Program, model: nn.Module, x: Tensor) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        outgrow.save(model, path)
        again = outgrow.load(build(program), path)
    assert list(again.state_dict()) == list(model.state_dict())
    for training in (False, True):
        assert torch.equal(outputs(again, x, training), outputs(model, x, training))


def carry_out(
    trained: Following, example: Tensor, transforms: Sequence[Transform]
) -> tuple[outgrow.Growth | None, outgrow.GrowthError | None]:
    """The growth, or its refusal; any other exception is a failure."""
    try:
        return outgrow.grow(trained.model, example, *transforms, optimizer=trained.optimizer, average=trained.average), None
    except outgrow.GrowthError as refusal:
        return None, refusal


def overflows(model: nn.Module, x: Tensor) -> bool:
    """Copies of blocks with products in them, one behind the other, may do so once they have faded in."""
    outcomes = [*model.parameters(), *(outputs(model, x, training) for training in (False, True))]
    return not all(bool(tensor.isfinite().all()) for tensor in outcomes)


def check(program: Program, requested: Sequence[Sequence[Any]], how: Training) -> list[outgrow.Growth]:
    """Grow by one request after the other, a step of training before each; each is refused without a trace, or exact."""
    model, example = build(program), inputs(program, batch=3, seed=0)
    trained, done = how.of(model), []
    for wanted in requested:
        trained.step(inputs(program, batch=4, seed=3))
        if overflows(model, example):
            return done
        before, dice, old = trained.state(), random_states(), copy.deepcopy(model)
        average = None if trained.average is None else outputs(trained.average, example, training=False)
        parameters = sum(p.numel() for p in model.parameters())
        transforms = [found for one in wanted if (found := one.of(model, example)) is not None]
        assert random_states() == dice
        if not transforms:
            continue
        growth, refusal = carry_out(trained, example, transforms)
        assert random_states() == dice
        if growth is None:
            late = isinstance(refusal, (ApplyError, TraceError, VerifyError))  # no reason, but a failure of what was tried
            assert not late, f"only the last check caught it: {refusal}"
            promised = len(transforms) == 1 and isinstance(wanted[0], Deeper) and wanted[0].among == "offered"
            assert not promised, f"{transforms[0]} was offered, and refused: {refusal}"
            assert trained.state() == before
            continue
        assert growth.preserving
        assert growth.parameters == (parameters, sum(p.numel() for p in model.parameters()))
        assert growth.parameters[1] > parameters
        assert_exact(program, old, model, transforms, example)
        assert_named(old, model, growth, transforms)
        assert_followed(trained)
        if learns(old, inputs(program, batch=4, seed=3)):  # some networks of many products overflow as they are
            assert_learns(without_dropout(model), inputs(program, batch=4, seed=3))
            assert_new_parts_learn(old, transforms, model, growth, program)
        if average is not None:
            assert distance(average, outputs(trained.average, example, training=False)) < 1e-9
        done.append(growth)
    if done:
        trained.step(inputs(program, batch=4, seed=3))
    if done and not overflows(model, example):
        assert_saved(program, model, example)
    return done


def run(cases: int) -> Any:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=cases, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)


networks = st.one_of(stacked(), stacked(), stacked(), programs(longest=4))
trainings = st.builds(Training, one_of("adam", "sgd"), one_of(1, 2), st.booleans(), st.booleans())
any_case = given(networks, st.lists(growths, min_size=1, max_size=3), trainings)
even_kernels = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@even_kernels
@run(ORDINARY)
@any_case
def test_any_growth_is_refused_without_a_trace_or_exact(program: Program, requested: list[Any], how: Training) -> None:
    check(program, requested, how)


@even_kernels
@pytest.mark.exhaustive
@run(EXHAUSTIVE)
@any_case
def test_any_growth_of_many_more(program: Program, requested: list[Any], how: Training) -> None:
    check(program, requested, how)
