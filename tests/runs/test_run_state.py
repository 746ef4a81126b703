"""Growth in the middle of a plain loop: everything in training continues as for a copy that is grown by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import outgrow
from outgrow.history.cohorts import cohorts
from tests.helpers.metrics import metric
from tests.helpers.small_runs import DEEPEN, WIDEN, Mlp, X, at, batch, facts, loss_of, mlp, started, train
from tests.helpers.training_run import assert_equal


def by_hand(model: nn.Module, optimizers: Any, *transforms: Any, average: Any = None, seed: int = 0) -> None:
    outgrow.grow(model, X, *(transforms or (WIDEN,)), optimizer=optimizers, average=average, seed=seed)


def test_several_optimizers() -> None:
    def make() -> tuple[Mlp, list[Optimizer]]:
        model = mlp()
        ends = [*model.stem.parameters(), *model.head.parameters()]
        return model, [SGD(ends, lr=0.1, momentum=0.9), AdamW(model.blocks.parameters(), lr=1e-2)]

    (model, optimizers), (twin, theirs) = make(), make()
    run = started(model, optimizers, [at(3, WIDEN, outgrow.Widen("stem", to=8)), at(5, DEEPEN)])
    for step in range(1, 9):
        train(model, optimizers, step)
        run.step()
        train(twin, theirs, step)
        if step == 3:
            by_hand(twin, theirs, WIDEN, outgrow.Widen("stem", to=8), seed=0)
        if step == 5:
            by_hand(twin, theirs, DEEPEN, seed=1)
    assert_equal(facts(model, optimizers), facts(twin, theirs))
    assert len(model.blocks) == 3
    assert {id(p) for p in model.blocks[1].parameters()} <= {id(p) for p in optimizers[1].param_groups[0]["params"]}
    assert not {id(p) for p in model.blocks.parameters()} & {id(p) for p in optimizers[0].param_groups[0]["params"]}


def test_groups_keep_their_settings_and_get_new_parameters() -> None:
    model = mlp()
    weights = [(n, p) for n, p in model.named_parameters() if p.ndim > 1 and n != "head.weight"]
    biases = [(n, p) for n, p in model.named_parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": weights, "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"params": biases, "lr": 0.02, "weight_decay": 0.0, "eps": 1e-6},
        {"params": [("head.weight", model.head.weight)], "lr": 0.003, "amsgrad": True},
    ]
    optimizer = AdamW(groups)

    def settings() -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups]

    before = settings()
    run = started(model, optimizer, [at(2), at(3, DEEPEN)])
    for step in range(1, 6):
        train(model, optimizer, step)
        run.step()
    assert settings() == before
    named = dict(model.named_parameters())
    held = [{n for n, p in named.items() if any(p is one for one in group["params"])} for group in optimizer.param_groups]
    matrices = {n for n, p in named.items() if p.ndim > 1}
    assert held == [matrices - {"head.weight"}, set(named) - matrices, {"head.weight"}]
    assert [set(group["param_names"]) for group in optimizer.param_groups] == held
    assert all(tensor.shape == p.shape for p, state in optimizer.state.items() for tensor in state.values() if tensor.ndim)


SCHEDULERS: dict[str, Any] = {
    "SequentialLR": lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 9), s.CosineAnnealingLR(o, 15, 1e-3)], [9]),
    "OneCycleLR": lambda o: s.OneCycleLR(o, [0.3, 0.1], 31),
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, factor=0.4, patience=2, min_lr=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 7, 2, 1e-3),
    "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, 4, cycle_momentum=True),
    "LambdaLR": lambda o: s.LambdaLR(o, [lambda t: 0.95**t, lambda t: 1 / (1 + t)]),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [5, 11, 20], 0.3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_rate_after_the_growth_is_a_fifth(name: str) -> None:
    """The copy does not grow; its rates do not depend on the parameters."""

    def make() -> tuple[Mlp, Optimizer, Any]:
        model = mlp()
        groups = [{"params": list(model.blocks.parameters())}, {"params": list(model.head.parameters()), "lr": 0.05}]
        optimizer = SGD(groups, lr=0.2, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    (model, optimizer, scheduler), (twin, other, theirs) = make(), make()
    run = started(
        model, optimizer, [at(6, WIDEN, DEEPEN, lr=1 / 5), at(14, outgrow.Widen("blocks.0.up", to=16), lr=2)], scheduler
    )
    for step in range(1, 31):
        for one, opt, schedule in ((model, optimizer, scheduler), (twin, other, theirs)):
            train(one, opt, step)
            schedule.step(metric(step)) if isinstance(schedule, s.ReduceLROnPlateau) else schedule.step()
        run.step()
        factor = 1 if step < 6 else 0.2 if step < 14 else 0.4
        wanted = [factor * group["lr"] for group in other.param_groups]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(wanted, rel=1e-9), step
        assert [group["momentum"] for group in optimizer.param_groups] == [g["momentum"] for g in other.param_groups]


@pytest.mark.parametrize("skipped", [3, 4])
def test_a_grad_scaler_skips_the_step_at_the_growth_or_after_it(skipped: int) -> None:
    def make() -> tuple[Any, Optimizer, Any]:
        model = mlp().float()
        return model, AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def step_of(model: nn.Module, optimizer: Optimizer, scaler: Any, step: int) -> None:
        optimizer.zero_grad()
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x.float()), y) * (float("inf") if step == skipped else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    (model, optimizer, scaler), (twin, other, theirs) = make(), make()
    run = outgrow.Run(model, X.float(), optimizer, [at(3)], also={"scaler": scaler}, quiet=True)
    for step in range(1, 8):
        before = [p.detach().clone() for p in model.parameters()]
        step_of(model, optimizer, scaler, step)
        assert all(map(torch.equal, before, model.parameters())) == (step == skipped)
        run.step()
        step_of(twin, other, theirs, step)
        if step == 3:
            outgrow.grow(twin, X.float(), WIDEN, optimizer=other)
    assert scaler.get_scale() == theirs.get_scale()
    assert_equal(facts(model, [optimizer], scaler), facts(twin, [other], theirs))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages(kind: str) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if kind == "ema" else None)
    run = started(model, optimizer, [at(3), at(5, DEEPEN)], None, average)
    for step in range(1, 8):
        train(model, optimizer, step)
        old, count = copy.deepcopy(average.module), int(average.n_averaged)
        average.update_parameters(model)
        weight = 1.0 if not count else 0.1 if kind == "ema" else 1 / (count + 1)
        for mean, before, now in zip(average.module.parameters(), old.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mean, before + weight * (now - before), rtol=1e-12, atol=1e-12)
        outputs = average(X)
        grown = run.step()
        assert (grown is not None) == (step in (3, 5))
        torch.testing.assert_close(average(X), outputs, rtol=1e-12, atol=1e-12)
        assert step == 1 or not torch.allclose(average(X), model(X), rtol=1e-3), "the average is no copy of the model"


def test_gradients_gathered_before_a_growth_are_kept() -> None:
    """Growth by r2r between two passes of one step: old entries have the gradients of a copy that does not grow."""
    model, twin = mlp(), mlp()
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    run = started(model, optimizer, [outgrow.At(epoch=1, grow=[WIDEN, outgrow.Widen("blocks.1.up", to=10, method="r2r")])])
    for one in (model, twin):
        loss_of(one, 1).backward()
    assert run.epoch() is not None
    for one in (model, twin):
        loss_of(one, 2).backward()
    optimizer.step()
    other.step()
    born, old = cohorts(model), dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        kept = (born[name] == 0).expand(parameter.shape)
        for mine, theirs in ((parameter.grad, old[name].grad), (parameter.detach(), old[name].detach())):
            assert theirs is not None
            torch.testing.assert_close(mine[kept], theirs.flatten(), rtol=1e-10, atol=1e-14)


def test_clipping_by_norm_after_a_growth_within_a_step() -> None:
    model, twin = mlp(), mlp()
    optimizer, other = SGD(model.parameters(), lr=0.1, momentum=0.9), SGD(twin.parameters(), lr=0.1, momentum=0.9)
    run = started(model, optimizer, [outgrow.At(epoch=2, grow=[WIDEN])])
    for step in range(1, 5):
        for one, opt in ((model, optimizer), (twin, other)):
            opt.zero_grad()
            loss_of(one, step).backward()
        before = nn.utils.get_total_norm([p.grad for p in twin.parameters()])  # type: ignore[misc]
        run.epoch()
        if step == 2:
            by_hand(twin, other)
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.05) for one in (model, twin)]
        assert norms[0] == norms[1] == before > 0.05
        optimizer.step()
        other.step()
    assert_equal(facts(model, [optimizer]), facts(twin, [other]))


def test_frozen_parameters_stay_frozen() -> None:
    model = mlp()
    frozen = [*model.stem.parameters(), *model.blocks[0].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run = started(model, optimizer, [at(2), at(3, outgrow.Deepen("blocks.1"))])
    for step in range(1, 6):
        before = [p.clone() for p in frozen]
        train(model, optimizer, step)
        assert all(map(torch.equal, before, frozen))
        run.step()
    assert not any(p.requires_grad for p in frozen)
    assert all(p.grad is None for p in frozen)
    assert all(p.requires_grad and p.grad is not None for p in model.blocks[2].parameters())


def test_hooks_survive_and_fire() -> None:
    model = mlp()
    optimizer, seen = SGD(model.parameters(), lr=0.1), []
    layer, block = model.blocks[0].up, model.blocks[1]

    def shape(name: str, tensor: Tensor) -> None:
        seen.append((name, tuple(tensor.shape)))

    layer.register_forward_hook(lambda module, args, out: shape("forward", out))
    layer.register_forward_pre_hook(lambda module, args: shape("before", args[0]))
    layer.register_full_backward_hook(lambda module, into, out: shape("backward", out[0]))
    layer.weight.register_hook(lambda grad: shape("gradient", grad))
    layer.weight.register_post_accumulate_grad_hook(lambda p: shape("gathered", p.grad))
    block.register_forward_hook(lambda module, args, out: shape("block", out))
    run = started(model, optimizer, [at(1, WIDEN, DEEPEN)])
    seen.clear()
    train(model, optimizer, 1)
    first = sorted(seen)
    run.step()
    assert model.blocks[2] is block
    seen.clear()
    train(model, optimizer, 2)
    wide = [("backward", (8, 12)), ("before", (8, 6)), ("block", (8, 6)), ("forward", (8, 12))]
    assert sorted(seen) == [*wide, ("gathered", (12, 6)), ("gradient", (12, 6))]
    assert [name for name, _ in first] == [name for name, _ in sorted(seen)]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend: str) -> None:
    inner, twin = mlp(), mlp()
    model: Any = torch.compile(inner, backend=backend)
    optimizer, other = AdamW(inner.parameters(), lr=1e-2), AdamW(twin.parameters(), lr=1e-2)
    run = started(model, optimizer, [at(2, WIDEN, DEEPEN)])
    for step in range(1, 5):
        loss, theirs = train(model, optimizer, step), train(twin, other, step)
        torch.testing.assert_close(loss, theirs, rtol=1e-10, atol=1e-12)
        run.step()
        if step == 2:
            by_hand(twin, other, WIDEN, DEEPEN)
    assert run.model is model
    assert model._orig_mod is inner
    for mine, their in zip(inner.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-9, atol=1e-12)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def test_channels_last() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 6, 3), Residual(), Residual(), nn.Flatten(), nn.Linear(6 * 36, 2))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    grow = [outgrow.Widen("1.f.0", to=12), outgrow.Deepen("1"), outgrow.Kernel("0", 5)]
    run = outgrow.Run(model, x, optimizer, [outgrow.At(epoch=1, grow=grow)], quiet=True)
    model(x).square().mean().backward()
    optimizer.step()
    run.epoch()
    assert model[1].f[0].weight.shape == (12, 6, 3, 3)
    assert len(model) == 6
    for name, parameter in model.named_parameters():
        momentum = optimizer.state[parameter].get("momentum_buffer")
        for tensor in (parameter, parameter.grad, momentum):
            if tensor is not None and tensor.ndim == 4:
                assert tensor.is_contiguous(memory_format=torch.channels_last), name
                assert not tensor.is_contiguous(), name
    assert model[:3](x).is_contiguous(memory_format=torch.channels_last)


def test_bfloat16() -> None:
    model = mlp().bfloat16()
    x = X.bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    run = outgrow.Run(model, x, optimizer, [at(2, WIDEN, DEEPEN)], quiet=True)
    for _ in range(4):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
        before, grown = model(x).float(), run.step()
        if grown is not None:  # bfloat16 has eight significant bits
            torch.testing.assert_close(model(x).float(), before, rtol=0.02, atol=0.02)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {v.dtype for state in optimizer.state.values() for k, v in state.items() if k != "step"} == {torch.bfloat16}
    assert len(model.blocks) == 3
