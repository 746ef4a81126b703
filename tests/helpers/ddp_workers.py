"""Worker functions for tests with several processes; `processes.launch` runs them, and a failed assertion fails the test."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import outgrow
from outgrow.distributed.ddp import checksums, renew
from outgrow.history.growths_on_model import history
from tests.helpers.processes import batches, hand_mean, refusal, same_everywhere, share

X = torch.linspace(-1, 1, 24).view(6, 4)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.f(x)
        return result


def network(seed: int = 0, norm: bool = False, idle: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    norms = [nn.BatchNorm1d(8)] if norm else []
    model = nn.Sequential(nn.Linear(4, 8), *norms, nn.ReLU(), Block(8), nn.Linear(8, 3)).double()
    if idle:
        model[-1].spare = nn.Linear(2, 2).double()  # never used by a forward pass
    return model


GROWTHS: list[Callable[..., outgrow.Growth]] = [
    lambda model, **options: outgrow.widen(model, X.double(), "0", by=4, seed=1, **options),
    lambda model, **options: outgrow.deepen(model, X.double(), "2", seed=2, **options),
    lambda model, **options: outgrow.widen(model, X.double(), "3.f.0", by=2, method="net2net", seed=3, **options),
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]], part: Any = share) -> None:
    for batch in data:
        x, y = part(batch)
        optimizer.zero_grad()
        cross_entropy(model(x.double()), y).backward()
        optimizer.step()


def whole(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def alone() -> nn.Module:
    """The reference: one process, whole batches, the same growths."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = batches(40)
    for number, growth in enumerate([*GROWTHS, None]):
        train(model, optimizer, data[10 * number : 10 * number + 10], whole)
        if growth is not None:
            growth(model, optimizer=optimizer)
    return model


def assert_close(one: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_parameters())
    own = [(name, parameter) for name, parameter in one.named_parameters() if "spare" not in name]
    assert list(theirs) == [name for name, _ in own]
    for name, parameter in own:
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-9, atol=1e-9)


def assert_mean(wrapper: DistributedDataParallel, batch: tuple[Tensor, Tensor]) -> None:
    """Check that a wrapper's gradients are the mean over the ranks."""
    x, y = share(batch)
    wrapper.zero_grad()
    cross_entropy(wrapper(x.double()), y).backward()
    got = [torch.zeros_like(p) if p.grad is None else p.grad for p in wrapper.module.parameters()]
    want = hand_mean(wrapper.module, cross_entropy(wrapper.module(x.double()), y))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def data_parallel() -> None:
    """Three growths in one run, for every setting of the wrapper, with the wrapper or the module inside as argument."""
    settings: list[dict[str, Any]] = [
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    ]
    truth, data = alone(), batches(40)
    for number, options in enumerate(settings):
        model = network(idle="find_unused_parameters" in options)
        wrapper = DistributedDataParallel(model, **options)
        optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.01)
        for stage, growth in enumerate([*GROWTHS, None]):
            train(wrapper, optimizer, data[10 * stage : 10 * stage + 10])
            if growth is not None:
                growth(wrapper if (stage + number) % 2 else model, optimizer=optimizer)
            assert wrapper.module is model
            assert same_everywhere(model.parameters())
            assert_mean(wrapper, data[stage])
            assert_mean(wrapper, data[stage])
        assert len(history(model)) == 3
        assert_close(model, truth)


def accumulation() -> None:
    """A growth between the backward passes of one step: the gradients so far differ between ranks, and are kept."""
    data = batches(4)
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = network()
        wrapper = DistributedDataParallel(model, **options)
        if "static_graph" in options:
            train(wrapper, torch.optim.SGD(model.parameters(), lr=0.0), data[3:])
            wrapper.zero_grad()
        with wrapper.no_sync() if "static_graph" not in options else contextlib.nullcontext():
            x, y = share(data[0])
            cross_entropy(wrapper(x.double()), y).backward()
            twin = copy.deepcopy(model)
            for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
                mine.grad = theirs.grad.clone()
        assert same_everywhere([model[0].weight.grad]) == ("static_graph" in options)
        GROWTHS[0](wrapper)
        x, y = share(data[1])
        cross_entropy(wrapper(x.double()), y).backward()
        # by hand: a copy without a wrapper, whose gradients grow in the same way
        GROWTHS[0](twin)
        cross_entropy(twin(x.double()), y).backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            dist.all_reduce(theirs.grad)
            torch.testing.assert_close(mine.grad, theirs.grad / 2, rtol=1e-12, atol=1e-14)


