"""DistributedDataParallel in a group of one process: behaviour that does not need several ranks."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import outgrow
from outgrow.errors import CheckpointError, ParallelError, VerifyError
from tests.helpers.judging import state_of

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def reduced(wrapper: DistributedDataParallel, seen: list[int]) -> int:
    """The number of gradient values that the wrapper has sent in one pass."""
    seen.clear()
    wrapper.zero_grad()
    wrapper(X).sum().backward()
    return sum(seen)


def watched(model: nn.Module) -> tuple[DistributedDataParallel, list[int]]:
    seen: list[int] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.buffer().numel())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(None, hook)
    return wrapper, seen


def test_gradients_are_still_averaged_after_a_growth_that_was_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, seen = watched(network())
    size = sum(parameter.numel() for parameter in wrapper.parameters())
    assert reduced(wrapper, seen) == size

    def fail(*given: Any) -> None:
        raise VerifyError("no")

    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("outgrow.verify.outputs"), "check", fail)
        with pytest.raises(VerifyError):
            outgrow.widen(wrapper, X, "*", factor=2)
    assert [reduced(wrapper, seen) for _ in range(3)] == [size] * 3
    outgrow.widen(wrapper, X, "*", factor=2)
    assert reduced(wrapper, seen) == sum(parameter.numel() for parameter in wrapper.parameters()) > size


def test_gradients_are_still_averaged_after_a_checkpoint_that_does_not_fit(tmp_path: Any) -> None:
    grown = network()
    outgrow.widen(grown, X, "*", factor=2)
    outgrow.save(grown, tmp_path / "model.safetensors")
    other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    wrapper, seen = watched(other)
    size = sum(parameter.numel() for parameter in wrapper.parameters())
    with pytest.raises(CheckpointError):
        outgrow.load(other, tmp_path / "model.safetensors")
    assert [reduced(wrapper, seen) for _ in range(3)] == [size] * 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.f(x)
        return result


class Plain(nn.Module):
    """A module with blocks that is not an nn.Sequential itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), Block(8), nn.Linear(8, 2))


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # torch warns while it compiles
def test_a_compiled_wrapper_that_would_leave_gates_out_is_refused() -> None:
    model = blocks()
    called = compiled(DistributedDataParallel(model))
    right = called(X).detach()
    before = state_of(model)
    with pytest.raises(
        ParallelError, match=r"without their forward hooks; without its gates[\s\S]*DistributedDataParallel\(torch.com"
    ):
        outgrow.deepen(called, X, "1", fade=4)
    assert state_of(model) == before
    assert torch.equal(called(X), right)
    events = [outgrow.At(step=1, grow=[outgrow.Deepen(after="1", fade=4)])]
    with pytest.raises(ParallelError, match=r"Deepen with fade=4"):
        outgrow.Run(called, X, torch.optim.SGD(model.parameters(), lr=0.1), events, quiet=True)
    outgrow.deepen(called, X, "1")
    torch.testing.assert_close(called(X), right)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # torch warns while it compiles
@pytest.mark.parametrize(
    ("build", "place", "wrap"),
    [
        (blocks, "1", lambda one: DistributedDataParallel(compiled(one))),
        (Plain, "body.1", lambda one: compiled(DistributedDataParallel(one))),
    ],
    ids=["compiled inside", "compiled outside"],
)
def test_other_orders_of_wrappers_fade_in(build: Callable[[], nn.Module], place: str, wrap: Callable[[nn.Module], Any]) -> None:
    called = wrap(build())
    right = called(X).detach()
    outgrow.deepen(called, X, place, fade=4)
    torch.testing.assert_close(called(X), right)
