"""Arms beside the paper's table: its other readings, controls, and questions that its text raises.

(author)    from scratch with the rates and weight decays of the author's code
(dropped)   not grown, but with the rate and weight decay that grown arms have from their growth on
(writers)   NetMorph with zero rows in writers instead of zero columns in readers
(NoDrop)    no drop of the rate at the growth
(printed), (code)   drawn values with a third, or a thousandth, of the deviation of the weights they join
(Residual)  Net2Net with skips, which the paper could not do
(noise)     R2R with noise of a hundredth of the weights' deviation on all new values (appendix C)
(scale3), (scale10)   drawn values with three and ten times that deviation (§5.4)
(carried)   the optimizer's state is kept over the growth instead of made again
(narrow)    deepening on 8/16 channels, as the table's 1/8 says, instead of 12/24
"""

from __future__ import annotations

from dataclasses import replace

from experiments.setting.arms import (
    EARLY,
    LATE,
    LEARNT,
    PLAIN,
    SHALLOW,
    SMALL,
    TAUGHT,
    TEACHERS,
    WIDE,
    Arm,
    Grow,
    Stage,
    deepen,
    drawn,
    faster,
    filters_arm,
    learnt,
    student,
    widen,
)
from experiments.setting.models import Net

NOISE = 0.01
UPDATES, DROP, EPOCH = 6_000, 4_500, 382  # of the guess at appendix B; updates of an epoch of 49,000 images


def more_arms() -> list[Arm]:
    return [*scratch_arms(), *controls(), *other_methods(), *carried(), *narrow(), *guessed_appendix_b()]


def scratch_arms() -> list[Arm]:
    author = Stage(250, 1.5e-3, 1e-4)
    return [
        Arm("NCT-RandomWide(author)", WIDE, (author,), paper=69.9),
        Arm("NCT-RandomWide(NoResidual)(author)", PLAIN[WIDE], (replace(author, rate=3e-3),)),
        Arm("FTT-RandomDeep(author)", WIDE, (replace(author, rate=3e-3),)),
        faster("RandomWide(NoResidual)", PLAIN[WIDE], None),
    ]


def controls() -> list[Arm]:
    """Networks that are not grown: small ones whose rate drops where others grow, and the large one with the same schedule."""
    return [
        *(learnt(f"{name}(dropped)", name, None) for name in TEACHERS),
        Arm("NCT-RandomWide(dropped)", WIDE, (TAUGHT, LEARNT)),
        Arm("NCT-RandomWide(NoResidual)(dropped)", PLAIN[WIDE], (TAUGHT, LEARNT)),
        Arm("FTT-WidenTeacher(dropped)", SMALL, (EARLY, LATE)),
        Arm("FTT-DeepenTeacher(dropped)", SHALLOW, (EARLY, LATE)),
        Arm("BI-Teacher(dropped)", SMALL, (Stage(20, 1e-3, 1e-3), Stage(100, 1e-3 / 5, 1e-3))),
    ]


def other_methods() -> list[Arm]:
    """Other ways to widen, and other values for new weights.

    Filters of zero writers for 20 epochs only: torch's ReLU has no slope at zero, so that they never move.
    """
    writers, noisy = widen("netmorph-writers"), widen("r2r", noise=NOISE)
    return [
        learnt("NCT-NetMorph(writers)", "NCT-WidenTeacher", writers, 69.8),
        faster("NetMorph(writers)", SMALL, writers),
        filters_arm("NetMorph(writers)", replace(writers, factor=2), 20),
        drawn("He(NoDrop)", 1e-3, init="he"),
        drawn("Std(NoDrop)", 1e-3),
        drawn("Code(NoDrop)", 1e-3, scale=1e-3),
        learnt("NCT-R2WiderR(printed)", "NCT-WidenTeacher", widen("r2r", scale=1 / 3), 69.9),
        learnt("NCT-R2WiderR(code)", "NCT-WidenTeacher", widen("r2r", scale=1e-3), 69.9),
        learnt("NCT-Net2WiderNet(Residual)", "NCT-WidenTeacher", widen("net2net")),
        faster("Net2WiderNet(Residual)", SMALL, widen("net2net")),
        learnt("NCT-R2WiderR(noise)", "NCT-WidenTeacher", noisy),
        filters_arm("R2R(noise)", replace(noisy, factor=2)),
        filters_arm("R2R(scale3)", widen("r2r", 2, scale=3.0)),
        filters_arm("R2R(scale10)", widen("r2r", 2, scale=10.0)),
    ]


def carried() -> list[Arm]:
    """The optimizer's state carried over the growth, on arms that have a fresh one in the paper. Filters for 20 epochs only."""
    late = replace(LEARNT, state="kept")
    teacher, shallow = TEACHERS["NCT-WidenTeacher"], TEACHERS["NCT-DeepenTeacher"]
    return [
        student("NCT-R2WiderR(carried)", teacher, replace(late, grow=widen("r2r"))),
        student("NCT-NetMorph(carried)", teacher, replace(late, grow=widen("netmorph"))),
        student("NCT-R2DeeperR(carried)", shallow, replace(late, grow=deepen("r2r"))),
        *(filters_arm(f"{title}(carried)", widen(title.lower(), 2), 20, "kept") for title in ("R2R", "Net2Net", "NetMorph")),
    ]


def narrow() -> list[Arm]:
    """Deepening on 8/16 channels, our second reading."""
    shallow = Net(r=1 / 8, blocks=2)
    flat = replace(shallow, residual=False)
    teacher, plain = (
        Arm("NCT-DeepenTeacher(narrow)", shallow, (TAUGHT,)),
        Arm("NCT-DeepenTeacher(NoResidual)(narrow)", flat, (TAUGHT,)),
    )
    ways = {"R2DeeperR": "r2r", "R2DeeperR(paper)": "r2r-paper", "RandPadDeeper": "random", "Net2DeeperNet": "net2net"}
    arms = [teacher, plain]
    for title, method in ways.items():
        taught = plain if method == "net2net" else teacher
        arms.append(student(f"NCT-{title}(narrow)", taught, replace(LEARNT, grow=deepen(method))))
        arms.append(faster(f"{title}(narrow)", taught.net, deepen(method)))
    return [*arms, Arm("NCT-RandomDeep(narrow)", SMALL, (TAUGHT,)), faster("RandomDeep(narrow)", SMALL, None)]


def guessed_appendix_b() -> list[Arm]:
    """Half the width or depth at first, all of it for the last quarter of the updates; or from earlier on.

    A guess at appendix B's runs that was made before its code was read, kept as a second reading; `appendix_b.py` has its own.
    """

    def stage(first: int, last: int, grow: Grow | None = None, state: str = "fresh") -> Stage:
        rate = 1e-3 if last <= DROP else 1e-3 / 5
        return Stage((last - first) / EPOCH, rate, 1e-3, grow, state if grow else "kept", looks=10)

    arms = [Arm("APB-Scratch", Net(r=1 / 4), (stage(0, DROP), stage(DROP, UPDATES)))]
    for title, net, grow in (("R2WiderR", SMALL, widen("r2r", 2)), ("R2DeeperR", Net(r=1 / 4, blocks=2), deepen("r2r"))):
        for mark, state in (("", "fresh"), ("(carried)", "kept")):
            arms.append(Arm(f"APB-{title}{mark}", net, (stage(0, DROP), stage(DROP, UPDATES, grow, state))))
        for at in (3_000, 1_500):
            arms.append(Arm(f"APB-{title}@{at}", net, (stage(0, at), stage(at, DROP, grow), stage(DROP, UPDATES))))
    return arms
