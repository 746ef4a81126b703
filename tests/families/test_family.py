"""Sizes on shared parameters compute, learn and grow like networks of their own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import outgrow
from outgrow.errors import CallError, GrowthError
from outgrow.families.member import HOOKS
from tests.helpers.nested_sizes import SIZES, Recurrent, cnn, grown_apart, images, same, state_of


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def numbers(count: int = 3) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def test_members_are_the_networks_that_growths_one_by_one_would_give() -> None:
    apart, model = grown_apart(cnn(), images(), [*SIZES, outgrow.Deepen("2")]), cnn()
    family = outgrow.Family(model, images(), *SIZES, outgrow.Deepen("2"))
    assert len(family) == 5
    assert family[-1] is model
    x = images(seed=9)
    for mode in (False, True):
        family.train(mode)
        for number, (member, alone) in enumerate(zip(family, apart, strict=True)):
            extract = family.extract(number)
            assert same(state_of(alone), state_of(extract))
            assert list(alone.state_dict()) == list(member.state_dict()) == list(extract.state_dict())
            expected = alone.train(mode)(x)
            torch.testing.assert_close(member(x), expected)
            torch.testing.assert_close(extract(x), expected)
    assert len({str(member) for member in family}) == 5


def test_gradients_of_all_sizes_meet_in_the_shared_parameters() -> None:
    """Each size alone, its gradients scattered by hand to the entries that were there at its growth."""
    apart, family = grown_apart(cnn(), images(), SIZES), outgrow.Family(cnn(), images(), *SIZES)
    x, weights = images(seed=9), torch.tensor([1.0, -2.0, 0.5, 3.0])
    for weight, member in zip(weights, family, strict=True):
        (weight * member(x).square().sum()).backward()
    births = outgrow.cohorts(apart[-1])
    expected = {name: torch.zeros_like(parameter) for name, parameter in apart[-1].named_parameters()}
    for number, (weight, model) in enumerate(zip(weights, apart, strict=True)):
        (weight * model(x).square().sum()).backward()
        for name, parameter in model.named_parameters():
            expected[name][(births[name] <= number).expand_as(expected[name])] += parameter.grad.flatten()
    for name, parameter in family[-1].named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_a_step_on_a_small_size_trains_it_alone_and_all_that_share_its_entries() -> None:
    family = outgrow.Family(mlp(), numbers(), [outgrow.Widen("0", to=12)])
    alone, x = family.extract(0), numbers(7)
    together = torch.optim.SGD(family.parameters(), lr=0.1, momentum=0.9)
    by_itself = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    rest = family[-1][0].weight[8:].clone()
    for _ in range(3):
        for model, optimizer in ((family[0], together), (alone, by_itself)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(family[0](x), alone(x))
    torch.testing.assert_close(family[-1][0].weight[:8], alone[0].weight)
    assert torch.equal(family[-1][0].weight[8:], rest)
    assert same(state_of(alone), state_of(family.extract(0)))


def test_each_size_has_batch_statistics_of_its_own() -> None:
    family = outgrow.Family(cnn(), images(), *SIZES[:2])
    before, alone = state_of(family.extract(1), family[-1]), family.extract(0)
    family[0](images(seed=3))
    alone(images(seed=3))
    assert same(before, state_of(family.extract(1), family[-1]))
    torch.testing.assert_close(family[0][1].running_var, alone[1].running_var)
    assert int(family[0][1].num_batches_tracked) == int(family[1][1].num_batches_tracked) + 1


def test_a_smaller_member_takes_no_memory_for_parameters() -> None:
    family = outgrow.Family(cnn(), images(), *SIZES[:1])
    shared = {parameter.untyped_storage().data_ptr() for parameter in family.parameters()}
    assert {parameter.untyped_storage().data_ptr() for parameter in family[0].parameters()} == shared
    assert not any(isinstance(tensor, nn.Parameter) for tensor in (family[0][0].weight, family[0][3].weight))


def test_a_size_is_added_in_mid_training() -> None:
    family = outgrow.Family(cnn(), images(), SIZES[0])
    optimizer, x = torch.optim.AdamW(family.parameters(), lr=0.01), images(seed=4)

    def step() -> None:
        optimizer.zero_grad()
        for member in family:
            member(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    weight = family[-1][3].weight
    moment = optimizer.state[weight]["exp_avg"].clone()
    before = [member(x) for member in family.eval()]
    growth = family.grow(SIZES[1], optimizer=optimizer)
    assert growth.preserving
    assert len(family) == 3
    for member, expected in zip(family, [*before, before[-1]], strict=True):
        torch.testing.assert_close(member(x), expected)
    kept = (family.largest[3].weight.shape == weight.shape, (outgrow.cohorts(family[-1])["3.weight"] < 2).expand_as(weight))
    assert kept[0]
    assert torch.equal(optimizer.state[weight]["exp_avg"][kept[1]], moment.flatten())
    step()
    for member, old in zip(family, before, strict=False):
        assert not torch.allclose(member(x), old)


@pytest.mark.parametrize("number", [0, 1])
def test_a_refused_size_leaves_everything_as_it_was(number: int) -> None:
    model, x = cnn(), images()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(x).sum().backward()
    optimizer.step()
    before, parameters, text = state_of(model, optimizer), list(model.parameters()), str(model)
    bad = outgrow.Widen("0", factor=2, method="net2net")
    with pytest.raises(GrowthError, match="existing values"):
        outgrow.Family(model, x, *[outgrow.Widen("*", by=2), outgrow.Deepen("2")][:number], bad, optimizer=optimizer)
    assert same(before, state_of(model, optimizer))
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    assert str(model) == text
    assert len(optimizer.param_groups[0]["params"]) == len(parameters)
    assert not outgrow.cohorts(model).growths
    family = outgrow.Family(model, x, outgrow.Widen("*", by=2), optimizer=optimizer)
    before, outputs = state_of(family, optimizer), [member(x) for member in family.eval()]
    with pytest.raises(GrowthError, match="existing values"):
        family.grow(bad, optimizer=optimizer)
    assert len(family) == 2
    assert same(before, state_of(family, optimizer))
    assert same(outputs, [member(x) for member in family])
    optimizer.step()


def test_the_sandwich_is_the_largest_the_smallest_and_some_between() -> None:
    family = outgrow.Family(mlp(), numbers(), *(outgrow.Widen("0", by=2) for _ in range(4)))
    generator, seen = torch.Generator().manual_seed(0), set()
    for _ in range(20):
        largest, smallest, *others = family.sandwich(generator, between=2)
        assert largest is family[-1]
        assert smallest is family[0]
        assert len({id(other) for other in others}) == 2
        seen |= {id(other) for other in others}
    assert seen == {id(family[number]) for number in (1, 2, 3)}
    assert {id(family.sample(generator)) for _ in range(50)} == {id(member) for member in family}
    assert len(family.sandwich(generator, between=9)) == 5
    two = outgrow.Family(mlp(), numbers(), outgrow.Widen("0", by=2))
    assert two.sandwich(generator) == [two[-1], two[0]]


def test_a_family_is_a_module() -> None:
    """It moves between types, has modes and a state dict, and can be copied."""
    family, other = (outgrow.Family(cnn(seed), images(), *SIZES[:2]) for seed in (0, 1))
    family[0](images(seed=3))
    x = images(seed=9)
    family.eval()
    assert not family[0].training
    expected = [member(x) for member in family]
    twin = pickle.loads(pickle.dumps(copy.deepcopy(family)))
    for assign in (False, True):
        other.load_state_dict(family.state_dict(), assign=assign)
        assert same(expected, [member(x) for member in other.eval()])
    with torch.no_grad():
        for parameter in family.parameters():
            parameter.zero_()
    assert same(expected, [member(x) for member in twin])
    assert torch.equal(twin(x), expected[-1])
    half = [member(x.float()) for member in twin.float()]
    assert {output.dtype for output in half} == {torch.float32}
    torch.testing.assert_close(half, [output.float() for output in expected], rtol=1e-3, atol=1e-3)
    missing = {name: value for name, value in other.state_dict().items() if name != "members.0.1.running_mean"}
    with pytest.raises(RuntimeError, match=r"Missing key.*members\.0\.1\.running_mean"):
        other.load_state_dict(missing)


def test_members_work_without_gradients_before_and_with_them_after() -> None:
    family = outgrow.Family(mlp(), numbers(), [outgrow.Widen("0", to=12)])
    small, x = family[0], numbers()
    with torch.inference_mode():
        small(x)
    with torch.no_grad():
        assert not small(x).requires_grad
    small[2](small[1](small[0](x))).sum().backward()
    first = family[-1][2].weight.grad.clone()
    assert bool((first[:, :8] != 0).any())
    assert not bool(first[:, 8:].any())


class Checkpointed(nn.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = mlp(), nn.Linear(2, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(checkpoint(self.inner, x, use_reentrant=False))
        return result


def test_gradients_through_a_recomputed_layer() -> None:
    family = outgrow.Family(Checkpointed(), numbers(), [outgrow.Widen("inner.0", to=12)])
    alone, x = family.extract(0), numbers()
    outputs = [family[0](x).square().sum(), family[1](x).sum()]
    outputs[0].backward()
    alone(x).square().sum().backward()
    torch.testing.assert_close(family[1].inner[0].weight.grad[:8], alone.inner[0].weight.grad)


def test_wrong_calls_are_explained() -> None:
    model, x = mlp(), numbers()
    with pytest.raises(GrowthError, match="two sizes or more"):
        outgrow.Family(model, x)
    with pytest.raises(CallError, match="Write e"):
        outgrow.Family(model)
    with pytest.raises(GrowthError, match="is no transform"):
        outgrow.Family(model, x, ["0"])
    with pytest.raises(GrowthError, match="wrapped in OptimizedModule"):
        outgrow.Family(torch.compile(model, backend="eager"), x, outgrow.Widen("0", by=2))
    family = outgrow.Family(model, x, outgrow.Widen("0", by=2))
    with pytest.raises(IndexError):
        family[2]
    with pytest.raises(GrowthError, match="between=-1"):
        family.sandwich(torch.Generator(), between=-1)
    small = family[0]
    outgrow.widen(model, x, "0", by=2)
    with pytest.raises(GrowthError, match="grown outside the family"):
        family[0]
    with pytest.raises(GrowthError, match="grown outside the family"):
        small(x)


class Aside(nn.Module):
    """A function that refers to the layer, and still does in a copy of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        layer = self.first
        self.begin = lambda x: torch.relu(layer(x))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.begin(x))
        return result


