"""Branches beside layers and stages: zero at first, and then they learn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import GrowthError, MethodError, SelectionError, SizeError
from outgrow.modules.gates import gates_of
from tests.helpers.fading import steps
from tests.helpers.judging import assert_same_function, distance, shake, state_of

IMAGES = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 5, stride=2, padding=1, dilation=2),
        nn.BatchNorm2d(6),
        nn.SiLU(),
        nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1),
        nn.GELU(),
        nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1)),
        nn.Sequential(nn.Conv2d(5, 5, 3, stride=2, padding=1), nn.Sigmoid()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 3),
    ).double()
    shake(model)
    return model


def resnet() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=4).double()
    shake(model)
    return model


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, num_classes=4, depth=2).double()
    shake(model)
    return model


def branch_at(model: nn.Module, path: str) -> Any:
    return model.get_submodule(f"{path}.1")


PLACES: list[tuple[Any, str]] = [
    *((layers, path) for path in ("0", "3", "5", "6", "9")),
    *((resnet, path) for path in ("conv1", "layer1", "layer2.0", "layer3.0.conv1", "fc")),
    *((vit, path) for path in ("blocks.0", "blocks.1.attn", "blocks.1.mlp", "blocks.0.mlp.fc1", "head", "blocks")),
]


def cases() -> list[Any]:
    """All places; the quick run has representatives of each model, with pairs at more of them than with zero ends."""
    quick = [(layers, "3"), (layers, "5"), (layers, "9"), (resnet, "layer2.0"), (vit, "blocks.0"), (vit, "blocks.0.mlp.fc1")]
    pairs = [*quick, (layers, "0"), (resnet, "conv1"), (resnet, "fc"), (vit, "blocks.1.attn"), (vit, "blocks")]
    named = [("r2r", build, path) for build, path in PLACES] + [("netmorph", build, path) for build, path in PLACES]
    return [
        pytest.param(
            method,
            build,
            path,
            id=f"{method}-{build.__name__}-{path}",
            marks=() if (build, path) in (pairs if method == "r2r" else quick) else pytest.mark.exhaustive,
        )
        for method, build, path in named
    ]


@pytest.mark.parametrize(("method", "build", "path"), cases())
def test_it_is_exact_and_learns(build: Any, path: str, method: str) -> None:
    model = build()
    old, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    growth = outgrow.branch(model, IMAGES, path, method=method, optimizer=optimizer)
    assert growth.preserving
    assert_same_function(old, model, [IMAGES, IMAGES[:2]])
    for name, tensor in old.state_dict().items():
        assert torch.equal(model.state_dict()[growth.plan.renamed(name)], tensor)
    branch = model.get_submodule(f"{path}.1")
    assert {id(p) for p in branch.parameters()} < {id(p) for group in optimizer.param_groups for p in group["params"]}
    before = {name: p.detach().clone() for name, p in branch.named_parameters()}
    moved = dict.fromkeys(before, 0.0)
    for _ in range(4):
        steps(model, optimizer, 1, IMAGES)
        for name, p in branch.named_parameters():
            moved[name] = max(moved[name], float((p.detach() - before[name]).abs().max()))
    biases = ("key", "k_bias")  # attention does not see what is added to all keys
    assert not [name for name, most in moved.items() if most == 0.0 and not name.endswith(biases)]
    assert sum(p.numel() for p in model.parameters()) == growth.parameters[1] > growth.parameters[0]


def test_pairs_are_dense_and_netmorph_is_zero_at_the_end() -> None:
    paired, zero = layers(), layers()
    outgrow.branch(paired, IMAGES, "9", hidden=6)
    outgrow.branch(zero, IMAGES, "9", hidden=6, method="netmorph")
    assert [type(part) for part in branch_at(paired, "9")] == [nn.Linear, nn.Sigmoid, nn.Linear]
    assert int((branch_at(paired, "9")[2].weight == 0).sum()) == 0
    assert int((branch_at(zero, "9")[2].weight != 0).sum()) == 0
    assert int((branch_at(zero, "9")[0].weight == 0).sum()) == 0


def test_layers_and_hidden_units_are_as_requested() -> None:
    model = layers()
    outgrow.branch(model, IMAGES, "5", layers=4, hidden=10)
    assert [part.out_channels for part in branch_at(model, "5") if isinstance(part, nn.Conv2d)] == [10, 10, 10, 5]
    assert any(isinstance(part, nn.BatchNorm2d) for part in branch_at(model, "5"))


def test_a_copy_is_of_the_same_kind() -> None:
    model = vit()
    outgrow.branch(model, IMAGES, "blocks.1.attn")
    assert type(branch_at(model, "blocks.1.attn")) is type(vit().get_submodule("blocks.1.attn"))


@pytest.mark.parametrize("method", ["auto", "copy", "random"])
def test_a_branch_can_fade_in(method: str) -> None:
    model = layers()
    old, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.0)
    growth = outgrow.branch(model, IMAGES, "5", method=method, fade=2, optimizer=optimizer)
    assert growth.preserving
    assert_same_function(old, model, [IMAGES])
    steps(model, optimizer, 1, IMAGES)
    inner = model[:5](IMAGES)
    main, other = model[5].get_submodule("0"), model[5].get_submodule("1")
    assert distance((model[5](inner) - main(inner)).detach(), other(inner).detach()) < 1e-12
    steps(model, optimizer, 1, IMAGES)
    assert gates_of(model) == {}
    assert distance((model[5](inner) - main(inner)).detach(), other(inner).detach()) < 1e-12
    assert other(inner).abs().max() > 1e-3


def test_what_does_not_preserve_says_so() -> None:
    for method in ("copy", "random"):
        growth = outgrow.branch(layers(), IMAGES, "5", method=method)
        assert not growth.preserving
        assert "does not preserve" in str(growth)
        assert growth.max_error > 1e-6


@pytest.mark.parametrize(("build", "path"), [(layers, "0"), (layers, "5"), (resnet, "layer2.0"), (vit, "blocks.1.mlp")])
def test_it_is_saved_and_loaded_and_grown_again(build: Any, path: str, tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    outgrow.branch(model, IMAGES, path, optimizer=optimizer)
    outgrow.branch(model, IMAGES, path, optimizer=optimizer, method="netmorph", seed=1)
    steps(model, optimizer, 2, IMAGES)
    old = copy.deepcopy(model)
    outgrow.widen(model, IMAGES, f"{path}.*", factor=2.0, optimizer=optimizer)
    assert_same_function(old, model, [IMAGES])
    steps(model, optimizer, 2, IMAGES)
    outgrow.save(model, tmp_path / "model.safetensors")
    again = outgrow.load(build(), tmp_path / "model.safetensors")
    assert torch.equal(again.eval()(IMAGES), model.eval()(IMAGES))
    assert len(list(again.get_submodule(path).children())) == 3


def test_it_is_one_transaction_with_others() -> None:
    model = resnet()
    old, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    growth = outgrow.grow(
        model,
        IMAGES,
        outgrow.Branch(beside="layer2.0"),
        outgrow.Deepen(after="layer1.0"),
        outgrow.Widen("layer3.*", factor=1.5),
        average=average,
    )
    assert_same_function(old, model, [IMAGES])
    assert_same_function(old, average.module, [IMAGES])
    assert growth.plan.renamed("layer2.0.conv1.weight") == "layer2.0.0.conv1.weight"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.twice = nn.LSTM(3, 4), nn.Linear(4, 4)
        self.head, self.idle = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twice(self.twice(self.inner(x)[0])))


@pytest.mark.parametrize(("path", "reason"), [("inner", "turn"), ("twice", "2 times"), ("idle", "does not run it")])
def test_refusals_name_the_reason_and_leave_no_trace(path: str, reason: str) -> None:
    model, x = Two(), torch.randn(2, 3)
    before = state_of(model)
    with pytest.raises(MethodError, match=reason) as refusal:
        outgrow.branch(model, x, path)
    assert path in str(refusal.value)
    assert state_of(model) == before


def test_requests_that_make_no_sense_are_refused() -> None:
    for wrong in ({"layers": 1}, {"hidden": 1}, {"fade": 0}):
        with pytest.raises(SizeError):
            outgrow.Branch("0", **wrong)
    for wrong in ({"method": "net2net"}, {"method": "r2r", "fade": 3}, {"method": "copy", "layers": 3}):
        with pytest.raises(MethodError):
            outgrow.Branch("0", **wrong)
    with pytest.raises(SelectionError, match="no module 'nowhere'"):
        outgrow.branch(layers(), IMAGES, "nowhere")
    with pytest.raises(GrowthError):
        outgrow.Branch("")


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + self.a.weight.sum()


def test_code_that_looks_at_the_module_itself_is_named() -> None:
    model = Looks()
    before = state_of(model)
    with pytest.raises(MethodError, match="uses more than its output"):
        outgrow.branch(model, torch.randn(4, 5), "a")
    assert state_of(model) == before


def test_a_copy_of_what_has_no_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(MethodError, match="learn nothing"):
        outgrow.branch(model, torch.randn(4, 5), "1", fade=2)
    outgrow.branch(model, torch.randn(4, 5), "1", method="random", fade=2)


def test_an_optimizer_that_was_left_out_goes_on_and_says_what_it_does_not_train() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(5, 3)
    steps(model, optimizer, 1, x)
    outgrow.branch(model, x, "0")
    with pytest.warns(UserWarning, match=r"Adam does not train the new parameters 0\.1\.0\.weight and 3 more"):
        steps(model, optimizer, 1, x)
    steps(model, optimizer, 1, x)
