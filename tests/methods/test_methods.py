"""What each method writes, checked on the tensors of a tiny network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import MethodError
from tests.helpers.judging import assert_same_function, distance, outputs, random_states
from tests.helpers.random_weights import DTYPE, randomise

OLD, NEW = 6, 10


def network(
    hidden: int = OLD, features: int = 5, classes: int = 3, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Linear, batch norm, activation, Linear: one hidden volume, named "0"."""
    with torch.random.fork_rng(devices=[]):
        layers = nn.Sequential(nn.Linear(features, hidden), nn.BatchNorm1d(hidden), activation(), nn.Linear(hidden, classes))
    model = layers.to(DTYPE).eval()
    randomise(model, torch.Generator().manual_seed(3))
    return model


def data(batch: int = 7, seed: int = 0, features: int = 5) -> Tensor:
    return torch.randn(batch, features, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def grow(
    method: str | outgrow.Method, to: int = NEW, seed: int = 0, model: nn.Module | None = None
) -> tuple[nn.Module, nn.Module, outgrow.Growth]:
    """(old, new, growth)."""
    model = network() if model is None else model
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, data(features=model[0].in_features), "0", to=to, method=method, seed=seed)
    return old, model, growth


def assert_old_part_untouched(old: nn.Module, new: nn.Module) -> None:
    """Old units come first, with unchanged values."""
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"):
        assert torch.equal(new.state_dict()[name][:OLD], old.state_dict()[name]), name
    assert torch.equal(new[3].weight[:, :OLD], old[3].weight)
    assert torch.equal(new[3].bias, old[3].bias)


EXACT = {
    "r2r": "r2r",
    "r2r he": outgrow.R2R(init="he"),
    "r2r copy": outgrow.R2R(init="copy"),
    "net2net": "net2net",
    "net2net random": outgrow.Net2Net(mapping="random", split="random"),
    "netmorph": "netmorph",
    "netmorph writers": outgrow.NetMorph(zero="writers"),
    "mean": "mean",
}


@pytest.mark.parametrize("method", EXACT.values(), ids=EXACT)
def test_exact_methods_keep_the_function_on_fresh_inputs(method: str | outgrow.Method) -> None:
    old, new, growth = grow(method)
    assert growth.preserving
    assert "NOT" not in str(growth)
    assert new[0].weight.shape == (NEW, 5)
    assert_same_function(old, new, [data(batch=9, seed=5)])


@pytest.mark.parametrize(
    "method", ["r2r", outgrow.R2R(init="copy"), outgrow.R2R(init="xavier", scale=3.0)], ids=["std", "copy", "xavier"]
)
def test_r2r_makes_pairs_written_alike_and_read_with_opposite_signs(method: str | outgrow.Method) -> None:
    old, new, _ = grow(method)
    assert_old_part_untouched(old, new)
    left, right = slice(OLD, OLD + 2), slice(OLD + 2, NEW)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"):
        tensor = new.state_dict()[name]
        assert torch.equal(tensor[left], tensor[right]), name
    readers = new[3].weight
    assert torch.equal(readers[:, left], -readers[:, right])
    assert bool((readers[:, left] != 0).all())
    assert not torch.equal(new[0].weight[OLD], new[0].weight[OLD + 1])


def test_r2r_needs_an_even_number_and_says_the_nearest_sizes() -> None:
    with pytest.raises(outgrow.GrowthError, match="8 and 10"):
        grow("r2r", to=9)


def test_r2r_from_copies_repeats_existing_units() -> None:
    old, new, _ = grow(outgrow.R2R(init="copy"))
    for row in new[0].weight[OLD:]:
        assert any(torch.equal(row, existing) for existing in old[0].weight)


def sources(old: nn.Module, new: nn.Module) -> list[int]:
    """The old unit that each new one repeats, identified by its row and all its scales."""
    found = []
    for unit in range(OLD, len(new[0].weight)):
        names = ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var")
        same = [k for k in range(OLD) if all(torch.equal(new.state_dict()[n][unit], old.state_dict()[n][k]) for n in names)]
        assert len(same) == 1
        found.append(same[0])
    return found


@pytest.mark.parametrize("split", ["equal", "random"])
@pytest.mark.parametrize("mapping", ["balanced", "random"])
def test_net2net_copies_units_and_shares_their_columns_out(mapping: str, split: str) -> None:
    old, new, _ = grow(outgrow.Net2Net(mapping=mapping, split=split), to=16)
    copied = sources(old, new)
    assert torch.equal(new[0].weight[:OLD], old[0].weight)
    for unit in range(OLD):
        group = [unit, *(OLD + k for k, source in enumerate(copied) if source == unit)]
        columns = new[3].weight[:, group]
        torch.testing.assert_close(columns.sum(1), old[3].weight[:, unit], rtol=1e-14, atol=1e-15)
        alike = torch.allclose(columns, columns[:, :1].expand_as(columns), rtol=1e-14)
        assert alike == (split == "equal" or len(group) == 1)
        shares = columns / old[3].weight[:, [unit]]
        assert bool((shares > 0).all()), "a share of another sign would cancel, not share"
    counts = [copied.count(unit) for unit in range(OLD)]
    assert (max(counts) - min(counts) <= 1) == (mapping == "balanced")


