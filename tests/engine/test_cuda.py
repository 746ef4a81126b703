"""Growth on a GPU: `pytest -m cuda`. Without one, these tests are skipped.

The truth is the model that was not grown: its outputs, and the values that its own next step gives to the existing entries.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import outgrow
from outgrow.modules.gates import gates_of

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(width, 2 * width, 3, padding=1), nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Convolutions with batch norm, residual blocks of one kind, and a linear head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return result


@pytest.fixture(autouse=True)
def _plain_float32() -> Iterator[None]:
    """Comparisons are of float32, not of TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).to(DEVICE)


def batch(number: int, samples: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(samples, 3, 12, 12, generator=generator)
    return images.to(DEVICE), torch.randint(0, 5, (samples,), generator=generator).to(DEVICE)


def loss_of(model: nn.Module, number: int) -> Tensor:
    x, y = batch(number)
    return nn.functional.cross_entropy(model(x), y)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, number)
    loss.backward()
    optimizer.step()
    return loss.item()


def outputs(model: nn.Module) -> Tensor:
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad():
        result: Tensor = model.eval()(batch(99)[0]).clone()
    for module, training in modes:
        module.training = training
    return result


WIDEN = outgrow.Widen("blocks.0.up", to=48, method="r2r")
DEEPEN = outgrow.Deepen("blocks.0")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam, fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "adamw, fused, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, amsgrad=True),
    "adam, capturable": lambda p: torch.optim.Adam(p, lr=1e-3, capturable=True),
    "adam, fused, capturable": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True, capturable=True),
    "adamw, rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), capturable=True, foreach=True),
    "sgd, fused, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop, capturable": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True, capturable=True),
    "adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}


