"""Cases for test_fused: the fused engine against the plain loop, the same networks, batches and optimizers, step by step.

Run in a process of its own, since Triton must know from the start whether it interprets or compiles.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import outgrow
from experiments.setting.data import batches
from experiments.setting.models import Layer, ResNetCifar, SmallConv
from experiments.training.eager import Eager
from experiments.training.fused.fleet import Fleet

BATCH = 16
SEED = 3  # with others a ReLU or a maximum may fall the other way by rounding, and a gradient with it
FADE = 2  # steps
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def optimizer_of(model: nn.Module, kind: type[torch.optim.Adam], **options: Any) -> torch.optim.Adam:
    """One that has taken steps already."""
    optimizer = kind(model.parameters(), lr=1e-3, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = 1e-2 * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


GROWTHS: dict[str, Callable[..., outgrow.Growth]] = {
    "deepen": lambda *what, **how: outgrow.deepen(*what, "layer1.0", method="copy", **how),
    "widen": lambda *what, **how: outgrow.widen(*what, "*", factor=2, method="random", **how),
}


def agree(build: Callable[[], nn.Module], nets: int, steps: int, kind: Any, grow: str = "", **options: Any) -> None:
    torch.manual_seed(0)
    models = [build() for _ in range(nets)]
    generator = torch.Generator().manual_seed(SEED)
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.2)
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2)
    optimizers = [optimizer_of(model, kind, **options) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        if grow:
            GROWTHS[grow](model, torch.randn(4, 3, 32, 32), fade=FADE, optimizer=optimizer)
    twins, started = copy.deepcopy(models), [copy.deepcopy(model.state_dict()) for model in models]
    theirs = [kind(twin.parameters(), lr=1e-3, **options) for twin in twins]
    for mine, other in zip(optimizers, theirs, strict=True):
        other.load_state_dict(copy.deepcopy(mine.state_dict()))
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (64,), generator=generator)
    made = [batches(stream, 0, 64, BATCH, steps) for stream in range(nets)]
    order, flips = torch.stack([one for one, _ in made]), torch.stack([other for _, other in made])
    rates, decays = 1e-3 * (1 + torch.rand(nets, steps)), 1e-2 * torch.rand(nets, steps)
    found = []
    streams = list(range(nets))[::-1]
    fused = Fleet(models, optimizers, streams, BATCH, DEVICE, "ieee", fades=[(0, FADE if grow else 0)] * nets)
    for engine in (fused, Eager(twins, theirs, streams, BATCH)):
        engine.feed(images, labels, torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.25, 0.3]))
        engine.examine((images[:12], labels[:12]), (images[12:30], labels[12:30]))
        engine.begin(order, rates, decays, flips)
        losses, right = (values.cpu().clone() for values in engine.run())
        found.append((losses, right, engine.evaluate()))
        engine.land()
    (losses, right, seen), (their_losses, their_right, theirs_seen) = found
    assert torch.allclose(losses, their_losses, rtol=1e-5)
    assert torch.equal(right, their_right)
    for (accuracy, loss), (their_accuracy, their_loss) in zip(seen, theirs_seen, strict=True):
        assert torch.allclose(accuracy, their_accuracy)
        assert torch.allclose(loss, their_loss, rtol=1e-4)
    for model, twin, mine, other, start in zip(models, twins, optimizers, theirs, started, strict=True):
        ours, expected = numbers(model, start), numbers(twin, start)
        for name, value in expected.items():
            assert close(ours[name], value, 2e-4), (name, float((ours[name] - value).abs().max()), float(value.abs().max()))
        for (name, one), two in zip(model.named_parameters(), twin.parameters(), strict=True):
            for key, moment in other.state[two].items() if name in expected else ():
                assert close(mine.state[one][key], moment, 1e-3), (name, key)


def numbers(model: nn.Module, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All that must agree: a bias before a norm has no effect but on the norm's running mean, which is taken without it."""
    state = {name: tensor for name, tensor in model.state_dict().items() if "num_batches" not in name}
    for name in [name for name in state if name.endswith(".0.bias")]:
        state[name.replace(".0.bias", ".1.running_mean")] -= start[name]
        del state[name]
    return state


def close(one: torch.Tensor, two: torch.Tensor, within: float) -> bool:
    return float((one - two).abs().max()) <= within * max(float(two.abs().max()), 1e-12)


def with_a_bias() -> nn.Module:
    """An identity layer of Net2DeeperNet's has a bias before its norm, which the fused engine leaves to the norm."""
    model = ResNetCifar(1 / 16, 1, residual=False)
    first = model.layer1[0]
    assert isinstance(first, Layer)
    first[0] = nn.Conv2d(4, 4, 3, padding=1)
    return model


CASES: dict[str, Callable[[], None]] = {
    "residual": lambda: agree(lambda: ResNetCifar(1 / 16, 1), 1, 1, torch.optim.Adam, amsgrad=True),
    "several": lambda: agree(lambda: ResNetCifar(3 / 32, 2), 2, 2, torch.optim.AdamW),
    "faded": lambda: agree(lambda: ResNetCifar(1 / 16, 1), 1, 3, torch.optim.AdamW, grow="deepen"),
    "drifting": lambda: agree(lambda: ResNetCifar(1 / 32, 1), 1, 3, torch.optim.AdamW, grow="widen"),
    "plain": lambda: agree(with_a_bias, 1, 1, torch.optim.Adam, amsgrad=True),
    "small": lambda: agree(lambda: SmallConv(4), 1, 1, torch.optim.Adam, amsgrad=True),
}


def without_overflow_checks() -> None:
    """Half of the time of Triton's interpreter goes into overflows of integers, whose result it uses only if it debugs."""
    from triton.runtime.interpreter import interpreter_builder as builder

    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        without_overflow_checks()
    CASES[sys.argv[1]]()