def unlike() -> None:
    """If the growth would differ between ranks, no rank grows; wrappers that can't follow are refused before that."""
    rank = dist.get_rank()
    model = network(norm=True)
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train(wrapper, optimizer, batches(3))
    before, running = checksums(model), model[1].running_mean.clone()
    assert not same_everywhere(
        [running]
    )  # ranks have different batches; rank 0's statistics are broadcast before the next forward pass

    text = refusal(outgrow.widen, wrapper, X.double(), "0", by=4, seed=rank, optimizer=optimizer)
    assert "rank 1: its plan differs from the plan of rank 0: seed [1] here, [0] there" in text, text
    assert "the same seed" in text
    text = refusal(outgrow.widen, wrapper, X.double(), "0" if rank else "nonsense", by=4)
    assert "nonsense" in text, text
    assert ("rank 0: " in text) == (rank == 1), text
    text = refusal(outgrow.widen, wrapper, X.double(), "0", by=4 + 2 * rank)
    assert "rank 1: its plan differs from the plan of rank 0" in text, text
    text = refusal(outgrow.widen, wrapper, (X.double(), X.double()) if rank else X.double(), "0", by=4)
    assert ("has 2 tensors here and 1 on rank 0" in text) if rank else ("rank 1: " in text), text
    assert checksums(model) == before
    assert torch.equal(model[1].running_mean, running)

    GROWTHS[0](wrapper, optimizer=optimizer)
    assert same_everywhere([*model.parameters(), *model.buffers()])  # rank 0's batch statistics were broadcast
    assert_mean(wrapper, batches(1)[0])
    train(wrapper, optimizer, batches(3))
    assert same_everywhere(model.parameters())

    with torch.no_grad():
        model[0].weight[0, 0] += rank
    text = refusal(outgrow.widen, model, X.double(), "0", by=4)
    assert "rank 1: 0.weight differed from rank 0 before the growth already" in text, text


def examples() -> None:
    """The batch norm of an identity layer depends on the example: if examples differ between ranks, rank 0's is used."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    model = nn.Sequential(*layers).double()
    twin = copy.deepcopy(model)
    x = torch.linspace(-1, 1, 96, dtype=torch.float64).view(6, 1, 4, 4)
    shifted = [x, x + x.abs()]
    wrapper = DistributedDataParallel(model)
    outgrow.deepen(wrapper, shifted[dist.get_rank()], "2", method="net2net")
    assert same_everywhere([*model.parameters(), *model.buffers()])
    by_second = copy.deepcopy(twin)
    outgrow.deepen(twin, shifted[0], "2", method="net2net")
    outgrow.deepen(by_second, shifted[1], "2", method="net2net")
    assert torch.equal(model[3][1].weight, twin[3][1].weight)
    assert not torch.equal(model[3][1].weight, by_second[3][1].weight)


def brief_checks() -> None:
    """A run's check uses the part of the example that rank 0 has chosen, even if another rank would choose another."""
    example = X.double() if dist.get_rank() else X[:1].double().expand(6, 4).contiguous()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = outgrow.Run(wrapper, example, optimizer, [outgrow.At(step=1, grow=[outgrow.Widen("0", to=12)])], quiet=True)
    own = run._brief.lengths if run._brief is not None else None
    assert own == ((6, 4) if dist.get_rank() else (1, 4)), own  # six equal samples show no more than one
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda module, args: None if args[0].is_meta else seen.append(tuple(args[0].shape)))
    assert run.step() is not None
    assert seen == [(1, 4)] * 2, seen
    assert same_everywhere(model.parameters())


def hooks() -> None:
    """Communication hooks without a state are kept; others are refused before anything changes."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    sent = []

    def counting(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and does not accept strings
        sent.append(bucket.buffer().numel())
        return default_hooks.allreduce_hook(state, bucket)

    model = network()
    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(None, counting)
    for growth in GROWTHS[:2]:
        growth(wrapper)
        sent.clear()
        assert_mean(wrapper, batches(1)[0])
        assert sum(sent) == sum(parameter.numel() for parameter in model.parameters())

    model = network()
    wrapper = DistributedDataParallel(model)
    wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    GROWTHS[0](wrapper)
    assert wrapper._get_ddp_logging_data()["comm_hook"] == "BuiltinCommHookType.ALLREDUCE"

    model = network()
    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    before = checksums(model)
    for grown in (wrapper, model):
        text = refusal(GROWTHS[0], grown)
        assert "a communication hook with a state" in text, text
        assert "del wrapper" in text
    assert "del wrapper" in refusal(renew, wrapper)
    assert checksums(model) == before
    del wrapper, grown  # the way out
    GROWTHS[0](model)
    wrapper = DistributedDataParallel(model)
    assert_mean(wrapper, batches(1)[0])

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    assert "distributes parameters over the ranks" in refusal(GROWTHS[0], wrapper, optimizer=optimizer)
    compiled = torch.compile(wrapper, backend="eager")
    before = compiled(X.double()).detach()
    GROWTHS[1](compiled)
    torch.testing.assert_close(compiled(X.double()).detach(), before)
    assert_mean(wrapper, batches(1)[0])
