"""`outgrow.rule`: operators from outside PyTorch, described by functions in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import RuleError
from tests.helpers.custom_operators import LIBRARY, act, attend, double_, mixed_linear, same

F = nn.functional


class Net(nn.Module):
    """Two layers with a function of the first one's output between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(4, width), nn.Linear(width, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.between(self.one(x)))


X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def frozen(model: nn.Module) -> nn.Module:
    return model.double().eval().requires_grad_(False)


def check_exact(model: nn.Module, x: Tensor, where: str, **options: Any) -> None:
    before = model(x).clone()
    growth = outgrow.widen(model, x, where, **options)
    assert growth.preserving
    torch.testing.assert_close(model(x), before, rtol=1e-11, atol=1e-11)


def test_an_operator_without_a_rule_is_refused_with_the_way_out() -> None:
    model = frozen(Net(act))
    with pytest.raises(
        outgrow.GrowthError, match=r"operator ruletest\.act has no rule \(outgrow\.rule\('ruletest::act'\) adds one\)"
    ):
        outgrow.widen(model, X, "one", by=4)
    assert model.one.out_features == 8


@pytest.mark.parametrize("method", ["r2r", "net2net", "netmorph"])
def test_an_activation_like_one_of_pytorch(method: str) -> None:
    outgrow.rule("ruletest::act", like=lambda x, slope=0.5: F.leaky_relu(x, slope))
    check_exact(frozen(Net(act)), X, "one", by=4, method=method)
    check_exact(frozen(Net(lambda x: act(x, 0.1))), X, "one", by=4, method=method)


def test_settings_behind_the_last_tensor_come_by_name() -> None:
    seen = []

    @outgrow.rule("ruletest::act")
    def reference(x: Tensor, *, slope: float = 0.5) -> Tensor:
        seen.append(slope)
        return F.leaky_relu(x, slope)

    check_exact(frozen(Net(lambda x: act(x, 0.25))), X, "one", by=4)
    assert set(seen) == {0.25}


def test_zero_stays_zero_through_an_operator_whose_reference_says_so() -> None:
    outgrow.rule("ruletest::act", like=lambda x, slope=0.5: F.leaky_relu(x, slope))
    model = frozen(Net(act))
    check_exact(model, X, "one", by=4, method=outgrow.NetMorph(zero="writers"))
    assert model.two.weight[:, 8:].abs().min() > 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 2, 3
        self.qkv, self.proj = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        return self.proj(attend(q, k, v).transpose(1, 2).flatten(2))


def test_fused_attention_without_a_fake_implementation_grows_heads() -> None:
    @outgrow.rule("ruletest::attend")
    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=0.3)

    model = frozen(Attention())
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    check_exact(model, x, "qkv", by=2)
    assert model.heads == 4


def test_weights_that_an_operator_takes_write_and_read_units() -> None:
    @outgrow.rule("ruletest::mixed_linear")
    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, weight, bias)
        return y, y.square().mean(-1)

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y, energy = mixed_linear(F.relu(self.one(x)), self.two.weight, self.two.bias)
            return y + energy[..., None]

    model = frozen(Fused())
    check_exact(model, X, "one", by=4)
    assert model.two.weight.shape == (3, 12)
    with pytest.raises(outgrow.GrowthError, match="output of the model"):
        outgrow.widen(model, X, "two", by=4)


def test_a_norm_over_units_gets_its_scale_and_refuses_pairs() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.gamma = nn.Linear(4, 8), nn.Linear(8, 3), nn.Parameter(torch.rand(8) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.ops.ruletest.normed(self.one(x), self.gamma))

    @outgrow.rule("ruletest::normed")
    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    with pytest.raises(outgrow.GrowthError, match="pairs would change its result"):
        outgrow.widen(frozen(Normed()), X, "one", by=4, method="r2r")
    check_exact(frozen(Normed()), X, "one", to=16, method="net2net")


