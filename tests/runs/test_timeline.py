"""Timelines compared with real growths."""

from __future__ import annotations

import copy
import json
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from outgrow import At, Branch, Deepen, Kernel, Schedule, Widen, grow, plateau
from outgrow.errors import GrowthError, MethodError, ScheduleError, TraceError
from outgrow.runs.schedule import When
from outgrow.runs.timeline import _copy, timeline


def cnn() -> tuple[nn.Module, Any]:
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10)), torch.randn(4, 1, 8, 8)


def mlp() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)


def resnet() -> tuple[nn.Module, Any]:
    import timm

    return timm.create_model("resnet18", num_classes=10), torch.randn(2, 3, 32, 32)


def vit() -> tuple[nn.Module, Any]:
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10, depth=3), torch.randn(2, 3, 32, 32)


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    config.num_key_value_heads, config.tie_word_embeddings = 2, True
    return LlamaForCausalLM(config), {"input_ids": torch.randint(64, (2, 7)), "use_cache": False}


class ReadsValues(nn.Module):
    """Code that reads values of tensors, and can't run on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()) * (2.0 if float(x.sum()) > -1e9 else 1.0)


class Keeping(nn.Module):
    """Unregistered tensors: a plain one, and one in an autograd graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.plain, self.part = torch.ones(8), self.a.weight * 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x * self.plain[:4]).relu())


class Drawing(nn.Module):
    """A variational autoencoder: the layer of the standard deviation runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.deviation, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        code = self.mean(x)
        deviation = self.deviation(x)
        return self.out(code + torch.randn_like(code) * deviation if self.training else code + 0 * deviation.sum())


def normed() -> tuple[nn.Module, Any]:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)


SCHEDULES: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], list[Any]]] = {
    "cnn": (
        cnn,
        [
            [Widen("*", factor=1.5)],
            [Kernel("0", 5), Deepen("2")],
            [Branch("0"), Deepen("4", fade=3)],
            [Widen("*", factor=1.5, fade=2), Kernel("0.0", 7, fade=2)],
            [Widen("*", by=2, method="random")],
        ],
    ),
    "mlp": (
        mlp,
        [
            [Deepen("1")],
            [Deepen("4", method="net2net", count=2)],
            [Deepen("0", method="netmorph")],
            [Deepen("0", method="netmorph", fade=3), Widen("*", factor=2)],
            [Deepen("1.0", method="net2net", fade=2), Branch("0", fade=2)],
        ],
    ),
    "resnet": (
        resnet,
        [
            [Widen("*", factor=1.25)],
            [Deepen("layer2.1"), Kernel("layer1.0.conv1", 5), Widen("layer1.0.conv2", by=8, residual="fold")],
        ],
    ),
    "vit": (vit, [[Widen("*", factor=4 / 3)], [Deepen("blocks.1", count=2), Widen("*.mlp.*", factor=1.5)]]),
    "llama": (
        llama,
        [
            [Widen("*", factor=1.5)],
            [Deepen("model.layers.0"), Deepen("model.layers.1", fade=2)],
            [Widen("*mlp*", by=4)],
        ],
    ),
    "reads values": (lambda: (ReadsValues(), torch.randn(3, 4)), [[Widen("a", by=2)], [Deepen("a")]]),
    "keeping": (lambda: (Keeping(), torch.randn(3, 4)), [[Widen("a", by=2)]]),
    "drawing": (lambda: (Drawing(), torch.randn(3, 4)), [[Widen("*", by=2)]]),
    "normed": (normed, [[Widen("*", by=2)]]),
}


def flops(model: nn.Module, example: Any) -> int:
    """FLOPs of a real pass, counted by torch."""
    twin = copy.deepcopy(model).eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        twin(**example) if isinstance(example, dict) else twin(example)
    return counter.get_total_flops()


def steps(model: nn.Module, count: int) -> None:
    """Make optimizer steps that change nothing except fades."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(count):
        optimizer.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_agrees_with_a_real_run(name: str) -> None:
    make, growths = SCHEDULES[name]
    torch.manual_seed(0)
    model, example = make()
    events = [At(epoch=number + 1, grow=transforms) for number, transforms in enumerate(growths)]
    found = timeline(model, example, Schedule(events))
    assert [stage.when for stage in found.stages] == ["start", *(f"epoch {number + 1}" for number in range(len(growths)))]
    for stage, transforms in zip(found.stages, [None, *growths], strict=True):
        if transforms is not None:
            growth = grow(model, example, *transforms)
            assert (stage.changes, stage.preserving) == (growth.plan.changes, growth.preserving)
            assert (stage.parameters, stage.flops) == (growth.parameters[1], growth.flops[1])
            steps(model, 3)
        assert stage.parameters == sum(parameter.numel() for parameter in model.parameters())
        if name not in ("keeping", "normed"):
            assert stage.flops == flops(model, example)


