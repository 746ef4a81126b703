"""A growth takes few operators per tensor: on a GPU their number determines the time, more than the memory they write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import outgrow
from outgrow.apply import grow_tensor as fill
from outgrow.apply.collected_writes import Writes
from outgrow.engine.carry_out import Work
from outgrow.growth_plan.plan import Rescaling
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
    # the weight: deviation, and along each axis a draw and its second half; moments: mean and fill; the rest is in common calls
    assert operators(7) - operators(6) <= 7


class Stream(nn.Module):
    """Residual blocks under layer norms: a growth of the stream rescales the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for norm, block in zip(self.norms, self.inner, strict=True):
            x = x + block(norm(x))
        result: Tensor = self.out(self.norms[0](x))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_of_rescaled_norms_are_the_same_with_few_operators(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for small in (0, fill.SMALL):
        monkeypatch.setattr(fill, "SMALL", small)
        torch.manual_seed(0)
        model, x = Stream().to(dtype), torch.randn(5, 6, dtype=dtype)
        optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        gradient = model.norms[0].weight.grad.clone()
        growth = outgrow.widen(model, x, "*", factor=1.5, optimizer=optimizer)
        factors = [edit.factor for edit in growth.plan.edits if isinstance(edit, Rescaling) and edit.tensor == "norms.0.weight"]
        torch.testing.assert_close(model.norms[0].weight.grad[:8] * factors[0], gradient)
        state = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
        results.append([*tensors_of(model).values(), *(parameter.grad for parameter in model.parameters()), *state])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_collected_writes_take_tensors_of_several_dtypes() -> None:
    writes, olds = Writes(), [torch.tensor([1.0, 3.0], dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    news = [old.new_full((3,), torch.nan) for old in (*olds, *olds)]
    for new, old, mean in zip(news, (*olds, *olds), (True,) * 3 + (False,) * 3, strict=True):
        writes.start(new, old if mean else None)
        writes.move([(new[:2], old)])
        writes.scale(new, 0.5)
    writes.make()
    assert [new.tolist() for new in news] == [[0.5, 1.5, 1.0]] * 3 + [[0.5, 1.5, 0.0]] * 3
    news[0].fill_(7.0)
    writes.make()  # nothing is left to write
    assert news[0].tolist() == [7.0] * 3


def test_the_generator_of_a_users_init_is_its_own() -> None:
    kept: list[torch.Generator] = []

    def init(old: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        kept.append(generator)
        return torch.randn(shape, generator=generator)

    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    outgrow.widen(model, x, "0", by=2, method=outgrow.R2R(init=init))
    assert len({id(generator) for generator in kept}) == len(kept) > 1


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
