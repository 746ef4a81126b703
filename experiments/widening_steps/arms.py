"""The arms of the study, and how long each width is trained; all of them are data.

    scratch             the whole width from the beginning
    scratch-short       the same, for the FLOPs of the grown arms
    pairs, …            a quarter of the width at first, an eighth more at each of six growths; all stages of the network grow
    …-rates             the same with a rate per cohort and layer (`cohort_rates.py`)
    …-long              the same growths, each width trained longer, for the FLOPs of scratch

Grown arms have the epochs of scratch, as in the paper of variance transfer (Yuan et al., 2023), and so fewer FLOPs. Each width
is trained 1.2 times as long as the one before it, in whole epochs.

Left out: units whose writers are zero, and with them GradMax as published, which outgrow refuses before a ReLU. A batch norm
keeps such units at zero, where a ReLU has no slope: they would never learn. In the arm `gradmax`, pairs have its directions as
readers. Neither GradMax nor North can be learned for the streams, which several layers write: both arms draw pairs for these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from experiments.setting.flops import step_flops
from experiments.widening_steps.network import build

Stages = tuple[tuple[int, int], ...]  # width of the network's first stage, and epochs with it


@dataclass(frozen=True)
class Setting:
    """The data, the networks, and how they are trained. width: of the first stage of the network, from `start` by `step`."""

    data: str
    channels: int
    pixels: int
    blocks: int
    start: int
    step: int
    width: int
    epochs: int
    batch: int
    pad: int  # zeros around an image, of which a random part of the image's size is cut out
    mirror: bool
    every: int  # epochs between two tests
    rate: float = 0.1  # goes down to zero on a cosine, after a linear rise in the first `rise` epochs
    rise: int = 1
    momentum: float = 0.9
    decay: float = 1e-4  # of all parameters
    longer: float = 1.2  # epochs with a width, relative to those with the one before it
    learn_from: int = 4  # batches for GradMax


SETTINGS = {
    "cifar": Setting("CIFAR-10", 3, 32, 3, 4, 2, 16, 100, 128, 4, True, 5),
    "tiny": Setting("digits", 1, 8, 1, 4, 2, 8, 6, 64, 1, False, 2),
}


@dataclass(frozen=True)
class Arm:
    """method: of each growth, empty if the network never grows. rates: per cohort. rescaled: all weights, at each growth."""

    name: str
    stages: Stages
    method: str = ""
    rates: bool = False
    rescaled: bool = False

    @property
    def epochs(self) -> int:
        return sum(epochs for _, epochs in self.stages)

    def stage_at(self, epoch: int) -> int:
        """The stage in which an epoch lies, counted from 0; the last one after all of them."""
        ends = [sum(epochs for _, epochs in self.stages[: number + 1]) for number in range(len(self.stages))]
        return next((number for number, end in enumerate(ends) if epoch < end), len(ends) - 1)


METHODS = ("pairs", "pairs-rescaled", "net2net", "random", "netmorph", "gradmax", "north")
LONG = ("pairs", "pairs-rates", "pairs-rescaled-rates")


def growing(setting: Setting, epochs: int) -> Stages:
    """All widths from the first to the last, with whole epochs that grow geometrically."""
    widths = range(setting.start, setting.width + 1, setting.step)
    parts = [setting.longer**number for number in range(len(widths))]
    ends = [round(epochs * sum(parts[:number]) / sum(parts)) for number in range(len(parts) + 1)]
    return tuple((width, end - begin) for width, (begin, end) in zip(widths, pairwise(ends), strict=True))


@cache
def image_flops(setting: Setting, width: int) -> int:
    """FLOPs of a training step, forward and backward, per image."""
    model = build(width, setting.channels, setting.blocks, 0)
    return step_flops(model, (setting.channels, setting.pixels, setting.pixels))[0]


def relative_flops(setting: Setting, stages: Stages) -> float:
    """FLOPs in epochs of the whole width."""
    return sum(epochs * image_flops(setting, width) for width, epochs in stages) / image_flops(setting, setting.width)


def arms(setting: Setting) -> list[Arm]:
    """All arms, those first on which most depends."""
    grown = growing(setting, setting.epochs)
    cost = relative_flops(setting, grown)
    longer = growing(setting, round(setting.epochs * setting.epochs / cost))
    found = [
        Arm("scratch", ((setting.width, setting.epochs),)),
        Arm("scratch-short", ((setting.width, round(cost)),)),
    ]
    for method in METHODS:
        plain, rescaled = method.removesuffix("-rescaled"), method.endswith("-rescaled")
        found += [Arm(f"{method}{'-rates' * rates}", grown, plain, rates, rescaled) for rates in (False, True)]
    by_name = {arm.name: arm for arm in found}
    for name in LONG:
        arm = by_name[name]
        found.append(Arm(f"{name}-long", longer, arm.method, arm.rates, arm.rescaled))
    return found