def test_net2net_noise_makes_copies_differ_and_is_not_called_exact() -> None:
    old, new, growth = grow(outgrow.Net2Net(noise=0.01), to=2 * OLD)
    assert not growth.preserving
    assert "NOT" in str(growth)
    nearest = (new[0].weight[OLD:, None] - old[0].weight[None]).abs().amax(-1).min(1)
    assert sorted(nearest.indices.tolist()) == list(range(OLD))
    assert bool((nearest.values > 0).all())
    assert 0 < distance(outputs(old, data(), False), outputs(new, data(), False)) < 0.2


def test_noise_on_pairs_breaks_them_a_little() -> None:
    old, new, growth = grow(outgrow.R2R(noise=0.01))
    assert not growth.preserving
    assert "NOT" in str(growth)
    left, right = new[0].weight[OLD : OLD + 2], new[0].weight[OLD + 2 :]
    assert not torch.equal(left, right)
    assert (left - right).abs().max() < 0.1 * left.abs().max()
    assert 0 < distance(outputs(old, data(), False), outputs(new, data(), False)) < 0.2


def test_netmorph_with_zero_readers() -> None:
    old, new, _ = grow(outgrow.NetMorph(zero="readers"), to=9)
    assert_old_part_untouched(old, new)
    assert not new[3].weight[:, OLD:].any()
    assert bool((new[0].weight[OLD:] != 0).all())
    assert bool((new[1].weight[OLD:] != 0).all()), "a dead scale would stop every gradient"


def test_netmorph_with_zero_writers() -> None:
    old, new, _ = grow(outgrow.NetMorph(zero="writers"), to=9)
    assert_old_part_untouched(old, new)
    for name in ("0.weight", "0.bias", "1.bias", "1.running_mean"):
        assert not new.state_dict()[name][OLD:].any(), name
    assert bool((new[3].weight[:, OLD:] != 0).all())
    assert bool((new[1].running_var[OLD:] > 0).all())


@pytest.mark.parametrize("zero", ["readers", "writers"])
def test_netmorph_lets_a_gradient_through_to_the_side_that_is_zero(zero: str) -> None:
    _, new, _ = grow(outgrow.NetMorph(zero=zero), to=9, model=network(activation=nn.Tanh))
    new.train()(data()).square().sum().backward()
    gradient = new[3].weight.grad[:, OLD:] if zero == "readers" else new[0].weight.grad[OLD:]
    assert bool((gradient != 0).all())


def test_netmorph_with_zero_writers_reads_by_zeros_where_zero_does_not_stay_zero() -> None:
    for activation in (nn.Sigmoid, nn.Softplus):
        _, new, _ = grow(outgrow.NetMorph(zero="writers"), model=network(activation=activation))
        assert not new[3].weight[:, OLD:].any(), "units that become 1/2 or log 2 must be read by zeros"


class Flat(nn.Module):
    """A stream before a norm over its units, so that zero writers are exact, and an activation before the norm."""

    def __init__(self, activation: nn.Module, direct: bool = False) -> None:
        super().__init__()
        self.a, self.activation, self.norm = nn.Linear(3, 4), activation, nn.RMSNorm(4, eps=1e-6)
        self.b, self.c, self.direct = nn.Linear(4, 2), nn.Linear(4, 2), direct

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(self.norm(self.activation(h)))
        return y + self.c(h) if self.direct else y


@pytest.mark.parametrize(
    ("activation", "direct", "learns"), [(nn.ReLU(), False, False), (nn.GELU(), False, True), (nn.ReLU(), True, True)]
)
def test_zero_units_before_an_activation_with_zero_slope_are_not_used(
    activation: nn.Module, direct: bool, learns: bool
) -> None:
    model, x = Flat(activation, direct), torch.randn(8, 3)
    assert ("netmorph" in next(v for v in outgrow.volumes(model, x) if v.name == "a").methods) == learns
    if not learns:
        with pytest.raises(outgrow.GrowthError, match="at zero is zero"):
            outgrow.widen(model, x, "a", by=2, method="netmorph")
    growth = outgrow.widen(model, x, "a", by=2, method=outgrow.NetMorph(zero="writers"))  # requested explicitly
    assert ("at zero is zero" in str(growth)) != learns
    optimizer, rows = torch.optim.Adam(model.parameters()), model.a.weight.detach()[4:].clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert bool((model.a.weight.detach()[4:] != rows).any()) == learns