def test_steps_of_a_fade_never_wait_for_the_device() -> None:
    """A level or an index on the host would be copied to the device in every step, behind all work that is under way there."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    fading = [outgrow.Deepen("blocks.1", fade=6), outgrow.Widen("blocks.0.up", to=48, method="random", fade=6)]
    outgrow.grow(model, batch(0)[0], *fading, optimizer=optimizer)
    step(model, optimizer, 0)
    x, y = batch(1)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gates = list(gates_of(model).values())
    assert gates
    assert all(gate.level.device == DEVICE for gate in gates)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("transform", [WIDEN, DEEPEN], ids=["widen", "deepen"])
def test_fused_and_capturable_optimizers_move_existing_entries_as_without_the_growth(name: str, transform: Any) -> None:
    try:
        model = net()
        optimizer = OPTIMIZERS[name](model.parameters())
        for number in range(5):
            step(model, optimizer, number)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"this version of torch has none such: {error}")
    twin, theirs = copy.deepcopy((model, optimizer))
    before = outputs(model)
    growth = outgrow.grow(model, batch(0)[0], transform, optimizer=optimizer)
    assert growth.max_error <= growth.tolerance
    torch.testing.assert_close(outputs(model), before, rtol=1e-5, atol=1e-5)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert step(model, optimizer, 5) == pytest.approx(step(twin, theirs, 5), rel=1e-5)
    parameters = dict(model.named_parameters())
    for old, expected in twin.named_parameters():
        ours = parameters[growth.plan.renamed(old)].detach()
        ours = ours[tuple(slice(0, size) for size in expected.shape)]  # new units stand behind the existing ones
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=2e-6, msg=lambda text, old=old: f"{old}: {text}")
    moved = max(float((parameters[name].detach() - start[name]).abs().max()) for name in parameters)
    assert moved < 0.1
    for number in range(6, 10):
        step(model, optimizer, number)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_run_with_autocast_and_a_grad_scaler_goes_on_over_growths(half: torch.dtype, tmp_path: Path) -> None:
    def made() -> tuple[Net, Any, Any, outgrow.Run]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cuda", enabled=half is torch.float16, growth_interval=4)
        events = [outgrow.At(step=6, grow=[WIDEN]), outgrow.At(step=10, grow=[outgrow.Deepen("blocks.1", fade=3)])]
        return model, optimizer, scaler, outgrow.Run(model, batch(0)[0], optimizer, events, also={"scaler": scaler}, quiet=True)

    def go(model: nn.Module, optimizer: Any, scaler: Any, run: outgrow.Run, until: int) -> list[float]:
        losses = []
        while run.steps < until:
            optimizer.zero_grad()
            with torch.autocast("cuda", half):
                loss = loss_of(model, run.steps)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            before, scale = outputs(model), scaler.get_scale()
            if run.step(loss) is not None:
                torch.testing.assert_close(outputs(model), before, rtol=1e-4, atol=1e-4)
                assert scaler.get_scale() == scale
            losses.append(loss.item())
        return losses

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        whole = made()
        losses = go(*whole, until=16)
        assert len(whole[3].records) == 2
        assert all(record.error is not None and record.error < 1e-4 for record in whole[3].records)
        first = made()
        go(*first, until=12)
        first[3].save(tmp_path / "run.pt")
        second = made()
        second[3].load(tmp_path / "run.pt")
        assert go(*second, until=16) == pytest.approx(losses[12:], rel=1e-3)
        assert second[2].state_dict() == whole[2].state_dict()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_growth_inside_an_autocast_region_leaves_a_model_that_trains() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with torch.autocast("cuda", torch.float16):
        loss_of(model, 0).backward()  # fills autocast's cache with the old weights
        before = outputs(model)
        outgrow.grow(model, batch(0)[0], WIDEN, optimizer=optimizer)
        torch.testing.assert_close(outputs(model), before, rtol=1e-2, atol=1e-2)
        loss_of(model, 1).backward()
    weight = model.blocks[0].up.weight
    start = weight.detach().clone()
    optimizer.step()
    assert bool((weight != start)[32:].any())


def test_cuda_graphs_of_a_compiled_model_are_made_again() -> None:
    model = net()
    compiled = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    twin = net()
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
    for number in range(10):
        if number in (4, 7):
            before = outputs(model)
            transform = WIDEN if number == 4 else DEEPEN
            outgrow.grow(compiled, batch(0)[0], transform, optimizer=optimizer)
            outgrow.grow(twin, batch(0)[0], transform, optimizer=theirs)
            torch.testing.assert_close(outputs(model), before, rtol=1e-5, atol=1e-5)
        torch.compiler.cudagraph_mark_step_begin()
        ours = step(compiled, optimizer, number)
        assert ours == pytest.approx(step(twin, theirs, number), rel=1e-3), number


def test_channels_last_stays() -> None:
    model = net().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = batch(0)[0].contiguous(memory_format=torch.channels_last)
    for number in range(3):
        step(model, optimizer, number)
    before = outputs(model)
    outgrow.grow(model, x, outgrow.Widen("*", factor=1.5), DEEPEN, optimizer=optimizer)
    torch.testing.assert_close(outputs(model), before, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last), name
            for key, value in optimizer.state.get(parameter, {}).items():
                assert value.ndim != 4 or value.is_contiguous(memory_format=torch.channels_last), (name, key)
    step(model, optimizer, 3)


def test_data_parallel_over_nccl() -> None:
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=DEVICE)
    try:
        model = net()
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True)
        twin = net()
        theirs = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
        events = [outgrow.At(step=3, grow=[WIDEN]), outgrow.At(step=5, grow=[outgrow.Deepen("blocks.1", fade=2)])]
        runs = [outgrow.Run(m, batch(0)[0], o, events, quiet=True) for m, o in ((wrapped, optimizer), (twin, theirs))]
        for number in range(8):
            assert step(wrapped, optimizer, number) == pytest.approx(step(twin, theirs, number), rel=1e-3), number
            for run in runs:
                run.step()
        assert len(model.blocks) == 3
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        dist.destroy_process_group()


def test_pinned_copies_and_checkpoints_follow(tmp_path: Path) -> None:
    model = net()
    average = copy.deepcopy(model).cpu()
    for tensor in (*average.parameters(), *average.buffers()):
        tensor.data = tensor.data.pin_memory()
    growth = outgrow.grow(model, batch(0)[0], WIDEN, DEEPEN, average=average)
    existing = {growth.plan.renamed(name) for name, _ in net().named_parameters()}
    for name, tensor in average.named_parameters():
        assert tensor.is_pinned() or name not in existing, name
        torch.testing.assert_close(tensor.detach(), dict(model.named_parameters())[name].detach().cpu())
    before = outputs(model)
    outgrow.save(model, tmp_path / "model.safetensors")
    fresh = net()
    outgrow.load(fresh, tmp_path / "model.safetensors")
    assert torch.equal(outputs(fresh), before)
    pinned = Net()
    for tensor in (*pinned.parameters(), *pinned.buffers()):
        tensor.data = tensor.data.pin_memory()
    outgrow.load(pinned, tmp_path / "model.safetensors")
    for name, tensor in pinned.state_dict().items():
        assert torch.equal(tensor.to(DEVICE, non_blocking=True), model.state_dict()[name]), name


def test_weights_in_bfloat16_on_the_gpu_are_grown_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(DEVICE, torch.bfloat16)
    x = torch.randn(5, 8, device=DEVICE, dtype=torch.bfloat16)
    before = model(x)
    growth = outgrow.widen(model, x, "0", to=24, method="net2net")
    assert growth.max_error <= growth.tolerance
    torch.testing.assert_close(model(x), before, rtol=2e-2, atol=2e-2)


def test_a_growth_leaves_the_random_state_of_the_device_alone() -> None:
    model = net()
    torch.cuda.manual_seed(7)
    expected = torch.rand(3, device=DEVICE)
    torch.cuda.manual_seed(7)
    outgrow.grow(model, batch(0)[0], WIDEN, DEEPEN)
    assert torch.equal(torch.rand(3, device=DEVICE), expected)
