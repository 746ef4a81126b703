"""Other learning rates for a network that grows from nothing than one cosine over its steps.

A small network makes more steps for its share of the FLOPs, so that a cosine over steps has gone down far when the large
network begins: after a quarter of the budget to about half of the peak rate (widening). Three changes of an arm:

    flops    the cosine goes over FLOPs: after a quarter of the budget it has gone down by a quarter of its length
    rewarm   the same cosine over steps; after the growth the rate rises again from zero to what that cosine has there
    repeak   after the growth the rate rises to the full peak, and a cosine of its own goes down over the remaining steps

A rise takes a twentieth of the steps after the growth, as the warm-up of every run takes a twentieth of its cosine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from experiments.setting.arms import Arm
from experiments.setting.protocol import BIG, cost, grown

RISE = 1 / 20


def over_flops(arm: Arm) -> Arm:
    """One cosine, whose length is the budget in epochs of the large network."""
    net, costs = arm.net, []
    for stage in arm.stages:
        net = grown(net, stage.grow) if stage.grow else net
        costs.append(cost(net) / cost(BIG))
    span = sum(stage.epochs * takes for stage, takes in zip(arm.stages, costs, strict=True))
    stages = (replace(stage, takes=takes, span=span) for stage, takes in zip(arm.stages, costs, strict=True))
    return replace(arm, stages=tuple(stages))


def rewarmed(arm: Arm) -> Arm:
    last = arm.stages[-1]
    return replace(arm, stages=(*arm.stages[:-1], replace(last, rewarm=RISE * last.epochs)))


def peaked_again(arm: Arm) -> Arm:
    last = arm.stages[-1]
    return replace(arm, stages=(*arm.stages[:-1], replace(last, span=last.epochs)))


SCHEDULES: dict[str, Callable[[Arm], Arm]] = {"flops": over_flops, "rewarm": rewarmed, "repeak": peaked_again}
