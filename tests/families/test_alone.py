"""A member that is trained alone makes the steps of the stand-alone network, and moves nothing else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import GrowthError, OptimizerError
from tests.helpers.nested_sizes import SIZES, Recurrent, Tied, cnn, images, same, state_of

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def all_sizes(family: outgrow.Family, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    for member in family:
        member(x).square().mean().backward()
    optimizer.step()


def entries(family: outgrow.Family, number: int) -> dict[str, Tensor]:
    """Which entries of the shared parameters a member has: those that are at most as old as its growth."""
    births = outgrow.cohorts(family[-1])
    return {name: (births[name] <= number).expand_as(parameter) for name, parameter in family[-1].named_parameters()}


def own_optimizer(family: outgrow.Family, optimizer: torch.optim.Optimizer, number: int, make: Make) -> tuple[Any, Any]:
    """The member as a network of its own, and a new optimizer with the member's entries of the state, taken by masks."""
    model, chosen = family.extract(number), entries(family, number)
    new, shared = make(model.parameters()), dict(family[-1].named_parameters())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(shared[name], {}).items():
            whole = isinstance(value, Tensor) and value.shape == shared[name].shape
            part = value[chosen[name]].view(parameter.shape) if whole else value
            new.state[parameter][key] = part.clone() if isinstance(part, Tensor) else part
    return model, new


def check_step(family: outgrow.Family, optimizer: Any, number: int, make: Make, x: Tensor, steps: int = 2) -> None:
    """Steps of a member alone against those of the stand-alone network; other entries stay bit for bit."""
    alone, own = own_optimizer(family, optimizer, number, make)
    shared, chosen = dict(family[-1].named_parameters()), entries(family, number)
    old = {name: parameter.detach().clone() for name, parameter in shared.items()}
    states = {name: copy.deepcopy(optimizer.state.get(parameter, {})) for name, parameter in shared.items()}
    for _ in range(steps):
        step(alone, own, x)
        with family.alone(number, optimizer) as member:
            assert member is family[number]
            step(member, optimizer, x)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(shared[name][chosen[name]].view(parameter.shape), parameter)
        assert torch.equal(shared[name][~chosen[name]], old[name][~chosen[name]])
        now = optimizer.state[shared[name]]
        assert set(now) == set(own.state[parameter])
        for key, value in own.state[parameter].items():
            if not isinstance(value, Tensor) or value.shape != parameter.shape or value.shape == ():
                torch.testing.assert_close(now[key], value)
                continue
            assert now[key].shape == shared[name].shape
            torch.testing.assert_close(now[key][chosen[name]].view(parameter.shape), value)
            if key in states[name]:
                assert torch.equal(now[key][~chosen[name]], states[name][key][~chosen[name]])
    assert not any(parameter.grad is not None for parameter in family.parameters())


QUICK = ("AdamW", "fused AdamW", "momentum", "ASGD")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.exhaustive) for n in OPTIMIZERS])
def test_steps_are_those_of_the_stand_alone_network(name: str) -> None:
    make, family, x = OPTIMIZERS[name], outgrow.Family(cnn(), images(), *SIZES), images(seed=9)
    optimizer = make(family.parameters())
    check_step(family, optimizer, 0, make, x)  # the first steps make the state
    all_sizes(family, optimizer, x)
    for number in (2, 1):
        check_step(family, optimizer, number, make, x)
    all_sizes(family, optimizer, x)
    with family.alone(-1, optimizer) as largest:
        assert largest is family[-1]


