"""New blocks under optimizers that count steps per group, or that need state for every parameter once one has it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import OptimizerError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


class GroupAdam(torch.optim.Optimizer):
    """Adam as apex fuses it: one step count for a group."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 0.001)
                one, two = 1 - 0.9 ** group["step"], 1 - 0.999 ** group["step"]
                p -= group["lr"] * (state["exp_avg"] / one) / ((state["exp_avg_sq"] / two).sqrt() + 1e-8)


class Undescribed(GroupAdam):
    def step(self, closure: Any = None) -> None:
        super().step(closure)


outgrow.register_optimizer(GroupAdam, {"exp_avg": "first moment", "exp_avg_sq": "second moment"})


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Sequential(Block(), Block()), nn.Linear(6, 3)).double()


def train(model: nn.Module, optimizer: Any, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = (torch.randn(16, size, generator=generator).double() for size in (5, 3))
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()


def trained(make: Any, steps: int) -> tuple[nn.Sequential, Any]:
    model = stack()
    optimizer = make(model.parameters())
    train(model, optimizer, steps, 0)
    return model, optimizer


def test_a_new_matrix_that_joins_another_kind_of_parameter_is_refused_if_its_state_depends_on_its_axes() -> None:
    """The only parameters before the new layer are those of a convolution, with preconditioners for four axes."""
    soap = importlib.import_module("pytorch_optimizer").SOAP
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.ReLU())
    optimizer, x = soap(model.parameters(), lr=1e-3), torch.randn(4, 1, 5, 5)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with pytest.raises(OptimizerError, match=r"SOAP can't follow: its state depends on the number of axes"):
        outgrow.deepen(model, x, "2", optimizer=optimizer)
    assert len(list(model.parameters())) == 2


@pytest.mark.filterwarnings("ignore:SGD does not train the new parameters")
@pytest.mark.parametrize("fused", [False, True])
def test_a_new_matrix_that_joins_another_kind_of_parameter_has_a_momentum_of_its_own_shape(fused: bool) -> None:
    """The nearest parameter is a bias. The truth is an optimizer that makes the momentum of the new layer itself."""
    results = []
    for follows in (True, False):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.ReLU()), torch.randn(4, 1, 5, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
        for step in range(5):
            if step == 3:
                outgrow.deepen(model, x, "2", optimizer=optimizer if follows else [])
                new = [] if follows else [torch.optim.SGD(model[3].parameters(), lr=0.01, momentum=0.9, fused=fused)]
            model.zero_grad()
            model(x).square().mean().backward()
            for one in (optimizer, *(new if step > 2 else ())):
                one.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_new_block_under_fused_sgd_trains_on_as_under_the_plain_one(momentum: float) -> None:
    results = []
    for fused in (False, True):
        model, optimizer = trained(lambda p, f=fused: torch.optim.SGD(p, lr=0.01, momentum=momentum, fused=f), 5)
        outgrow.deepen(model, torch.randn(2, 5).double(), "1.0", optimizer=optimizer)
        train(model, optimizer, 5, 1)
        results.append([parameter.detach() for parameter in model.parameters()])
    assert len(results[0]) == 16
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-12, atol=1e-12)


def test_a_new_block_does_not_leap_where_steps_are_counted_for_the_group() -> None:
    """Without state, the first update of a new parameter would be two to three learning rates long."""
    model, optimizer = trained(GroupAdam, 600)
    twin, other = trained(GroupAdam, 600)
    outgrow.deepen(model, torch.randn(2, 5).double(), "1.0", optimizer=optimizer)
    block = model[1][1]
    assert all(set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq"} for p in block.parameters())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    old = [parameter.detach().clone() for parameter in twin.parameters()]
    train(model, optimizer, 1, 1)
    train(twin, other, 1, 1)
    updates = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    moved = max(float(update.abs().max()) for name, update in updates.items() if name.startswith("1.1."))
    assert 1e-5 < moved < 1.0 * optimizer.param_groups[0]["lr"]
    others = [update for name, update in updates.items() if not name.startswith("1.1.")]
    for update, parameter, then in zip(others, twin.parameters(), old, strict=True):
        torch.testing.assert_close(update, parameter.detach() - then, rtol=1e-9, atol=1e-12)
    train(model, optimizer, 5, 2)


def test_an_undescribed_optimizer_is_not_given_new_blocks_once_it_has_state() -> None:
    model, optimizer = trained(Undescribed, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(OptimizerError, match=r"overrides GroupAdam.step(.|\n)*register_optimizer\(Undescribed"):
        outgrow.deepen(model, torch.randn(2, 5).double(), "1.0", optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    fresh = Undescribed(model.parameters())
    outgrow.deepen(model, torch.randn(2, 5).double(), "1.0", optimizer=fresh)
    train(model, fresh, 2, 1)


def test_a_wrapper_that_shares_the_state_of_another_and_keeps_more_is_refused() -> None:
    magma = importlib.import_module("pytorch_optimizer").Magma
    model, optimizer = trained(lambda parameters: magma(torch.optim.AdamW(parameters)), 2)
    x, before = torch.randn(2, 5).double(), [parameter.detach().clone() for parameter in model.parameters()]
    for grow in (outgrow.deepen, outgrow.branch):
        with pytest.raises(OptimizerError, match=r"Magma: it keeps data per parameter outside"):
            grow(model, x, "1.0", optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_tensors_outside_of_the_state_are_refused_also_of_a_described_class() -> None:
    for place in ("flat", "group"):
        model, optimizer = trained(GroupAdam, 2)
        if place == "flat":
            optimizer.flat = [torch.zeros(100)]
        else:
            optimizer.param_groups[0]["norms"] = torch.zeros(12)
        x, found = torch.randn(2, 5).double(), r"keeps tensors outside of its state, in .*(flat|norms)"
        with pytest.raises(OptimizerError, match=found):
            outgrow.deepen(model, x, "1.0", optimizer=optimizer)
        with pytest.raises(OptimizerError, match=found):
            outgrow.widen(model, x, factor=2, optimizer=optimizer)


def test_a_failed_deepening_leaves_no_state_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(GroupAdam, 3)
    held = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]

    def fail(*args: object) -> None:
        raise outgrow.GrowthError("as if it were wrong")

    monkeypatch.setattr(importlib.import_module("outgrow.verify.outputs"), "check", fail)
    with pytest.raises(outgrow.GrowthError, match="as if"):
        outgrow.deepen(model, torch.randn(2, 5).double(), "1.0", optimizer=optimizer)
    assert len(optimizer.state) == 12
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == held
