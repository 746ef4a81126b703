"""The fairest network from scratch for a grown one: of all that have its architecture, the one that ends highest.

The paper's claim is that a student reaches at least the score of its network from scratch. How high that score is depends on
the rate: kept to the end, dropped, or chosen as in the author's code. All of them are rivals, and the best one is the judge.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.reading.curves import Results
from experiments.reading.tables import LAST, Pair, late_mean, paired
from experiments.setting.models import Net


def network(results: Results, name: str) -> Net:
    """The network with which an arm ends."""
    arm = results[name]["arm"]
    known = {key: value for key, value in arm["net"].items() if key in Net.__dataclass_fields__}
    net = Net(**known)
    for stage in arm["stages"]:
        if stage["grow"]:
            widens = stage["grow"]["what"] == "widen"
            net = replace(net, r=net.r * stage["grow"]["factor"]) if widens else replace(net, blocks=2 * net.blocks)
    return net


def scratches(results: Results, name: str) -> list[str]:
    """Arms of the convergence and faster-training tests that are trained from scratch with the network of a grown arm."""
    net = network(results, name)
    return [
        other
        for other in sorted(results)
        if other.startswith(("NCT-", "FTT-"))
        and not any(stage["grow"] for stage in results[other]["arm"]["stages"])
        and network(results, other) == net
    ]


def fairest(results: Results, name: str) -> str | None:
    """The rival from scratch with the highest mean accuracy over its last ten epochs."""
    return max(scratches(results, name), key=lambda other: late_mean(results, other), default=None)


def against_fairest(results: Results, name: str) -> Pair | None:
    """How much better a grown arm ends than its fairest rival from scratch."""
    if name not in results:
        return None
    rival = fairest(results, name)
    return None if rival is None else paired(results, name, rival, f"fairest scratch, last {LAST} epochs")
