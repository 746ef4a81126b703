"""The arms of the demo: a small network is trained on digits, and it is too small.

Three ways to spend a budget, counted in epochs of the network that is twice as wide, at equal FLOPs:

    grown     the small network, twice as wide by r2r, trained on     random   the same, widened by random padding
    on        the small network, trained on as it is
    scratch   the wide network, from the beginning

Each is a whole run with a warm-up and a cosine down to zero. The peak rate of each way is the best of 0.003, 0.01, 0.03 and
0.06 for budgets 2 and 8 on 300 training images that were held out; random padding uses the rate of the grown network.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.setting.arms import Arm, Grow, Stage
from experiments.setting.flops import step_flops
from experiments.setting.models import Net

SMALL = Net("digits", r=4 / 64, blocks=1)
BIG = replace(SMALL, r=2 * SMALL.r)
IMAGE = (1, 8, 8)
EPOCHS, TAUGHT, DECAY = 20, 3e-2, 0.01  # how the small network is trained at first
BUDGETS = (1, 2, 4, 8)
RATES = {"grown": 3e-2, "on": 6e-2, "scratch": 6e-2, "random": 3e-2}
METHODS = {"grown": "r2r", "random": "random"}


def demo_arms(epochs: int = EPOCHS, budgets: tuple[int, ...] = BUDGETS) -> list[Arm]:
    """The small network, and each way at each budget; losses step by step are kept for the largest budget alone."""
    first = Stage(epochs, TAUGHT, DECAY, span=epochs)
    small_cost, big_cost = (step_flops(net.build(0), IMAGE)[0] for net in (SMALL, BIG))
    arms = [Arm("small", SMALL, (first,), optimizer="adamw")]
    for way, rate in RATES.items():
        for budget in budgets:
            length = budget * big_cost / small_cost if way == "on" else budget
            looks = int(budget == max(budgets) and way != "scratch")
            last = Stage(length, rate, DECAY, span=length, state="kept", looks=looks)
            name = f"{way}@{budget}"
            if way == "scratch":
                arms.append(Arm(name, BIG, (last,), optimizer="adamw"))
            else:
                grow = Grow("widen", METHODS[way], factor=2) if way in METHODS else None
                arms.append(Arm(name, SMALL, (first, replace(last, grow=grow)), own=1, optimizer="adamw"))
    return arms