def test_an_operator_that_writes_into_its_argument() -> None:
    @outgrow.rule("ruletest::double_")
    def reference(x: Tensor) -> None:
        x.mul_(2)

    def between(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        double_(y)
        return y

    check_exact(frozen(Net(between)), X, "one", by=4)


def test_a_reference_that_returns_its_argument() -> None:
    outgrow.rule("ruletest::same", like=lambda x: x)
    check_exact(Net(same).double(), X, "one", by=4, method="r2r")


def test_training_goes_through_the_operator_and_not_through_the_rule() -> None:
    calls: list[tuple[int, ...]] = []

    @torch.library.custom_op("ruletest::trained", mutates_args=())
    def trained(x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return x.sigmoid()

    trained.register_autograd(
        lambda ctx, g: g * ctx.y * (1 - ctx.y), setup_context=lambda ctx, inputs, output: setattr(ctx, "y", output)
    )
    outgrow.rule("ruletest::trained", like=torch.sigmoid)
    model = Net(trained).double()
    optimizer = torch.optim.Adam(model.parameters())
    for width in (8, 12):
        model(X).square().sum().backward()
        optimizer.step()
        calls.clear()
        model(X)
        assert calls == [(5, width)]
        if width == 8:
            outgrow.widen(model, X, "one", to=12, optimizer=optimizer)


@torch.library.custom_op("ruletest::tanh2", mutates_args=())
def tanh2(x: Tensor) -> Tensor:
    return 2 * torch.tanh(x)


def _slope(ctx: Any, upstream: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return upstream * (2 - y * y / 2)


tanh2.register_autograd(_slope, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(tanh2(self.up(x)))


class Reads(nn.Module):
    """Reads a value of its input, so that it does not run on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * (1 if x.sum().item() > 0 else 2)


class Force(nn.Module):
    """A module that differentiates in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.two(tanh2(self.one(x))).sum(), x, create_graph=True)[0]


def test_models_that_read_values_or_differentiate_or_are_deepened() -> None:
    outgrow.rule("ruletest::tanh2", like=lambda x: 2 * torch.tanh(x))
    check_exact(Reads().double(), X, "block.up", by=4)
    check_exact(Force().double(), X, "one", by=4)
    chain = nn.Sequential(Block(), Block()).double()
    before = chain(X)
    assert outgrow.deepen(chain, X, "1", count=2).preserving
    torch.testing.assert_close(chain(X), before, rtol=1e-11, atol=1e-11)
    assert len(chain) == 4
    assert outgrow.compare(chain, X, "0.up").widen["r2r"].preserving == "yes"


def test_lists_of_tensors_and_settings_by_name() -> None:
    LIBRARY.define("joined(Tensor[] parts, Tensor? weight, *, float scale=1.0) -> Tensor")

    def joined(parts: list[Tensor], weight: Tensor | None, *, scale: float = 1.0) -> Tensor:
        x = scale * torch.cat(list(parts), -1)
        return x if weight is None else x * weight

    LIBRARY.impl("joined", joined, "CompositeExplicitAutograd")
    outgrow.rule("ruletest::joined", like=joined)

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(4, 5), nn.Linear(11, 2)
            self.weight = nn.Parameter(torch.rand(11))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.ops.ruletest.joined([self.a(x), self.b(x)], None, scale=0.5)
            return self.out(torch.ops.ruletest.joined([y], self.weight))

    model = frozen(Joined())
    check_exact(model, X, "a", by=4)
    assert model.weight.shape == (15,)


def test_a_rule_that_computes_something_else_is_caught_by_the_check_of_outputs() -> None:
    outgrow.rule("ruletest::normed", like=lambda x, weight: x * weight)  # forgets the norm

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.gamma = nn.Linear(4, 8), nn.Linear(8, 3), nn.Parameter(torch.rand(8) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.ops.ruletest.normed(self.one(x), self.gamma))

    model = frozen(Normed())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(outgrow.GrowthError, match=r"differs from the old one(.|\n)*ruletest::normed"):
        outgrow.widen(model, X, "one", by=4, method="r2r")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def fails(x: Tensor, slope: float = 0.5) -> Tensor:
    raise ValueError("no slope")


def narrower(x: Tensor, slope: float = 0.5) -> Tensor:
    return x[:, 1:]


def none(x: Tensor, slope: float = 0.5) -> None:
    return None


def itself(x: Tensor, slope: float = 0.5) -> Tensor:
    return act(x, slope)


def single(x: Tensor, slope: float = 0.5) -> Tensor:
    return x.float()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (fails, r"ruletest::act failed: .*fails\(tensor of \(5, 8\)\) raised ValueError: no slope"),
        (narrower, r"ruletest::act returns something else than the operator: .*narrower returns \(5, 7\) float64"),
        (none, r".*none returns nothing, and the operator \(5, 8\) float64"),
        (itself, r"ruletest::act calls the operator itself: .*itself"),
        (single, r".*single returns \(5, 8\) float32"),
    ],
)
def test_a_rule_that_fails_or_returns_nonsense_names_operator_and_function(function: Callable[..., Any], expected: str) -> None:
    outgrow.rule("ruletest::act", like=function)
    with pytest.raises(RuleError, match=expected):
        outgrow.widen(frozen(Net(act)), X, "one", by=4)


def test_a_rule_for_an_operator_of_pytorch_that_outgrow_does_not_know() -> None:
    class Bessel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.special.bessel_j0(self.one(x)))

    outgrow.rule("aten::special_bessel_j0", like=torch.cos)  # elementwise, and 1 at 0, like the operator
    check_exact(frozen(Bessel()), X, "one", by=4)
    outgrow.rule("aten::special_bessel_j0", like=lambda x: torch.sigmoid(x) + 0.5, replace=True)
    check_exact(frozen(Bessel()), X, "one", by=4)