def test_a_model_whose_copy_does_not_use_its_own_modules_is_refused() -> None:
    model, x = Aside(), torch.randn(3, 4)
    before = state_of(model)
    with pytest.raises(GrowthError, match="member 0 does not compute the same"):
        outgrow.Family(model, x, outgrow.Widen("first", by=4))
    assert same(before, state_of(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copied_member_and_its_original_keep_their_size_in_state_dicts(duplicate: Any) -> None:
    family = outgrow.Family(cnn(), images(), *SIZES[:2])
    member = family[0]
    wanted = state_of(member)
    assert same(state_of(duplicate(member)), wanted)
    assert same(state_of(member), wanted)
    duplicate(family)
    assert same(state_of(member), wanted)
    assert not family.extract(0)._state_dict_pre_hooks
    assert not family[-1]._state_dict_pre_hooks


def test_a_smaller_member_does_not_grow_by_itself() -> None:
    family = outgrow.Family(cnn(), images(), *SIZES[:2])
    before = state_of(family)
    for grow in (lambda: outgrow.widen(family[0], images(), "0", by=4), lambda: outgrow.Family(family[1], images(), SIZES[2])):
        with pytest.raises(GrowthError, match=r"as in a smaller member of a family\n.*family\.grow.*family\.extract"):
            grow()
    assert same(before, state_of(family))
    family.grow(SIZES[2])


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_family_does_not_grow_as_one_model(wrapped: bool) -> None:
    family = outgrow.Family(cnn(), images(), *SIZES[:2])
    model = nn.Sequential(family, nn.Identity()) if wrapped else family
    optimizer = torch.optim.AdamW(model.parameters())
    before, widened = state_of(family), outgrow.Widen("*", factor=2)
    calls: list[Any] = [
        lambda: outgrow.widen(model, images(), "largest.0", by=4, optimizer=optimizer),
        lambda: outgrow.deepen(model, images(), "largest.0"),
        lambda: outgrow.grow(model, images(), widened),
        lambda: outgrow.plan(model, images(), widened),
        lambda: outgrow.volumes(model, images()),
        lambda: outgrow.Run(model, images(), optimizer, [outgrow.At(step=1, grow=[widened])], quiet=True),
        lambda: outgrow.Family(model, images(), SIZES[2]),
    ]
    for call in calls:
        with pytest.raises(GrowthError, match=r"is an outgrow\.Family(.|\n)*family\.grow\(transforms\) adds a size"):
            call()
    assert same(before, state_of(family))
    assert [len(list(member.parameters())) for member in family]  # all members run on
    family.grow(SIZES[2])


@pytest.mark.parametrize(("number", "kind"), [(3, IndexError), (-4, IndexError), ("0", TypeError), (slice(0, 2), TypeError)])
def test_numbers_of_members(number: Any, kind: type[Exception]) -> None:
    family = outgrow.Family(cnn(), images(), *SIZES[:2])
    for call in (family.__getitem__, family.extract, family.alone):
        with pytest.raises(kind, match="the family has 3 members, from 0 to 2"):
            call(number)


@pytest.mark.parametrize("build", [Recurrent, cnn])
def test_a_state_dict_that_is_loaded_into_a_smaller_member_reaches_the_shared_parameters(build: Any) -> None:
    torch.manual_seed(0)
    x = images() if build is cnn else torch.randn(2, 5, 3, dtype=torch.float64)
    family = outgrow.Family(build().double(), x, outgrow.Widen("*", by=2))
    wanted = family.extract(0).state_dict()
    with torch.no_grad():
        for parameter in family.parameters():
            parameter.add_(1.0)
    member = family[0]
    copy.deepcopy(family)
    member.load_state_dict(wanted)
    family.load_state_dict(family.state_dict())
    assert same(state_of(family.extract(0)), [*wanted.values()])
    assert same(state_of(member), [*wanted.values()])
    small = family.extract(0)
    assert not any(getattr(small, name) for name in HOOKS)


def test_values_that_functional_call_puts_into_a_member_are_used_for_that_call_only() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    family = outgrow.Family(model, x, [outgrow.Widen("0", to=12)])
    member, alone = family[0], family.extract(0)
    before = member(x)
    some = {"0.weight": torch.ones(8, 4)}
    for values in (some, {name: torch.ones_like(one) for name, one in alone.named_parameters()}):
        assert torch.equal(functional_call(member, values, (x,)), functional_call(alone, values, (x,)))
        assert torch.equal(member(x), before)
    assert torch.equal(copy.deepcopy(member)(x), before)
    with torch.no_grad():
        model[2].bias.add_(1.0)
    assert torch.allclose(member(x), before + 1.0)
