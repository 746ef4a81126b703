"""Every arm of the paper's hyper-parameter table, as data.

An arm is a network and stages of training; a stage may begin with a growth. Arms that begin alike (the same network, stages and
seed) share that beginning: it is trained once.

Where the paper disagrees with itself, with its table, or with its author's code, the choice made here is named in `CHOICES`,
and `Reading` keeps the other one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.setting.models import Net

CHOICES = (
    "Sizes: the table's 1/8 → 3/16 for widening; `--reading text` has the text's 2^-3.5 → 2^-3.",
    "Deepening: ResNetCifar-10(1/8) → 18(1/8), as appendix D says; the table calls its deepen teachers ResNetCifar18, and the "
    "text has 10(2^-4) → 18(2^-3), which no deepening gives. `--reading text` starts from r = 2^-4.",
    "Drawn values have the standard deviation of the weights they join, as the text says; the printed U(−s/√3, s/√3) has a "
    "third of it (`--reading printed`), and the author's code draws nearly zero (`--reading code`). New blocks are drawn "
    "as the network's own.",
    "Adam is torch's with L2 in the gradient and amsgrad, and is made anew at each growth, as in the author's code.",
    "R2DeeperR closes a branch that ends in a batch norm by γ = 0; NCT-R2DeeperR(paper) and FTT-R2DeeperR(paper) close it by "
    "pairs, as the paper writes.",
    "Widening multiplies all streams by 1.5, so that plain skips stay exact; nothing is folded.",
    "The networks from scratch have no row in the table: they are trained like the arms beside them (NCT: rate and weight "
    "decay of the teacher; FTT: rate, drop and weight decay of the grown arms).",
    "Appendix B names no sizes and no rates: its arms (APB) go from 18(1/8) or 10(1/4) to 18(1/4) in 6,000 updates, the last "
    "1,500 of them at a fifth of the rate, whenever they grow.",
    "The last 80 images of an epoch, less than a batch, are left out.",
    "The validation set is CIFAR-10's test set, as in the paper.",
)


@dataclass(frozen=True)
class Reading:
    """How the paper is read where it can be read in several ways."""

    name: str = "table"
    small: float = 1 / 8
    deepen: float = 1 / 8
    factor: float = 1.5
    scale: float = 1.0  # of drawn values, in standard deviations of the weights they join


READINGS = {
    "table": Reading(),
    "text": Reading("text", 2**-3.5, 2**-4, 2**0.5),
    "printed": Reading("printed", scale=1 / 3),
    "code": Reading("code", scale=1e-3),
}


@dataclass(frozen=True)
class Grow:
    """A growth: `what` is "widen" or "deepen"."""

    what: str
    method: str
    factor: float = 1.5
    init: str = "std"
    scale: float = 1.0
    fade: int = 0  # steps over which new blocks, or what reads new units, come in


@dataclass(frozen=True)
class Stage:
    """Some epochs of training. `state`: what becomes of the optimizer's at the growth, "fresh" or "kept".

    `rate` is the peak of the cosine where there is one, after a warm-up over a twentieth of it. Stages in a row that have the
    same span share one cosine; a stage with another begins its own.
    """

    epochs: float
    rate: float
    decay: float
    grow: Grow | None = None
    state: str = "fresh"
    span: float = 0  # over how many epochs, from the arm's first on, a cosine goes down to zero; 0: the rate stays
    new_rate: float = 1.0  # factor on the updates of what the growth has brought
    looks: int = 1  # how often an epoch its accuracy is measured; 0: at its end alone


@dataclass(frozen=True)
class Arm:
    """One line of a figure. Its own curve begins with stage `own`; those before are its teacher's."""

    name: str
    net: Net
    stages: tuple[Stage, ...]
    own: int = 0
    optimizer: str = "adam"  # with amsgrad and L2; or "adamw"
    flips: bool = False
    paper: float | None = None  # final accuracy in per cent

    @property
    def test(self) -> str:
        return self.name.split("-")[0]


def student(name: str, teacher: Arm, stage: Stage, paper: float | None = None) -> Arm:
    return replace(teacher, name=name, stages=(*teacher.stages, stage), own=len(teacher.stages), paper=paper)


