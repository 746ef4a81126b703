"""The arms of appendix B, on its own network, with its own rates and schedule (the author's `src/batch_cifar_tests.py`).

6,000 updates of 32 images, Adam with amsgrad, rate 3e-3, weight decay 1e-6, binary cross entropy over the ten classes. At a
growth, after 0, 1,500, 3,000 or 4,500 updates, rate and weight decay are multiplied by |θ₁|/|θ₂|, the share of the parameters
that were there before, and the optimizer is made again; there is no other drop. Drawn values have half the deviation of the
weights they join. Growth at update 0 is what the author's plots call no growth; APB3-Scratch keeps the rate of 3e-3 instead.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from experiments.setting.arms import Arm, Grow, Stage
from experiments.setting.models import Net

BATCH, UPDATES, GROWN_AT = 32, 6_000, (0, 1_500, 3_000, 4_500)
EPOCH = 49_000 // BATCH  # updates
RATE, DECAY = 3e-3, 1e-6
LARGE = Net("three", r=2, blocks=3)
WAYS = {
    "R2WiderR": (Net("three", r=1, blocks=3), Grow("widen", "r2r", factor=2, scale=0.5)),
    "R2DeeperR": (Net("three", r=2, blocks=2), Grow("deepen", "r2r")),
}


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits, one_hot(labels, logits.shape[1]).to(logits.dtype))


@cache
def size(net: Net) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in net.build(0).parameters())


def appendix_b_arms() -> list[Arm]:
    arms = [Arm("APB3-Scratch", LARGE, (Stage(UPDATES / EPOCH, RATE, DECAY, looks=10),))]
    for title, (net, grow) in WAYS.items():
        share = size(net) / size(LARGE)
        for at in GROWN_AT:
            late = Stage((UPDATES - at) / EPOCH, RATE * share, DECAY * share, grow, looks=10)
            stages = (Stage(at / EPOCH, RATE, DECAY, looks=10), late) if at else (late,)
            arms.append(Arm(f"APB3-{title}@{at}", net, stages))
    return arms
