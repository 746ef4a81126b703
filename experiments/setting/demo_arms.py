"""The arms of the demo: a small residual network on digits, grown in the middle of its training by each method.

Everything ends after as many epochs, with one cosine over all of them; two arms from scratch per way of growing: for as many
epochs, and for as many FLOPs as the grown ones.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.setting.arms import Arm, Grow, Stage
from experiments.setting.flops import step_flops
from experiments.setting.models import Net

SMALL = Net("digits", r=4 / 64, blocks=2)
EPOCHS, RATE, DECAY = 16, 1e-2, 0.01
IMAGE = (1, 8, 8)
WIDENINGS = {"r2r": "r2r", "net2net": "net2net", "netmorph": "netmorph", "random": "random"}
DEEPENINGS = {"r2r": "r2r", "copy": "copy", "random": "random"}


def arm(name: str, net: Net, *stages: Stage) -> Arm:
    return Arm(name, net, stages, optimizer="adamw")


def demo_arms(epochs: int = EPOCHS) -> list[Arm]:
    half = epochs // 2
    early = Stage(half, RATE, DECAY, span=epochs)
    late = replace(early, epochs=epochs - half, state="kept")
    arms = [arm("small", SMALL, early, late)]
    big = {"widen": replace(SMALL, r=2 * SMALL.r), "deepen": replace(SMALL, blocks=2 * SMALL.blocks)}
    for what, methods in (("widen", WIDENINGS), ("deepen", DEEPENINGS)):
        for title, method in methods.items():
            arms.append(arm(f"{what}-{title}", SMALL, early, replace(late, grow=Grow(what, method, factor=2))))
        small_cost, big_cost = (step_flops(net.build(0), IMAGE)[0] for net in (SMALL, big[what]))
        equal = half * small_cost / big_cost + epochs - half
        arms.append(arm(f"{what}-scratch", big[what], replace(early, epochs=epochs)))
        arms.append(arm(f"{what}-scratch, same FLOPs", big[what], replace(early, epochs=equal, span=equal)))
    return arms