@pytest.mark.parametrize("build", [Recurrent, Tied])
def test_fused_weights_of_which_a_member_has_no_view(build: Any) -> None:
    torch.manual_seed(0)
    model = build().double()
    x = torch.randint(0, 7, (2, 5)) if build is Tied else torch.randn(2, 5, 3, dtype=torch.float64)
    sizes = [outgrow.Widen(kind="mlp", by=4)] if build is Tied else [outgrow.Widen("*", by=3), outgrow.Widen("*", by=2)]
    family = outgrow.Family(model, x, *sizes)
    make = OPTIMIZERS["AdamW"]
    optimizer = make(family.parameters())
    for number in (0, len(family) - 2):
        check_step(family, optimizer, number, make, x)
        all_sizes(family, optimizer, x)
    with family.alone(0, optimizer) as member:  # other members see each of its steps
        step(member, optimizer, x)
        torch.testing.assert_close(family[-1](x), family.extract(-1)(x))
        torch.testing.assert_close(member(x), family.extract(0)(x))


def test_state_that_starts_in_a_small_member_is_made_whole_as_at_a_growth() -> None:
    family = outgrow.Family(cnn(), images(), SIZES[0])
    optimizer = torch.optim.AdamW(family.parameters())
    with family.alone(0, optimizer) as member:
        step(member, optimizer, images())
    weight, chosen = family[-1][0].weight, entries(family, 0)["0.weight"]
    state = optimizer.state[weight]
    assert not state["exp_avg"][~chosen].any()
    torch.testing.assert_close(state["exp_avg_sq"][~chosen], state["exp_avg_sq"][chosen].mean().expand(int((~chosen).sum())))
    plain = torch.optim.AdamW(family.parameters())
    plain.load_state_dict(optimizer.state_dict())
    all_sizes(family, plain, images())


def test_skipped_blocks_and_parameters_of_others_are_left_to_themselves() -> None:
    """A block that the member skips stays, though it has an old gradient; another module's parameter is updated."""
    family, other = outgrow.Family(cnn(), images(), outgrow.Deepen("2")), nn.Parameter(torch.ones(3, dtype=torch.float64))
    groups = [{"params": list(family.parameters())[:2], "lr": 0.5}, {"params": [*list(family.parameters())[2:], other]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    before_lists = [list(group["params"]) for group in optimizer.param_groups]
    all_sizes(family, optimizer, images())
    used = {parameter.untyped_storage().data_ptr() for parameter in family[0].parameters()}
    skipped = [parameter for parameter in family.parameters() if parameter.untyped_storage().data_ptr() not in used]
    old = [parameter.detach().clone() for parameter in skipped]
    assert skipped
    alone = family.extract(0)
    with family.alone(0, optimizer) as member:
        (member(images()).square().mean() + other.sum()).backward()
        optimizer.step()
    assert same(old, [parameter.detach() for parameter in skipped])
    torch.testing.assert_close(other.detach(), torch.full((3,), 0.9, dtype=torch.float64))
    assert not torch.equal(family[0][0].weight, alone[0].weight)
    assert all(torch.equal(a, b) for a, b in zip(before_lists[1], optimizer.param_groups[1]["params"], strict=True))
    assert "momentum_buffer" in optimizer.state[other]


def test_schedulers_clipping_and_closures_work_as_for_a_network_alone() -> None:
    family, x = outgrow.Family(cnn(), images(), *SIZES), images(seed=9)
    alone = family.extract(1)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (family, alone)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]

    def train(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        optimizer.step(closure)
        scheduler.step()

    for _ in range(3):
        train(alone, optimizers[1], schedulers[1])
        with family.alone(1, optimizers[0]) as member:
            train(member, optimizers[0], schedulers[0])
    torch.testing.assert_close(state_of(family.extract(1)), state_of(alone))
    assert optimizers[0].param_groups[0]["lr"] == 0.1 / 8


def test_growing_and_resuming_between_contexts(tmp_path: Path) -> None:
    def steps(family: outgrow.Family, optimizer: Any) -> None:
        for number in (0, 1, 0, 2):
            with family.alone(number, optimizer) as member:
                step(member, optimizer, images(seed=number))
        all_sizes(family, optimizer, images(seed=7))

    family = outgrow.Family(cnn(), images(), *SIZES[:1])
    optimizer = torch.optim.AdamW(family.parameters(), lr=0.01)
    with family.alone(0, optimizer) as member:
        step(member, optimizer, images())
    family.grow(SIZES[1], optimizer=optimizer)
    steps(family, optimizer)
    family.save(tmp_path / "family.pt", optimizer=optimizer)
    again = cnn(3)
    other = torch.optim.AdamW(again.parameters(), lr=0.01)
    loaded = outgrow.Family.load(again, tmp_path / "family.pt", optimizer=other)
    twin = copy.deepcopy(family)
    for one, its in ((family, optimizer), (loaded, other)):
        steps(one, its)
    assert same(state_of(family, optimizer), state_of(loaded, other))
    assert not same(state_of(family), state_of(twin))
    mine = torch.optim.AdamW(twin.parameters(), lr=0.01)
    with twin.alone(0, mine) as member:
        step(member, mine, images())


def test_an_error_inside_leaves_the_optimizer_with_the_family() -> None:
    family = outgrow.Family(cnn(), images(), *SIZES[:2])
    optimizer = torch.optim.AdamW(family.parameters())
    all_sizes(family, optimizer, images())
    held, before = list(optimizer.param_groups[0]["params"]), [*state_of(family.extract(-1)), *state_of(optimizer)]

    def fail() -> None:
        with family.alone(0, optimizer) as member:
            member(images()).square().mean().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], held, strict=True))
    assert set(map(id, optimizer.state)) == set(map(id, held))
    assert same(before, [*state_of(family.extract(-1)), *state_of(optimizer)])
    assert not isinstance(family[0][3].weight, nn.Parameter)


