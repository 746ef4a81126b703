"""Every arm of the paper's hyper-parameter table, as data.

An arm is a network and stages of training; a stage may begin with a growth. Arms that begin alike (the same network, stages and
seed) share that beginning: it is trained once.

Where the paper disagrees with itself, with its table, or with its author's code, the choice made here is named in `CHOICES`;
`more_arms.py` has the other ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from experiments.setting.models import Net

CHOICES = (
    "Sizes of widening: the table's 1/8 → 3/16 (8/16 → 12/24 channels). The text's 2^-3.5 → 2^-3 is not run: its networks have "
    "other sizes than those of the table.",
    "Deepening: 10(3/16) → 18(3/16), 12/24 channels, two new blocks in each stage, as the author's code does "
    "(`resnet10_cifar(thin=True, thinning_ratio=6)`, `[2,2,0,0]`): the network that widening reaches as well, hence one row "
    "from scratch for both. The table's 1/8 (8/16 channels) is in the arms called (narrow).",
    "Drawn values have the standard deviation of the weights they join, as the text says; the printed U(−s/√3, s/√3) has a "
    "third of it (NCT-R2WiderR(printed)), and the author's code draws nearly zero (NCT-R2WiderR(code), BI-Code(NoDrop)). New "
    "blocks are drawn as the network's own.",
    "Adam is torch's with L2 in the gradient and amsgrad, and is made again at each growth, as in the author's code; arms "
    "called (carried) keep its state.",
    "R2DeeperR closes a branch that ends in a batch norm by γ = 0; NCT-R2DeeperR(paper) and FTT-R2DeeperR(paper) close it by "
    "pairs, as the paper writes.",
    "NetMorph zeroes the columns of readers; arms called (writers) zero the rows of writers, as in figure 4. Their γ are 1 on "
    "average: the author's code pads γ with 0, where new units would get no gradient at all.",
    "Widening multiplies all streams by 1.5, so that plain skips stay exact; nothing is folded.",
    "The networks from scratch have no row in the table: they are trained like the arms beside them (NCT: rate and weight "
    "decay of the teacher; FTT: rate, drop and weight decay of the grown arms). Those called (author) have the settings of the "
    "author's code: NCT 1.5e-3 and 1e-4, without skips 3e-3 and 1e-4 (commit f28a838). In FTT the code (a later version, "
    "1c2dafb) drops no rate from scratch and has the same rate as NCT for widening, so that NCT-RandomWide(author) is its "
    "scratch too, and 3e-3 for deepening: FTT-RandomDeep(author).",
    "BI drops its rate at the growth, as the table says; arms called (NoDrop) do not, as in the author's code.",
    "Appendix B's own network, rates and schedule are those of the author's code for it (`src/batch_cifar_tests.py`): arms "
    "APB3. The arms APB are an earlier guess, from 18(1/8) or 10(1/4) to 18(1/4).",
    "The last images of an epoch, less than a batch, are left out.",
    "The validation set is the last 1,000 training images, as many as in the author's code; 49,000 are trained on. The "
    "test set is evaluated beside it.",
)


@dataclass(frozen=True)
class Grow:
    """A growth: `what` is "widen" or "deepen"."""

    what: str
    method: str
    factor: float = 1.5
    init: str = "std"
    scale: float = 1.0
    fade: int = 0  # steps over which new blocks, or what reads new units, come in
    noise: float = 0.0  # on new values, relative to the deviation of their tensor


@dataclass(frozen=True)
class Stage:
    """Some epochs of training. `state`: what becomes of the optimizer's at the growth, "fresh" or "kept".

    `rate` is the peak of the cosine where there is one, after a warm-up over a twentieth of it. Stages in a row that have the
    same span share one cosine; a stage with another begins its own. A cosine over FLOPs instead of steps has its span in epochs
    of one network, and `takes` of every stage is the cost of its network relative to that one.
    """

    epochs: float
    rate: float
    decay: float
    grow: Grow | None = None
    state: str = "fresh"
    span: float = 0  # over how many epochs, from the arm's first on, a cosine goes down to zero; 0: the rate stays
    new_rate: float = 1.0  # factor on the updates of what the growth has brought
    looks: int = 1  # how often an epoch its accuracy is measured; 0: at its end alone
    takes: float = 0.0  # epochs of the span that one epoch of this stage takes; 0: one
    rewarm: float = 0.0  # epochs at the beginning of this stage in which the rate rises from zero to that of the cosine


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


SMALL, WIDE, SHALLOW = Net(r=1 / 8), Net(r=3 / 16), Net(r=3 / 16, blocks=2)
PLAIN = {net: replace(net, residual=False) for net in (SMALL, WIDE, SHALLOW)}
TAUGHT, LEARNT = Stage(250, 3e-3, 5e-3), Stage(250, 3e-3 / 5, 1e-2)  # NCT: teachers, students
EARLY, LATE = Stage(25, 3e-3, 1e-2), Stage(225, 3e-3 / 5, 1e-2)  # FTT: before the growth, after it
TEACHERS = {
    arm.name: arm
    for arm in (
        Arm("NCT-WidenTeacher", SMALL, (TAUGHT,)),
        Arm("NCT-WidenTeacher(NoResidual)", PLAIN[SMALL], (TAUGHT,)),
        Arm("NCT-DeepenTeacher", SHALLOW, (TAUGHT,)),
        Arm("NCT-DeepenTeacher(NoResidual)", PLAIN[SHALLOW], (TAUGHT,)),
    )
}


def widen(method: str, factor: float = 1.5, **options: Any) -> Grow:
    return Grow("widen", method, factor, **options)


def deepen(method: str) -> Grow:
    return Grow("deepen", method)


def filters_arm(title: str, grow: Grow, epochs: float = 450, state: str = "fresh") -> Arm:
    return Arm(f"VIZ-{title}", Net("small"), (Stage(150, 1e-3, 1e-3), Stage(epochs, 1e-3, 1e-3, grow, state)))


def drawn(title: str, rate: float, **options: Any) -> Arm:
    """A test of initial values, which goes on at some rate after its growth."""
    return Arm(f"BI-{title}", SMALL, (Stage(20, 1e-3, 1e-3), Stage(100, rate, 1e-3, widen("r2r", **options))))


def learnt(name: str, teacher: str, grow: Grow | None, paper: float | None = None) -> Arm:
    return student(name, TEACHERS[teacher], replace(LEARNT, grow=grow), paper)


def faster(title: str, net: Net, grow: Grow | None) -> Arm:
    return Arm(f"FTT-{title}", net, (EARLY, replace(LATE, grow=grow, state="fresh" if grow else "kept")))


def paper_arms() -> list[Arm]:
    """All arms of the table, in its order, and the networks from scratch."""
    overfit = Arm("OF-Teacher", SMALL, (Stage(250, 1e-3, 0),))
    return [
        *(filters_arm(title, widen(title.lower(), 2)) for title in ("R2R", "Net2Net", "NetMorph")),
        overfit,
        student("OF-Student", overfit, Stage(250, 1e-3 / 5, 3e-3, widen("r2r"))),
        Arm("OF-Rand", WIDE, (Stage(250, 1e-3, 3e-4),)),
        drawn("He", 1e-3 / 5, init="he"),
        drawn("Std", 1e-3 / 5),
        TEACHERS["NCT-WidenTeacher"],
        learnt("NCT-R2WiderR", "NCT-WidenTeacher", widen("r2r"), 69.9),
        learnt("NCT-NetMorph", "NCT-WidenTeacher", widen("netmorph"), 69.8),
        learnt("NCT-RandPadWiden", "NCT-WidenTeacher", widen("random"), 70.2),
        TEACHERS["NCT-WidenTeacher(NoResidual)"],
        learnt("NCT-Net2WiderNet", "NCT-WidenTeacher(NoResidual)", widen("net2net"), 69.6),
        Arm("NCT-RandomWide", WIDE, (TAUGHT,), paper=69.9),
        Arm("NCT-RandomWide(NoResidual)", PLAIN[WIDE], (TAUGHT,)),
        TEACHERS["NCT-DeepenTeacher"],
        learnt("NCT-R2DeeperR", "NCT-DeepenTeacher", deepen("r2r"), 72.1),
        learnt("NCT-R2DeeperR(paper)", "NCT-DeepenTeacher", deepen("r2r-paper"), 72.1),
        learnt("NCT-RandPadDeeper", "NCT-DeepenTeacher", deepen("random"), 71.5),
        TEACHERS["NCT-DeepenTeacher(NoResidual)"],
        learnt("NCT-Net2DeeperNet", "NCT-DeepenTeacher(NoResidual)", deepen("net2net"), 70.5),
        Arm("NCT-RandomDeep", WIDE, (TAUGHT,), paper=69.9),
        faster("R2WiderR", SMALL, widen("r2r")),
        faster("NetMorph", SMALL, widen("netmorph")),
        faster("RandPadWiden", SMALL, widen("random")),
        faster("Net2WiderNet", PLAIN[SMALL], widen("net2net")),
        faster("RandomWide", WIDE, None),
        faster("R2DeeperR", SHALLOW, deepen("r2r")),
        faster("R2DeeperR(paper)", SHALLOW, deepen("r2r-paper")),
        faster("RandPadDeeper", SHALLOW, deepen("random")),
        faster("Net2DeeperNet", PLAIN[SHALLOW], deepen("net2net")),
        faster("RandomDeep", WIDE, None),
    ]
