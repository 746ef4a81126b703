"""The smallest members of timm's families: code that was not written with growth in mind.

Each is built tiny, moved to random weights and widened everywhere by a half, twice. It must compute what it did on inputs that
the growth never saw, stay the model that timm made, and learn with its new weights too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.judging import distance, gradient_shares, jiggled, shake

timm = pytest.importorskip("timm")

DTYPE, CLASSES = torch.float64, 5
LIMIT, MULTIPLE, ULPS = 1e-9, 10.0, 64.0
RATIO, SHARE = 1.3, 0.9
BOUNDARY = ("output of the model", "another direction", "looked up", "set by the model's input", "a fixed table")


@dataclass(frozen=True)
class Case:
    """A model of a family; `refused`: volumes that can't grow exactly, each with a word of the reason."""

    family: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    size: int = 32
    refused: Mapping[str, str] = field(default_factory=dict)
    slack: float = 0.02
    stages: tuple[int, ...] = ()  # which of its `features` to keep

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        if "." in self.model:
            module, name = self.model.split(".")
            model = getattr(getattr(timm.models, module), name)(num_classes=CLASSES, **self.options)
        else:
            model = timm.create_model(self.model, num_classes=CLASSES, **self.options)
        if self.stages:
            model.features = nn.Sequential(*(model.features[index] for index in self.stages))
        return shake(model.to(DTYPE)).eval()

    def images(self, batch: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, 3, self.size, self.size, generator=generator, dtype=DTYPE)

    def __str__(self) -> str:
        return self.family


STATISTICS = "takes its statistics over the units"
CASES = [
    Case("resnet", "test_resnet", size=48),
    Case("resnetv2", "resnetv2_18", {"layers": (1, 1, 1, 1), "channels": (16, 24, 32, 40), "stem_chs": 16}, 64),
    Case("densenet", "densenet121", {"block_config": (2, 2), "growth_rate": 8, "bn_size": 2}),
    Case("efficientnet", "test_efficientnet"),
    Case("mobilenetv3", "mobilenetv3_small_050"),
    Case("regnet", "regnetx_002"),
    # A depthwise convolution stands between each stream and its layer norm.
    Case("convnext", "test_convnext", refused={"stem.0": STATISTICS, "stages.?.downsample.1": STATISTICS}),
    # Without norms half of its units are dead, whether new or old.
    Case("vgg", "vgg.VGG", {"cfg": [8, "M", 12, "M", 16, 16, "M"], "mlp_ratio": 0.01}, 64, slack=0.1),
    Case("inception_v4", "inception_v4", size=75, stages=(0, 1, 2, 3, 4, 5, 6, 10, 18)),
    Case("ghostnet", "ghostnet_050"),
    Case("hrnet", "hrnet_w18_small"),
    Case("nfnet", "test_nfnet"),
    Case("vision_transformer", "test_vit", {"img_size": 32, "patch_size": 8}),
    Case(
        "swin_transformer",
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "window_size": 2, "depths": (1, 2), "num_heads": (2, 4), "embed_dim": 16},
        refused={"patch_embed.proj": STATISTICS},  # the stream comes out of a norm
    ),
    Case(
        "mlp_mixer",
        "mlp_mixer.MlpMixer",
        {"img_size": 16, "patch_size": 4, "num_blocks": 2, "embed_dim": 16},
        16,
        refused={"stem.proj": STATISTICS},  # token mixing, not linear, stands between one layer norm and the next
    ),
    Case(
        "levit",
        "levit_128s",
        {"img_size": 64, "embed_dim": (16, 24, 32), "key_dim": 8, "num_heads": (2, 3, 4), "depth": (1, 1, 1)},
        64,
    ),
    Case(
        "efficientformer",
        "efficientformer_l1",
        {"depths": (1, 1, 1, 2), "embed_dims": (16, 16, 24, 32)},
        224,
        refused={"stages.3.downsample.conv": STATISTICS},  # blocks without a norm of that kind write into the stream too
    ),
    Case("repvit", "repvit_m0_9", {"embed_dim": (16, 24), "depth": (1, 2)}),
    Case("cait", "cait_xxs24_224", {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}),
    # A group norm with one group takes its statistics over channels and places at once.
    Case("metaformer", "poolformer_s12", refused={"stem.conv": STATISTICS, "stages.?.downsample.conv": STATISTICS}),
]


# Every kind of its blocks; slow, because the last ones are wide.
WIDE = Case("inception_v4 with all kinds of blocks", "inception_v4", size=75, stages=(0, 1, 2, 3, 4, 5, 6, 10, 11, 18, 19))


@torch.no_grad()
def sensitivity(model: nn.Module, x: Tensor) -> float:
    want = model(x)
    return max(distance(want, jiggled(model, seed)(x)) for seed in range(3))


SLOW = {  # each has a quick relative in the list
    *("hrnet", "inception_v4"),  # sums and concatenations of branches: ghostnet, densenet
    *("regnet", "mobilenetv3"),  # groups, inverted bottlenecks: resnet, efficientnet
    "efficientformer",  # levit, metaformer
}
CASES_AND_MARKS = [
    pytest.param(case, id=str(case), marks=[pytest.mark.exhaustive] if case is WIDE or str(case) in SLOW else [])
    for case in (*CASES, WIDE)
]


@pytest.mark.parametrize("case", CASES_AND_MARKS)
def test_a_family_grows_twice_stays_itself_and_learns(case: Case) -> None:
    model, example, fresh = case.build(), case.images(2, seed=1), case.images(3, seed=2)
    old, keys = copy.deepcopy(model), list(model.state_dict())
    kinds = [(path, type(module), module.training) for path, module in model.named_modules()]
    eps = torch.finfo(DTYPE).eps
    allowed = min(max(MULTIPLE * sensitivity(old, fresh), ULPS * eps), LIMIT)
    with torch.no_grad():
        want = old(fresh)
    for number in range(2):
        growth = outgrow.widen(model, example, "*", factor=1.5)
        with torch.no_grad():
            assert distance(want, model(fresh)) <= allowed
        assert list(model.state_dict()) == keys
        assert [(path, type(module), module.training) for path, module in model.named_modules()] == kinds
        if number == 0:
            assert growth.parameters[1] / growth.parameters[0] >= RATIO
            for skip in growth.skipped:
                known = [word for pattern, word in case.refused.items() if fnmatchcase(skip.volume, pattern)]
                assert any(word in skip.reason for word in (*BOUNDARY, *known)), str(skip)
            new, others = gradient_shares(model, growth.plan, [case.images(6, seed) for seed in range(3, 6)])
            assert new >= min(SHARE, others - case.slack)