def test_no_memory_is_kept_of_an_optimizer_that_is_gone() -> None:
    family = outgrow.Family(cnn(), images(), *SIZES[:2])
    optimizer = torch.optim.AdamW(family.parameters())
    with family.alone(0, optimizer) as member:
        step(member, optimizer, images())
    moment = weakref.ref(optimizer.state[family[-1][3].weight]["exp_avg"])
    del optimizer
    gc.collect()
    assert moment() is None


def test_what_does_not_fit_is_refused() -> None:
    family, other = outgrow.Family(cnn(), images(), *SIZES[:2]), cnn()
    optimizer = torch.optim.AdamW(family.parameters())
    with pytest.raises(OptimizerError, match="holds none of the family's parameters"):
        family.alone(0, torch.optim.AdamW(other.parameters())).__enter__()
    with pytest.raises(OptimizerError, match=r"row means.*\n.*plain step"):
        family.alone(0, torch.optim.Adafactor(family.parameters())).__enter__()
    with pytest.raises(OptimizerError, match="LBFGS"):
        family.alone(0, torch.optim.LBFGS(family.parameters())).__enter__()
    with pytest.raises(IndexError):
        family.alone(3, optimizer)
    with family.alone(0, optimizer):
        for call in (
            lambda: family.grow(SIZES[2]),
            lambda: family.save("never.pt"),
            lambda: family.float(),
            lambda: family.alone(1, optimizer).__enter__(),
        ):
            with pytest.raises(GrowthError, match="member 0 is trained alone at present"):
                call()
    family.grow(SIZES[2], optimizer=optimizer)


def test_inside_a_context_copies_and_state_dicts_have_the_present_values_and_training_goes_on() -> None:
    family, x = outgrow.Family(cnn(), images(), *SIZES[:2]), images(seed=3)
    optimizer = torch.optim.SGD(family.parameters(), lr=0.1)
    with family.alone(0, optimizer) as member:
        step(member, optimizer, x)
        family.extract(0)
        before = state_of(member)
        step(member, optimizer, x)
        assert not same(state_of(member), before)
        assert same(state_of(family.extract(0)), state_of(member))
        for copies in (copy.deepcopy, pickle.dumps):
            for one in (member, family):
                with pytest.raises(GrowthError, match=r"copy it by family\.extract"):
                    copies(one)
        inside = [*state_of(family), *state_of(family[-1]), *state_of(family[1])]
    assert same(inside, [*state_of(family), *state_of(family[-1]), *state_of(family[1])])