def test_random_padding_moves_the_function_and_says_so() -> None:
    old, new, growth = grow("random")
    assert_old_part_untouched(old, new)
    assert growth.preserving is False
    assert growth.max_error > 1e-3
    assert "does NOT preserve" in str(growth)
    assert "(does not preserve)" in str(growth.plan)
    assert distance(outputs(old, data(), False), outputs(new, data(), False)) > 1e-3


def deviation(method: outgrow.Method, hidden: int = 64) -> tuple[float, float, float]:
    """Standard deviations of the old first weight, of its new rows and of the new columns of the last weight."""
    old, new, _ = grow(method, to=5 * hidden, model=network(hidden, features=40, classes=50))
    half = hidden + 2 * hidden
    return old[0].weight.std().item(), new[0].weight[hidden:half].std().item(), new[3].weight[:, hidden:half].std().item()


def test_free_values_have_the_deviation_of_the_tensor_they_join() -> None:
    existing, rows, columns = deviation(outgrow.R2R())
    assert rows == pytest.approx(existing, rel=0.05)
    assert columns == pytest.approx(network(64, 40, 50)[3].weight.std().item(), rel=0.05)
    assert abs(rows - existing / 3) > 0.5 * existing, "the paper's printed bound would give a third"


def test_free_values_are_uniform() -> None:
    _, new, _ = grow(outgrow.R2R(), to=320, model=network(64, features=40, classes=50))
    rows = new[0].weight[64:192].flatten()
    assert rows.abs().max().item() / rows.std().item() == pytest.approx(math.sqrt(3), rel=0.03)


def test_scale_multiplies_free_values() -> None:
    assert deviation(outgrow.R2R(scale=0.1))[1] == pytest.approx(0.1 * deviation(outgrow.R2R())[1], rel=1e-6)


def reference(init: Callable[..., Tensor], *shape: int) -> float:
    """The result of torch's own initialiser for a weight of that shape."""
    return init(torch.empty(shape), generator=torch.Generator().manual_seed(0)).std().item()


def test_he_and_xavier_follow_the_fans_of_the_grown_layer() -> None:
    _, rows, columns = deviation(outgrow.R2R(init="he"))
    assert rows == pytest.approx(reference(nn.init.kaiming_normal_, 320, 40), rel=0.06)
    assert columns == pytest.approx(reference(nn.init.kaiming_normal_, 50, 320), rel=0.06)
    _, rows, columns = deviation(outgrow.R2R(init="xavier"))
    assert rows == pytest.approx(reference(nn.init.xavier_normal_, 320, 40), rel=0.06)
    assert columns == pytest.approx(reference(nn.init.xavier_normal_, 50, 320), rel=0.06)


def test_a_function_draws_free_values() -> None:
    def halves(existing: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        assert existing.shape in [(OLD, 5), (OLD,), (3, OLD)]
        return torch.full(shape, 0.5, dtype=DTYPE)

    old, new, growth = grow(outgrow.R2R(init=halves))
    assert bool((new[0].weight[OLD:] == 0.5).all())
    assert new[3].weight[0, OLD:].tolist() == [0.5, 0.5, -0.5, -0.5]
    assert growth.preserving
    assert_same_function(old, new, [data(batch=3, seed=8)])


def test_a_function_gets_a_generator_that_the_seed_decides() -> None:
    def normal(existing: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DTYPE)

    weights = [grow(outgrow.R2R(init=normal), seed=seed)[1][0].weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("method", [*EXACT.values(), "random", outgrow.Net2Net(noise=0.1)], ids=[*EXACT, "random", "noise"])
def test_the_seed_decides_all_and_the_global_state_nothing(method: str | outgrow.Method) -> None:
    dice = random_states()
    one = grow(method, seed=5)[1].state_dict()
    assert random_states() == dice
    torch.manual_seed(1234)
    again, other = grow(method, seed=5)[1].state_dict(), grow(method, seed=6)[1].state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_two_layers_of_one_shape_draw_different_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(DTYPE)
    randomise(model, torch.Generator().manual_seed(0))
    outgrow.widen(model, data(features=4), "*", to=6, method="r2r")
    assert not torch.equal(model[0].bias[4:], model[2].bias[4:])


@pytest.mark.parametrize("wrong", [{"mapping": "other"}, {"split": "other"}])
def test_net2net_refuses_unknown_words(wrong: dict[str, str]) -> None:
    with pytest.raises(MethodError, match="other"):
        outgrow.Net2Net(**wrong)


def test_netmorph_refuses_unknown_words() -> None:
    with pytest.raises(MethodError, match="both"):
        outgrow.NetMorph(zero="both")


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(outgrow.GrowthError, match="'r2r', 'net2net', 'netmorph'"):
        grow("net3net")


def test_a_function_for_drawn_values_is_used_with_a_scale_too() -> None:
    def ones(existing: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.ones(shape)

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    outgrow.widen(model, torch.randn(2, 3), "0", by=2, method=outgrow.R2R(init=ones, scale=0.25))
    assert (model[0].weight[4:] == 0.25).all()
    assert (model[2].weight[:, 4:].abs() == 0.25).all()
