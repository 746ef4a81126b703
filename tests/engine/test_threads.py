"""Growths in one thread while other threads import outgrow, run other models, train them, or grow them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import outgrow
from outgrow.model.compiled import uncompiled
from outgrow.model.sandbox import elementary, precise
from outgrow.trace.record import module_paths

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Attending(nn.Module):
    """Uses much of what a trace patches or switches: weight norm, attention, nested modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = weight_norm(nn.Linear(4, 8))
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.stem(x)).view(1, 1, *x.shape[:1], 8)
        result: Tensor = self.head(nn.functional.scaled_dot_product_attention(y, y, y)[0, 0])
        return result


def network(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[list[int]]:
    """Repeat an action in another thread, and switch threads as often as possible; its errors are raised here."""
    stop, errors, rounds, interval = threading.Event(), [], [0], sys.getswitchinterval()

    def loop() -> None:
        try:
            while not stop.is_set():
                work()
                rounds[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield rounds
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def grow_some() -> list[Any]:
    """The results of some growths and traces."""
    results: list[Any] = []
    for seed in range(2):
        model = network(seed)
        results.append([(volume.name, volume.reason) for volume in outgrow.volumes(Attending(), X)])
        results.append(outgrow.widen(model, X, "*", factor=2).plan.to_json())
        results.append(outgrow.deepen(model, X, "3", fade=3).plan.to_json())
        results.append([parameter.detach() for parameter in model.parameters()])
    return results


def assert_alike(one: Any, other: Any) -> None:
    for left, right in zip(one, other, strict=True):
        if isinstance(left, list) and left and isinstance(left[0], Tensor):
            assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
        else:
            assert left == right


def test_first_use_from_several_threads() -> None:
    program = """
import sys, threading
sys.setswitchinterval(1e-6)
import outgrow
names = ["widen", "Run", "At", "volumes", "load", "grow", "compare", "plateau"]
barrier, failed = threading.Barrier(len(names)), []
def use(name):
    barrier.wait()
    try:
        assert callable(getattr(outgrow, name))
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=use, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed, failed
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_other_models_run_in_other_threads_meanwhile() -> None:
    model = Attending()
    with torch.no_grad():
        right = model(X)
    alone = grow_some()

    def run() -> None:
        with torch.no_grad():
            torch.testing.assert_close(model(X), right)

    with meanwhile(run) as rounds:
        watched = grow_some()
    assert rounds[0] > 10
    assert_alike(watched, alone)


def test_other_models_train_in_other_threads_meanwhile() -> None:
    model = network(9)
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()

    with meanwhile(train) as rounds:
        grow_some()
    assert rounds[0] > 10
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_growths_in_several_threads_come_out_as_one_by_one() -> None:
    alone = grow_some()
    switches = _switches()
    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(grow_some) for _ in range(3)]:
            assert_alike(future.result(), alone)
    assert _switches() == switches


def _switches() -> tuple[Any, ...]:
    return (
        torch._weight_norm,
        sys.modules["torch.nn.utils.weight_norm"]._weight_norm,
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )


def test_switches_are_put_back_when_threads_overlap() -> None:
    switches = _switches()
    inside, leave = threading.Barrier(2, timeout=60), threading.Event()

    def hold(context: Any) -> None:
        inside.wait()
        with context:
            leave.wait(0.05)

    for first, second in ((elementary, precise), (precise, elementary), (elementary, elementary), (uncompiled, uncompiled)):
        threads = [threading.Thread(target=hold, args=(context(),)) for context in (first, second)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert _switches() == switches
    stance = sys.modules.get("torch._dynamo.eval_frame")
    assert stance is None or stance._stance.stance == "default"


def test_weight_norm_is_elementary_in_the_watching_thread_only() -> None:
    fused, results = torch._weight_norm, []
    with elementary(), ThreadPoolExecutor(1) as pool:
        v, g = torch.randn(3, 4), torch.randn(3, 1)
        with torch.profiler.profile() as seen:
            results.append(torch._weight_norm(v, g, 0))
        assert "aten::_weight_norm_interface" not in {event.key for event in seen.key_averages()}
        results.append(pool.submit(torch._weight_norm, v, g, 0).result())
    torch.testing.assert_close(results[0], results[1])
    assert torch.equal(results[1], fused(v, g, 0))


def test_paths_are_those_of_the_watching_thread() -> None:
    model, seen = network(), []
    model[2].register_forward_hook(lambda *given: seen.append(here()))
    with module_paths(model) as here, ThreadPoolExecutor(1) as pool:
        assert here() == ""
        model[1].register_forward_pre_hook(lambda *given: _ignored(pool.submit(model[4], torch.zeros(1, 8)).result()))
        with pytest.raises(RuntimeError):
            model(X[:, :3])
        assert here() == ""
        model(X)
        assert here() == ""
    assert seen == [""]  # behind its forward, its own hooks are none of its code


def _ignored(result: Any) -> None:
    """A hook that returns nothing changes nothing."""
