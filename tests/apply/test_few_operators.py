"""A growth takes few operators per tensor: on a GPU their number determines the time, more than the memory they write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import outgrow
from outgrow.apply import grow_tensor as fill
from outgrow.engine.carry_out import Work
from outgrow.model.sandbox import tensors_of

VIEWS = (
    "aten.detach",
    "aten.view",
    "aten.as_strided",
    "aten.slice",
    "aten.expand",
    "aten.set_",
    "aten.unsqueeze",
    "aten.alias",
)


class Counter(TorchDispatchMode):
    """Counts operators that write memory, and notes their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if not name.startswith(("aten.empty", "aten.new_empty", "aten.promote_types")) and name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def trained(depth: int) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(12, 12, bias=False), nn.ReLU())]
    model, x = nn.Sequential(*layers, nn.Linear(12, 4)), torch.randn(3, 12)
    optimizer = torch.optim.Adam(model.parameters())
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, x


def operators(depth: int) -> int:
    """The number of operators of a growth of all layers after a dry run."""
    model, optimizer, x = trained(depth)
    events = [outgrow.At(step=1, grow=[outgrow.Widen("*", factor=1.5, method="r2r")])]
    ready = outgrow.Run(model, x, optimizer, events, check=False, quiet=True)._ready[0]
    assert ready is not None
    with Counter() as counter:
        work = Work(model, [], [optimizer], x)
        for step in ready.steps:
            work.carry_out(step)
    return len(counter.names)


def test_one_more_layer_takes_a_few_more_operators() -> None:
    # the weight: deviation, copy, and along each axis a draw and its second half; moments: copy and fill, one with a mean
    assert operators(7) - operators(6) <= 11


@pytest.mark.parametrize("method", ["r2r", "net2net", "netmorph"])
def test_few_operators_write_what_many_do(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for small in (0, fill.SMALL):
        monkeypatch.setattr(fill, "SMALL", small)
        model, optimizer, x = trained(3)
        outgrow.widen(model, x, "*", factor=1.5, method=method, optimizer=optimizer)
        state = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
        results.append([*tensors_of(model).values(), *state])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_tied_and_shared_tensors_have_their_first_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model.add_module("again", model[1])
    found = tensors_of(model)
    assert list(found) == [*dict(model.named_parameters()), *dict(model.named_buffers())]
    assert all(found[name] is tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()))