def everything(model: nn.Module) -> list[Any]:
    """Everything that a model holds, and the random state."""
    modules = [(path, type(module), module.training, sorted(vars(module))) for path, module in model.named_modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    tensors = [(name, id(tensor), tensor.requires_grad) for name, tensor in model.state_dict(keep_vars=True).items()]
    states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    return [modules, hooks, tensors, states]


@pytest.mark.parametrize("name", ["cnn", "mlp", "llama", "reads values"])
def test_changes_nothing(name: str) -> None:
    make, growths = SCHEDULES[name]
    model, example = make()
    model.train()
    next(model.children()).eval()
    before, numbers = everything(model), {key: value.clone() for key, value in model.state_dict().items()}
    given = example.clone() if isinstance(example, Tensor) else example["input_ids"].clone()
    timeline(model, example, [At(epoch=number + 1, grow=transforms) for number, transforms in enumerate(growths)])
    assert everything(model) == before
    assert all(torch.equal(value, numbers[key]) for key, value in model.state_dict().items())
    assert torch.equal(given, example if isinstance(example, Tensor) else example["input_ids"])


def test_the_copy_is_on_the_meta_device_and_keeps_ties() -> None:
    model, _ = llama()
    twin = _copy(model, meta=True)
    assert all(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert all(a.requires_grad == b.requires_grad for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_model_on_the_meta_device_that_would_not_fit_into_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**17, 2**10), nn.ReLU(), nn.Linear(2**10, 2**17), nn.ReLU(), nn.Linear(2**17, 2**17))
    found = timeline(model, torch.zeros(1, 2**17, device="meta"), [At(step=1, grow=[Widen("0", by=2)])])
    assert found.stages[1].parameters - found.stages[0].parameters == 2 * (2**17 + 1) + 2 * 2**17
    assert model[0].out_features == 2**10


STAGES = [At(epoch=5, grow=[Widen("0", to=16)]), At(epoch=9, grow=[Deepen("4")])]
IMPOSSIBLE = [
    Widen("nowhere", by=2),
    Widen("0", to=12),
    Widen("0", by=3, method="r2r"),
    Deepen("6", method="net2net"),
    Kernel("0", 3),
    Branch("layer9"),
]


@pytest.mark.parametrize("transform", IMPOSSIBLE, ids=str)
def test_fails_early(transform: Any) -> None:
    model, example = cnn()
    event = At(epoch=25, grow=[transform])
    with pytest.raises(ScheduleError, match=r"^event 3, at epoch 25: ") as error:
        timeline(model, example, [*STAGES, event])
    for before in STAGES:
        grow(model, example, *before.grow)
    with pytest.raises(GrowthError) as real:
        grow(model, example, *event.grow)
    assert str(error.value) == f"event 3, at epoch 25: {real.value}"  # the error of the real run
    assert type(error.value.__cause__) is type(real.value)


def test_a_method_that_is_not_exact_there() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    event = When(plateau("loss"), grow=[Widen("0", by=2, method="r2r")])
    with pytest.raises(ScheduleError, match="event 1, when loss has not improved for 3 epochs: 1 of the named") as error:
        timeline(model, torch.randn(3, 4), [event])
    assert isinstance(error.value.__cause__, MethodError)


@pytest.mark.parametrize("make", [cnn, lambda: (ReadsValues(), None)])
def test_an_example_of_another_shape(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, _ = make()
    wrong = torch.randn(2, 3, 5, 7)
    with pytest.raises(TraceError) as real:
        grow(model, wrong, Widen("*", by=2), check=False)
    with pytest.raises(TraceError) as error:
        timeline(model, wrong, STAGES)
    assert str(error.value) == str(real.value)


def test_arguments_that_a_growth_refuses_at_once() -> None:
    with pytest.raises(GrowthError, match=r"pass a torch\.nn\.Module"):
        timeline("resnet18", torch.zeros(1, 3), STAGES)  # type: ignore[arg-type]
    with pytest.raises(GrowthError, match="no parameters"):
        timeline(nn.ReLU(), torch.zeros(1, 3), STAGES)
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared[1].weight.data = shared[0].weight.data
    with pytest.raises(TraceError, match="share memory"):
        timeline(shared, torch.zeros(1, 4), STAGES)


@pytest.mark.parametrize(("second", "possible"), [(3, False), (20, True)])
def test_takes_unfinished_fades_into_account(second: int, possible: bool) -> None:
    """Behind an activation that fades in over ten steps, an identity layer is exact only after the fade."""
    model, example = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    first, then = Deepen("0", method="netmorph", fade=10), Deepen("1.0", method="net2net")
    schedule = [At(step=1, grow=[first]), At(step=second, grow=[then])]
    if possible:
        assert len(timeline(model, example, schedule).stages) == 3
    else:
        with pytest.raises(ScheduleError, match="event 2, at step 3"):
            timeline(model, example, schedule)
    grow(model, example, first)
    steps(model, second - 1)
    if possible:
        grow(model, example, then)
    else:
        with pytest.raises(MethodError):
            grow(model, example, then)


def test_as_table_data_and_picture(tmp_path: Path) -> None:
    model, example = cnn()
    schedule = [*STAGES, When(plateau("a<b"), grow=[Widen("*", factor=1.5, method="random")])]
    found = timeline(model, example, schedule)
    text = str(found)
    assert all(name in text for name in ("start", "epoch 5", "a<b has not improved", "0: 8 → 16", "(does not preserve)"))
    assert f"{found.stages[3].parameters:,} (× " in text
    assert max(map(len, text.splitlines())) <= 132
    data = json.loads(json.dumps(found.to_json()))
    assert [stage["parameters"] for stage in data["stages"]] == [stage.parameters for stage in found.stages]
    assert data["stages"][1]["changes"][0] | {"old": 8, "new": 16, "method": "r2r"} == data["stages"][1]["changes"][0]
    found.svg(tmp_path / "timeline.svg")
    picture = ET.parse(tmp_path / "timeline.svg").getroot()
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"epoch 5", "epoch 9", "0: 8\xa0→\xa016", "× 1"} <= set(words)
    width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 < float(text.get("x", 0)) < width
        assert 0 < float(text.get("y", 0)) < height


def test_lines_of_equal_values_do_not_hide_each_other() -> None:
    model, example = cnn()
    picture = ET.fromstring(timeline(model, example, Schedule()).to_svg())
    lines = {path.get("class"): path.get("d", "") for path in picture.iter("{http://www.w3.org/2000/svg}path")}
    heights = [float(re.findall(r"M\d+ ([\d.]+)H", lines[name])[0]) for name in ("parameters", "FLOPs")]
    assert abs(heights[0] - heights[1]) >= 3  # a line is 2.5 wide


def test_a_schedule_of_nothing() -> None:
    model, example = cnn()
    found = timeline(model, example, Schedule())
    assert [stage.when for stage in found.stages] == ["start"]
    ET.fromstring(found.to_svg())