def paper_arms(reading: Reading = READINGS["table"]) -> list[Arm]:
    """All arms of the table, in its order, and the networks from scratch."""
    wide = reading.small * reading.factor

    def widen(method: str, init: str = "std", factor: float = reading.factor) -> Grow:
        return Grow("widen", method, factor, init, reading.scale)

    def deepen(method: str) -> Grow:
        return Grow("deepen", method, scale=reading.scale)

    small, plain = Net(r=reading.small), Net(r=reading.small, residual=False)
    shallow, flat = Net(r=reading.deepen, blocks=2), Net(r=reading.deepen, blocks=2, residual=False)
    arms = [
        Arm(f"VIZ-{title}", Net("small"), (Stage(150, 1e-3, 1e-3), Stage(450, 1e-3, 1e-3, widen(method, factor=2))))
        for title, method in (("R2R", "r2r"), ("Net2Net", "net2net"), ("NetMorph", "netmorph"))
    ]
    overfit = Arm("OF-Teacher", small, (Stage(250, 1e-3, 0),))
    arms += [
        overfit,
        student("OF-Student", overfit, Stage(250, 1e-3 / 5, 3e-3, widen("r2r"))),
        Arm("OF-Rand", Net(r=wide), (Stage(250, 1e-3, 3e-4),)),
    ]
    for title, init in (("He", "he"), ("Std", "std")):
        arms.append(Arm(f"BI-{title}", small, (Stage(20, 1e-3, 1e-3), Stage(100, 1e-3 / 5, 1e-3, widen("r2r", init)))))

    first = Stage(250, 3e-3, 5e-3)
    teacher, teacher_plain = Arm("NCT-WidenTeacher", small, (first,)), Arm("NCT-WidenTeacher(NoResidual)", plain, (first,))
    later = Stage(250, 3e-3 / 5, 1e-2)
    arms += [
        teacher,
        student("NCT-R2WiderR", teacher, replace(later, grow=widen("r2r")), 69.9),
        student("NCT-NetMorph", teacher, replace(later, grow=widen("netmorph")), 69.8),
        student("NCT-RandPadWiden", teacher, replace(later, grow=widen("random")), 70.2),
        teacher_plain,
        student("NCT-Net2WiderNet", teacher_plain, replace(later, grow=widen("net2net")), 69.6),
        Arm("NCT-RandomWide", Net(r=wide), (first,), paper=69.9),
        Arm("NCT-RandomWide(NoResidual)", Net(r=wide, residual=False), (first,)),
    ]
    teacher, teacher_plain = Arm("NCT-DeepenTeacher", shallow, (first,)), Arm("NCT-DeepenTeacher(NoResidual)", flat, (first,))
    deep = Net(r=reading.deepen)
    arms += [
        teacher,
        student("NCT-R2DeeperR", teacher, replace(later, grow=deepen("r2r")), 72.1),
        student("NCT-R2DeeperR(paper)", teacher, replace(later, grow=deepen("r2r-paper")), 72.1),
        student("NCT-RandPadDeeper", teacher, replace(later, grow=deepen("random")), 71.5),
        teacher_plain,
        student("NCT-Net2DeeperNet", teacher_plain, replace(later, grow=deepen("net2net")), 70.5),
        Arm("NCT-RandomDeep", deep, (first,), paper=69.9),
    ]
    early, late = Stage(25, 3e-3, 1e-2), Stage(225, 3e-3 / 5, 1e-2)
    for title, net, grow in (
        ("R2WiderR", small, widen("r2r")),
        ("NetMorph", small, widen("netmorph")),
        ("RandPadWiden", small, widen("random")),
        ("Net2WiderNet", plain, widen("net2net")),
        ("RandomWide", Net(r=wide), None),
        ("R2DeeperR", shallow, deepen("r2r")),
        ("R2DeeperR(paper)", shallow, deepen("r2r-paper")),
        ("RandPadDeeper", shallow, deepen("random")),
        ("Net2DeeperNet", flat, deepen("net2net")),
        ("RandomDeep", deep, None),
    ):
        arms.append(Arm(f"FTT-{title}", net, (early, replace(late, grow=grow, state="fresh" if grow else "kept"))))
    return arms + appendix_b(widen("r2r", factor=2), deepen("r2r"))


UPDATES, DROP, EPOCH = 6_000, 4_500, 390  # of appendix B's runs; an epoch's


def appendix_b(widen: Grow, deepen: Grow) -> list[Arm]:
    """Half the width or depth at first, all of it for the last quarter of the updates, as in appendix B; or from earlier on."""

    def stage(first: int, last: int, grow: Grow | None = None) -> Stage:
        rate = 1e-3 if last <= DROP else 1e-3 / 5
        return Stage((last - first) / EPOCH, rate, 1e-3, grow, "fresh" if grow else "kept", looks=10)

    arms = [Arm("APB-Scratch", Net(r=1 / 4), (stage(0, DROP), stage(DROP, UPDATES)))]
    for title, net, grow in (("R2WiderR", Net(r=1 / 8), widen), ("R2DeeperR", Net(r=1 / 4, blocks=2), deepen)):
        arms.append(Arm(f"APB-{title}", net, (stage(0, DROP), stage(DROP, UPDATES, grow))))
        for at in (3_000, 1_500):
            stages = stage(0, at), stage(at, DROP, grow), stage(DROP, UPDATES)
            arms.append(Arm(f"APB-{title}@{at}", net, stages))
    return arms
